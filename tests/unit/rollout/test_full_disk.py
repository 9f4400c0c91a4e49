"""A disk that is full or may not be written: every file is named, nothing that was there goes, and the run can resume.

The disk is a limit of the size of this process's files, which cuts a write short where a full disk would.
"""

import contextlib
import os
import resource
import shutil
import tempfile
from pathlib import Path

import pytest
import torch
from test_journal import Engine, episode, group, restore, start

from megatron_rl.api import RolloutWorkflow
from megatron_rl.config import RolloutConfig
from megatron_rl.rollout.events import DeadLetters
from megatron_rl.rollout.executor import RolloutExecutor
from megatron_rl.servers.event_loop import EventLoopThread
from megatron_rl.telemetry.rollout_metrics import RolloutMetrics
from megatron_rl.telemetry.run_log import RunLog, Sample
from megatron_rl.weights.hf_files import write_hf_folder
from tests.unit.telemetry.test_run_log import METRICS, steps_of, text_console


@contextlib.contextmanager
def disk_full_after(size):
    """No file grows past `size` bytes."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.fixture
def thread():
    thread = EventLoopThread("test")
    yield thread
    thread.stop()


class Steady(RolloutWorkflow):
    async def arun_episode(self, engine, data):
        return group(data["prompt_index"])


class Failing(RolloutWorkflow):
    async def arun_episode(self, engine, data):
        raise RuntimeError("no verifier")


def test_a_run_stops_where_its_journal_cannot_be_written_and_the_next_one_has_the_groups_before(tmp_path, thread):
    journal, prompts = start(tmp_path), [episode(index).data for index in range(4)]
    executor = RolloutExecutor(Engine(), RolloutConfig(max_concurrent_episodes=1), RolloutMetrics(), [journal])
    for data in prompts[:2]:
        journal.accepted(episode(data["prompt_index"]), group(data["prompt_index"]))
    with disk_full_after(journal.path.stat().st_size + 200), pytest.raises(RuntimeError) as raised:
        thread.run(executor.rollout_batch(prompts[2:], Steady()))
    for part in (f"rollout journal {journal.path}", "only 200 of a record's", "make room on the disk and resume"):
        assert part in str(raised.value)
    with pytest.raises(RuntimeError, match="rollout journal"):  # also where somebody asks again
        thread.run(executor.rollout_batch(prompts[:1], Steady()))
    with pytest.raises(RuntimeError, match="rollout journal"):  # nor is anything written behind what is torn
        journal.accepted(episode(9), group(9))
    journal.close()
    left, found = journal.path.read_bytes(), restore(tmp_path)
    assert found.faults == [f"{journal.path.name} ends in the middle of a record, 200 bytes of it are left"]
    assert [found.take(data["sample_key"], 0) is not None for data in prompts] == [True, True, False, False]
    assert journal.path.read_bytes() == left


def test_a_journal_whose_records_cannot_be_brought_to_the_disk_is_named_and_can_be_closed(tmp_path):
    journal = start(tmp_path)
    os.close(journal._file)
    journal._file = os.open("/dev/full", os.O_WRONLY)  # which has no fsync
    for _ in range(2):
        with pytest.raises(RuntimeError, match=f"rollout journal {journal.path}: .*make room on the disk and resume"):
            journal.accepted(episode(0), group(0))
        with pytest.raises(RuntimeError, match=f"rollout journal {journal.path}: .*make room on the disk and resume"):
            journal.begin_file()
    journal.close()
    journal.close()


@pytest.mark.parametrize("name", ["metrics.jsonl", "samples.jsonl"])
def test_a_step_that_cannot_be_logged_is_named_and_only_its_torn_line_goes(name, tmp_path):
    samples = [Sample(prompt="p", reply="r" * (1000 if name == "samples.jsonl" else 10), reward=1.0)]
    log = RunLog(tmp_path, 3, console=text_console())
    log.log_step(0, METRICS, samples)
    with disk_full_after((tmp_path / name).stat().st_size + 30):
        with pytest.raises(RuntimeError, match=f"{name}: only 30 of .* bytes .*make room on the disk and resume"):
            log.log_step(1, METRICS, samples)
        log.close()
    assert steps_of(tmp_path) == [0] and (tmp_path / name).read_bytes()[-1:] != b"\n"
    with RunLog(tmp_path, 3, first_step=1, console=text_console()) as log:
        log.log_step(1, METRICS, samples)
    assert steps_of(tmp_path) == [0, 1]


def test_a_config_that_cannot_be_written_is_named(tmp_path):
    with RunLog(tmp_path, 1, console=text_console()) as log, disk_full_after(10):
        with pytest.raises(RuntimeError, match="config.yaml: .*make room on the disk"):
            log.log_config("run:\n  folder: runs/demo\n")


def test_a_run_stops_where_a_dead_letter_cannot_be_written(tmp_path, thread):
    events = [DeadLetters(tmp_path / "dead_letters.jsonl")]
    executor = RolloutExecutor(Engine(), RolloutConfig(episode_attempts=1), RolloutMetrics(), events)
    with disk_full_after(20), pytest.raises(RuntimeError, match="dead letters .*dead_letters.jsonl: .*make room"):
        thread.run(executor.rollout_batch([episode(0).data], Failing()))


def test_weights_that_cannot_be_written_leave_the_earlier_ones_and_nothing_half(tmp_path):
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    (tmp_path / "model" / "tokenizer.json").write_text(" " * 2000)

    def write(value):
        tensors = [(f"layer.{n}.weight", torch.full((200,), value)) for n in range(4)]
        options = {"model_folder": tmp_path / "model", "dtype": torch.float32, "shard_bytes": 1000}
        write_hf_folder(tmp_path / "final", tensors, **options)

    write(1.0)
    before = {path.name: path.read_bytes() for path in (tmp_path / "final").iterdir()}
    assert len(before) == 7
    for size in (500, 1500):  # no shard fits, or the tokenizer does not
        with disk_full_after(size), pytest.raises(OSError, match=f"{tmp_path}/final: .*"):
            write(2.0)
        assert {path.name: path.read_bytes() for path in (tmp_path / "final").iterdir()} == before
        assert {path.name for path in tmp_path.iterdir()} == {"model", "final"}


@contextlib.contextmanager
def read_only(folder):
    """Nothing can be written into the folder, also where the tests run as root."""
    folder.chmod(0o555)
    user = os.geteuid()
    if user == 0:
        os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(user)
        folder.chmod(0o755)


@pytest.mark.parametrize("first_step", [0, 1])
def test_a_folder_that_may_not_be_written_is_named_at_the_start(first_step):
    folder = Path(tempfile.mkdtemp(prefix="read-only-"))  # pytest's own are closed to other users
    try:
        with RunLog(folder, 2, console=text_console()) as log:
            log.log_step(0, METRICS)
        before = (folder / "metrics.jsonl").read_bytes()
        with read_only(folder):
            with pytest.raises(ValueError, match=f"run.folder = '{folder}': cannot be written .*name another one"):
                RunLog(folder, 2, first_step=first_step, console=text_console())
            with pytest.raises(RuntimeError, match=f"rollout journal {folder}/journal/.*: .*Permission denied"):
                start(folder / "journal")
        assert (folder / "metrics.jsonl").read_bytes() == before
    finally:
        shutil.rmtree(folder)
