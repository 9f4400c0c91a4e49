"""Loads prompts, and iterates over them in a way that a resumed run can continue.

A prompt is a dict with exactly one of these:
- `input_ids`: token ids
- `prompt`: text, tokenized as it is
- `messages`: input of the chat template, with the row's `tools` and `chat_template_kwargs` if it has them

It usually has `answer` (str), which rewards compare with and the warm start trains on. It may have any further fields
for its workflow or reward.
"""

from __future__ import annotations

import hashlib
import inspect
import json
import random
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from numbers import Integral
from typing import Any

from megatron_rl.config import MIXTURE, TrainConfig
from megatron_rl.config.data_section import BLOCK
from megatron_rl.config.import_path import resolve
from megatron_rl.data.data_files import holds_rows, is_file, read_rows
from megatron_rl.workflows.messages import Message, shown

Row = dict[str, Any]
FORMS = ("input_ids", "prompt", "messages")
PAIR = ("chosen", "rejected")
RESERVED = ("prompt_number", "prompt_index", "epoch")
IMPORT_FROM = "import_from"
"""Name of an argument: a prompt function that has it receives the config's run.import_from. A config cannot set it."""


def load_prompts(
    source: str, args: dict[str, Any] | None = None, *, key: str = "source", import_from: Sequence[str] = ()
) -> list[dict[str, Any]]:
    """Load prompts from a data set (data_files.py), a mixture, or a function `package.module:name` called with `args`.

    A data set accepts only the argument `split`. The arguments of a `mixture` are its parts by name, each with
    `source`, `args` and `weight`. It sets each prompt's `source` to the name of its part. Raises ValueError for
    anything else.

    key: the config key of `source`, for error messages. import_from: the config's run.import_from.
    """
    args = args or {}
    if source == MIXTURE:
        return load_mixture(args, key=key_of_args(key), import_from=import_from)
    if holds_rows(source):
        taken = () if is_file(source) else ("split",)
        if others := {name: value for name, value in args.items() if name not in taken}:
            takes = "a folder or hub name, which takes split alone" if taken else "a file, which takes no arguments"
            raise ValueError(f"{key_of_args(key)} = {others}: {key} = {source!r} is {takes}; remove them.")
        prompts = read_rows(source, key=key, split=args.get("split", ""))
    else:
        prompts = call_source(source, args, key, import_from)
    if not prompts:
        raise ValueError(f"{key} = {source!r}: holds no prompts; give a source with at least one.")
    prompts = [as_prompt(prompt) if isinstance(prompt, dict) else prompt for prompt in prompts]
    for number, prompt in enumerate(prompts, start=1):
        check_prompt(prompt, f"{key} = {source!r}, prompt {number}")
    return prompts


def load_held_out(config: TrainConfig) -> dict[str, list[dict[str, Any]]]:
    """Load the prompts of data.evaluation, as the set `held_out`, and then those of eval.sets.

    Return {} if there are none.
    """
    allowed, found = config.run.import_from, {}
    if config.data.evaluation:
        source, args = config.data.evaluation, config.data.evaluation_args
        found["held_out"] = load_prompts(source, args, key="data.evaluation", import_from=allowed)
    for name, part in config.eval.sets.items():
        args = dict(part.get("args", {}))
        found[name] = load_prompts(part["source"], args, key=f"eval.sets.{name}.source", import_from=allowed)
    return found


def key_of_args(key: str) -> str:
    """Return the config key of the arguments of the source at `key`: data.train_args, or eval.sets.NAME.args."""
    return f"{key.removesuffix('source')}args" if key.endswith("source") else f"{key}_args"


def load_mixture(parts: dict[str, Any], *, key: str, import_from: Sequence[str]) -> list[dict[str, Any]]:
    prompts = []
    for name, part in parts.items():
        if not isinstance(part, Mapping) or not isinstance(part.get("source"), str):
            raise ValueError(f"{key}.{name} = {part!r}: must have source, and may have args and weight.")
        if part["source"] == MIXTURE:
            raise ValueError(f"{key}.{name}: is a mixture in a mixture; name its parts here.")
        args = dict(part.get("args", {}))
        for prompt in load_prompts(part["source"], args, key=f"{key}.{name}.source", import_from=import_from):
            if "source" in prompt:
                raise ValueError(f"{key}.{name}: its prompts have 'source', which the mixture writes; rename it.")
            prompts.append(prompt | {"source": name})
    return prompts


def call_source(source: str, args: dict[str, Any], key: str, import_from: Sequence[str]) -> list[dict[str, Any]]:
    function = resolve(source, key=key, kind="data", import_from=import_from)
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError) as error:
        rule = "name a Python function that returns a list of dicts"
        raise ValueError(f"{key} = {source!r}: {error}; {rule}.") from error
    try:
        # Checked before the call: a TypeError from inside the function would not concern its arguments.
        signature.bind(**args)
    except TypeError as error:
        raise ValueError(f"{key_of_args(key)} = {args}: {error}; the signature is {source}{signature}.") from error
    # For functions that resolve import paths themselves. The config cannot set this argument.
    allowed = {IMPORT_FROM: import_from} if IMPORT_FROM in signature.parameters else {}
    prompts = function(**args | allowed)
    if not isinstance(prompts, list):
        raise ValueError(f"{key} = {source!r}: returned {type(prompts).__name__}; must return a list of dicts.")
    return prompts


def check_prompt(prompt: Any, where: str) -> None:
    """Raise ValueError unless `prompt` is a dict with exactly one of the prompt FORMS, which must be valid."""
    if not isinstance(prompt, dict):
        raise ValueError(f"{where}: is {type(prompt).__name__}; must be an object with one of {', '.join(FORMS)}.")
    forms = [form for form in FORMS if form in prompt]
    if len(forms) != 1:
        found = " and ".join(forms) or f"only {', '.join(map(str, prompt)) or 'nothing'}"
        raise ValueError(f"{where}: has {found}; must have exactly one of {', '.join(FORMS)}.")
    if isinstance(prompt[forms[0]], str | list | tuple) and not prompt[forms[0]]:
        raise ValueError(f"{where}: {forms[0]} is empty; a server needs at least one token to continue.")
    if forms == ["prompt"] and not isinstance(prompt["prompt"], str):
        raise ValueError(f"{where}: prompt = {shown(prompt['prompt'])}: must be text, or a list of messages.")
    for token in prompt["input_ids"] if forms == ["input_ids"] else ():  # messages are checked when rendered
        if not isinstance(token, Integral) or isinstance(token, bool) or token < 0:
            raise ValueError(f"{where}: input_ids has {shown(token)}: must be token ids, whole numbers from 0.")
    for name in RESERVED:
        if name in prompt:
            raise ValueError(f"{where}: has {name!r}, which the iterator writes; rename it.")


def as_prompt(row: Row) -> Row:
    """Return the row with its prompt in one of the FORMS.

    Forms whose value is None are dropped, because data frames fill missing columns with None. A `prompt` that is a list
    of messages (as for TRL and verl) becomes `messages`. If `chosen` and `rejected` are whole dialogues, `messages`
    becomes their common beginning.
    """
    if any(form in row and row[form] is None for form in FORMS):
        row = {name: value for name, value in row.items() if name not in FORMS or value is not None}
    if is_dialogue(row.get("prompt")) and "messages" not in row:
        row = {name: value for name, value in row.items() if name != "prompt"} | {"messages": row["prompt"]}
    chosen, rejected = (row.get(name) for name in PAIR)
    if is_dialogue(chosen) and is_dialogue(rejected) and len(chosen) > 1 and chosen[:-1] == rejected[:-1]:
        is_asked = is_dialogue(row.get("messages")) and row["messages"] != chosen[:-1]
        if not is_asked:  # otherwise they are replies of several messages, which are refused later
            others = {name: value for name, value in row.items() if name != "prompt"}
            row = others | {"messages": chosen[:-1], "chosen": chosen[-1:], "rejected": rejected[-1:]}
    return row


def is_dialogue(value: Any) -> bool:
    return isinstance(value, list | tuple) and bool(value) and all(isinstance(entry, dict) for entry in value)


def as_reply(value: Any) -> str | Message | None:
    """Return a reply that is given as text, number, message or a list of one message; None for anything else."""
    if isinstance(value, Sequence) and not isinstance(value, str) and len(value) == 1 and isinstance(value[0], dict):
        value = value[0]
    if isinstance(value, dict):
        return value if value.get("role", "assistant") == "assistant" and says(value) else None
    if isinstance(value, int | float):
        return None if value != value else str(value)  # NaN is a data frame's empty field
    return value if isinstance(value, str) and value.strip() else None


def says(message: Message) -> bool:
    """Return whether a message has content or tool calls."""
    content = message.get("content")
    return bool(message.get("tool_calls") or (content.strip() if isinstance(content, str) else content))


class PromptIterator(Iterator[dict[str, Any]]):
    """Endless iterator over prompts. The order in each epoch is drawn from (seed, epoch).

    It yields copies with `prompt_number` (position in the endless order, from 0), `prompt_index` (position in the list)
    and `epoch` (from 0). `weights` maps the prompts' sources to weights. With it, every source has its own epochs and a
    fixed share of each block of BLOCK prompts, in an order drawn from (seed, block).

        prompts = PromptIterator(load_prompts("my_prompts.jsonl"), seed=1)
        batch = prompts.next_batch(8)
        state = prompts.state_dict()  # another iterator's load_state_dict(state) continues after these 8
    """

    def __init__(
        self,
        prompts: list[dict[str, Any]],
        *,
        seed: int = 0,
        shuffle: bool = True,
        weights: Mapping[str, float] | None = None,
        key: str = "data.train",
    ) -> None:
        """key: the prompts' config key, for error messages."""
        if not prompts:
            raise ValueError("prompts = []: an endless iterator needs at least one prompt.")
        self.prompts, self.seed, self.shuffle, self.key = prompts, seed, shuffle, key
        self.weights = dict(weights or {})
        self.number = 0
        """Position of the next prompt in the endless order."""
        self._members: dict[str, list[int]] = {name: [] for name in self.weights}
        for index, prompt in enumerate(prompts):
            self._members.setdefault(prompt["source"] if self.weights else "", []).append(index)
        for name, members in self._members.items():
            if not members:
                raise ValueError(f"prompts of {name!r}: none is left for its share of the mixture; leave it out.")
        self._shares = shares(self.weights, BLOCK) if self.weights else {}
        # Both are only caches: `at` depends on the number and the seed, not on earlier calls.
        self._block = -1, [("", 0)]
        self._orders = {name: (0, self._order_of(name, 0)) for name in self._members}

    def __len__(self) -> int:
        """Return the number of prompts per epoch."""
        return len(self.prompts)

    def __next__(self) -> dict[str, Any]:
        self.number += 1
        return self.at(self.number - 1)

    def at(self, number: int) -> dict[str, Any]:
        """Return the prompt at a position of the endless order, without moving the iterator."""
        source, place = self._source_at(number)
        epoch, position = divmod(place, len(self._members[source]))
        if epoch != self._orders[source][0]:
            self._orders[source] = epoch, self._order_of(source, epoch)
        index = self._orders[source][1][position]
        return self.prompts[index] | {"prompt_number": number, "prompt_index": index, "epoch": epoch}

    def next_batch(self, count: int) -> list[dict[str, Any]]:
        """Return the next `count` prompts. They may be of several epochs."""
        return [next(self) for _ in range(count)]

    @cached_property
    def digest(self) -> str:
        """Digest of the prompts and their order, equal in all processes.

        Computing it takes a second for 100,000 prompts.
        """
        return digest_of_all(self.prompts)

    def state_dict(self) -> dict[str, Any]:
        state = {"number": self.number, "count": len(self.prompts), "seed": self.seed, "shuffle": self.shuffle}
        state["digest"] = self.digest
        return state | ({"weights": self.weights} if self.weights else {})

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from the position at which `state_dict` was called.

        Raises ValueError if the prompts or their order differ.
        """
        mine = {"weights": {}} | self.state_dict()
        state = {"weights": {}} | state  # absent in runs without a mixture
        # Checked before the digest: it differs whenever the count does, but its message says less.
        for name in ("count", "seed", "shuffle", "weights"):
            if state[name] != mine[name]:
                raise ValueError(
                    f"{self.key}: the saved iterator has {name} = {state[name]}, this run {mine[name]}; resume with "
                    f"the same data, run.seed and data.shuffle, or start a new run."
                )
        if state.get("digest") != self.digest:
            raise ValueError(
                f"{self.key}: its {len(self.prompts)} prompts have the digest {self.digest!r}, but those of the saved "
                f"iterator {state.get('digest')!r}: the prompts or their order have changed, or an older version saved "
                f"them. Resume with the same data, or start a new run. If a function gives other prompts in each "
                f"process, write them to a file and read that."
            )
        self.number = int(state["number"])

    def _source_at(self, number: int) -> tuple[str, int]:
        """Return the source of the prompt at a position, and its position in that source's own endless order."""
        if not self.weights:
            return "", number
        block, position = divmod(number, BLOCK)
        if block != self._block[0]:
            names = [name for name, share in self._shares.items() for _ in range(share)]
            # Changing this text, or those in `_order_of`, would give every resumed run different prompts.
            random.Random(f"{self.seed} mixture {block}").shuffle(names)
            # All blocks have the same shares, so a source's position follows from the block's number.
            next_of = {name: block * share for name, share in self._shares.items()}
            places = []
            for name in names:
                places.append((name, next_of[name]))
                next_of[name] += 1
            self._block = block, places
        return self._block[1][position]

    def _order_of(self, source: str, epoch: int) -> list[int]:
        order = list(self._members[source])
        if self.shuffle:
            random.Random(f"{self.seed} {source} {epoch}" if source else f"{self.seed} {epoch}").shuffle(order)
        return order


def digest_of_all(prompts: Sequence[Mapping[str, Any]]) -> str:
    """Return a digest of the prompts and their order.

    Values that JSON cannot represent count only by their type, because their text could differ between processes. Such
    keys are skipped.
    """
    encode = json.JSONEncoder(skipkeys=True, default=lambda value: type(value).__qualname__).encode
    whole = hashlib.sha256()
    for prompt in prompts:
        whole.update(encode(prompt).encode() + b"\n")
    return whole.hexdigest()[:32]


def shares(weights: Mapping[str, float], total: int) -> dict[str, int]:
    """Split `total` by weight, rounded so that the parts sum to `total` (largest remainder method)."""
    exact = {name: weight * total / sum(weights.values()) for name, weight in weights.items()}
    rounded = {name: int(share) for name, share in exact.items()}
    for name in sorted(exact, key=lambda name: rounded[name] - exact[name])[: total - sum(rounded.values())]:
        rounded[name] += 1
    return rounded
