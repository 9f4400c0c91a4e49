from __future__ import annotations

import contextlib
import hashlib
import io
import json
import os
import random
import subprocess
import sys
from collections import Counter
from datetime import date

import pytest

from megatron_rl.data import tasks
from megatron_rl.data.curriculum import by_success, digest_of
from megatron_rl.data.prompts import BLOCK, PromptIterator, load_prompts, shares

COUNT = "megatron_rl.data.tasks:count_ones"


def numbered(count: int) -> list[dict]:
    return [{"prompt": f"{i}?", "answer": str(i)} for i in range(count)]


def test_jsonl_lines_become_prompts_and_blank_lines_are_skipped(tmp_path):
    path = tmp_path / "data.jsonl"
    lines = [
        {"prompt": "1+1=", "answer": "2"},
        {"messages": [{"role": "user", "content": "hi"}]},
        {"input_ids": [5, 6], "level": 3},
        {"prompt": "line ends\u2028of other\x85alphabets\x0c stay in their line"},
    ]
    path.write_text("\n\n".join(json.dumps(line, ensure_ascii=False) for line in lines) + "\n", encoding="utf-8")
    assert load_prompts(str(path), key="data.train") == lines


def test_function_is_called_with_its_arguments():
    prompts = load_prompts(COUNT, {"split": "held_out", "digits": 4, "held_out": 3}, key="data.train")
    assert len(prompts) == 3
    assert all(p["answer"] == str(p["prompt"].count("1")) and len(p["prompt"]) == 5 for p in prompts)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "data.train = .*holds no prompts; give a source with at least one"),
        ('{"prompt": "a"}\n{oops\n', "data.train = .*line 2: not JSON.*write one JSON object per line"),
        ('{"answer": "4"}\n', "prompt 1: has only answer; must have exactly one of input_ids, prompt, messages"),
        ('{"prompt": "a", "messages": [1]}\n', "prompt 1: has prompt and messages; must have exactly one"),
        ('{"prompt": ""}\n', "prompt 1: prompt is empty; a server needs at least one token"),
        ('["a"]\n', "line 1: is a list; write one JSON object"),
        ('{"prompt": "a", "epoch": 3}\n', "prompt 1: has 'epoch', which the iterator writes; rename it"),
    ],
)
def test_bad_file_is_refused_with_the_way_out(tmp_path, text, message):
    path = tmp_path / "data.jsonl"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(ValueError, match=message):
        load_prompts(str(path), key="data.train")


@pytest.mark.parametrize(
    ("source", "args", "message"),
    [
        ("absent.jsonl", {}, "data.train = 'absent.jsonl': cannot be read .*give a UTF-8 file"),
        ("absent.jsonl", {"seed": 1}, "data.train_args = .*is a file, which takes no arguments; remove them"),
        ("no_colon", {}, "data.train = 'no_colon': must be .*import path package.module:"),
        ("megatron_rl.no_such:f", {}, "data.train = 'megatron_rl.no_such:f': .*is no data that megatron_rl offers"),
        ("megatron_rl.data.tasks:addion", {}, "did you mean megatron_rl.data.tasks:addition. One of your own"),
        (
            "megatron_rl.config.import_path:resolve",
            {"path": "os:getcwd", "key": "k", "import_from": None},
            "is no data that",
        ),
        (
            COUNT,
            {"digit": 8},
            r"data.train_args = .*unexpected keyword argument 'digit'; the signature is .*count_ones\(",
        ),
        ("json:dumps", {"obj": 1}, "data.train = 'json:dumps': module json is not in megatron_rl or run.import_from"),
        ("megatron_rl.data.tasks:SPLITS", {}, "is no data that megatron_rl offers"),
    ],
)
def test_bad_source_is_refused_with_the_way_out(source, args, message):
    with pytest.raises(ValueError, match=message):
        load_prompts(source, args, key="data.train")


@pytest.mark.parametrize(
    ("key", "source", "args", "message"),
    [
        ("eval.sets.hard.source", COUNT, {"digit": 8}, r"eval.sets.hard.args = \{'digit': 8\}: .*'digit'; the"),
        ("data.train", "mixture", {"a": {"source": COUNT, "args": {"digit": 8}}}, "data.train_args.a.args = "),
        ("data.train", "mixture", {"a": {}}, r"data.train_args.a = \{\}: must have source"),
    ],
)
def test_arguments_of_a_part_are_named_by_their_own_key(key, source, args, message):
    with pytest.raises(ValueError, match=f"^{message}"):
        load_prompts(source, args, key=key)


def test_source_of_a_declared_package_is_called():
    with pytest.raises(ValueError, match="data.train = 'json:dumps': returned str; must return a list of dicts"):
        load_prompts("json:dumps", {"obj": 1}, key="data.train", import_from=["json"])


def test_every_epoch_has_every_prompt_once_in_an_order_of_its_own():
    iterator = PromptIterator(numbered(10), seed=3)
    epochs = [iterator.next_batch(10) for _ in range(3)]
    orders = [[p["prompt_index"] for p in epoch] for epoch in epochs]
    assert all(sorted(order) == list(range(10)) for order in orders)
    assert orders[0] != orders[1] != orders[2]
    assert [{p["epoch"] for p in epoch} for epoch in epochs] == [{0}, {1}, {2}]
    assert epochs[0][0]["answer"] == str(orders[0][0])


def test_order_depends_on_the_seed_only():
    first, again, other = (PromptIterator(numbered(20), seed=s).next_batch(50) for s in (1, 1, 2))
    assert first == again != other


def test_without_shuffle_prompts_come_in_the_given_order():
    batch = PromptIterator(numbered(3), shuffle=False).next_batch(5)
    assert [p["prompt_index"] for p in batch] == [0, 1, 2, 0, 1]


def test_iteration_leaves_the_source_untouched():
    prompts = numbered(2)
    PromptIterator(prompts).next_batch(4)
    assert prompts == numbered(2)


@pytest.mark.parametrize("taken", [0, 1, 9, 10, 11, 25])  # start, middle, epoch's end and just past it, third epoch
def test_resumed_iteration_continues_with_the_next_prompt(taken):
    whole = PromptIterator(numbered(10), seed=7)
    whole.next_batch(taken)
    state = json.loads(json.dumps(whole.state_dict()))
    resumed = PromptIterator(numbered(10), seed=7)
    resumed.load_state_dict(state)
    assert resumed.next_batch(15) == whole.next_batch(15)


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (PromptIterator(numbered(9), seed=7), "count = 10, this run 9"),
        (PromptIterator(numbered(10), seed=8), "seed = 7, this run 8"),
        (PromptIterator(numbered(10), seed=7, shuffle=False), "shuffle = True, this run False"),
    ],
)
def test_state_of_other_prompts_is_refused(other, message):
    with pytest.raises(ValueError, match=message):
        other.load_state_dict(PromptIterator(numbered(10), seed=7).state_dict())


def test_other_prompts_of_the_same_number_are_refused():
    state = PromptIterator(numbered(10), seed=7).state_dict()
    changed = [prompt | {"answer": "x"} if number == 9 else prompt for number, prompt in enumerate(numbered(10))]
    for prompts in (changed, numbered(10)[::-1], [prompt | {"level": 1} for prompt in numbered(10)]):
        other = PromptIterator(prompts, seed=7)
        message = f"data.train: its 10 prompts have the digest '{other.digest}', but those .*'{state['digest']}'.*"
        with pytest.raises(ValueError, match=message + "Resume with the same data, or start a new run"):
            other.load_state_dict(state)
    del state["digest"]  # of a checkpoint that has none
    with pytest.raises(ValueError, match="of the saved iterator None"):
        PromptIterator(numbered(10), seed=7).load_state_dict(state)


ODD = r"""
from fractions import Fraction
from megatron_rl.data.prompts import PromptIterator
odd = {"words": {"some", "words", "in", "any", "order"}, "thing": object(), "half": Fraction(1, 2), (1, 2): 3, 4: 5}
prompts = [{"prompt": "na\u00efve \ud800", "big": 2**200, "share": 0.1, "metadata": odd}]
print(PromptIterator(prompts).digest)
"""


@pytest.mark.thorough
def test_the_digest_is_the_same_in_every_process_whatever_a_prompt_holds():
    environment = os.environ | {"PYTHONHASHSEED": "1"}
    done = subprocess.run([sys.executable, "-c", ODD], env=environment, capture_output=True, text=True, check=True)
    with contextlib.redirect_stdout(io.StringIO()) as here:  # where words are in another order
        exec(ODD, {})
    assert done.stdout == here.getvalue() and len(done.stdout.strip()) == 32
    # Of these bytes, whichever version of Python made them.
    content = b'{"prompt": "0?", "answer": "0"}\n{"prompt": "1?", "answer": "1"}\n'
    assert PromptIterator(numbered(2)).digest == hashlib.sha256(content).hexdigest()[:32]


def test_iterator_without_prompts_is_refused():
    with pytest.raises(ValueError, match="needs at least one prompt"):
        PromptIterator([])


@pytest.mark.slow
@pytest.mark.parametrize("task", [tasks.addition, tasks.count_ones, tasks.sort_digits, tasks.copy_letters])
def test_held_out_problems_are_disjoint_from_training_for_every_seed(task):
    held_out = {p["prompt"] for p in task("held_out", seed=5)}
    for seed in range(3):
        assert {p["prompt"] for p in task("held_out", seed=seed)} == held_out
        assert not held_out & {p["prompt"] for p in task("train", seed=seed)}


def test_addition_shows_two_examples_and_never_asks_for_them():
    prompts = tasks.addition("train") + tasks.addition("held_out")
    assert len(prompts) == 98 and len({p["prompt"] for p in prompts}) == 98
    assert len(tasks.addition("held_out")) == 32
    by_prompt = {p["prompt"]: p["answer"] for p in prompts}
    assert by_prompt["2+3=5\n8+1=9\n7+5="] == "12"
    assert "2+3=5\n8+1=9\n2+3=" not in by_prompt


def test_answers_of_the_tiny_tasks():
    counts = {p["prompt"]: p["answer"] for split in tasks.SPLITS for p in tasks.count_ones(split)}
    assert len(counts) == 256 and counts["01101001?"] == "4" and counts["00000000?"] == "0"
    sort = tasks.sort_digits("train", seed=1, count=50)
    assert len(sort) == 50
    assert all(p["answer"] == "".join(sorted(p["prompt"][:-1])) and p["prompt"][-1] == ">" for p in sort)
    pairs = [p for split in tasks.SPLITS for p in tasks.copy_letters(split, letters=2, held_out=9)]
    assert {p["prompt"]: p["answer"] for p in pairs} == {f"{x}{y}>": f"{x}{y}" for x in "abcdefgh" for y in "abcdefgh"}


def test_trail_has_each_order_of_its_boxes_once_and_the_held_out_ones_are_not_trained():
    assert [tasks.order_of(number, 3) for number in range(6)] == [
        [0, 1, 2],
        [1, 0, 2],
        [2, 0, 1],
        [0, 2, 1],
        [1, 2, 0],
        [2, 1, 0],
    ]
    parts = [tasks.trail(split, seed=seed, boxes=4, held_out=6) for seed in range(2) for split in ("train", "held_out")]
    orders = [{tuple(p["trail"]) for p in part} for part in parts]
    assert [len(part) for part in orders] == [18, 6, 18, 6]
    assert orders[0] == orders[2] and orders[1] == orders[3] and len(orders[0] | orders[1]) == 24
    assert parts[0] != parts[2], "a seed has an order of its own"
    (problem,) = tasks.trail(count=1, boxes=4, held_out=6)
    first, second, *_ = problem["trail"]
    assert (problem["prompt"], problem["answer"]) == (f"{first}\n{second}\n", str(second))
    with pytest.raises(ValueError, match="boxes = 11: must be in"):
        tasks.trail(boxes=11)


def test_large_task_is_not_enumerated():
    prompts = tasks.count_ones("train", count=3, digits=60)
    assert len(prompts) == 3 and all(len(p["prompt"]) == 61 for p in prompts)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"split": "test"}, "split = 'test': must be one of train, held_out"),
        ({"count": 67}, "count = 67: the train part of addition has 66 problems; ask for 1 to 66"),
        ({"count": 0}, "count = 0"),
        ({"held_out": 98}, "held_out = 98: addition has 98 problems"),
    ],
)
def test_addition_refuses_what_it_does_not_have(arguments, message):
    with pytest.raises(ValueError, match=message):
        tasks.addition(**arguments)


@pytest.mark.slow
def test_reasoning_gym_items_become_messages_with_an_instruction():
    pytest.importorskip(
        "reasoning_gym", reason="reasoning-gym is not installed (the extra megatron-rl[tasks] brings it)"
    )
    options = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}
    first, *rest = tasks.reasoning_gym("chain_sum", seed=1, count=3, **options)
    assert len(rest) == 2
    (message,) = first["messages"]
    assert message["role"] == "user" and message["content"].endswith(tasks.TAG_INSTRUCTION)
    x, y = message["content"].split("problem: ")[1].split(" =")[0].replace("- ", "+ -").split(" + ")
    assert int(first["answer"]) == int(x) + int(y)
    plain = tasks.reasoning_gym("chain_sum", seed=1, count=1, messages=False, answer_in="last_number", **options)[0]
    assert plain["prompt"].endswith(f"{tasks.NUMBER_INSTRUCTION}\n") and plain["answer"] == first["answer"]
    with pytest.raises(ValueError, match="reasoning_gym name = 'chain_sums'"):
        tasks.reasoning_gym("chain_sums")
    with pytest.raises(ValueError, match="reasoning_gym name = 'chain_sum' with {'max_term': 3}"):
        tasks.reasoning_gym("chain_sum", max_term=3)


MIXED = [
    {"prompt": f"{name} {n}", "source": name} for name, size in (("a", 7), ("b", 3), ("c", 400)) for n in range(size)
]
WEIGHTS = {"a": 2.0, "b": 1.0, "c": 0.25}


def test_mixture_has_its_shares_and_each_source_has_epochs_of_its_own():
    iterator = PromptIterator(MIXED, seed=4, weights=WEIGHTS)
    taken = iterator.next_batch(3 * BLOCK)
    for block in range(3):
        counts = Counter(p["source"] for p in taken[block * BLOCK : (block + 1) * BLOCK])
        assert counts == shares(WEIGHTS, BLOCK) == {"a": 615, "b": 308, "c": 77}
    places = {(p["epoch"], p["prompt_index"]) for p in taken}
    assert len(places) == len(taken), "epoch and index name a prompt in all books"
    of_a = [p["prompt_index"] for p in taken if p["source"] == "a"]
    epochs = [of_a[start : start + 7] for start in range(0, len(of_a) - 7, 7)]
    assert all(sorted(epoch) == list(range(7)) for epoch in epochs) and epochs[0] != epochs[1]


def test_a_place_in_a_mixture_is_a_function_of_its_number_alone():
    whole = PromptIterator(MIXED, seed=4, weights=WEIGHTS).next_batch(2500)
    other = PromptIterator(MIXED, seed=4, weights=WEIGHTS)
    for number in random.Random(0).sample(range(2500), 300):
        assert other.at(number) == whole[number]
    other.load_state_dict(json.loads(json.dumps({**other.state_dict(), "number": 2000})))
    assert other.next_batch(500) == whole[2000:]
    with pytest.raises(ValueError, match="weights = {'a': 2.0, .*this run {}"):
        PromptIterator(MIXED, seed=4).load_state_dict(other.state_dict())
    with pytest.raises(ValueError, match="'d': none is left for its share"):
        PromptIterator(MIXED, weights=WEIGHTS | {"d": 1.0})


def test_mixture_is_loaded_part_by_part(tmp_path):
    file = tmp_path / "own.jsonl"
    file.write_text('{"prompt": "mine", "answer": "1"}\n', encoding="utf-8")
    parts = {"own": {"source": str(file)}, "ones": {"source": COUNT, "args": {"count": 2}, "weight": 3}}
    prompts = load_prompts("mixture", parts, key="data.train")
    assert [p["source"] for p in prompts] == ["own", "ones", "ones"]
    with pytest.raises(ValueError, match="data.train_args.own = 3: must have source"):
        load_prompts("mixture", {"own": 3}, key="data.train")
    with pytest.raises(ValueError, match="data.train_args.x.source = 'json:dumps': .*run.import_from"):
        load_prompts("mixture", {"x": {"source": "json:dumps"}}, key="data.train")


def test_rows_of_parquet_and_saved_datasets_are_those_of_json_lines(tmp_path):
    datasets = pytest.importorskip("datasets", reason="datasets is not installed: pip install 'megatron-rl[data]'")
    rows = [{"prompt": f"{n}?", "answer": str(n)} for n in range(3)]
    whole = datasets.Dataset.from_list(rows)
    whole.to_parquet(tmp_path / "rows.parquet")
    whole.save_to_disk(tmp_path / "saved")
    datasets.DatasetDict({"train": whole, "test": whole.select([0])}).save_to_disk(tmp_path / "splits")
    assert load_prompts(str(tmp_path / "rows.parquet"), key="data.train") == rows
    assert load_prompts(str(tmp_path / "saved"), key="data.train") == rows
    assert load_prompts(str(tmp_path / "splits"), {"split": "test"}, key="data.train") == rows[:1]
    with pytest.raises(ValueError, match="has no split ''; its splits are train, test"):
        load_prompts(str(tmp_path / "splits"), key="data.train")
    (tmp_path / "bad.parquet").write_bytes(b"no")
    with pytest.raises(ValueError, match="bad.parquet': cannot be read"):
        load_prompts(str(tmp_path / "bad.parquet"), key="data.train")


def test_a_prompt_with_values_that_json_lacks_has_a_name_too():
    one, other = ({"prompt": "a", "asked": date(2024, 1, day)} for day in (1, 2))
    assert digest_of(one) == digest_of(dict(one)) != digest_of(other)


def test_prompts_are_chosen_and_ordered_by_measured_success(tmp_path):
    prompts, rewards = numbered(5), [[0, 0], [1, 0], [1, 1], [0.5, 1], [0, 1]]
    rows = [{"prompt": digest_of(p), "rewards": r} for p, r in zip(prompts, rewards, strict=True)]
    path = tmp_path / "eval.jsonl"
    path.write_text("\n".join(map(json.dumps, reversed(rows))), encoding="utf-8")
    mixed = [prompt | {"source": "a"} for prompt in prompts]
    assert [p["prompt"] for p in by_success(mixed, str(path), [0.25, 0.9])] == ["3?", "1?", "4?"]
    with pytest.raises(ValueError, match="data.success_rates = .*no replies to 2 of the 7 training prompts"):
        by_success(numbered(7), str(path), [0.0, 1.0])
    with pytest.raises(ValueError, match=r"data.success_band = \[0.8, 0.9\]: no prompt has a success rate in it"):
        by_success(prompts, str(path), [0.8, 0.9])
    path.write_text("{}", encoding="utf-8")
    with pytest.raises(ValueError, match="line 1: has no prompt and rewards"):
        by_success(prompts, str(path), [0.0, 1.0])


def test_a_prompts_number_is_its_place_in_the_endless_order():
    prompts = PromptIterator([{"prompt": letter} for letter in "abcde"], seed=3)
    taken = prompts.next_batch(8)  # over the end of an epoch
    assert [prompt["prompt_number"] for prompt in taken] == list(range(8))
    assert [prompts.at(number) for number in range(8)] == taken and prompts.number == 8
