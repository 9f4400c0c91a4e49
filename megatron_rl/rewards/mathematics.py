"""Equality of mathematical answers, decided with the package math-verify (the extra `math`).

Answers are first compared as text, so that a literal copy of the right answer is always right. Then they are parsed
into parts, which are compared (math_text.py): sets, intervals, units, the letter of a choice. Words are only compared
as text.

math-verify compares the remaining single values. It extracts an answer from any text, such as 4 from `\\neq 4` and
`5 = 4`. So it only gets values whose letters and signs occur in the right answer or in numbers.
"""

from __future__ import annotations

import functools
import logging
import re
from typing import Any

from megatron_rl.rewards import BOXED, answer_of, gold, last_boxed
from megatron_rl.rewards.math_text import (
    FUNCTIONS,
    RELATION,
    Quantity,
    as_bracketed,
    as_choice,
    as_range,
    as_set,
    computable,
    key,
    plain,
    quantity,
    split_at,
    words_in,
)
from megatron_rl.sandbox.locked import TextFailed, evaluate

MEMORY_BYTES = 1 << 30
MOST_CHARACTERS = 50_000
"""Only this many characters at the end of a reply are searched for its answer."""


def math_answer(prompt: str, completions: str, *_: Any, time_s: float = 5.0, **data: Any) -> float:
    """Return 1 if the reply's answer equals data["answer"]; else 0.

    The answer is the content of the last `\\boxed{..}`, or else LaTeX or plain text at the reply's end. 1/2 equals 0.5,
    and (x+1)^2 equals x^2+2x+1. The comparison runs in a locked process, because sympy evaluates the model's text. A
    text that cannot be evaluated within `time_s` is wrong.
    """
    warm_up()
    wanted = gold(data)
    end = answer_of(prompt, completions)[-MOST_CHARACTERS:]
    try:
        return float(evaluate(is_right, wanted, end, time_s=time_s, memory_bytes=MEMORY_BYTES))
    except TextFailed:
        return 0.0


@functools.cache
def warm_up() -> None:
    """Import math-verify and parse one answer, so that locked forks start with everything loaded."""
    try:
        import math_verify
    except ImportError as error:
        raise RuntimeError("math-verify is not installed; run pip install 'megatron-rl[math]'.") from error
    logging.getLogger(math_verify.__name__).setLevel(logging.ERROR)  # it warns that its own time limits are disabled
    is_right("\\frac{1}{2} + x", "$x + 0.5$")


def is_right(wanted: str, reply: str) -> bool:
    """Return True if the answer in a reply's last box, or else at the end of its text, is the right answer."""
    if reply.strip() == wanted.strip():
        return True
    # If the right answer's own brackets do not match, the end of a box cannot be found.
    box = f"{BOXED}{wanted}}}"
    if last_boxed(box) != wanted and reply.rstrip(" .$\n").endswith(box.rstrip(" .$\n")):
        return True
    boxed = last_boxed(reply)
    if boxed.strip() or BOXED in reply:
        return bool(boxed.strip()) and is_equal(wanted, boxed)
    said = SAID.search(reply.strip()[-LONGEST_ANSWER:])
    if any(is_equal(wanted, text) for text in (reply, *(said.groups() if said else ())) if is_short(text, wanted)):
        return True
    found = [part.rstrip("*. ") for part in parsed(reply) if isinstance(part, str)]
    return bool(found) and not is_taken_back(reply, found[0]) and is_equal(wanted, found[0])


def parsed(text: str) -> list[Any]:
    # Its own time limits use alarms, which would hit this process's handler. The lock has a time limit anyway.
    from math_verify import parse

    return list(parse(text, parsing_timeout=None))


def is_short(text: str, wanted: str) -> bool:
    return len(text) <= LONGEST_ANSWER + 4 * len(wanted)


def is_equal(wanted: str, given: str) -> bool:
    """Return True if two answers are equal, either as text or in meaning."""
    if given.strip() == wanted.strip():
        return True
    ours, theirs = (plain(given), plain(wanted)) if is_short(given, wanted) else ("", "")
    return bool(ours) and are_equal(theirs, ours)


def are_equal(wanted: str, given: str) -> bool:
    """Compare two normalised answers by their parts. The order of the checks matters: whole texts come first."""
    if not key(given) or not key(wanted):
        return False
    if key(wanted) == key(given):
        return True
    names = [named(text) for text in (wanted, given)]
    if all(names) and len({key(name) for name, _ in names}) > 1 and not all(NAME.fullmatch(it) for _, it in names):
        return False
    # A different equation, not one that only names a number.
    if names[0] and not names[1] and "=" in given and not re.search("[A-Za-z]", names[0][1]):
        return False
    wanted, given = without_name(wanted, given)
    if key(wanted) == key(given):
        return True
    if (choice := as_choice(wanted)) is not None:
        return is_choice(choice, given)
    for compare in (equal_unions, equal_ranges, equal_brackets, equal_sets):
        if (verdict := compare(wanted, given)) is not None:
            return verdict
    return equal_quantities(quantity(wanted), quantity(given))


def without_name(wanted: str, given: str) -> tuple[str, str]:
    """Remove the names of values from two answers: `f(2) =` from f(2) = 5, and `x \\in` from x \\in [0, 1]."""
    wanted, given = (re.sub(r"^\\?[A-Za-z]+\s*\\in(?![A-Za-z])\s*", "", text) for text in (wanted, given))
    left, right = named(wanted), named(given)
    if left is not None and right is not None and key(left[0]) != key(right[0]):
        return wanted, given
    if left is not None and (right is not None or "=" not in given):
        wanted = left[1]
    if right is not None and (left is not None or "=" not in wanted):
        given = right[1]
    return wanted, given


def named(text: str) -> tuple[str, str] | None:
    """Return the name and the value of a text such as `x = 5`; None for other text."""
    name, equals, value = text.partition("=")
    # In a list each entry may have a name.
    is_one = equals and NAME.fullmatch(name.strip()) and not (NAME_IN_LIST.search(value) or RELATION.search(value))
    return (name.strip(), value.strip()) if is_one else None


def is_choice(wanted: tuple[str, str], given: str) -> bool:
    choice = as_choice(given)
    if choice is not None:
        return choice[0] == wanted[0] and not re.match(r"(?:or|and|,)(?![A-Za-z])", choice[1])
    return bool(wanted[1]) and are_equal(wanted[1], given)


def equal_unions(wanted: str, given: str) -> bool | None:
    ours, theirs = union_parts(given), union_parts(wanted)
    if len(ours) == 1 and len(theirs) == 1:
        return None
    return equal_in_any_order(theirs, ours)


def union_parts(text: str) -> list[str]:
    parts = [part.strip() for part in split_at(text, CUP)]
    either = [part.strip() for part in split_at(text, OR)]
    ranges = [as_range(part) for part in either]
    # such as x < -2 or x > 2, if the letter is the same
    return either if len(either) > 1 and all(ranges) and len({it[0] for it in ranges if it}) == 1 else parts


def equal_ranges(wanted: str, given: str) -> bool | None:
    """Compare inequalities, or an inequality with an interval; None if neither answer is an inequality."""
    ours, theirs = as_range(given), as_range(wanted)
    if ours is None and theirs is None:
        return None
    if ours is not None and theirs is not None and ours[0] != theirs[0]:
        return False
    left = theirs[1:] if theirs is not None else as_bracketed(wanted)
    right = ours[1:] if ours is not None else as_bracketed(given)
    if left is None or right is None:
        # Any other inequality, such as x^2 < 4.
        return bool(RELATION.search(wanted)) and equal_values(wanted, given)
    return left[0] == right[0] and equal_in_order(left[1], right[1])


def equal_brackets(wanted: str, given: str) -> bool | None:
    ours, theirs = as_bracketed(given), as_bracketed(wanted)
    if ours is None and theirs is None:
        return None
    if ours is None or theirs is None:
        return False
    return ours[0] == theirs[0] and equal_in_order(theirs[1], ours[1])


def equal_sets(wanted: str, given: str) -> bool | None:
    """Compare sets, or lists such as `3 \\pm 1`, in any order; None if neither answer is a set or a list."""
    ours, theirs = members(given), members(wanted)
    if ours is None and theirs is None:
        return None
    for found, text in ((ours, given), (theirs, wanted)):
        if found is None and not text.startswith("\\emptyset"):
            return False
    return equal_in_any_order(theirs or [], ours or [])


def members(text: str) -> list[str] | None:
    found = as_set(text)
    if found is None and PLUS_MINUS.search(text):
        found = [text]
    if found is None:
        return None
    values = []
    for part in found:
        part = name[1] if (name := named(part)) else part
        if PLUS_MINUS.search(part):
            values += [PLUS_MINUS.sub("+", part).removeprefix("+"), PLUS_MINUS.sub("-", part)]
        else:
            values.append(part)
    return values


def equal_in_order(wanted: list[str], given: list[str]) -> bool:
    return len(wanted) == len(given) and all(map(are_equal, wanted, given))


def equal_in_any_order(wanted: list[str], given: list[str]) -> bool:
    if len(wanted) != len(given) or len(wanted) > MOST_MEMBERS:
        return False
    left = list(given)
    for right in wanted:
        place = next((place for place, entry in enumerate(left) if are_equal(right, entry)), None)
        if place is None:
            return False
        del left[place]
    return True


def equal_quantities(wanted: Quantity, given: Quantity) -> bool:
    """Compare values with their units. A unit may be missing; if both have one, the units must be equal."""
    if wanted.is_percent or given.is_percent:
        if wanted.is_percent and given.is_percent:
            return equal_values(wanted.value, given.value)
        if given.is_percent:
            return not wanted.unit and equal_values(wanted.value, rf"\frac{{{given.value}}}{{100}}")
        # If the right answer is a percentage, the sign may be missing.
        return not given.unit and any(
            equal_values(value, given.value) for value in (wanted.value, rf"\frac{{{wanted.value}}}{{100}}")
        )
    is_same_unit = not (wanted.unit and given.unit) or wanted.unit == given.unit
    return is_same_unit and equal_values(wanted.value, given.value)


def equal_values(wanted: str, given: str) -> bool:
    """Compare single values with math-verify. Words, and numbers in other bases, are only compared as text."""
    if not key(given) or not key(wanted):
        return False
    if key(wanted) in (key(given), key(JOINED.sub("", given))):
        return True
    if FORMULA.fullmatch(wanted) and FORMULA.fullmatch(given):
        return False
    if words_in(wanted) or words_in(given) or BASE.search(wanted) or BASE.search(given):
        return False
    wanted, given = (RATIO.sub(r"\\frac{\1}{\2}", computable(text)) for text in (wanted, given))
    if SPACED_DIGITS.search(given) and not SPACED_DIGITS.search(wanted):
        return False
    if set(COMMAND.findall(given)) - set(COMMAND.findall(wanted)) - OF_VALUES:
        return False
    relates = bool(RELATION.search(wanted))
    sides = [given]
    if "=" in given and "=" not in wanted and not relates:
        sides = [side.strip() for side in given.split("=")]
        sides = sides[1:] if NAME.fullmatch(sides[0]) else sides
    if not relates and not all(is_value(side, wanted) for side in sides):
        return False
    from math_verify import verify

    right = parsed(f"\\boxed{{{wanted}}}")
    return all(verify(right, parsed(f"\\boxed{{{side}}}"), timeout_seconds=None) for side in sides)


NAME = re.compile(
    r"(?!\\(?:n?eq?|not|neg|approx|sim|equiv|pm|int|sum|prod|lim)(?![A-Za-z]))"
    r"(?:\\[A-Za-z]+\s*)?[|(]?(?:[A-Za-z]|\\[A-Za-z]+)[A-Za-z' ]*(?:_\s*(?:\w|\{[^{}=]{1,8}\}))?(?:,\s*[A-Za-z])*[|)]?"
    r"(?:\s*\((?:[^()=]|\([^()=]*\))*\))?"
)
"""Matches names that may precede = and a value: x, a_{10}, f(2), |x|, (x, y), Area."""
NAME_IN_LIST = re.compile(r"[,;]\s*[A-Za-z](?:_\{?\w\}?)?\s*=")
MOST_MEMBERS = 30
SAID = re.compile(r"(?s:.*)(?:\banswer\b(?:\s+is\b)?|####|\bis\b|\bequals\b)[\s:*]*([^\n]+?)[*.\s]*$", re.IGNORECASE)
"""Finds the answer at the end of a plain-text reply, after words such as "answer", "is" and "equals"."""
OR = re.compile(r"\s*\bor\b\s*")
CUP = re.compile(r"\\cup(?![A-Za-z])")
JOINED = re.compile(r"(?<=\b[a-z])\s*(?:\\cdot\s*|\*\s*|\s)(?=[a-z]\b)")
FORMULA = re.compile(r"(?:[A-Z][a-z]?(?:_\s*\{?\d+\}?)?\s*){2,}")
"""Matches chemical formulas. Unlike in a product, the order of the letters matters in a formula."""
SPACED_DIGITS = re.compile(r"\d\s+\d")
PLUS_MINUS = re.compile(r"\s*\\pm(?![A-Za-z])\s*")
BASE = re.compile(r"(?<![A-Za-z}])\d+\s*_\s*\{?\d")
RATIO = re.compile(r"^(\d+)\s*:\s*(\d+)$")
LONGEST_ANSWER = 200
"""An answer is compared only if it has at most this many characters plus four times the right answer's length."""
COMMAND = re.compile(r"\\([A-Za-z]+)")
OF_VALUES = frozenset(
    "frac dfrac tfrac cfrac sqrt pi cdot times div left right infty sin cos tan cot sec csc arcsin arccos arctan sinh "
    "cosh tanh log ln lg exp binom dbinom tbinom pm cup cap begin end quad qquad displaystyle mathbf mathbb mathrm "
    "boldsymbol circ degree emptyset alpha beta gamma delta epsilon theta lambda mu nu rho sigma tau phi varphi psi "
    "omega Gamma Delta Theta Lambda Sigma Phi Psi Omega mathcal hat vec".split()
)
"""LaTeX commands allowed in an answer even if the right answer lacks them. None expresses a relation or hides text."""
NAMED_FUNCTIONS = re.compile(rf"\b(?:{'|'.join(sorted(FUNCTIONS))})\b")
SIGNS = frozenset("+-*/^_(){}.!|&\\$'=,;: ~\t\n0123456789%[]")
"""Characters that a value may contain even if the right answer lacks them. Other rules restrict some of these."""
KNOWN_SIGNS = frozenset("\u03c0\u221a\u00d7\u00b7\u00f7\u221e\u00b0\u2212ie")
TAKEN_BACK = re.compile(
    r"(?:\u2260|!=|[<>\u2264\u2265\u2248~\u00b1]|\\(?:neq?|not|[lg]e(?:q|qslant)?|approx|sim|pm)|n't|\b(?:not|never|or|nor|"
    r"than|about|approximately|around|minus)|[0-9]\s*[,;|]|(?<![-+*/^0-9.\s])\s*[0-9.]+\s*=)"
    r"\s*(?:equal(?:s|\sto)?|is|be)?[\s$*({{\\]*$"
)
"""Matches words and signs, such as "not", "<" and "about", that change the meaning of an answer right after them."""


def is_taken_back(reply: str, found: str) -> bool:
    """Return True if the text around an unboxed answer negates it, or shows it to be a percentage or one of several."""
    place = reply.rfind(found)
    before, after = reply[max(0, place - 40) : place], reply[place + len(found) :][:10]
    return place >= 0 and bool(TAKEN_BACK.search(f" {before}") or re.match(r"[\s$*\\]*%|\s*(?:or|=|!=)(?!\w)", after))


def is_value(text: str, right: str) -> bool:
    """Return True if the text is a single value whose letters and signs occur in the right answer or in numbers."""
    letters = NAMED_FUNCTIONS.sub("", COMMAND.sub(" ", re.sub(r"\\sqrt\[\d\]", "", text)))
    foreign = set(letters) - set(right) - SIGNS - KNOWN_SIGNS
    has_others = any(mark in text and mark not in right for mark in (",", ";", "[", "]", "\\{", "\\}", "="))
    return bool(text) and not foreign and not has_others
