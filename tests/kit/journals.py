"""What the journals of a run say about the steps that trained its weights."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from megatron_rl.rollout.journal import SUFFIX, read_file


def consumed_by_step(folder: str | Path) -> Iterator[tuple[int, list[int]]]:
    """Yield (step, prompts) of every batch that the current weights were trained on, over all attempts and ranks.

    Batches of steps that a later process repeated are excluded.
    """
    attempts: dict[int, tuple[int, list[dict[str, Any]]]] = {}
    for path in sorted(Path(folder).glob(f"*{SUFFIX}")):
        events = [record.event for record in read_file(path)[0]]
        if events:
            _, batches = attempts.setdefault(int(path.name.split("-")[0]), (events[0]["first_step"], []))
            batches += [event for event in events if event["event"] == "consumed"]
    for attempt, (_, batches) in sorted(attempts.items()):
        # A later attempt repeated all steps from its first one on.
        end = min((first for other, (first, _) in attempts.items() if other > attempt), default=None)
        yield from ((b["step"], b["prompts"]) for b in batches if end is None or b["step"] < end)
