"""Evaluates arithmetic that a model wrote: + - * / and brackets over numbers, parsed as a tree and never run as code.

Values are exact. The calculator tool uses this module, as do the rewards and prompts of countdown.
"""

from __future__ import annotations

import ast
import operator
import re
from collections import Counter
from collections.abc import Callable
from fractions import Fraction

LONGEST_EXPRESSION = 200  # characters
WHOLE_NUMBERS_ONLY = re.compile(r"[0-9+\-*/()\s]*", re.ASCII)
OPERATORS: dict[type[ast.operator], Callable[[Fraction, Fraction], Fraction]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}


class NotArithmetic(ValueError):
    """The text is not an expression of the four operations. The message tells the text's author why."""


def evaluate_expression(text: str, *, most_digits: int | None = None) -> tuple[Fraction, Counter[Fraction]]:
    """Return the value of an expression and the numbers written in it. NotArithmetic for any other text.

    For `(12 + 30) / 2`, the result is 21 and a Counter with one each of 12, 30 and 2.
    most_digits: maximum number of digits in the numerator and in the denominator of every intermediate value.
    """
    if len(text) > LONGEST_EXPRESSION:
        raise NotArithmetic(f"the expression has more than {LONGEST_EXPRESSION} characters")
    written: Counter[Fraction] = Counter()

    def value_of(node: ast.expr) -> Fraction:
        match node:
            case ast.BinOp(op=op) if type(op) in OPERATORS:
                value = OPERATORS[type(op)](value_of(node.left), value_of(node.right))
            case ast.UnaryOp(op=ast.USub()):
                value = -value_of(node.operand)
            case ast.Constant(value=int() | float()) if not isinstance(node.value, bool):
                digits = (ast.get_source_segment(text, node) or "").replace("_", "")
                if not re.fullmatch(r"[0-9]*\.?[0-9]*", digits):  # with an exponent, a number could have any size
                    raise NotArithmetic("write numbers with digits and a point alone")
                value = Fraction(digits)  # as written, so that 0.1 is a tenth
                # Counted in the tree, since comments may contain numbers too.
                written[value] += 1
            case _:
                raise NotArithmetic("only numbers, + - * / and brackets are allowed")
        # Checked at every node, because a product of 30 numbers exceeds any bound before the last one is read.
        if most_digits is not None and max(abs(value.numerator), value.denominator) >= 10**most_digits:
            raise NotArithmetic(f"a number has more than {most_digits} digits")
        return value

    text = text.strip()
    try:
        return value_of(ast.parse(text, mode="eval").body), written
    except NotArithmetic:
        raise
    # ast.parse raises all of these for some text: a null byte, many brackets, a number of 5,000 digits.
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise NotArithmetic("this is no arithmetic expression") from error
    except ZeroDivisionError as error:
        raise NotArithmetic("division by zero") from error


def value_and_numbers(text: str) -> tuple[Fraction | None, Counter[Fraction]]:
    """Return an expression's value and the integers in it; None and no numbers for any other text, such as `1_2`."""
    if not WHOLE_NUMBERS_ONLY.fullmatch(text):
        return None, Counter()
    try:
        return evaluate_expression(text)
    except NotArithmetic:
        return None, Counter()
