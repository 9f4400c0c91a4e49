"""The rollout process gives its trainer what an engine in the trainer would give. Neither outlives, or waits for, the
other's death.
"""

import contextlib
import os
import signal
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest
import torch

from megatron_rl.api import NoServerLeft, WeightReceiver
from megatron_rl.config import load_config
from megatron_rl.data.prompts import PromptIterator
from megatron_rl.data.tokens import load_tokenizer
from megatron_rl.rollout import journal
from megatron_rl.rollout import process as process_module
from megatron_rl.rollout.factory import make_workflow
from megatron_rl.rollout.process import RolloutDied, RolloutProcess
from megatron_rl.rollout.resume_state import ResumePoint
from megatron_rl.rollout.rollout_rank import Beginning, RolloutRank
from megatron_rl.rollout.sglang_engine import RemoteSGLangEngine
from megatron_rl.telemetry.rollout_metrics import metrics_of
from tests.kit.examples import IS_THOROUGH
from tests.kit.forks import killed
from tests.kit.ranks import fork
from tests.kit.run_tokens import TOKEN_FILE
from tests.kit.scripted_server import never
from tests.kit.waiting import LATE_S, LIMIT_S, wait_until

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
PROMPTS = [{"prompt": f"What is {number} + 30?", "answer": "42"} for number in range(12)]
PLACE = ResumePoint(rank=0, ranks=1, run_attempt=1, fingerprint="", resumed=None)


class Run:
    """Starts rollout processes of one folder."""

    def __init__(self, folder: Path, model: Path):
        self.folder, self.model = folder, model
        self.died: list[str] = []
        self.dropped: list[tuple[str, str]] = []
        self.processes: list[RolloutProcess] = []

    def config(self, *overrides):
        settings = (f"model.path={self.model}", f"run.folder={self.folder}", "generation.max_new_tokens=6")
        settings += (
            "generation.n_samples=2",
            f"rollout.request_timeout_s={LATE_S}",
            f"rollout.token_file={TOKEN_FILE}",
        )
        settings += ("run.import_from=[own_rewards,own_workflows]",)
        return load_config(ROOT / "configs/count_grpo.yaml", [*settings, *overrides])

    def start(self, urls, *overrides, lock=None):
        log = self.folder / "rollout.log"
        on_drop = lambda *drop: self.dropped.append(drop)  # noqa: E731
        process = RolloutProcess(log, on_death=self.died.append, on_drop=on_drop, lock=lock)
        self.processes.append(process)
        config = self.config(*overrides)
        here = {"prompts": PROMPTS, "held_out": PROMPTS[:3], "sys_path": sys.path}
        process.begin(Beginning(config=config, tokenizer=load_tokenizer(config.model.path), resume_point=PLACE, **here))
        process.connect(urls)
        return process


@pytest.fixture
def run(tmp_path, tiny_model):
    started = Run(tmp_path, tiny_model)
    yield started
    for process in started.processes:
        process.close()


def test_its_trajectories_are_those_of_an_engine_in_the_trainer(run, embedded_servers):
    config = run.config()
    engine = RemoteSGLangEngine(config.rollout, seed=config.run.seed)
    engine.initialize(embedded_servers)
    prompts = PromptIterator(PROMPTS, seed=config.run.seed, shuffle=config.data.shuffle)
    tokenizer = load_tokenizer(config.model.path)
    workflow = make_workflow(config, tokenizer, config.generation)
    greedy = config.generation.new(greedy=True, n_samples=1)
    expected = [
        engine.rollout_batch(prompts.next_batch(5), workflow),
        engine.rollout_batch(prompts.next_batch(5), workflow),  # over the end of an epoch of 12
        engine.rollout_batch(prompts.next_batch(5), workflow),
        engine.evaluate(PROMPTS[:3], make_workflow(config, tokenizer, greedy)).result(LIMIT_S),
    ]
    engine.destroy()
    process = run.start(embedded_servers)
    given = [process.rpc.start(RolloutRank.prepare_batch, 5).result(LIMIT_S) for _ in range(3)]
    given.append(process.rpc.start(RolloutRank.evaluate, greedy).result(LIMIT_S))
    for ours, theirs in zip(given, expected, strict=True):
        assert ours.tokens.keys() == theirs.tokens.keys() and ours.sequences.keys() == theirs.sequences.keys()
        for key in ("input_ids", "loss_mask", "versions", "rewards", "group"):
            assert torch.equal(ours[key], theirs[key]), key
        # What a server reports depends in its last bits on the requests that it happened to compute together.
        torch.testing.assert_close(ours["logprobs"], theirs["logprobs"])
        assert torch.equal(ours.cu_seqlens, theirs.cu_seqlens)
    assert metrics_of([process.counts()])["rollout/episodes_accepted"] == 15
    process.close()
    assert list((run.folder / "hang").iterdir()) == [], "nothing stood still"


def test_a_reward_that_computes_leaves_the_trainers_interpreter_alone(run, scripted):
    process = run.start([scripted().url], "rollout.reward=own_rewards:burn", "generation.n_samples=4")
    pending = process.rpc.start(RolloutRank.prepare_batch, 1)
    turns, own_s, all_s = 0, time.thread_time(), time.process_time()
    while not pending.done():
        turns += sum(range(100)) > 0
    own_s, all_s = time.thread_time() - own_s, time.process_time() - all_s
    rewards = pending.result()["rewards"]
    workers = {child.pid for child in psutil.Process(process.process.pid).children(recursive=True)}
    assert set(rewards.int().tolist()) <= workers, "they were computed over there"
    if IS_THOROUGH:  # in a thread of this process they would have had the interpreter for as long as this loop
        assert turns > 1000 and all_s < 1.2 * own_s


def test_errors_and_warnings_reach_the_trainer(run, scripted, caplog):
    process = run.start([scripted().url], "rollout.reward=own_rewards:undecided", "rollout.episode_attempts=1")
    with pytest.raises(RuntimeError, match="1 episodes failed .* NoVerdict: no verdict at line 3") as raised:
        process.rpc.start(RolloutRank.prepare_batch, 1).result(LIMIT_S)
    assert "own_rewards.py" in str(raised.value.__cause__), "it says where"
    assert "episode 0 is given up: RewardFailed: NoVerdict" in caplog.text
    assert "episode 0 is given up: RewardFailed: NoVerdict" in process.log.read_text()
    assert "no verdict" in (run.folder / "dead_letters.jsonl").read_text()
    process.fail("the world ends")
    with pytest.raises(RuntimeError, match="the world ends"):
        process.rpc.start(RolloutRank.prepare_batch, 1).result(LIMIT_S)


def test_it_is_the_weight_receiver_of_its_servers(run, scripted):
    servers = [scripted(), scripted()]
    urls = [server.url for server in servers]
    process = run.start(urls)
    members = {name for name in vars(WeightReceiver) if not name.startswith("_")}
    assert len(members) > 12 and all(hasattr(process, name) for name in members)
    assert process.server_ranks == dict.fromkeys(urls, 1) and process.serving == urls and not process.needs_weights
    before = process.membership
    process.pause()
    process.begin_weight_update(7)
    bucket = {"names": ["w"], "dtypes": ["float32"], "shapes": [[2, 3]], "group": "g", "version": 7}
    loads = process.load_bucket(**bucket)
    assert [load.result(LIMIT_S) for load in loads.values()] == [None, None] and list(loads) == urls
    assert servers[1].body_of("/update_weights_from_distributed")["names"] == ["w"]
    servers[0].refusals["/update_weights_from_distributed"] = (500, {"error": {"message": "no memory"}})
    loads = process.load_bucket(**bucket)
    with pytest.raises(RuntimeError, match="no memory") as raised:
        loads[urls[0]].result(LIMIT_S)
    assert type(raised.value).__name__ == "ServerError" and loads[urls[1]].result(LIMIT_S) is None
    process.drop(urls[0], "no memory")
    assert run.dropped == [(urls[0], "no memory")] and list(process.server_ranks) == urls[1:]
    assert process.membership > before
    process.end_weight_update(7)
    process.finish_update(7)
    process.resume()
    assert "/continue_generation" in servers[1].controls() and process.serving == urls[1:]
    servers[1].hang_up_on.add("/pause_generation")
    with pytest.raises(NoServerLeft, match="no rollout server is left"):
        process.pause()


def test_a_killed_one_is_named_at_once_with_its_log(run, scripted):
    process = run.start([scripted().url], "rollout.reward=own_rewards:wait_for_long")
    pending = process.rpc.start(RolloutRank.prepare_batch, 1)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):  # the trainer's business
        process.process.send_signal(number)
    assert process.serving and not run.died
    process.process.kill()
    with pytest.raises(RolloutDied, match=rf"\(pid {process.process.pid}\) was killed by SIGKILL; its log is .*\.log"):
        pending.result(LIMIT_S)
    assert len(run.died) == 1
    with pytest.raises(RolloutDied, match="was killed by SIGKILL"):
        process.counts()


def test_one_that_stands_still_says_which_rewards_it_waits_for(run, scripted):
    process = run.start([scripted().url], "rollout.reward=own_rewards:wait_for_long")
    process.rpc.start(RolloutRank.prepare_batch, 1)
    wait_until(lambda: "rewards: 2" in process.hang_report(), "the rewards did not begin")
    assert "; the oldest: reward own_rewards:wait_for_long (of " in process.hang_report()
    stacks = run.folder / "hang" / "rollout-0.txt"
    wait_until(
        lambda: process.hang_report() and "in wait_for_long" in stacks.read_text(), "the worker's stacks are missing"
    )


def test_a_command_that_a_publication_waits_for_is_named_while_it_is_under_way(run, scripted):
    server = scripted()
    process = run.start([server.url])
    server.answers["/pause_generation"] = never

    def pause():
        with contextlib.suppress(RuntimeError):  # the process is closed meanwhile
            process.pause()

    thread = threading.Thread(target=pause)
    thread.start()
    wait_until(lambda: "/pause_generation" in server.controls(), "the pause did not begin")
    assert f"control: 1; the oldest: /pause_generation to {server.url} for" in process.hang_report()
    assert thread.is_alive()
    process.process.kill()
    thread.join(LIMIT_S)


def test_one_that_does_not_answer_is_said_to_and_leaves_its_stacks_once_it_runs(run, scripted, monkeypatch):
    monkeypatch.setattr(process_module, "ANSWER_S", 0.3)
    process = run.start([scripted().url])
    stacks = run.folder / "hang" / "rollout-0.txt"
    process.process.send_signal(signal.SIGSTOP)
    wait_until(lambda: psutil.Process(process.process.pid).status() == psutil.STATUS_STOPPED, "it did not stop")
    try:
        assert process.hang_report() == f"the rollout process (pid {process.process.pid}), which does not answer"
        assert stacks.read_text() == ""
    finally:
        process.process.send_signal(signal.SIGCONT)
    wait_until(lambda: "in serve_trainer" in stacks.read_text(), "no stacks")
    run.processes.remove(process)
    process.close()
    assert stacks.exists(), "what was found stays"


def test_one_that_cannot_begin_says_why(run, scripted):
    with pytest.raises(ValueError, match="has no 'nothing'"):
        run.start([scripted().url], "rollout.reward=own_rewards:nothing")
    with pytest.raises(RuntimeError, match="is the server up"):
        run.start(["http://127.0.0.1:9"])
    with pytest.raises(ValueError, match="quantization = 'fp8': what is published would be copied"):
        run.start([scripted(info={"quantization": "fp8"}).url])
    assert not run.died


def test_one_that_is_stopped_while_it_ends_does_not_hold_the_trainer(tmp_path, monkeypatch):
    monkeypatch.setattr(process_module, "STOP_S", 0.5)
    process = RolloutProcess(tmp_path / "log", on_death=print)
    process.process.send_signal(signal.SIGSTOP)
    process.close()  # which it hears no more
    assert process.process.returncode == -signal.SIGKILL


def start_as_a_trainer(folder):
    process = RolloutProcess(folder / "log", on_death=print, lock=journal.take_lock(folder, 0))
    writer = os.fork()  # as a checkpoint's
    if writer:
        print(process.process.pid, writer)
    time.sleep(10_000)


def test_it_dies_with_its_trainer_and_gives_the_journal_free(tmp_path):
    output = tmp_path / "output.txt"
    trainer = fork(start_as_a_trainer, tmp_path, output)
    wait_until(lambda: output.exists() and output.read_text().endswith("\n"), "no rollout process was started")
    pid, writer = map(int, output.read_text().split())
    try:
        with pytest.raises(BlockingIOError, match=rf"process {pid} on .* still writes it"):
            journal.wait_for_owners(tmp_path, patience_s=0.1)
        killed(trainer)
        wait_until(lambda: not psutil.pid_exists(pid), "the rollout process outlived its trainer")
        assert psutil.pid_exists(writer), "which still has what it inherited"
        journal.wait_for_owners(tmp_path, patience_s=LATE_S)
        os.close(journal.take_lock(tmp_path, 0, patience_s=LATE_S))
    finally:
        os.kill(writer, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            killed(trainer)


def test_one_that_is_stopped_or_whose_event_loop_stands_still_is_known_to_the_trainer(
    run, scripted, monkeypatch, tmp_path
):
    monkeypatch.setattr(process_module, "PULSE_S", 0.1)
    monkeypatch.setenv("BLOCKED_UNTIL", str(tmp_path / "go on"))
    process = run.start([scripted().url], "rollout.workflow=own_workflows:Blocking")

    def is_silent(who):
        return lambda: [name for name, (seconds, _) in process.silent().items() if seconds > 0.5 and name.endswith(who)]

    pending = process.rpc.start(RolloutRank.prepare_batch, 1)
    wait_until(is_silent("its event loop,"), "a workflow blocks it")
    process.process.send_signal(signal.SIGSTOP)
    wait_until(is_silent(f"(pid {process.process.pid})"), "nothing of it answers")
    process.process.send_signal(signal.SIGCONT)
    wait_until(lambda: not is_silent(f"(pid {process.process.pid})")(), "it answers again")
    assert is_silent("its event loop,")()
    (tmp_path / "go on").touch()
    wait_until(lambda: not is_silent("its event loop,")(), "the workflow blocks it no more")
    pending.cancel()
