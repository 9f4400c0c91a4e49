"""What is read out of a model's text takes time in proportion to its length: the event loop waits for it."""

import time

import pytest

from megatron_rl.rewards import exact_match, find_last_number, find_tagged, last_boxed
from megatron_rl.rewards.judge import Grading
from megatron_rl.rewards.program_text import find_program
from megatron_rl.run.evaluation import final_answer
from megatron_rl.workflows.tools import ToolCall, split_tool_calls

READERS = {
    "tool calls": split_tool_calls,
    "a judge's question": lambda text: Grading().asked("p", text, {}),
    "a judge's grade": Grading().grade_of,
    "last number": lambda text: find_last_number(text, whole=True),
    "tagged": find_tagged,
    "boxed": last_boxed,
    "program": find_program,
    "exact match": lambda text: exact_match("", text, [], [], answer="4"),
    "final answer": final_answer,
}
TEXTS = [
    *(
        ("", unit)
        for unit in ("<tool_call>", "</tool_call>", "<tool_call>{", "<tool_call></tool_call>", "<score>", "< /")
    ),
    *(
        ("", unit)
        for unit in ("\\boxed{", "{", "}", "<answer>", "</answer>", "```", "```\n", "\n", "[/", "{reply}", "1e")
    ),
    *(("", unit) for unit in ("1", "1,", "1,111", "1.", "-", "^", "1/", "a", "<score>1 ", "<score>1</score>")),
    *((begin, " ") for begin in ("<", "</", "<score>", "<score>1", "1", "1/", "<tool_call>", "```python", "\\boxed{")),
    ("</tool_call>", "<tool_call>"),
    ("<tool_call>", "</tool_call>"),
]
LENGTH, MOST_S = 150_000, 2.0
"""15,000 beginnings of a call took 13 seconds; each reader takes a twentieth of a second at most."""


@pytest.mark.slow
@pytest.mark.parametrize("reader", READERS.values(), ids=READERS)
def test_no_text_holds_its_reader_for_long(reader):
    for begin, unit in TEXTS:
        text, start_s = begin + unit * (LENGTH // len(unit)), time.thread_time()
        try:
            reader(text)
        except ValueError:
            pass  # a refusal
        assert time.thread_time() - start_s < MOST_S, (begin, unit)


def test_a_call_is_what_stands_between_a_beginning_and_the_next_end():
    call = '<tool_call>{"name": "f", "arguments": {"x": 1}}</tool_call>'
    parsed = ToolCall(name="f", arguments={"x": 1})
    assert split_tool_calls(f"a {call} b{call}") == ("a  b", [parsed, parsed])
    assert split_tool_calls("</tool_call> <tool_call> a ") == ("</tool_call> <tool_call> a ", [])
    text, (wrong,) = split_tool_calls("<tool_call><tool_call>{}</tool_call></tool_call>")
    assert text == "</tool_call>" and wrong.fault
    assert split_tool_calls(f"{call}<tool_call>cut off") == ("<tool_call>cut off", [parsed])
