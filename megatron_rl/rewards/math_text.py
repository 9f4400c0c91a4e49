"""Parses mathematical answers as text: their value, their unit, and the parts of sets, intervals and lists.

This module does not compute. `mathematics.py` compares the parts, and uses math-verify to compare values.
"""

from __future__ import annotations

import itertools
import re
from dataclasses import dataclass

SIGNS = {
    **{"−": "-", "–": "-", "×": r"\times ", "·": r"\cdot ", "÷": "/", "∞": r"\infty ", "π": r"\pi ", "≤": r"\le "},
    **{"≥": r"\ge ", "≠": r"\ne ", "≈": r"\approx ", "∪": r"\cup ", "∩": r"\cap ", "∅": r"\emptyset ", "∈": r"\in "},
    **{"±": r"\pm ", "°": r"^\circ ", "ℝ": r"\mathbb{R}", "½": r"\frac{1}{2}", "¼": r"\frac{1}{4}", "’": "'"},
    **{"¾": r"\frac{3}{4}", "α": r"\alpha ", "β": r"\beta ", "γ": r"\gamma ", "θ": r"\theta ", "λ": r"\lambda "},
    **{"μ": r"\mu ", "σ": r"\sigma ", "φ": r"\phi ", "ω": r"\omega ", "\u00a0": " ", "\u202f": " ", "，": ","},
}
SUPERSCRIPTS = str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹⁻⁺", "0123456789-+")
SAME = {
    **{"dfrac": "frac", "tfrac": "frac", "cfrac": "frac", "geq": "ge", "geqslant": "ge", "leq": "le", "neq": "ne"},
    **{"leqslant": "le", "varnothing": "emptyset", "dbinom": "binom", "tbinom": "binom", "lbrace": "{", "rbrace": "}"},
    **{"gt": ">", "lt": "<", "degree": "^circ", "land": "text{ and }", "lor": "text{ or }", "varphi": "phi"},
}
"""LaTeX commands, each with the command of the same meaning that replaces it."""
SIZES = re.compile(r"\\(?:left|right|[bB]igg?[lr]?|displaystyle|limits|!)(?![A-Za-z])(?:\s*\.)?")
SPACES = re.compile(r"(?:(?<!\\)\\[,;: ]|\\q?quad(?![A-Za-z])|(?<=.)~|\s)+")
TEXT = re.compile(
    r"\\(?:text(?:bf|it|rm|sf|tt)?|math(?:rm|bf|it|sf)|mbox|operatorname\*?|boldsymbol|bm)\s*\{([^{}]*)\}"
)
WHOLE = re.compile(
    r"\\(?:boxed|fbox|text|textbf|textrm|mathrm|mathbf|mbox|boldsymbol)\s*\{((?:[^{}]|\{(?:[^{}]|\{[^{}]*\})*\})*)\}"
)
THIN_THOUSANDS = re.compile(r"(?<=\d)(?:\{,\}(?:\\!)?|,\\!|\\,|\\ |~)(?=\d{3}(?!\d))")
THOUSANDS = re.compile(r"[-+]?\D{0,2}\d{1,3}(?:,\d{3})+(?![,\d])[^,]*")
SPACED_THOUSANDS = re.compile(r"[-+]?[1-9]\d{0,2}(?: \d{3})+(?:\.\d+)?")
TIMES_TEN = re.compile(r"(\d)\s*(?:[xX*]|\\cdot|\\times)\s*10\s*\^\s*\{?\s*([-+]?\d+)\s*\}?")
ALL_REALS = re.compile(r"\\mathbb\s*\{?R\}?(?!\s*\^)|\b(?:all )?real numbers\b|\ball reals\b", re.IGNORECASE)
DEGREES = re.compile(r"\^\s*\{?\s*\\circ\s*\}?(?:\s*([CF])\b)?")
MONEY = re.compile(r"(\\?\$|€|£)\s*(?=[\d.])|(?<=\d)\s*(\\?\$|€|£|¢)")
MONEY_UNITS = {"€": "euro", "£": "pound sterling", "¢": "cent"}
PERCENT = re.compile(r"\s*(?:\\?%|\b(?:percent|per cent|pct)\b\.?)\s*$", re.IGNORECASE)
SCIENTIFIC = re.compile(r"(?<![A-Za-z\d.])(\d+(?:\.\d*)?)[eE]([-+]?)(\d{1,4})(?![\d.A-Za-z])")
SHORT_FRACTION = re.compile(r"\\frac\s*(\d)\s*(\d)(?!\d)|\\frac\s*(\d)\s*\{([^{}]*)\}|\\frac\s*\{([^{}]*)\}\s*(\d)")
MIXED = re.compile(r"(-?)(\d+)\s*\\frac\s*\{(\d+)\}\s*\{(\d+)\}|(-?)(\d+) (\d+)\s*/\s*(\d+)")
RECURRING = re.compile(r"(-?)(\d*)\.(\d*)\\overline\s*\{(\d+)\}")
FUNCTIONS = frozenset(
    "sin cos tan cot sec csc arcsin arccos arctan sinh cosh tanh log ln lg exp sqrt pi min max gcd lcm mod det "
    "pmatrix bmatrix vmatrix matrix array cases".split()
)
RUN = re.compile(r"(?<![\\A-Za-z])[A-Za-z]{2,}")
SPLIT = re.compile(r"\s*(?:[,;]|\band\b|\bor\b|\\text\{\s*(?:and|or)\s*\})\s*")

UNIT_NAMES = """
mm millimeter millimetre, cm centimeter centimetre, m meter metre, km kilometer kilometre, inch in inches, foot ft feet,
yard yd, mile mi, mg milligram, g gram, kg kilogram, pound lb lbs, ounce oz, second s sec, minute min, hour h hr hrs,
mile/hour mph, km/hour kph, ml mL milliliter, liter L litre, cent, dollar USD, euro EUR, degree deg, radian rad, unit,
N newton, J joule, W watt, V volt, K kelvin, am AM, pm PM
"""
UNITS = {name: names.split()[0] for names in UNIT_NAMES.split(",") for name in names.split()}
"""{name of a unit: the unit's first name}."""
UNIT = re.compile(
    r"(?P<value>.*[\d})|]|.*\\pi|.*\\infty)(?P<gap>\s*)"
    r"(?P<unit>(?:(?:square|cubic|sq|cu)\.? )?[A-Za-z]+(?:/[A-Za-z]+|(?: per)? [A-Za-z]+){0,2})\.?"
    r"\s*(?:\^\s*\{?(?P<power>[23])\}?)?"
)
NO_UNITS = frozenset(
    "or and not no nor never is isnt wrong false incorrect than less more most least about approximately roughly minus "
    "plus times over by hundred thousand million billion trillion dozen half percent to between if unless but maybe "
    "otherwise negative mod squared cubed factorial base pi infinity".split()
)


@dataclass(frozen=True)
class Quantity:
    """A value and its unit.

    unit: a unit's first name in UNITS or any other word; empty if there is no unit. is_percent: True if the value is a
    percentage.
    """

    value: str
    unit: str = ""
    is_percent: bool = False


def plain(text: str) -> str:
    """Normalise an answer's mathematical symbols, sizes, spaces and fonts, without changing its value."""
    for sign, command in SIGNS.items():
        text = text.replace(sign, command)
    text = re.sub("[⁰¹²³⁴⁵⁶⁷⁸⁹⁻⁺]+", lambda it: f"^{{{it[0].translate(SUPERSCRIPTS)}}}", text)
    text = re.sub(r"√\s*(\d+|[A-Za-z]|(?=[{(]))", lambda it: rf"\sqrt{{{it[1]}}}" if it[1] else r"\sqrt", text)
    before = None
    while before != text:
        before, text = text, unwrapped(text.strip())
    text = re.sub(r"\\([A-Za-z]+)", lambda it: f"\\{SAME[it[1]]}" if it[1] in SAME else it[0], text)
    text = text.replace(r"\^circ", r"^\circ").replace(r"\>", ">").replace(r"\<", "<")
    text = text.replace("<=", r"\le ").replace(">=", r"\ge ").replace("!=", r"\ne ")
    text = SIZES.sub(lambda it: "" if it[0].startswith("\\!") else " ", THIN_THOUSANDS.sub("", text))
    before = None
    while before != text:
        before, text = text, TEXT.sub(r" \1 ", text)
    text = SPACES.sub(" ", text).strip()
    text = re.sub(r"\b(?:plus |\+)?infinity\b", r"\\infty", text, flags=re.IGNORECASE)
    text = re.sub(r"(?<![A-Za-z\\])pi(?![A-Za-z])", r"\\pi", text)
    text = re.sub(r"\+\s*\\infty", r"\\infty", text)
    text = re.sub(r"\\overline\s*\{([A-Za-z]+)\}|\\vec\s*\{([A-Za-z]+)\}", r"\1\2", text)
    text = ALL_REALS.sub(r"(-\\infty, \\infty)", text)
    text = re.sub(r"(?<=[)\]])\s*U\s*(?=[(\[])", r" \\cup ", text)
    text = re.sub(r"\s*\bdegrees? (celsius|fahrenheit)\b", lambda it: rf"^\circ {it[1][0].upper()}", text, flags=re.I)
    text = re.sub(r"^(\d+) to (\d+)$", r"\1:\2", text)
    text = TIMES_TEN.sub(r"\1 \\times 10^{\2}", text)
    text = SHORT_FRACTION.sub(
        lambda it: "\\frac" + "".join(f"{{{part}}}" for part in it.groups() if part is not None), text
    )
    text = re.sub(r"\\sqrt\s*(\d)", r"\\sqrt{\1}", text)
    if THOUSANDS.fullmatch(text):
        text = re.sub(r"(?<=\d),(?=\d{3}(?!\d))", "", text)
    if SPACED_THOUSANDS.fullmatch(text):
        text = text.replace(" ", "")
    return text.strip()


QUOTES = (("`", "`"), ('"', '"'), ("'", "'"), ("\u201c", "\u201d"), ("``", "''"))


def unwrapped(text: str) -> str:
    """Remove a pair of marks (math delimiters, emphasis, quotes, a box) around the text, or else a final full stop."""
    for begin, end in (("$$", "$$"), ("$", "$"), (r"\(", r"\)"), (r"\[", r"\]"), ("**", "**"), *QUOTES):
        inner = text[len(begin) : len(text) - len(end)]
        if len(text) > len(begin + end) and text.startswith(begin) and text.endswith(end) and begin not in inner:
            return inner
    if whole := WHOLE.fullmatch(text):
        return whole[1]
    return text[:-1] if text.endswith(".") and not text.endswith("..") else text


def key(text: str) -> str:
    """Return a normalised answer in the form that is compared: no unnecessary spaces, and words in lower case."""
    text = re.sub(r"(?<![A-Za-z])(?<!\d)\s+|\s+(?![A-Za-z\d])|(?<=\d)\s+(?=[A-Za-z])|(?<=[A-Za-z])\s+(?=\d)", "", text)
    text = re.sub(r"\{(\\?[A-Za-z0-9]+)\}", r"{\1}", text.strip(" ."))
    text = re.sub(r"([\^_])\{(\w)\}", r"\1\2", text)
    return RUN.sub(lambda run: run[0].lower() if not run[0].isupper() or len(run[0]) > 2 else run[0], text)


def words_in(text: str) -> list[str]:
    """Return the words of a normalised answer, in lower case. Products of letters, as in 2ab and xy, are not words."""
    is_formula = re.search(r"[\d+*/^=_]|(?<!\s)-|-(?!\s)", text) is not None
    found = []
    for run in RUN.findall(re.sub(r"\\[A-Za-z]+", " ", text)):
        is_product = len(run) <= 3 and (is_formula or (run.islower() and not set(run) & set("aeiou")))
        if run.lower() not in FUNCTIONS and not is_product:
            found.append(run.lower())
    return found


def quantity(text: str) -> Quantity:
    """Split a normalised answer into its value and its unit."""
    money = MONEY.sub("", text)
    sign = "".join(MONEY.search(text).groups("")) if money != text else ""
    unit = MONEY_UNITS.get(sign, "dollar") if sign else ""
    value = money.strip()
    if PERCENT.search(value):
        return Quantity(PERCENT.sub("", value).strip(), is_percent=True)
    bare = DEGREES.sub("", value).strip()
    if bare != value:
        return Quantity(bare, f"degree {DEGREES.findall(value)[-1]}".strip())
    if (match := UNIT.fullmatch(value)) and (name := unit_name(match)):
        return Quantity(match["value"].strip(), name)
    return Quantity(value, unit)


def unit_name(match: re.Match[str]) -> str:
    """Return the canonical name of a unit; empty if the matched words are not a unit."""
    words, power = match["unit"].split(), match["power"] or ""
    if words[0] in ("square", "sq", "cubic", "cu"):
        power = "2" if words[0].startswith("sq") else "3"
        words = words[1:]
    if not words or NO_UNITS.intersection(word.lower() for word in words):
        return ""
    parts = re.split(r"/| per ", " ".join(words))
    names = [UNITS.get(part) or UNITS.get(part.lower().removesuffix("s")) for part in parts]
    is_known = all(names)
    if not is_known and (not match["gap"] or any(len(word) < 3 for word in words)):
        return ""
    # 4m is a product, but 4 m is a length.
    if not match["gap"] and len(match["unit"]) < 2:
        return ""
    return "/".join(name or part.lower().removesuffix("s") for name, part in zip(names, parts, strict=True)) + power


BRACKETS = dict.fromkeys("([{", 1) | dict.fromkeys(")]}", -1)


def split_at(text: str, separator: re.Pattern[str]) -> list[str]:
    """Split a text at the separators that are outside brackets."""
    parts, depth, begin, place = [], 0, 0, 0
    while place < len(text):
        if text[place] in BRACKETS:
            depth += BRACKETS[text[place]]
        elif depth <= 0 and (found := separator.match(text, place)) and found.end() > place:
            parts.append(text[begin:place])
            begin = place = found.end()
            continue
        place += 1
    return [*parts, text[begin:]]


def as_set(text: str) -> list[str] | None:
    """Return the members of a set, or of a list without brackets; None for a single answer."""
    if text.startswith(r"\{") and text.endswith(r"\}"):
        text = text[2:-2]
        return [part.strip() for part in split_at(text, SPLIT)] if text.strip() else []
    parts = [stripped for part in split_at(text, SPLIT) if (stripped := part.strip())]
    return parts if len(parts) > 1 else None


def as_bracketed(text: str) -> tuple[str, list[str]] | None:
    """Return the brackets and the entries of a tuple or an interval; None for any other text.

    For `[0, 1)` these are `[)` and the list of `0` and `1`.
    """
    if len(text) < 3 or text[0] not in "([" or text[-1] not in ")]":
        return None
    depths = list(itertools.accumulate(BRACKETS.get(sign, 0) for sign in text))
    if 0 in depths[:-1] or depths[-1] != 0:  # the last bracket does not close the first one
        return None
    entries = [part.strip() for part in split_at(text[1:-1], re.compile(r"[,;]"))]
    return (text[0] + text[-1], entries) if len(entries) > 1 and all(entries) else None


RELATION = re.compile(r"\s*(<|>|\\le(?![A-Za-z])|\\ge(?![A-Za-z]))\s*")


def as_range(text: str) -> tuple[str, str, list[str]] | None:
    """Return the variable, the brackets and the ends of a range; None for any other text.

    For `2 < x \\le 5` these are `x`, `(]` and the list of `2` and `5`.
    """
    parts = RELATION.split(text)
    if len(parts) not in (3, 5) or any(not part.strip() for part in parts):
        return None
    if ">" in parts[1] or "ge" in parts[1]:
        turn = {">": "<", r"\ge": r"\le", "<": ">", r"\le": r"\ge"}
        parts = [turn.get(part, part) for part in reversed(parts)]
    signs, sides = parts[1::2], [side.strip() for side in parts[0::2]]
    if any(sign not in ("<", r"\le") for sign in signs):
        return None
    letter = re.compile(r"\\?[A-Za-z]+")
    closed = ["<" not in sign for sign in signs]
    if len(sides) == 3 and letter.fullmatch(sides[1]):
        return sides[1], "(["[closed[0]] + ")]"[closed[1]], [sides[0], sides[2]]
    if len(sides) == 2 and letter.fullmatch(sides[0]):
        return sides[0], "(" + ")]"[closed[0]], [r"-\infty", sides[1]]
    if len(sides) == 2 and letter.fullmatch(sides[1]):
        return sides[1], "(["[closed[0]] + ")", [sides[0], r"\infty"]
    return None


CHOICE = re.compile(
    r"(?:(?:the )?(?:correct )?(?:option|choice|answer)(?: is)?:? )?(?:\(([A-Z])\)|([A-Z])(?=[.):]|$))[.):]?\s*(.*)",
    re.I,
)


def as_choice(text: str) -> tuple[str, str] | None:
    """Return the letter of a multiple-choice answer and the text after it; None for other text."""
    match = CHOICE.fullmatch(text)
    letter = (match[1] or match[2]) if match else ""
    return (letter, match[3].strip()) if match and letter.isupper() else None


def computable(text: str) -> str:
    """Convert a normalised value to the notation that math-verify reads."""
    text = SCIENTIFIC.sub(lambda it: rf"{it[1]} \times 10^{{{it[2].strip('+')}{it[3]}}}", text)
    text = re.sub(r"(?<=\d)\s*\*\s*(?=10\^)", r" \\times ", text)
    text = RECURRING.sub(recurring, text)
    return MIXED.sub(mixed, text)


def mixed(found: re.Match[str]) -> str:
    sign, whole, over, under = [part for part in found.groups() if part is not None]
    return rf"{sign}\frac{{{int(whole) * int(under) + int(over)}}}{{{int(under)}}}"


def recurring(found: re.Match[str]) -> str:
    sign, whole, first, again = found.groups()
    under = (10 ** len(again) - 1) * 10 ** len(first)
    return rf"{sign}\frac{{{int(whole + first + again) - int(whole + first or 0)}}}{{{under}}}"
