"""Built-in reward functions: `reward(prompt, completions, prompt_ids, completion_ids, **data) -> float`.

`completions` is the text of one reply without special tokens; the right answer is `data["answer"]`. None of them
evaluates the model's text as code.
"""

from __future__ import annotations

import re
from decimal import Decimal
from typing import Any

NUMBER = re.compile(r"[0-9]{1,3}(?:,[0-9]{3})+(?:\.[0-9]+)?|[0-9]+(?:\.[0-9]+)?|\.[0-9]+")
ANSWER_TAGS = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)


def exact_match(prompt: str, completions: str, prompt_ids: list[int], completion_ids: list[int], **data: Any) -> float:
    """1 if the reply's first line that is not blank is the answer, white space around both aside; else 0.

    Only that line counts because a model without a stop token goes on after it (`12\\n3+4=7`). An answer of several
    lines is compared with as many lines.
    """
    answer = gold(data).strip()
    lines = completions.strip().splitlines()[: len(answer.splitlines())]
    return float([line.strip() for line in lines] == [line.strip() for line in answer.splitlines()])


def last_number(prompt: str, completions: str, prompt_ids: list[int], completion_ids: list[int], **data: Any) -> float:
    """1 if the last number in the reply equals the last number in the answer (1,000 = 1000.0); else 0."""
    wanted = find_last_number(gold(data))
    if wanted is None:
        raise ValueError(
            f"answer = {data['answer']!r}: holds no number; last_number needs one in every prompt's answer."
        )
    return float(find_last_number(completions) == wanted)


def tagged_answer(
    prompt: str, completions: str, prompt_ids: list[int], completion_ids: list[int], **data: Any
) -> float:
    """1 if the last `<answer>..</answer>` of the reply is the answer, white space around both aside; else 0."""
    found = ANSWER_TAGS.findall(completions)
    return float(bool(found) and found[-1].strip() == gold(data).strip())


def gold(data: dict[str, Any]) -> str:
    if "answer" not in data:
        raise ValueError(
            f"prompt with keys {sorted(data)}: has no 'answer'; this reward compares with it, so give every prompt one."
        )
    if not str(data["answer"]).strip():
        raise ValueError("answer = '': is blank, and any reply would match it; give every prompt an answer.")
    return str(data["answer"])


def find_last_number(text: str) -> Decimal | None:
    matches = list(NUMBER.finditer(text))
    if not matches:
        return None
    start = matches[-1].start()
    value = Decimal(matches[-1].group().replace(",", ""))
    # A dash is a sign unless it follows an operand: `5 - 3` and `x-3` end in 3, but `is -3` in -3.
    before = text[max(0, start - 8) : start]
    is_negative = before.endswith(("-", "\u2212")) and not re.search(r"(?:[0-9)]\s*|[A-Za-z_])[-\u2212]$", before)
    return -value if is_negative else value
