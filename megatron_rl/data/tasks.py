"""Built-in tasks that need no download. Each function returns a list of prompts with an `answer`.

`split` is `train` or `held_out`. Which problems are held out does not depend on the seed. So the `train` split contains
none of them, whatever its seed.
"""

from __future__ import annotations

import math
import random
from typing import Any

SPLITS = ("train", "held_out")
ADDITION_EXAMPLES = ((2, 3), (8, 1))
TRAIL_HEAD = "Each box says which one is next.\n"
TRAIL_EXAMPLE = f"{TRAIL_HEAD}open 2\n5\nopen 5\n9\nopen 9\n1\nopen 1\n7\n\n{TRAIL_HEAD}"
TAG_INSTRUCTION = "Give the final answer, and nothing else, between <answer> and </answer>."
NUMBER_INSTRUCTION = "End your reply with the final answer as a number."


def addition(split: str = "train", seed: int = 0, count: int | None = None, held_out: int = 32) -> list[dict[str, Any]]:
    """Make prompts with a sum of two digits after two worked examples: `2+3=5\\n8+1=9\\n7+5=` -> `12`.

    There are 98 problems.
    """
    pairs = [(x, y) for x in range(10) for y in range(10) if (x, y) not in ADDITION_EXAMPLES]
    examples = "".join(f"{x}+{y}={x + y}\n" for x, y in ADDITION_EXAMPLES)
    chosen = (pairs[i] for i in choose("addition", len(pairs), split, seed, count, held_out))
    return [{"prompt": f"{examples}{x}+{y}=", "answer": str(x + y)} for x, y in chosen]


def count_ones(
    split: str = "train", seed: int = 0, count: int | None = None, digits: int = 8, held_out: int = 64
) -> list[dict[str, Any]]:
    """Make prompts that ask for the number of ones in 2 to 60 binary digits: `01101001?` -> `4`."""
    if not 2 <= digits <= 60:
        raise ValueError(f"digits = {digits}: must be in [2, 60]; 8 is what a tiny model learns in a minute.")
    chosen = choose("count_ones", 2**digits, split, seed, count, held_out)
    return [{"prompt": f"{number:0{digits}b}?", "answer": str(number.bit_count())} for number in chosen]


def count_ones_pairs(
    split: str = "train", seed: int = 0, count: int | None = None, digits: int = 8, held_out: int = 64
) -> list[dict[str, Any]]:
    """Make preference pairs for `count_ones`: the right count is preferred to a wrong one from 0 to `digits`."""
    pairs, draw = [], random.Random(f"count_ones_pairs {split} {seed}")
    for problem in count_ones(split, seed, count, digits, held_out):
        wrong = draw.choice([str(n) for n in range(digits + 1) if str(n) != problem["answer"]])
        pairs.append({"prompt": problem["prompt"], "chosen": problem["answer"], "rejected": wrong})
    return pairs


def sort_digits(
    split: str = "train", seed: int = 0, count: int | None = None, digits: int = 5, held_out: int = 500
) -> list[dict[str, Any]]:
    """Make prompts that ask to sort 2 to 18 digits in ascending order: `52731>` -> `12357`."""
    if not 2 <= digits <= 18:
        raise ValueError(f"digits = {digits}: must be in [2, 18]; 5 is what a tiny model learns in a minute.")
    strings = (f"{number:0{digits}d}" for number in choose("sort_digits", 10**digits, split, seed, count, held_out))
    return [{"prompt": f"{text}>", "answer": "".join(sorted(text))} for text in strings]


def copy_letters(
    split: str = "train", seed: int = 0, count: int | None = None, letters: int = 3, held_out: int = 64
) -> list[dict[str, Any]]:
    """Make prompts that ask to repeat 2 to 8 letters between a and h: `bdh>` -> `bdh`."""
    if not 2 <= letters <= 8:
        raise ValueError(f"letters = {letters}: must be in [2, 8]; 3 is what a tiny model learns from scratch.")
    chosen = choose("copy_letters", 8**letters, split, seed, count, held_out)
    texts = ["".join("abcdefgh"[number >> 3 * place & 7] for place in range(letters)) for number in chosen]
    return [{"prompt": f"{text}>", "answer": text} for text in texts]


def trail(
    split: str = "train",
    seed: int = 0,
    count: int | None = None,
    boxes: int = 10,
    words: bool = False,
    held_out: int = 500,
) -> list[dict[str, Any]]:
    """Follow a round trip through 3 to 10 boxes, each with a note that names the next one: `3\\n7\\n` -> `7`.

    The environment megatron_rl.workflows.trail:Trail opens the boxes, in as many calls as there are boxes; `answer` is
    the first call. words: calls are `open 7`, and the prompt starts with a worked example.
    """
    if not 3 <= boxes <= 10:
        raise ValueError(f"boxes = {boxes}: must be in [3, 10]; a box's number is one digit.")
    call, before = ("open ", TRAIL_EXAMPLE) if words else ("", "")
    prompts = []
    for number in choose("trail", math.factorial(boxes), split, seed, count, held_out):
        first, second, *_ = order = order_of(number, boxes)
        prompt = f"{before}{call}{first}\n{second}\n"
        prompts.append({"prompt": prompt, "answer": f"{call}{second}", "trail": order, "call": call})
    return prompts


def order_of(number: int, size: int) -> list[int]:
    """Return the permutation with index `number` among the size! permutations of 0 to size - 1."""
    left, order = list(range(size)), []
    for choices in range(size, 0, -1):
        number, place = divmod(number, choices)
        order.append(left.pop(place))
    return order


def reasoning_gym(
    name: str, seed: int = 0, count: int = 1000, messages: bool = True, answer_in: str = "tags", **config: Any
) -> list[dict[str, Any]]:
    """Load a data set of the package reasoning-gym, e.g. name="chain_sum", max_terms=2, max_digits=1.

    The prompt asks for the answer in the form `answer_in`: `tags` (<answer>..</answer>) or `last_number`. Use another
    seed for evaluation. Reward: megatron_rl.rewards.procedural:reasoning_gym, or one that finds an answer in this form.
    """
    instructions = {"tags": TAG_INSTRUCTION, "last_number": NUMBER_INSTRUCTION}
    if answer_in not in instructions:
        raise ValueError(f"answer_in = {answer_in!r}: must be one of {', '.join(instructions)}.")
    try:
        from reasoning_gym import create_dataset
    except ImportError as error:
        raise RuntimeError("reasoning-gym is not installed; run pip install 'megatron-rl[tasks]'.") from error
    try:
        items = create_dataset(name, size=count, seed=seed, **config)
    except (ValueError, TypeError, AssertionError) as error:
        raise ValueError(f"reasoning_gym name = {name!r} with {config}: {error}.") from error
    prompts = []
    for item in items:
        text = f"{item['question']}\n{instructions[answer_in]}"
        form = {"messages": [{"role": "user", "content": text}]} if messages else {"prompt": f"{text}\n"}
        known = {"question": item["question"], "metadata": item["metadata"]}  # needed by the package's scorer
        prompts.append(form | {"answer": item["answer"], "task": name} | known)
    return prompts


def choose(task: str, total: int, split: str, seed: int, count: int | None, held_out: int) -> list[int]:
    """Choose `count` of `total` numbered problems, without repetition, from the part `split`.

    None chooses all of the part. held_out: number of the problems in the held-out part. It is the same for every seed.
    """
    if split not in SPLITS:
        raise ValueError(f"split = {split!r}: must be one of {', '.join(SPLITS)}.")
    if not 1 <= held_out < total:
        raise ValueError(f"held_out = {held_out}: {task} has {total} problems; keep at least 1 and fewer than all.")
    # Independent of the seed: no seed may train on problems that another one holds out.
    reserved = random.Random(f"{task} held out").sample(range(total), held_out)
    size = held_out if split == "held_out" else total - held_out
    wanted = size if count is None else count
    if not 1 <= wanted <= size:
        raise ValueError(f"count = {count}: the {split} part of {task} has {size} problems; ask for 1 to {size}.")
    draw = random.Random(f"{task} {split} {seed}")
    if split == "held_out":
        return draw.sample(sorted(reserved), wanted)
    # Draw held_out more than wanted: enough remain, whichever of them are reserved.
    taken = set(reserved)
    return [number for number in draw.sample(range(total), wanted + held_out) if number not in taken][:wanted]
