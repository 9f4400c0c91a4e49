"""A killed process's dialogues go on where they were: their worlds are restored and do nothing again."""

import asyncio
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_rl.config import GenerationConfig, RolloutConfig
from megatron_rl.rollout import journal
from megatron_rl.rollout.executor import RolloutExecutor
from megatron_rl.rollout.journal import Records, Restored, RolloutJournal
from megatron_rl.telemetry.rollout_metrics import RolloutMetrics
from megatron_rl.workflows import MultiTurnWorkflow
from megatron_rl.workflows.environments import Environment, Turn
from tests.kit.replies import RecordingEngine
from tests.kit.tokenizers import make_tokenizer
from tests.kit.waiting import wait_until

ROOT = Path(__file__).parents[3]
TURNS = 4


class Counter(Environment):
    """Counts its steps; notes all that it does in a file, and hangs in its third step where another file is there."""

    SAVES = True

    def __init__(self, data, folder, saved_bytes=0):
        super().__init__(data)
        self.folder, self.count, self.saved_bytes = Path(folder), 0, saved_bytes

    def note(self, what):
        with (self.folder / "notes").open("a") as file:
            file.write(f"{os.getpid()} {what}\n")

    async def opening(self):
        self.note("opening")
        return {"prompt": "count"}

    async def step(self, reply, score):
        self.count += 1
        if self.count == 3 and (self.folder / "hangs").exists():
            self.note("hangs")
            await asyncio.sleep(3600)
        self.note(f"step {self.count}")
        if self.count == TURNS:
            return Turn(reward=1.0)
        return Turn(messages=[{"role": "user", "content": f"count to {self.count}"}], reward=0.25)

    async def save(self):
        return {"count": self.count, "padding": "x" * self.saved_bytes}

    async def restore(self, state):
        self.note(f"restore {state['count']}")
        self.count = state["count"]

    async def close(self):
        self.note(f"close {self.count}")


def play(folder, run_attempt, **options):
    """One episode as a rollout process has it with journal_replies; returns its trajectories and how many replies."""
    written = {"run_attempt": run_attempt, "rank": 0, "first_step": 0, "version": 0, "fingerprint": "f"}
    record = RolloutJournal(folder / journal.FOLDER, **written)
    restored = Restored(folder / journal.FOLDER, run_attempt=run_attempt, version=0, max_staleness=4, fingerprint="f")
    tokenizer = make_tokenizer()
    engine = RecordingEngine(tokenizer, seed=run_attempt, ends=("stop",))
    engine.version = 0
    arguments = {"max_tokens": 400, "environment_args": {"folder": str(folder)} | options}
    gconfig = GenerationConfig(n_samples=1, max_new_tokens=8)
    workflow = MultiTurnWorkflow(lambda **_: 0.0, gconfig, tokenizer, Counter, **arguments)
    executor = RolloutExecutor(
        engine, RolloutConfig(journal_replies=True), RolloutMetrics(), [record], records=Records(restored, record)
    )
    prompts = iter([{"prompt_number": 0, "prompt_index": 0, "epoch": 0, "prompt": "count"}])

    batch = asyncio.run(executor.prepare_batch(prompts, workflow, 1))
    record.close()
    return batch, len(engine.served)


def notes(folder):
    return [line.split(" ", 1) for line in (folder / "notes").read_text().splitlines()]


def kill_in_the_third_step(folder):
    (folder / "hangs").touch()
    imports = "from pathlib import Path; from tests.unit.rollout.test_long_episodes import play"
    command = [sys.executable, "-c", f"{imports}; play(Path({str(folder)!r}), 1)"]
    process = subprocess.Popen(command, cwd=ROOT, env=os.environ | {"PYTHONPATH": str(ROOT)})

    def hangs():
        assert process.poll() is None
        return (folder / "notes").exists() and "hangs" in (folder / "notes").read_text()

    def is_written():  # by a thread: of a process that is killed before, the last ones would be lost
        (path,) = (folder / journal.FOLDER).glob("*.journal")
        events = [record.event["event"] for record in journal.read_file(path)[0]]
        return events.count("stepped") == 3 and events.count("replied") == 3

    wait_until(hangs, "it does not come to the third step")
    wait_until(is_written, "its journal lacks what it has done")
    process.send_signal(signal.SIGKILL)
    process.wait()
    (folder / "hangs").unlink()
    return str(process.pid)


@pytest.mark.slow
def test_a_killed_dialogue_goes_on_in_its_restored_world_and_no_step_is_done_twice(tmp_path):
    killed = kill_in_the_third_step(tmp_path)
    batch, generated = play(tmp_path, 2)
    done = [what for pid, what in notes(tmp_path) if pid == killed]
    again = [what for pid, what in notes(tmp_path) if pid == str(os.getpid())]
    assert done == ["opening", "step 1", "step 2", "hangs"]
    assert again == ["restore 2", "step 3", "step 4", "close 4"]
    # Three replies are the killed process's; the reward has the turns that it had.
    assert generated == 1 and batch["rewards"].tolist() == [1.75] and batch["turns"].tolist() == [4]


def test_a_state_that_is_too_large_is_left_out_and_said_so(tmp_path, caplog):
    batch, _ = play(tmp_path, 1, saved_bytes=journal.MOST_STEP_BYTES)
    (path,) = (tmp_path / journal.FOLDER).glob("*.journal")
    assert path.stat().st_size < 100_000 and batch["rewards"].tolist() == [1.75]
    assert "1048576 are kept in the journal" in caplog.text


def test_a_journal_of_steps_is_json(tmp_path):
    play(tmp_path, 1)
    (path,) = (tmp_path / journal.FOLDER).glob("*.journal")
    events = [record.event for record in journal.read_file(path)[0]]
    steps = [event["step"] for event in events if event["event"] == "stepped"]
    assert [step["state"]["count"] for step in steps] == [0, 1, 2, 3, 4] and json.dumps(steps)
