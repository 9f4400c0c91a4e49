"""Finds where two runs diverge: the first step whose metrics differ, and the first token that differs in this step.

All trajectories are compared if both runs recorded the step (telemetry.record_steps), otherwise the logged samples.
"""

from __future__ import annotations

import itertools
import json
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from safetensors import SafetensorError
from safetensors.numpy import load_file
from tokenizers import Tokenizer

from megatron_rl.telemetry.run_log import CONFIG, RunRecord, is_number

OF_TIME = ("time/", "rollout/", "publish/", "mismatch/", "elapsed_s")
"""Prefixes of metrics that are not compared: they depend on time, or on how servers batched requests."""
COLUMN = 56
"""Width in characters of each of two texts shown side by side."""
SHOWN = 200
"""Maximum characters of a text, or tokens on each side, that are shown around the first difference."""
Sequence = tuple[list[int], list[float]]
"""A trajectory's token ids and log-probabilities."""


@dataclass(frozen=True, kw_only=True)
class Parting:
    """The first step in which two runs differ, and where in it."""

    step: int
    metrics: dict[str, tuple[Any, Any]]
    """{name of a metric that differs: (value in the first run, value in the second run)}."""
    where: str
    """Text that shows the first prompt and token that differ with both replies, or says that no known reply differs."""

    def __str__(self) -> str:
        shown = [f"{name} {a!r} and {b!r}" for name, (a, b) in itertools.islice(self.metrics.items(), 4)]
        more = f", and {len(self.metrics) - 4} more" if len(self.metrics) > 4 else ""
        numbers = f": {', '.join(shown)}{more}" if shown else ""
        return f"part at step {self.step}{numbers}\n{self.where}"


def parting(runs: tuple[RunRecord, RunRecord], folders: tuple[Path, Path], *, bound: float = 0.0) -> Parting | None:
    """Return where two runs first differ; None if all their common steps agree.

    bound: largest relative difference of a metric or reward that counts as equal. Replies are compared exactly.
    """
    of_steps = [{line["step"]: line for line in run.steps} for run in runs]
    for step in sorted(of_steps[0].keys() & of_steps[1].keys()):
        metrics = dict(_differing(of_steps[0][step], of_steps[1][step], bound))
        where = _first_token(step, folders) or _first_sample(step, runs, bound)
        if metrics or where:
            nothing = "no reply that was logged or recorded differs in this step; set telemetry.record_steps to see all"
            return Parting(step=step, metrics=metrics, where=where or nothing)
    return None


def _differing(a: dict[str, Any], b: dict[str, Any], bound: float) -> Iterator[tuple[str, tuple[Any, Any]]]:
    for name in dict.fromkeys([*a, *b]):
        if name.startswith(OF_TIME) or name.endswith("_s"):
            continue
        mine, theirs = a.get(name), b.get(name)
        # Histograms (dicts) are compared only if there is no bound.
        if not _are_close(mine, theirs, bound) and not (bound and isinstance(mine, dict)):
            yield name, (mine, theirs)


def _are_close(a: Any, b: Any, bound: float) -> bool:
    return a == b or (is_number(a) and is_number(b) and abs(a - b) <= bound * max(abs(a), abs(b)))


def _first_sample(step: int, runs: tuple[RunRecord, RunRecord], bound: float) -> str:
    """Describe the first logged sample of a step that differs; '' if none does."""
    pairs = zip(*(run.samples.get(("train", step), []) for run in runs), strict=False)
    for a, b in pairs:
        if a["prompt"] != b["prompt"]:
            return f"sample {a['number']}: the prompts differ\n  {_cut(a['prompt'], 0)}\n  {_cut(b['prompt'], 0)}"
        if a["reply"] != b["reply"]:
            place = _common(a["reply"], b["reply"])
            prompt = f"  prompt: {_cut(a['prompt'], len(a['prompt']))}"
            replies = f"  {_cut(a['reply'], place)}\n  {_cut(b['reply'], place)}"
            return f"sample {a['number']}: the replies part at character {place}\n{prompt}\n{replies}"
        if not _are_close(a["reward"], b["reward"], bound):
            replies = f"  {_cut(a['reply'], 0)}"
            return f"sample {a['number']}: the same reply has reward {a['reward']!r} and {b['reward']!r}\n{replies}"
    return ""


def _first_token(step: int, folders: tuple[Path, Path]) -> str:
    """Describe the first token that differs in the records of a step; '' if they agree or a run has no record."""
    found = [_recorded(folder / "records" / f"step-{step}") for folder in folders]
    if found[0] is None or found[1] is None:
        return ""
    for (prompt, sample), mine in found[0].items():
        theirs = found[1].get((prompt, sample))
        name = f"prompt {prompt}, trajectory {sample} of it"
        if theirs is None:
            return f"{name}: only the first run has it in this step"
        place = _common(mine[0], theirs[0])
        if place < max(len(mine[0]), len(theirs[0])):
            sides = "".join(f"\n  tokens {ids[place : place + 12]}" for ids, _ in (mine, theirs))
            sides += "".join(
                f"\n  log-probs {[round(p, 6) for p in ps[place : place + 4]]}" for _, ps in (mine, theirs)
            )
            after = f"after {mine[0][max(place - 12, 0) : place]}"
            return (
                f"{name}: the tokens part at token {place}, {after}{sides}{_texts(folders, mine[0], theirs[0], place)}"
            )
    return ""


def _texts(folders: tuple[Path, Path], mine: list[int], theirs: list[int], place: int) -> str:
    """Return the common text before token `place`, and the two texts from there on side by side.

    mine, theirs: the two sequences' token ids. Returns "" if a run's tokenizer is missing.
    """
    tokenizers = [_tokenizer(folder) for folder in folders]
    if tokenizers[0] is None or tokenizers[1] is None:
        return ""
    before = tokenizers[0].decode(mine[max(place - SHOWN, 0) : place], skip_special_tokens=False)
    columns = [
        textwrap.wrap(repr(it.decode(ids[place : place + SHOWN], skip_special_tokens=False)), COLUMN) or ["''"]
        for it, ids in zip(tokenizers, (mine, theirs), strict=True)
    ]
    rows = itertools.zip_longest(*columns, fillvalue="")
    lines = "".join(f"\n  {left:<{COLUMN}} | {right}".rstrip() for left, right in rows)
    return f"\n  both say {_cut(before, len(before))}, and then{lines}"


def _tokenizer(folder: Path) -> Tokenizer | None:
    """Return the tokenizer of a run's model, if the model's folder is still there."""
    try:
        config = yaml.safe_load((folder / CONFIG).read_text(encoding="utf-8"))
        return Tokenizer.from_file(str(Path(config["model"]["path"]) / "tokenizer.json"))
    except Exception:  # tokenizers raises plain Exceptions; a config that is cut off may have any form
        return None


def _recorded(folder: Path) -> dict[tuple[int, int], Sequence] | None:
    """Return {(prompt, index among the prompt's trajectories): trajectory} of a record; None if there is no record."""
    try:
        numbers = load_file(folder / "consumed.safetensors")
        replicas = json.loads((folder / "record.json").read_text(encoding="utf-8"))["replicas"]
        parts = [load_file(folder / f"consumed-{number}.safetensors") for number in range(replicas)]
    except (OSError, ValueError, KeyError, SafetensorError):
        return None
    prompts = numbers["sequences.prompt" if "sequences.prompt" in numbers else "sequences.group"].tolist()
    trajectories: dict[int, Sequence] = {}
    for replica, part in enumerate(parts):
        rows, ends = np.nonzero(numbers["plan.owner"] == replica)[0].tolist(), part["cu_seqlens"].tolist()
        for row, first, end in zip(rows, ends, ends[1:], strict=False):
            ids, logprobs = part["tokens.input_ids"][first:end], part["tokens.logprobs"][first:end]
            trajectories[row] = ids.tolist(), logprobs.tolist()
    found: dict[tuple[int, int], Sequence] = {}
    counts: dict[int, int] = {}
    for row, prompt in enumerate(prompts):
        found[prompt, counts.get(prompt, 0)] = trajectories[row]
        counts[prompt] = counts.get(prompt, 0) + 1
    return found


def _common(a: Any, b: Any) -> int:
    """Return the length of the common prefix of two texts or lists."""
    return next((place for place, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def _cut(text: str, place: int) -> str:
    """Return at most SHOWN characters of `text` around `place`, on one line."""
    begin = max(0, place - SHOWN // 2)
    return repr(("..." if begin else "") + text[begin : begin + SHOWN] + ("..." if len(text) > begin + SHOWN else ""))
