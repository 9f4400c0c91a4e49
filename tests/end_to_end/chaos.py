"""Training among everything that goes wrong at once: `make soak-chaos` prints the table.

Two rollout servers stand behind proxies that spoil replies and lie. Meanwhile servers are killed (their supervisor
starts them again) and frozen, ranks and rollout processes are killed and frozen, and the run is resumed until it ends.
After it kills.py's questions are asked (lost, trained twice, the losses of a calm run), and one more: was every token
sampled by the version that it names? For that the log-probs in the journal are compared with those of the weights which
the run wrote after each step.
"""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import itertools
import os
import random
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import torch
from kills import ASYNCHRONOUS, JOURNAL, SMALL, do_the_books
from transformers import AutoModelForCausalLM
from transformers.utils import logging

from megatron_rl.config import RolloutConfig
from megatron_rl.rollout.journal import read_file
from megatron_rl.servers import supervisor as supervision
from megatron_rl.servers.supervisor import Supervisor
from tests.kit.fault_proxy import FaultProxy
from tests.kit.forks import exit_codes, has_ended, killed, start_ranks
from tests.kit.runs import COUNT_MODEL, experiment, losses, run_to_the_end
from tests.kit.waiting import wait_until

logging.disable_progress_bar()

FAULT_SHARE = 0.05
"""Of the replies, which come spoilt or lie."""
SERVER_TROUBLE_S = (3.0, 10.0)
"""Between one trouble of the servers and the next."""
TRAINER_TROUBLE_S = (2.0, 12.0)
"""How long a life goes on before one of its processes is killed or frozen."""
FROZEN_S = (0.2, 4.0)
STANDS_STILL_S = 240.0
"""No life may last longer: 12 steps take seconds."""
MOST_LIVES = 8
"""Lives of a run that are disturbed; from the next one on all is calm."""
CLOSE = 1e-3
"""Between a server's log-prob and that of the same weights by transformers, nats."""
LAST_VERSION = torch.iinfo(torch.int32).max
"""Versions of tokens are int32: compared with a larger number, none of them would be smaller."""
MODES = {"synchronous": (), "asynchronous": ASYNCHRONOUS}


@dataclass(kw_only=True)
class Survival:
    """What became of one run."""

    mode: str
    lives: int
    troubles: list[str]
    lies: int
    lost: int
    twice: int
    tokens: int
    """Sampled tokens whose version's weights are there."""
    wrong: int
    """Those that these weights give another log-prob."""
    is_same: bool | None

    @property
    def is_good(self) -> bool:
        return (self.lost, self.twice, self.wrong) == (0, 0, 0) and self.is_same is not False and self.tokens > 0


class UnreliableServers:
    """Two servers that are killed and frozen now and then, each behind a proxy that lies; in a `with` block."""

    def __init__(self, folder: Path, chance: random.Random) -> None:
        # They are started again at once, however often they die.
        supervision.FIRST_RESTART_S = supervision.LONGEST_RESTART_S = 0.2
        config = RolloutConfig(backend="embedded", server_count=2, server_restarts=1_000_000)
        self._supervisor, self._chance = Supervisor(config, COUNT_MODEL, folder, dummy_weights=True), chance
        self.is_calm, self._is_over = threading.Event(), threading.Event()
        self.is_calm.set()
        self.troubles: list[str] = []

    def __enter__(self) -> UnreliableServers:
        with contextlib.ExitStack() as at_end:
            at_end.enter_context(self._supervisor)
            self.proxies = [FaultProxy(url, chance=self._chance) for url in self._supervisor.urls]
            for proxy in self.proxies:
                at_end.callback(proxy.stop)
            thread = threading.Thread(target=self._make_trouble, daemon=True)
            thread.start()
            at_end.callback(thread.join)
            at_end.callback(self._is_over.set)
            self._at_end = at_end.pop_all()
        return self

    def __exit__(self, *error: object) -> None:
        self._at_end.close()

    @property
    def settings(self) -> tuple[str, ...]:
        urls = ",".join(proxy.url for proxy in self.proxies)
        return f"rollout.servers=[{urls}]", f"rollout.token_file={self._supervisor.token_file}"

    def disturb(self, is_disturbed: bool) -> None:
        for proxy in self.proxies:
            proxy.fault_share = FAULT_SHARE if is_disturbed else 0.0
        (self.is_calm.clear if is_disturbed else self.is_calm.set)()

    def _make_trouble(self) -> None:
        while not self._is_over.wait(self._chance.uniform(*SERVER_TROUBLE_S)):
            if self.is_calm.is_set():
                continue
            pids = list(self._supervisor.starts.values())  # of those that have come up
            if pids:
                self.troubles.append(kill_or_freeze(self._chance.choice(pids), self._chance, "server"))


def kill_or_freeze(pid: int, chance: random.Random, name: str) -> str:
    """Kill a process, or stop it for a while and let it go on; say which."""
    with contextlib.suppress(ProcessLookupError):
        if chance.random() < 0.5:
            os.kill(pid, signal.SIGKILL)
            return f"{name} killed"
        os.kill(pid, signal.SIGSTOP)
        time.sleep(chance.uniform(*FROZEN_S))
        os.kill(pid, signal.SIGCONT)
    return f"{name} frozen"


def survive(
    folder: Path,
    mode: str,
    servers: UnreliableServers,
    common: tuple[str, ...],
    chance: random.Random,
) -> Survival:
    """Run to the end, through kills and freezes of its own processes and those of its servers."""
    folder.mkdir(parents=True)
    output, troubles = folder / "output.txt", []
    overrides = (f"run.folder={folder}", *servers.settings, *common, *MODES[mode])
    before, met = len(servers.troubles), sum(len(proxy.met) for proxy in servers.proxies)
    for life in itertools.count(1):
        assert life <= MOST_LIVES + 3, f"a run that nobody disturbs any more does not end\n{output.read_text()}"
        servers.disturb(life <= MOST_LIVES)  # else it might die of its servers' troubles each time
        pids = start_ranks(1, with_stacks, overrides, output)
        if life <= MOST_LIVES:
            troubles += trouble_of(pids[0], chance)
        wait_for_the_end(pids, output)
        if exit_codes(pids) == [0]:
            break
    servers.disturb(False)
    lost, twice = do_the_books(folder)
    tokens, wrong = tokens_of_wrong_versions(folder)
    return Survival(
        mode=mode,
        lives=life,
        troubles=troubles + servers.troubles[before:],
        lies=sum(len(proxy.met) for proxy in servers.proxies) - met,
        lost=lost,
        twice=twice,
        tokens=tokens,
        wrong=wrong,
        is_same=None,
    )


def with_stacks(overrides: tuple[str, ...]) -> None:
    """Run as kills.py does, and say where it stands shortly before it would be called a standstill."""
    faulthandler.dump_traceback_later(0.9 * STANDS_STILL_S)
    experiment(overrides)
    faulthandler.cancel_dump_traceback_later()


def trouble_of(pid: int, chance: random.Random) -> list[str]:
    """Let a life go on for a while, then kill or freeze the trainer or one of its children."""
    deadline = time.monotonic() + chance.uniform(*TRAINER_TROUBLE_S)
    while time.monotonic() < deadline:
        if has_ended(pid):
            return []
        time.sleep(0.02)
    with contextlib.suppress(psutil.NoSuchProcess):
        children = psutil.Process(pid).children(recursive=True)
        victim = chance.choice([pid, *(child.pid for child in children)])
        return [kill_or_freeze(victim, chance, "trainer" if victim == pid else "child")]
    return []


def wait_for_the_end(pids: list[int], output: Path) -> None:
    try:
        what = lambda: f"a life stands still\n{output.read_text()}"  # noqa: E731
        wait_until(lambda: all(map(has_ended, pids)), what, limit_s=STANDS_STILL_S)
    except AssertionError:
        for pid in pids:
            killed(pid)
        raise


def tokens_of_wrong_versions(folder: Path) -> tuple[int, int]:
    """Return how many sampled tokens of the run's journals could be checked, and how many of them failed.

    A token of version n is checked against the weights of step n, unless a later life has repeated that step. Of what
    a life takes over from an earlier one, tokens are checked if a version sampled them that both have in common. A
    token of a version that was lost with its life counts as of the last such version (journal.py: Restored), and
    the weights that sampled it are gone.
    """
    models: dict[int, torch.nn.Module | None] = {}
    files = [(int(path.name[:6]), read_file(path)[0]) for path in sorted((folder / JOURNAL).glob("*.journal"))]
    first = {attempt: records[0].event["version"] for attempt, records in reversed(files) if records}
    sampled_by: dict[tuple[str, bytes], torch.Tensor] = {}
    checked = wrong = 0
    for attempt, records in files:
        repeated_from = min((version for other, version in first.items() if other > attempt), default=LAST_VERSION)
        for record in records:
            if record.event["event"] != "accepted":
                continue
            group = record.group()
            is_replayed_as_sampled = group["versions"] == sampled_by.setdefault(
                (record.event["key"], group["input_ids"].numpy().tobytes()), group["versions"]
            )
            sampled = group["loss_mask"] & (group["versions"] <= repeated_from) & is_replayed_as_sampled
            for version in group["versions"][sampled].unique().tolist():
                if version not in models:
                    models[version] = weights_of(folder, version)
                model = models[version]
                if model is None:
                    continue
                rows = sampled & (group["versions"] == version)
                away = (logprobs_by(model, group) - group["logprobs"]).abs()[rows]
                checked, wrong = checked + int(rows.sum()), wrong + int((away > CLOSE).sum())
    return checked, wrong


def weights_of(folder: Path, version: int) -> torch.nn.Module | None:
    path = folder / (f"step-{version}" if version else "../warm")
    if not (path / "config.json").is_file():  # the last step's are not kept, and train nothing
        return None
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()


@torch.no_grad()
def logprobs_by(model: torch.nn.Module, group) -> torch.Tensor:
    """`[N]`: log-prob of each token of a group after those before it, 0 for first tokens."""
    parts = []
    for ids in group["input_ids"].split(group.lengths.tolist()):
        scores = model(ids[None]).logits[0, :-1].log_softmax(-1)
        parts.append(torch.nn.functional.pad(scores.gather(1, ids[1:, None])[:, 0], (1, 0)))
    return torch.cat(parts)


def soak(folder: Path, *, minutes: float, seed: int) -> Iterator[Survival]:
    """Train run after run, of every mode in turn, for so long."""
    chance, deadline = random.Random(seed), time.monotonic() + 60 * minutes
    common = (*SMALL, "run.save_every_steps=1", f"warm_start.folder={folder}/warm", "warm_start.updates=15")
    with UnreliableServers(folder / "servers", chance) as servers:
        calm = folder / "calm"
        calm.mkdir()
        run_to_the_end(calm, (f"run.folder={calm}", *servers.settings, *common))
        expected = losses(calm)
        for number, mode in enumerate(itertools.cycle(MODES)):
            if time.monotonic() > deadline:
                return
            target = folder / f"{mode}-{number}"
            result = survive(target, mode, servers, common, chance)
            if not MODES[mode]:
                result.is_same = losses(target) == expected
            yield result


def row(name: str, results: list[Survival]) -> str:
    """Add up the runs of one mode, or say how one run went."""
    compared = [result.is_same for result in results if result.is_same is not None]
    same = f"{sum(compared)} of {len(compared)}" if compared else "-"
    lives, troubles = sum(result.lives for result in results), sum(len(result.troubles) for result in results)
    lies, lost, twice, tokens, wrong = (
        sum(getattr(result, column) for result in results) for column in ("lies", "lost", "twice", "tokens", "wrong")
    )
    counts = f"{len(results):>5}{lives:>7}{troubles:>10}{lies:>9,}{lost:>6}{twice:>7}{tokens:>9,}{wrong:>7}"
    return f"{name:14}{counts}  {same}"


def main() -> None:
    from frame import Machine

    parser = argparse.ArgumentParser(description="Train among kills, freezes, lies and restarts, and count the losses.")
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    machine = Machine()
    results: list[Survival] = []
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="chaos-") as folder, contextlib.suppress(KeyboardInterrupt):
        for result in soak(Path(folder), minutes=args.minutes, seed=args.seed):
            results.append(result)
            print(row(result.mode, [result]), file=sys.stderr, flush=True)
    print(
        f"12 steps a run, two servers, 1 of {1 / FAULT_SHARE:.0f} replies spoilt, {args.minutes:g} minutes; {machine}\n"
    )
    print(f"{'runs':14}count  lives  troubles   spoilt  lost  twice   tokens  wrong  same losses")
    for mode in MODES:
        print(row(mode, [result for result in results if result.mode == mode]))
    total = {name: sum(getattr(result, name) for result in results) for name in ("lies", "lost", "twice", "wrong")}
    troubles = sum(len(result.troubles) for result in results)
    print(
        f"\n{len(results)} runs in {(time.monotonic() - began) / 60:.0f} minutes, {troubles} kills and freezes, "
        f"{total['lies']:,} spoilt replies: {total['lost']} groups lost, {total['twice']} trained twice, "
        f"{total['wrong']} tokens of a wrong version"
    )
    sys.exit(0 if results and all(result.is_good for result in results) else 1)


if __name__ == "__main__":
    main()
