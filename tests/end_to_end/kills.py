"""Kills trainers with SIGKILL again and again, resumes them, and does the books: `make soak` prints the table.

A run's processes are forked from this one, which has imported everything, and share one rollout server: a life begins
in a second. A trial is one run of 12 steps with several kills, each of one rank, which the others must not outlive
once they have met; before that all are killed, as their launcher does.
After it three questions are asked. Was every prompt trained once (lost, twice)? Are the steps and their losses those of
a run that nobody killed (synchronous runs)?
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import random
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from megatron_rl.rollout.journal import FOLDER as JOURNAL
from megatron_rl.rollout.ledger import Share
from tests.kit.forks import check_end, exit_codes, has_ended, start_ranks
from tests.kit.journals import consumed_by_step
from tests.kit.runs import (
    UNTAUGHT,
    experiment,
    logged,
    losses,
    newest_checkpoint,
    rollout_servers,
    run_to_the_end,
    served_by,
)
from tests.kit.waiting import wait_until

STEPS, PROMPTS = 12, 8
SMALL = (
    *(f"run.steps={STEPS}", f"batch.prompts_per_step={PROMPTS}", "generation.n_samples=4", "data.evaluation="),
    "rollout.reward_workers=1",
    # All checkpoints and with them all journals stay: the books are done at the end.
    *("run.checkpoint_every_steps=2", "run.keep_checkpoints=100", "run.save_at_end=false"),
)
ASYNCHRONOUS = ("rollout.max_staleness=2", "correction.weight=mask")
TENSOR = ("parallel.tensor=2",)


@dataclass(frozen=True, kw_only=True)
class Mode:
    """What is common to all lives of a run, and the layouts, (ranks, settings), that they have in turn."""

    settings: tuple[str, ...] = ()
    layouts: tuple[tuple[int, tuple[str, ...]], ...] = ((1, ()),)

    @property
    def has_same_losses(self) -> bool:
        return not self.settings and len(self.layouts) == 1


MODES = {
    "synchronous": Mode(),
    "asynchronous": Mode(settings=ASYNCHRONOUS),
    "tensor=2": Mode(layouts=((2, TENSOR),)),
    # Two ranks with one journal, two with one each, and one; with single replies in the journals.
    "layouts": Mode(settings=(*ASYNCHRONOUS, "rollout.journal_replies=true"), layouts=((2, TENSOR), (2, ()), (1, ()))),
}
"""By their names in the table; `layouts` is asynchronous too."""
PLACES = ("in a checkpoint", "in a step", "in a checkpoint", "in a step", "at the start")
"""Where the kills of a run fall, in turn."""


@dataclass(kw_only=True)
class Trial:
    """What became of one run."""

    mode: str
    kills: list[str]
    resumed: list[int]
    lost: int
    twice: int
    is_same: bool | None
    """Losses equal those of the uninterrupted run; None where they need not."""

    @property
    def is_good(self) -> bool:
        return self.lost == 0 and self.twice == 0 and self.is_same is not False


def trial(folder: Path, name: str, kills: int, settings: tuple[str, ...], chance: random.Random) -> Trial:
    """Run to the end, killed `kills` times on the way (at most 5); `settings` name the server and what is learned."""
    folder.mkdir(parents=True)
    mode, output = MODES[name], folder / "output.txt"
    lives = itertools.cycle(mode.layouts)
    common = (f"run.folder={folder}", *settings, *SMALL, *mode.settings)
    places, resumed = [], []
    for place in PLACES[:kills]:
        ranks, layout = next(lives)
        pids = start_ranks(ranks, experiment, (*common, *layout), output)
        if not wait_for(place, folder, pids, chance):
            check_end(pids, output)
            break
        if place == "at the start":  # where the ranks still wait for each other, their launcher ends them
            for pid in pids:
                os.kill(pid, signal.SIGKILL)
            check_end(pids, output, -signal.SIGKILL)
        else:
            end_without(pids, chance.choice(pids), output)
        places.append(place)
        resumed.append(newest_checkpoint(folder))
    ranks, layout = next(lives)
    run_to_the_end(folder, (*common, *layout), ranks)
    lost, twice = do_the_books(folder)
    return Trial(mode=name, kills=places, resumed=resumed, lost=lost, twice=twice, is_same=None)


def end_without(pids: list[int], victim: int, output: Path) -> None:
    """Kill one rank with SIGKILL and see that the others end because of it."""
    os.kill(victim, signal.SIGKILL)
    wait_until(lambda: all(map(has_ended, pids)), lambda: f"a rank outlives another\n{output.read_text()}")
    codes = dict(zip(pids, exit_codes(pids), strict=True))
    assert codes.pop(victim) == -signal.SIGKILL and 0 not in codes.values(), codes


def wait_for(place: str, folder: Path, pids: list[int], chance: random.Random) -> bool:
    """Wait until it is time to kill; False if the run ended before."""
    is_over = lambda: any(map(has_ended, pids))  # noqa: E731
    if place == "at the start":
        time.sleep(chance.uniform(0.05, 1.0))
        return not is_over()
    before, seen, skipped = partial_checkpoints(folder), set(), chance.randrange(3)
    steps = len(logged(folder)) + chance.randrange(1, 5)

    def is_there() -> bool:
        if place == "in a step":
            return len(logged(folder)) >= steps
        seen.update(partial_checkpoints(folder) - before)
        return len(seen) > skipped

    wait_until(lambda: is_over() or is_there(), lambda: (folder / "output.txt").read_text(), poll_s=0.001)
    # Somewhere in what has just begun; of a checkpoint, which takes less, half of the time at its very beginning.
    time.sleep(chance.uniform(0.0, 0.15) * (place == "in a step" or chance.choice([0.0, 0.8])))
    return not is_over()


def partial_checkpoints(folder: Path) -> set[str]:
    try:
        return {name for name in os.listdir(folder / "checkpoints") if name.endswith(".partial")}
    except FileNotFoundError:
        return set()


def do_the_books(folder: Path, steps: int = STEPS) -> tuple[int, int]:
    """Return how many prompts were lost and how many trained more than once.

    A run deletes the journals of steps that no checkpoint needs, such as the first ones if the first checkpoint was
    lost with its writer. As many prompts as those steps trained are not counted as lost.
    """
    batches = list(consumed_by_step(folder / JOURNAL))
    trained = [prompt for _, prompts in batches for prompt in prompts]
    found = {step for step, _ in batches}
    kept = [path.name for path in (folder / "checkpoints").glob("step-*") if not path.suffix]
    oldest = min(int(name.removeprefix("step-")) for name in kept)
    assert found == set(range(min(found), steps)) and min(found) < max(1, oldest), (
        f"steps {found}, checkpoints {oldest}"
    )
    deleted = min(found) * len(trained) // len(found)
    state = json.loads((folder / "checkpoints" / f"step-{steps}" / "run.json").read_text())
    furthest = max(ledger["next"] for ledger in state["ledgers"])
    still_open = {number for ledger in state["ledgers"] for number in ledger["open"]}
    to_come = {
        number
        for ledger in state["ledgers"]
        for number in range(ledger["next"], furthest)
        if number in Share.of_state(ledger)
    }
    lost = set(range(furthest)) - to_come - set(trained) - still_open
    twice = len(trained) - len(set(trained)) + len(set(trained) & still_open)
    return max(0, len(lost) - deleted), twice


def soak(folder: Path, points: int, seed: int, modes: Sequence[str] = tuple(MODES)) -> Iterator[Trial]:
    """Kill runs at `points` points in all, of each of these modes about as often, at most 5 times each."""
    chance = random.Random(seed)
    with rollout_servers(folder / "servers") as server:
        settings = (*served_by(server), *UNTAUGHT)
        for number, name in enumerate(modes):
            mode = MODES[name]
            expected = uninterrupted(folder / f"{name}-whole", mode, settings) if mode.has_same_losses else None
            done, wanted = 0, points // len(modes) + (number < points % len(modes))
            for attempt in itertools.count():
                if done == wanted:
                    break
                target = folder / f"{name}-{attempt}"
                result = trial(target, name, min(len(PLACES), wanted - done), settings, chance)
                if expected is not None:
                    result.is_same = losses(target) == expected
                done += len(result.kills)
                yield result


def uninterrupted(folder: Path, mode: Mode, settings: tuple[str, ...]) -> list[tuple]:
    """Return the losses of a run that nobody kills."""
    folder.mkdir()
    ranks, layout = mode.layouts[0]
    run_to_the_end(folder, (f"run.folder={folder}", *settings, *SMALL, *layout), ranks)
    return losses(folder)


def row(trial: Trial) -> str:
    places = ", ".join(f"{place} (-> {step})" for place, step in zip(trial.kills, trial.resumed, strict=True))
    same = {True: "yes", False: "NO", None: "-"}[trial.is_same]
    return f"{trial.mode:14}{len(trial.kills):>6}{trial.lost:>6}{trial.twice:>7}  {same:10}  {places}"


def main() -> None:
    from frame import Machine

    parser = argparse.ArgumentParser(description="Kill, resume, and count what was lost.")
    parser.add_argument("--points", type=int, default=50, help="kills in all, as many of every kind of run")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    print(f"{STEPS} steps, a checkpoint every 2; {Machine()}\n")
    print(f"{'run':14}{'kills':>6}{'lost':>6}{'twice':>7}  {'same loss':10}  killed (-> step that it resumed after)")
    results: list[Trial] = []
    with tempfile.TemporaryDirectory(prefix="soak-") as folder, contextlib.suppress(KeyboardInterrupt):
        for result in soak(Path(folder), args.points, args.seed):
            results.append(result)
            print(row(result), flush=True)
    kills, lost, twice = (
        sum(column) for column in zip(*((len(r.kills), r.lost, r.twice) for r in results), strict=True)
    )
    print(f"\n{kills} kills: {lost} prompts or groups lost, {twice} trained twice")
    sys.exit(0 if all(result.is_good for result in results) else 1)


if __name__ == "__main__":
    main()
