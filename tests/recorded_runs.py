"""Six seeded runs, written down and compared: after a change of form alone they do what they did before.

    python tests/recorded_runs.py write before.json     # a minute or two
    python tests/recorded_runs.py compare before.json   # after the change: names what differs first, and ends with 1

Of each run: reward, loss and gradient norm of every step, all requests to the server, the journal's records, checksums
of what the server held after each publication, and the weights that were saved. Everything is compared exactly, with
two exceptions. Log-probabilities are compared to four digits: their last bits depend on which requests a server had
together. Of an asynchronous run only the groups are compared that both recordings have, without their versions: which
prompts were in flight when depends on time, as does which process asked first in a run that was killed.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import hashlib
import json
import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

sys.path += [str(Path(__file__).parents[1]), str(Path(__file__).parent / "end_to_end")]  # tests.kit, talkative_tasks

import pytest

from megatron_rl.rollout.journal import FOLDER as JOURNAL
from megatron_rl.rollout.journal import Record, read_file
from megatron_rl.tools.embedded_server import protocol
from megatron_rl.tools.embedded_server.batcher import Batcher
from tests.kit.forks import check_end, start_ranks
from tests.kit.programs import fork_programs
from tests.kit.runs import experiment, logged, losses, run_until_killed
from tests.kit.talkative_model import make_talkative_model
from tests.kit.waiting import wait_until

RECORD = "RECORDED_RUN"
"""Environment variable: the file to which a server writes what it was asked and what it holds."""
SMALL = (
    *("run.steps=4", "batch.prompts_per_step=8", "generation.n_samples=4", "data.evaluation=", "warm_start.updates=5"),
    *("warm_start.folder=", "warm_start.check_every_updates=2", "rollout.backend=embedded", "rollout.server_count=1"),
    *("run.checkpoint_every_steps=2", "run.keep_checkpoints=100", "optimizer.eps=1e-4", "rollout.journal_replies=true"),
)
TALKATIVE = (
    *("batch.prompts_per_step=3", "generation.max_new_tokens=16", "algo.loss=reinforce", "batch.updates_per_step=1"),
    *("model.init=hf", "warm_start.updates=0", "data.evaluation_args={}", "data.train_args={}"),
    *("data.train=talkative_tasks:questions", "rollout.reward=talkative_tasks:vowels", "rollout.reward_workers=1"),
    *("run.import_from=[talkative_tasks]", "rollout.workflow=megatron_rl.agents:AgentWorkflow"),
    'rollout.workflow_args={"agent": "talkative_tasks:goes_back", "max_tokens": 300}',
)
KILLED_AFTER = 3
"""Steps of the run that is killed: one more than its checkpoint."""


@dataclasses.dataclass(frozen=True)
class Case:
    """A run, and how much of its recording depends on nothing but its seed."""

    settings: tuple[str, ...] = ()
    is_killed: bool = False
    is_timed: bool = False
    """The clock decides which of its groups are trained, and when."""


CASES = {
    "synchronous": Case(),
    "asynchronous": Case(
        ("rollout.max_staleness=2", "rollout.interruption=in_place", "rollout.max_cache_age=1", "optimizer.lr=1e-12"),
        is_timed=True,
    ),
    "killed": Case(is_killed=True),
    "colocated": Case(("rollout.colocated=true", "algo.kl_coefficient=0.1")),
    "agents": Case(TALKATIVE),
    "adapters": Case(
        (*TALKATIVE, "lora.rank=4", "rollout.publication=adapters", "rollout.interruption=abort", "optimizer.lr=0.01")
    ),
}


def recorded(folder: Path, case: Case) -> dict[str, Any]:
    """Do one run in `folder` and return its recording, as JSON takes it."""
    folder.mkdir()
    output, served = folder / "output.txt", folder / "served.jsonl"
    os.environ[RECORD] = str(served)
    settings = (*SMALL, f"run.folder={folder}", *case.settings)
    if TALKATIVE[0] in case.settings:
        settings += (f"model.path={make_talkative_model(folder / 'model')}",)
    if case.is_killed:
        with run_until_killed(settings, output):
            wait_until(lambda: len(logged(folder)) >= KILLED_AFTER, output.read_text)
    check_end(start_ranks(1, experiment, settings, output), output)
    lines = [json.loads(line) for line in served.read_text().splitlines()]
    groups, events = journal(folder / JOURNAL)
    return {
        "losses": losses(folder),
        "requests": sorted({line["request"] for line in lines if "request" in line}),
        "published": [line["published"] for line in lines if "published" in line],
        "groups": groups,
        "events": events,
        "saved": {path.name: digest(path.read_bytes()) for path in sorted((folder / "final").rglob("*.safetensors"))},
    }


def journal(folder: Path) -> tuple[dict[str, Any], list[str]]:
    """Return every group of a journal by its key, and all other records, sorted, without times."""
    groups, events = {}, []
    for path in sorted(folder.glob("*.journal")):
        records, fault = read_file(path)
        assert not fault, fault
        for record in records:
            if record.event["event"] == "accepted":
                groups[record.event["key"]] = group_of(record)
            elif record.event["event"] == "replied":
                events.append(json.dumps({k: v for k, v in record.event.items() if k != "rest"}, sort_keys=True))
            else:
                about = {k: v for k, v in record.event.items() if k != "fingerprint"}
                events.append(json.dumps(about, sort_keys=True))
    return groups, sorted(set(events))


def group_of(record: Record) -> dict[str, Any]:
    columns = record.group().columns()
    exact = {name: digest(column.numpy().tobytes()) for name, column in columns.items() if not is_logprob(name)}
    near = {name: round(float(column.double().sum()), 4) for name, column in columns.items() if is_logprob(name)}
    return exact | near


def is_logprob(name: str) -> bool:
    return "logprobs" in name


def digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:16]


@contextlib.contextmanager
def servers_record() -> Iterator[None]:
    """Let embedded servers that are forked from this process write down their requests and publications."""
    parse, name = protocol.parse_generate, Batcher.set_version

    def write(**line: Any) -> None:
        with open(os.environ[RECORD], "a") as file:
            file.write(json.dumps(line) + "\n")

    def parsed(body: Any, *rest: Any) -> Any:
        # The request's own name is drawn at random.
        write(request=json.dumps({k: v for k, v in body.items() if k != "rid"}, sort_keys=True))
        return parse(body, *rest)

    def named(self: Batcher, version: str) -> None:
        is_new = version not in (None, self.weight_version)
        name(self, version)
        if is_new and "weights" not in self.released:
            write(published=[version, digest(json.dumps(sorted(self.model.checksums().items())).encode())])

    with pytest.MonkeyPatch.context() as patch:
        fork_programs(patch)
        patch.setattr(protocol, "parse_generate", parsed)
        patch.setattr(Batcher, "set_version", named)
        yield


def first_difference(before: dict[str, Any], now: dict[str, Any], case: Case) -> str:
    """Name what differs first between two recordings of a run; empty where nothing does."""
    if case.is_timed:
        both = before["groups"].keys() & now["groups"].keys()
        if len(before["losses"]) != len(now["losses"]) or not both:
            return f"{len(now['losses'])} steps and {len(both)} common groups, there were {len(before['losses'])} steps"
        before, now = ({"groups": {k: without_versions(run["groups"][k]) for k in both}} for run in (before, now))
    parts = ("losses", "requests", "groups", "saved") if case.is_killed else tuple(before)
    for part in parts:
        for place, (one, other) in pairs(before[part], now[part]):
            if one != other and not (part == "groups" and is_near(one, other)):
                return f"{part}, {place}:\n  before {one}\n  now    {other}"
    return ""


def without_versions(group: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in group.items() if not name.startswith("versions.")}


def pairs(before: Any, now: Any) -> Iterator[tuple[Any, tuple[Any, Any]]]:
    """Yield what stands at each place of two lists or dicts, None where one of them ends."""
    if isinstance(before, dict):
        for key in sorted(before.keys() | now.keys()):
            yield key, (before.get(key), now.get(key))
    else:
        for number in range(max(len(before), len(now))):
            yield number, tuple(part[number] if number < len(part) else None for part in (before, now))


def is_near(before: dict[str, Any] | None, now: dict[str, Any] | None) -> bool:
    """Return True for the same group, whose log-probabilities may differ in the fourth digit."""
    if before is None or now is None or before.keys() != now.keys():
        return False
    return all(abs(before[k] - now[k]) <= 1e-3 if is_logprob(k) else before[k] == now[k] for k in before)


def main(arguments: list[str] | None = None, say: Callable[[str], None] = print) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("write", "compare"))
    parser.add_argument("file", type=Path)
    parser.add_argument("--only", choices=CASES, nargs="+", default=list(CASES))
    args = parser.parse_args(arguments)
    runs, differs = {}, False
    with tempfile.TemporaryDirectory(prefix="recorded-") as folder, servers_record():
        for name in args.only:
            runs[name] = recorded(Path(folder) / name, CASES[name])
            size = f"{len(runs[name]['requests'])} requests, {len(runs[name]['groups'])} groups"
            why = ""
            if args.what == "compare":
                # Through JSON: what was read from a file has no tuples.
                why = first_difference(
                    json.loads(args.file.read_text())[name], json.loads(json.dumps(runs[name])), CASES[name]
                )
            differs |= bool(why)
            say(f"{name:13} {size}{': ' + why if why else ''}")
    if args.what == "write":
        args.file.write_text(json.dumps(runs))
    return int(differs)


if __name__ == "__main__":
    sys.exit(main())
