"""Built-in reward functions: `reward(prompt, completions, prompt_ids, completion_ids, **data) -> float`.

`completions` is the text of one reply without special tokens; the right answer is `data["answer"]`. Text in a reply's
thoughts does not count as the reply's answer (`answer_of`). No reward in this module runs the model's text as code, and
each takes time linear in the length of the text. The rewards in `code.py`, `mathematics.py` and `procedural.py` run the
model's text sandboxed.

The rewards in a config are computed in worker processes. `reward_service.py` makes the requests, `call_queue.py` sends
them, `worker_pool.py` manages the processes, `worker.py` is the code that they run, and `recipe.py` sums several
rewards. Worker processes also run agents (`agent_worker.py`).
"""

from __future__ import annotations

import re
from collections import deque
from decimal import Decimal
from typing import Any

NUMBER = re.compile(r"[0-9]{1,3}(?:,[0-9]{3})+(?:\.[0-9]+)?|[0-9]+(?:\.[0-9]+)?|\.[0-9]+")
PART = re.compile(r"(?:[0-9)}\]]\s*/\s*|\^\s*[{(]?|[0-9.][eE]|\}\s*\{\s*|(?:\u2260|!=|\\neq?)\s*\$?)[-+\u2212]?\s*$")
"""Matches text that makes the number directly after it a divisor, an exponent or a negated value."""
BEGIN, END = "<answer>", "</answer>"
BOXED = "\\boxed{"
THINK, THOUGHT = "<think>", "</think>"
BRACKET = re.compile(r"\\boxed\{|[{}]")


def exact_match(prompt: str, completions: str, *_: Any, **data: Any) -> float:
    """Return 1 if the reply's first non-blank line equals the answer, except for white space around both; else 0.

    Only that line counts, because a model that knows no stop token writes further lines after it (`12\\n3+4=7`). An
    answer of several lines is compared with as many of the reply's first lines.
    """
    answer = gold(data).strip()
    lines = answer_of(prompt, completions).strip().splitlines()[: len(answer.splitlines())]
    return float([line.strip() for line in lines] == [line.strip() for line in answer.splitlines()])


def last_number(prompt: str, completions: str, *_: Any, **data: Any) -> float:
    """Return 1 if the last number in the reply equals the last number in the answer (1,000 = 1000.0); else 0.

    The reward is also 0 if the reply's last number is part of another value, such as the 4 in 3/4, 2^4, 1e4,
    \\frac{3}{4} or \\neq 4.
    """
    wanted = find_last_number(gold(data))
    if wanted is None:
        raise ValueError(
            f"answer = {data['answer']!r}: holds no number; last_number needs one in every prompt's answer."
        )
    return float(find_last_number(answer_of(prompt, completions), whole=True) == wanted)


def tagged_answer(prompt: str, completions: str, *_: Any, **data: Any) -> float:
    """Return 1 if the reply's last `<answer>..</answer>` holds the answer, except for white space; else 0."""
    found = find_tagged(answer_of(prompt, completions))
    return float(found is not None and found.strip() == gold(data).strip())


def right_positions(prompt: str, completions: str, *_: Any, **data: Any) -> float:
    """Return the share of positions at which reply and answer have the same character.

    It is a share of the positions in the longer of the two texts.
    """
    answer = gold(data)
    right = sum(ours == wanted for ours, wanted in zip(completions, answer, strict=False))
    return right / max(len(completions), len(answer))


def matches(prompt: str, completions: str, *_: Any, pattern: str, **data: Any) -> float:
    """Return 1 if the whole reply, without white space around it, matches the regular expression `pattern`; else 0.

    A dot also matches line ends. Avoid patterns that backtrack heavily: on a long reply they exceed the deadline.
    """
    return float(re.fullmatch(pattern, completions.strip(), re.DOTALL) is not None)


def length(
    prompt: str, completions: str, prompt_ids: list[int], completion_ids: list[int], *, most: int, **data: Any
) -> float:
    """Return the reply's number of tokens divided by `most`, at most 1. A negative weight penalises long replies."""
    return min(len(completion_ids), most) / most


def gold(data: dict[str, Any]) -> str:
    if "answer" not in data:
        keys = sorted(data.keys() - {"prompt_ids", "completion_ids"})
        raise ValueError(
            f"prompt with keys {keys}: has no 'answer'; this reward compares with it, so give every prompt one."
        )
    if not str(data["answer"]).strip():
        raise ValueError("answer = '': is blank, and any reply would match it; give every prompt an answer.")
    return str(data["answer"])


def answer_of(prompt: str, reply: str) -> str:
    """Return a reply's text after its last thought, which the prompt may have opened; empty if the thought is open."""
    _, is_ended, said = reply.rpartition(THOUGHT)
    is_open = THINK in said or (not is_ended and prompt.rstrip().endswith(THINK))
    return "" if is_open else said


def find_tagged(text: str) -> str | None:
    """Return the content of the last `<answer>..</answer>`; None if there is none."""
    before, end, _ = text.rpartition(END)
    _, begin, found = before.rpartition(BEGIN)
    return found if begin and end else None


def last_boxed(text: str) -> str:
    """Return the content of the \\boxed{...} that is closed last, including inner braces; empty if there is none."""
    begins: list[int] = []  # starts of open braces, -1 for a brace that opens no box
    last = (0, 0)
    for mark in BRACKET.finditer(text):
        if mark[0] != "}":
            begins.append(mark.end() if len(mark[0]) > 1 else -1)
        elif begins and (begin := begins.pop()) >= 0:
            last = (begin, mark.start())
    return text[slice(*last)]


def find_last_number(text: str, *, whole: bool = False) -> Decimal | None:
    """Return the last number in a text. With `whole`, return None if that number is a part of a value such as 3/4."""
    last = deque(NUMBER.finditer(text), maxlen=1)
    if not last:
        return None
    start = last[0].start()
    value = Decimal(last[0].group().replace(",", ""))
    # A dash is a sign unless it follows an operand: `5 - 3` and `x-3` end in 3, but `is -3` in -3.
    before = text[max(0, start - 8) : start]
    if whole and PART.search(text[max(0, start - 16) : start]):
        return None
    is_negative = before.endswith(("-", "\u2212")) and not re.search(r"(?:[0-9)]\s*|[A-Za-z_])[-\u2212]$", before)
    return -value if is_negative else value
