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
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_rl.config import RolloutConfig, load_config
from megatron_rl.launch.ports import free_port
from megatron_rl.rollout.journal import FOLDER as JOURNAL
from megatron_rl.rollout.journal import consumed_by_step
from megatron_rl.rollout.ledger import Share
from megatron_rl.servers.supervisor import Supervisor
from megatron_rl.train import train
from tests.kit.ranks import fork
from tests.kit.runs import COUNT, ROOT, steps_of

STEPS, PROMPTS = 12, 8
SMALL = (
    *(f"run.steps={STEPS}", f"batch.prompts_per_step={PROMPTS}", "generation.n_samples=4", "data.evaluation="),
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
OUTLIVES_S = 60.0
"""How long the ranks may go on that have lost one."""
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


def one_server(folder: Path) -> Supervisor:
    model = ROOT / "configs" / "models" / "count_tiny"
    return Supervisor(RolloutConfig(backend="embedded"), model, folder, dummy_weights=True)


def served_by(servers: Supervisor) -> tuple[str, str]:
    """Return the settings of a run whose servers these are."""
    return f"rollout.servers=[{','.join(servers.urls)}]", f"rollout.token_file={servers.token_file}"


def experiment(overrides: tuple[str, ...]) -> None:
    os.chdir(ROOT)
    train(load_config(COUNT, list(overrides)), resume="auto")


def start_ranks(
    count: int, run: Callable[..., Any], overrides: tuple[str, ...], output: Path, *, nodes: int = 1
) -> list[int]:
    """Start `run(overrides)` on every rank of a world, told that they are on so many nodes; return the pids."""
    here = count // nodes
    shared = {"WORLD_SIZE": str(count), "LOCAL_WORLD_SIZE": str(here), "MASTER_ADDR": "127.0.0.1"}
    shared["MASTER_PORT"] = str(free_port("127.0.0.1"))
    places = [shared | {"RANK": str(rank), "LOCAL_RANK": str(rank % here)} for rank in range(count)]

    def rank(place: dict[str, str]) -> None:
        os.environ |= place
        run(overrides)

    return [fork(rank, place, output) for place in places]


def run_to_the_end(folder: Path, overrides: tuple[str, ...], ranks: int = 1) -> None:
    codes = exit_codes(start_ranks(ranks, experiment, overrides, folder / "output.txt"))
    assert codes == [0] * ranks, (folder / "output.txt").read_text()


@contextlib.contextmanager
def run_until_killed(overrides: tuple[str, ...], output: Path) -> Iterator[int]:
    """A run on one rank, by its pid, that is killed with SIGKILL in the end."""
    (pid,) = start_ranks(1, experiment, overrides, output)
    try:
        yield pid
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def exit_codes(pids: list[int]) -> list[int]:
    return [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]


def trial(folder: Path, name: str, kills: int, settings: tuple[str, ...], chance: random.Random) -> Trial:
    """Run to the end, killed `kills` times on the way (at most 5); `settings` name the server and the warm start."""
    folder.mkdir(parents=True)
    mode, output = MODES[name], folder / "output.txt"
    lives = itertools.cycle(mode.layouts)
    common = (f"run.folder={folder}", *settings, *SMALL, *mode.settings)
    places, resumed = [], []
    for place in PLACES[:kills]:
        ranks, layout = next(lives)
        pids = start_ranks(ranks, experiment, (*common, *layout), output)
        if not wait_for(place, folder, pids, chance):
            assert exit_codes(pids) == [0] * ranks, output.read_text()
            break
        if place == "at the start":  # where the ranks still wait for each other, their launcher ends them
            for pid in pids:
                os.kill(pid, signal.SIGKILL)
            assert exit_codes(pids) == [-signal.SIGKILL] * ranks, output.read_text()
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
    deadline = time.monotonic() + OUTLIVES_S
    while not all(has_ended(pid) for pid in pids):
        assert time.monotonic() < deadline, f"a rank outlives another by {OUTLIVES_S:g} s\n{output.read_text()}"
        time.sleep(0.01)
    codes = dict(zip(pids, exit_codes(pids), strict=True))
    assert codes.pop(victim) == -signal.SIGKILL and 0 not in codes.values(), codes


def wait_for(place: str, folder: Path, pids: list[int], chance: random.Random) -> bool:
    """Wait until it is time to kill; False if the run ended before."""
    has_ended_too_early = lambda: any(map(has_ended, pids))  # noqa: E731
    begun = time.monotonic()
    before, seen, skipped = partial_checkpoints(folder), set(), chance.randrange(3)
    steps = len(logged(folder)) + chance.randrange(1, 5)
    at_start_s = chance.uniform(0.05, 1.0)
    while time.monotonic() < begun + 120:
        if has_ended_too_early():
            return False
        if place == "at the start" and time.monotonic() > begun + at_start_s:
            return True
        if place == "in a step" and len(logged(folder)) >= steps:
            time.sleep(chance.uniform(0.0, 0.15))
            return not has_ended_too_early()
        seen |= partial_checkpoints(folder) - before
        if place == "in a checkpoint" and len(seen) > skipped:
            time.sleep(chance.choice([0.0, chance.uniform(0.0, 0.12)]))
            return not has_ended_too_early()
        time.sleep(0.001)
    raise AssertionError((folder / "output.txt").read_text())


def has_ended(pid: int) -> bool:
    """True for a child that is gone; leaves it for waitpid."""
    return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None


def partial_checkpoints(folder: Path) -> set[str]:
    try:
        return {name for name in os.listdir(folder / "checkpoints") if name.endswith(".partial")}
    except FileNotFoundError:
        return set()


def newest_checkpoint(folder: Path) -> int:
    return max((int(path.name.removeprefix("step-")) for path in (folder / "checkpoints").glob("step-*")), default=0)


def logged(folder: Path) -> list[str]:
    try:
        return [line for line in (folder / "metrics.jsonl").read_text().splitlines() if '"kind": "step"' in line]
    except FileNotFoundError:
        return []


def do_the_books(folder: Path) -> tuple[int, int]:
    """Return how many prompts were lost and how many trained more than once."""
    batches = list(consumed_by_step(folder / JOURNAL))
    trained = [prompt for _, prompts in batches for prompt in prompts]
    assert {step for step, _ in batches} == set(range(STEPS)), f"batches of the steps {[step for step, _ in batches]}"
    state = json.loads((folder / "checkpoints" / f"step-{STEPS}" / "run.json").read_text())
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
    return len(lost), twice


def losses(folder: Path) -> list[tuple]:
    keys = ("step", "reward/mean", "policy/loss", "policy/grad_norm", "policy/first_loss")
    return [tuple(step[key] for key in keys) for step in steps_of(folder)]


def soak(folder: Path, points: int, seed: int) -> Iterator[Trial]:
    """Kill runs at `points` points in all, of every mode about as often, at most 5 times each."""
    chance = random.Random(seed)
    with one_server(folder / "servers") as server:
        settings = (*served_by(server), f"warm_start.folder={folder}/warm", "warm_start.updates=15")
        for number, (name, mode) in enumerate(MODES.items()):
            expected = uninterrupted(folder / f"{name}-whole", mode, settings) if mode.has_same_losses else None
            done, wanted = 0, points // len(MODES) + (number < points % len(MODES))
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
