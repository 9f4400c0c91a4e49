"""Equality of mathematical answers, by the package math-verify (the extra `math`).

The package looks for an answer in whatever it is given: of `\\neq 4` and `5 = 4` it takes the 4. So what is given must
first be one: the value itself, with a name and `=` before it and a unit after it at most. What the right answer is
written with, such as a relation or an interval's brackets, a given one may have too.
"""

from __future__ import annotations

import functools
import logging
import re
from typing import Any

from megatron_rl.rewards import BOXED, gold, last_boxed
from megatron_rl.rewards.locked import TextFailed, evaluate

MEMORY_BYTES = 1 << 30
MOST_CHARACTERS = 50_000
"""Characters of a reply's end that are read: its answer is there."""


def math_answer(
    prompt: str, completions: str, prompt_ids: list[int], completion_ids: list[int], *, time_s: float = 5.0, **data: Any
) -> float:
    """1 if the reply's answer, in its last `\\boxed{..}`, other LaTeX or plain, equals data["answer"]; else 0.

    1/2 is 0.5 and (x+1)^2 is x^2+2x+1. The package works on the model's text with sympy, so it does that locked in; a
    text with which it does not come to an end within `time_s` is no right answer.
    """
    warm_up()
    wanted = gold(data)
    end = completions[-MOST_CHARACTERS:]
    try:
        verdict = evaluate(is_equal, wanted, end, time_s=time_s, memory_bytes=MEMORY_BYTES)
    except TextFailed:
        return 0.0
    if verdict is None:
        raise ValueError(f"answer = {wanted!r}: math-verify reads no answer in it; give a number or LaTeX.")
    return float(verdict)


@functools.cache
def warm_up() -> None:
    """Import the package and have it read an answer of ours: locked forks begin with all that this has loaded."""
    try:
        import math_verify
    except ImportError as error:
        raise RuntimeError("math-verify is not installed; run pip install 'megatron-rl[math]'.") from error
    logging.getLogger(math_verify.__name__).setLevel(logging.ERROR)  # it warns that its own time limits are off
    is_equal("\\frac{1}{2} + x", "$x + 0.5$")


def is_equal(wanted: str, reply: str) -> bool | None:
    # Its own time limits are alarms that would end up in this process's; the lock has one.
    from math_verify import parse, verify

    def read(text: str) -> list[Any]:
        return parse(text, parsing_timeout=None)

    # Outside of LaTeX the last number would be all that is read of an answer such as x + 1.
    is_marked = any(mark in wanted for mark in ("$", "\\(", "\\[", "\\boxed"))
    right = read(wanted if is_marked else f"\\boxed{{{wanted}}}")
    if not right:
        return None
    # Of several boxes the package makes one set: who has corrected himself would be wrong.
    given = last_boxed(reply)
    if not given.strip():
        if BOXED in reply:
            return False
        found = [part for part in read(reply) if isinstance(part, str)]
        if not found or is_taken_back(reply, found[0].rstrip("*. ")):
            return False
        given = found[0].rstrip("*. ")
    values = values_of(given, wanted)
    return bool(values) and all(verify(right, read(f"\\boxed{{{value}}}"), timeout_seconds=None) for value in values)


LONGEST_ANSWER = 200
"""Characters, beside four times the right answer's."""
COMMAND = re.compile(r"\\([A-Za-z]+)")
OF_VALUES = frozenset(
    "frac dfrac tfrac cfrac sqrt pi cdot times div left right infty sin cos tan cot sec csc arcsin arccos arctan sinh "
    "cosh tanh log ln lg exp binom dbinom tbinom pm cup cap begin end quad qquad displaystyle mathbf mathbb mathrm "
    "boldsymbol circ degree emptyset alpha beta gamma delta epsilon theta lambda mu nu rho sigma tau phi varphi psi "
    "omega Gamma Delta Theta Lambda Sigma Phi Psi Omega mathcal hat vec boxed".split()
)
"""LaTeX commands that an answer may have though the right one has not: none that relates, hides or is not evaluated."""
SAME_COMMANDS = {"geq": "ge", "geqslant": "ge", "leq": "le", "leqslant": "le", "neq": "ne", "varnothing": "emptyset"}
RELATIONS, TEXTS = {"ge", "le", "gt", "lt"}, {"text", "textbf"}
FUNCTIONS = re.compile(r"\b(?:sqrt|pi|sin|cos|tan|log|ln|exp|pmatrix|bmatrix|matrix|vmatrix|array|cases)\b")
SIGNS = frozenset("+-*/^_(){}.!|&\\$'=,;: ~\t\n0123456789%[]")
"""The characters of plain values. The last three have rules of their own."""
KNOWN_SIGNS = frozenset("\u03c0\u221a\u00d7\u00b7\u00f7\u221e\u00b0\u2212ie")
SPACE = r"(?:\\[,;:! ]|[~\s])*"
WHOLE = re.compile(r"\\(?:boxed|text|textbf|mathrm|mbox)\{((?:[^{}]|\{[^{}]*\})*)\}")
UNIT = re.compile(
    rf"{SPACE}(?:\\(?:text|mathrm|textrm|mbox|textbf)\{{([^{{}}]{{1,40}})\}}|(?<=[\s}}])(?:[kcm]?m|k?g|h|s|min|in|ft|feet|"
    r"inches|yards|miles|met(?:er|re)s|dollars|cents|degrees|units|hours|minutes|seconds|days|weeks|years))(?:\^\{?[23]\}?)?$"
)
NO_UNITS = frozenset(
    "or and not no nor never is isnt wrong false incorrect than less more most least about approximately roughly minus "
    "plus times over by hundred thousand million billion trillion dozen half percent per-cent pi to between if unless "
    "but maybe otherwise negative mod squared cubed factorial".split()
)
NAME = re.compile(r"(?:[A-Za-z]|\\(?:text|mathrm)\{[A-Za-z ]{1,20}\})(?:_\{?[A-Za-z0-9]{1,4}\}?)?(?:\([A-Za-z]\))?")
THOUSANDS = re.compile(r"(?<=\d),(?:\\!)?(?=\d{3}(?!\d))")
TAKEN_BACK = re.compile(
    r"(?:\u2260|!=|[<>\u2264\u2265\u2248~\u00b1]|\\(?:neq?|not|[lg]e(?:q|qslant)?|approx|sim|pm)|n't|\b(?:not|never|or|nor|"
    r"than|about|approximately|around|minus)|[0-9]\s*[,;|]|(?<![-+*/^0-9.\s])\s*[0-9.]+\s*=)"
    r"\s*(?:equal(?:s|\sto)?|is|be)?[\s$*({{\\]*$"
)
"""Before an answer in plain text: what makes it something else."""


def is_taken_back(reply: str, found: str) -> bool:
    """True where the text beside an answer found outside of a box denies it, or makes it one of several or a share."""
    place = reply.rfind(found)
    before, after = reply[max(0, place - 40) : place], reply[place + len(found) :][:10]
    return place >= 0 and bool(TAKEN_BACK.search(f" {before}") or re.match(r"[\s$*\\]*%|\s*(?:or|=|!=)(?!\w)", after))


def values_of(given: str, wanted: str) -> list[str]:
    """Return what must all equal the right answer for the given one to do so; nothing where it is no answer."""
    text, right = given.strip().strip("$").rstrip(".").strip(), THOUSANDS.sub("", wanted)
    while whole := WHOLE.fullmatch(text):
        text = whole[1].strip()
    if len(text) > LONGEST_ANSWER + 4 * len(wanted) or ("boxed" in text and "boxed" not in wanted):
        return []
    # A right answer of several parts is compared as a whole; beside a single one, a list is a wrong answer or a guess.
    is_single = not any(mark in right for mark in (",", "[", "\\{", "\\text{", "\\cup", "\\in", "matrix"))
    relates = bool(relations_of(wanted) or commands_of(wanted) & RELATIONS)
    is_single = is_single and not relates
    if is_single:
        text = THOUSANDS.sub("", text)
        if unit := UNIT.search(text):
            words = (unit[1] or "").lower().replace("'", "").split()
            if len(words) > 2 or NO_UNITS.intersection(words) or any(letter.isdigit() for letter in "".join(words)):
                return []
            text = text[: unit.start()]
    else:
        text = re.sub(r"\\text\{ *(?:or|and) *\}", ",", text)
    known = commands_of(wanted) | OF_VALUES | (RELATIONS if relates else set()) | (set() if is_single else TEXTS)
    if commands_of(text) - known:
        return []
    sides = [text]
    if is_single and "=" in text and "=" not in right:
        sides = [side.strip() for side in text.split("=")]
        if NAME.fullmatch(sides[0]):
            del sides[0]
    if not is_single:
        return sides if relates or not relations_of(text) else []
    return [as_fraction(side, right) for side in sides] if sides and all(is_value(it, right) for it in sides) else []


def commands_of(text: str) -> set[str]:
    return {SAME_COMMANDS.get(name, name) for name in COMMAND.findall(text)}


def relations_of(text: str) -> set[str]:
    return set(text) & set("<>\u2264\u2265\u2248\u2260\u2208\u2192")


def is_value(text: str, right: str) -> bool:
    """True where only one value is written, with the letters and signs of the right answer and those of numbers."""
    plain = FUNCTIONS.sub("", COMMAND.sub(" ", re.sub(r"\\sqrt\[\d\]", "", text)))
    foreign = set(plain) - set(right) - SIGNS - KNOWN_SIGNS
    has_others = any(mark in text and mark not in right for mark in (",", ";", "[", "]", "\\{", "\\}", "="))
    return bool(text) and not foreign and not has_others


def as_fraction(text: str, right: str) -> str:
    """Write a share of a hundred as what it is, beside a right answer that is none."""
    value = re.sub(r"\\?%", "", text)
    return f"\\frac{{{value}}}{{100}}" if value != text and "%" not in right else text
