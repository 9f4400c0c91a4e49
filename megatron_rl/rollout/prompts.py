"""Where prompts come from, and resumable iteration over them.

A prompt is a dict with exactly one of `input_ids` (token ids), `prompt` (text, tokenised as it is) and `messages` (for
the chat template), usually `answer` (str; what rewards compare with and the warm start trains on), and whatever else
its workflow or reward wants.
"""

from __future__ import annotations

import inspect
import json
import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from megatron_rl.import_path import resolve

FORMS = ("input_ids", "prompt", "messages")
RESERVED = ("prompt_index", "epoch")


def load_prompts(
    source: str, args: dict[str, Any] | None = None, *, key: str, import_from: Sequence[str] = ()
) -> list[dict[str, Any]]:
    """Return the prompts of a .jsonl file, or of the function `package.module:name` called with `args`.

    `key` is the config key that `source` came from (`data.train`); errors name it. `import_from` is the config's
    run.import_from. Raises ValueError.
    """
    args = args or {}
    if source.endswith(".jsonl"):
        if args:
            raise ValueError(
                f"{key}_args = {args}: {key} = {source!r} is a file, which takes no arguments; remove them."
            )
        prompts = read_jsonl(source, key)
    else:
        prompts = call_source(source, args, key, import_from)
    if not prompts:
        raise ValueError(f"{key} = {source!r}: holds no prompts; give a source with at least one.")
    for number, prompt in enumerate(prompts, start=1):
        check_prompt(prompt, f"{key} = {source!r}, prompt {number}")
    return prompts


def read_jsonl(source: str, key: str) -> list[dict[str, Any]]:
    try:
        lines = Path(source).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(
            f"{key} = {source!r}: cannot be read ({error}); give a UTF-8 file with one JSON object per line."
        ) from error
    prompts = []
    for number, line in enumerate(lines, start=1):
        if line.strip():
            try:
                prompts.append(json.loads(line))
            except json.JSONDecodeError as error:
                raise ValueError(
                    f"{key} = {source!r}, line {number}: not JSON ({error}); write one JSON object per line."
                ) from error
    return prompts


def call_source(source: str, args: dict[str, Any], key: str, import_from: Sequence[str]) -> list[dict[str, Any]]:
    function = resolve(source, key=key, import_from=import_from)
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"{key} = {source!r}: {error}; name a Python function that returns a list of dicts."
        ) from error
    try:
        signature.bind(**args)
    except TypeError as error:
        raise ValueError(f"{key}_args = {args}: {error}; the signature is {source}{signature}.") from error
    prompts = function(**args)
    if not isinstance(prompts, list):
        raise ValueError(f"{key} = {source!r}: returned {type(prompts).__name__}; must return a list of dicts.")
    return prompts


def check_prompt(prompt: Any, where: str) -> None:
    """Raise ValueError unless `prompt` is a dict with exactly one non-empty form."""
    if not isinstance(prompt, dict):
        raise ValueError(f"{where}: is {type(prompt).__name__}; must be an object with one of {', '.join(FORMS)}.")
    forms = [form for form in FORMS if form in prompt]
    if len(forms) != 1:
        found = " and ".join(forms) or f"only {', '.join(map(str, prompt)) or 'nothing'}"
        raise ValueError(f"{where}: has {found}; must have exactly one of {', '.join(FORMS)}.")
    if not prompt[forms[0]]:
        raise ValueError(f"{where}: {forms[0]} is empty; a server needs at least one token to continue.")
    for name in RESERVED:
        if name in prompt:
            raise ValueError(f"{where}: has {name!r}, which the iterator writes; rename it.")


class PromptIterator(Iterator[dict[str, Any]]):
    """Endless prompts, each epoch in an order of its own drawn from (seed, epoch).

    Yields copies with `prompt_index` (the prompt's number in the source) and `epoch` (from 0). Its state is a few
    numbers; a resumed run continues with the prompt that comes next.
    """

    def __init__(self, prompts: list[dict[str, Any]], *, seed: int = 0, shuffle: bool = True) -> None:
        if not prompts:
            raise ValueError("prompts = []: an endless iterator needs at least one prompt.")
        self.prompts, self.seed, self.shuffle = prompts, seed, shuffle
        self.number = 0
        """Prompts that were taken: the place, in the endless order, of the one that comes next."""
        self._epoch, self._order = 0, self._order_of(0)

    def __len__(self) -> int:
        """Prompts of one epoch."""
        return len(self.prompts)

    def __next__(self) -> dict[str, Any]:
        self.number += 1
        return self.at(self.number - 1)

    def skip(self, count: int) -> int:
        """Leave out the next `count` prompts, and return the place of the first of them."""
        self.number += count
        return self.number - count

    def at(self, number: int) -> dict[str, Any]:
        """Return the prompt at a place of the endless order; the iteration stays where it is."""
        epoch, position = divmod(number, len(self.prompts))
        if epoch != self._epoch:
            self._epoch, self._order = epoch, self._order_of(epoch)
        index = self._order[position]
        return self.prompts[index] | {"prompt_index": index, "epoch": epoch}

    def next_batch(self, count: int) -> list[dict[str, Any]]:
        """Return the next `count` prompts, over the end of an epoch where needed."""
        return [next(self) for _ in range(count)]

    def state_dict(self) -> dict[str, int | bool]:
        return {"number": self.number, "count": len(self.prompts), "seed": self.seed, "shuffle": self.shuffle}

    def load_state_dict(self, state: dict[str, int | bool]) -> None:
        """Continue where `state_dict` was taken; ValueError for the state of other prompts or another order."""
        mine = self.state_dict()
        for name in ("count", "seed", "shuffle"):
            if state[name] != mine[name]:
                raise ValueError(
                    f"prompts: the saved iterator has {name} = {state[name]}, this run {mine[name]}; "
                    "resume with the same data, run.seed and data.shuffle, or start a new run."
                )
        self.number = int(state["number"])

    def _order_of(self, epoch: int) -> list[int]:
        order = list(range(len(self.prompts)))
        if self.shuffle:
            random.Random(f"{self.seed} {epoch}").shuffle(order)
        return order
