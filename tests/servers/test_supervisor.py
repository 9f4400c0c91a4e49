"""Starting, watching and stopping servers. Every end is tried: a bad model, a crash, a stop, the trainer's death."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from pathlib import Path

import psutil
import pytest

from megatron_rl.config import RolloutConfig
from megatron_rl.launch.run_token import token_in
from megatron_rl.servers import supervisor as supervisor_module
from megatron_rl.servers.server_process import SGLANG_CPU, SGLANG_CPU_PACKAGES, WATCHDOG
from megatron_rl.servers.supervisor import Supervisor, is_healthy
from tests.kit.ranks import fork
from tests.kit.waiting import LATE_S, LIMIT_S, SLOWNESS, wait_until


def is_alive(pid):
    """A zombie, whose parent has not looked yet, is dead."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")")[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def wait_for_end(pid):
    wait_until(lambda: not is_alive(pid), f"process {pid} is left")


def config(**fields):
    return RolloutConfig(**{"backend": "embedded", "start_timeout_s": LATE_S} | fields)


def test_server_that_cannot_start_shows_its_log(tmp_path):
    with pytest.raises(
        RuntimeError, match=r"(?s)rollout server 0 \(pid \d+\) exited with status 1 .*no config.json"
    ) as raised:
        Supervisor(config(), tmp_path, tmp_path / "logs").start()
    assert str(tmp_path / "logs" / "server-0.log") in str(raised.value)


def test_server_that_takes_too_long_is_stopped(tiny_model, tmp_path, from_command_lines):
    supervisor = Supervisor(config(start_timeout_s=0.05), tiny_model, tmp_path)
    with pytest.raises(RuntimeError, match="did not answer within rollout.start_timeout_s = 0.05 s"):
        supervisor.start()
    assert supervisor.urls == []


def test_server_that_dies_once_too_often_is_given_up_in_one_line(tiny_model, tmp_path):
    messages, told = [], threading.Event()

    def on_death(message):
        messages.append(message)
        told.set()

    supervisor = Supervisor(config(server_restarts=0), tiny_model, tmp_path, on_death=on_death)
    supervisor.start()
    pid = supervisor._servers[0].process.pid
    os.kill(pid, signal.SIGKILL)
    assert told.wait(LIMIT_S)
    supervisor.stop()
    (message,) = messages
    assert message.startswith(f"rollout server 0 (pid {pid}) was killed by SIGKILL and is given up after 0 restarts")
    # The last thing that it logged is in the same line.
    assert f"{tmp_path}/server-0.log, ends with: " in message and "rollout server ready at" in message
    assert "\n" not in message


def test_last_server_to_be_given_up_ends_the_run_and_not_the_first(tiny_model, tmp_path, caplog):
    messages, told = [], threading.Event()

    def on_death(message):
        messages.append(message)
        told.set()

    with Supervisor(config(server_count=2, server_restarts=0), tiny_model, tmp_path, on_death=on_death) as supervisor:
        first, second = (server.process.pid for server in supervisor._servers)
        os.kill(first, signal.SIGKILL)
        wait_until(lambda: "is given up" in caplog.text)
        assert f"(pid {first}) was killed by SIGKILL and is given up" in caplog.text
        assert messages == [] and is_alive(second)
        os.kill(second, signal.SIGKILL)
        assert told.wait(LIMIT_S)
    assert f"(pid {second})" in messages[0]


def healthy_pid(supervisor, url, other_than):
    """Wait for a new process that answers at the URL."""
    process = lambda: supervisor._servers[0].process  # noqa: E731
    wait_until(
        lambda: process().pid != other_than and is_healthy(url, "/health", timeout_s=LIMIT_S),
        f"{url} did not come back",
    )
    return process().pid


def test_dead_server_comes_back_at_its_url_without_weights(tiny_model, tmp_path, monkeypatch):
    monkeypatch.setattr(supervisor_module, "FIRST_RESTART_S", 0.1)
    with Supervisor(config(server_restarts=1), tiny_model, tmp_path, dummy_weights=True) as supervisor:
        (url,), pid = supervisor.urls, supervisor._servers[0].process.pid
        os.kill(pid, signal.SIGKILL)
        healthy_pid(supervisor, url, other_than=pid)
        token = {"Authorization": f"Bearer {token_in(supervisor.token_file)}"}  # the same one
        with urllib.request.urlopen(
            urllib.request.Request(f"{url}/model_info", headers=token), timeout=LATE_S
        ) as answer:
            assert json.load(answer)["weight_version"] == "none"
        # Both lives are in one log, so the first death can still be read.
        log = (tmp_path / "server-0.log").read_text()
        assert log.count("rollout server ready at") == 2


def test_server_that_hangs_is_killed_and_restarted(tiny_model, tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(supervisor_module, "FIRST_RESTART_S", 0.1)
    patience_s = round(SLOWNESS, 1)
    with Supervisor(config(health_timeout_s=patience_s), tiny_model, tmp_path) as supervisor:
        (url,), (server,) = supervisor.urls, supervisor._servers
        pid = server.process.pid
        with supervisor.publication():  # in which generating nothing is nothing unusual
            os.kill(pid, signal.SIGSTOP)
            stopped_at = time.monotonic()
            wait_until(lambda: server.looked_at > stopped_at + 2 * patience_s, "nobody looks after it")
            assert is_alive(pid)
        healthy_pid(supervisor, url, other_than=pid)
    said = f"was killed: it hung: no good answer to /health_generate for {patience_s:g} s; restart 1 of 3"
    assert said in caplog.text


def test_server_that_failed_is_replaced_and_one_that_is_dead_already_is_not_killed_twice(tiny_model, tmp_path, caplog):
    with Supervisor(config(server_restarts=0), tiny_model, tmp_path) as supervisor:
        (url,) = supervisor.urls
        supervisor.replace(url, "its weights are wrong")
        supervisor.replace(url, "too late")
        supervisor.replace("http://elsewhere:1", "not ours")
        wait_until(lambda: "is given up" in caplog.text)
    assert "was killed: its weights are wrong and is given up" in caplog.text


def shown_to_others(pid):
    """What every user of the host, or the owner alone, sees of a process and its children."""
    processes = [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]
    return " ".join(f"{process.cmdline()} {process.environ()}" for process in processes)


def test_started_server_listens_for_this_host_alone_and_shows_its_token_to_nobody(
    tiny_model, tmp_path, from_command_lines
):
    with Supervisor(config(), tiny_model, tmp_path) as supervisor:
        (server,), token = supervisor._servers, token_in(supervisor.token_file)
        listening = [c.laddr for c in psutil.Process(server.process.pid).net_connections() if c.status == "LISTEN"]
        assert [(a.ip, f"http://127.0.0.1:{a.port}") for a in listening] == [("127.0.0.1", server.url)]
        assert str(supervisor.token_file) in shown_to_others(server.process.pid)
        assert token not in shown_to_others(server.process.pid)
        assert token not in server.log.read_text()


def test_server_is_not_started_with_a_token_that_others_may_read(tiny_model, tmp_path):
    (tmp_path / "token").write_text("x" * 40)
    (tmp_path / "token").chmod(0o644)
    with pytest.raises(ValueError, match=f"rollout.token_file = '{tmp_path}/token': has mode 644"):
        Supervisor(config(), tiny_model, tmp_path).start()


def test_stopped_servers_are_gone_and_nobody_is_alarmed(tiny_model, tmp_path):
    messages = []
    with Supervisor(config(), tiny_model, tmp_path, on_death=messages.append) as supervisor:
        pid = supervisor._servers[0].process.pid
        assert is_alive(pid)
    assert not is_alive(pid)
    assert messages == []


def start_a_server(where):
    model, folder = where
    with Supervisor(config(), model, folder) as supervisor:
        print(supervisor._servers[0].process.pid)
        signal.pause()


def test_servers_die_with_a_trainer_that_is_killed(tiny_model, tmp_path):
    output = tmp_path / "output.txt"
    trainer = fork(start_a_server, (tiny_model, tmp_path / "servers"), output)
    wait_until(lambda: output.exists() and output.read_text().endswith("\n"), "no server was started")
    server = int(output.read_text())
    assert is_alive(server)
    os.kill(trainer, signal.SIGKILL)
    os.waitpid(trainer, 0)
    wait_for_end(server)


def has_watchdog(pid):
    """Whether a watchdog knows by now whose child it is: it sleeps for the first time."""
    children = psutil.Process(pid).children()
    return any("-S" in child.cmdline() and child.status() == psutil.STATUS_SLEEPING for child in children)


@pytest.mark.parametrize("worker", ["sleep 10000", "(trap '' TERM; sleep 10000; true)"])
def test_watchdog_ends_a_server_and_its_workers(worker):
    # This server is a shell with a worker of its own in the same group, which may ignore SIGTERM.
    script = (
        "import subprocess, sys, time\n"
        f"command = ['sh', '-c', {worker + ' & echo $!; wait'!r}]\n"
        "server = subprocess.Popen(command, start_new_session=True, stdout=subprocess.PIPE)\n"
        "print(server.pid, int(server.stdout.readline()), flush=True)\n"
        "subprocess.Popen([sys.executable, '-S', '-E', sys.argv[1], str(server.pid)], start_new_session=True)\n"
        "time.sleep(10_000)\n"
    )
    with subprocess.Popen([sys.executable, "-c", script, str(WATCHDOG)], stdout=subprocess.PIPE, text=True) as trainer:
        server, worker = map(int, trainer.stdout.readline().split())
        wait_until(lambda: has_watchdog(trainer.pid), "no watchdog watches")
        assert is_alive(server) and is_alive(worker)
        trainer.kill()
    wait_for_end(server)
    wait_for_end(worker)


def test_sglang_command_on_a_host_without_cuda(tmp_path, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
    monkeypatch.setenv("WORLD_SIZE", "8")
    supervisor = Supervisor(
        config(backend="sglang"),
        "model",
        tmp_path,
        dummy_weights=True,
        threads_per_server=2,
    )
    command = " ".join(supervisor._launcher.sglang_command(1234))
    started = f"-m megatron_rl.servers.sglang_launch --token-file {tmp_path}/token --model-path model"
    assert f"{started} --host 127.0.0.1 --port 1234" in command
    assert "--weight-version none" in command and "api-key" not in command
    assert "--device cpu" in command and "--load-format dummy" in command
    environment = supervisor._launcher.environment(0)
    assert environment["PYTHONPATH"].split(os.pathsep)[:2] == [str(SGLANG_CPU), str(SGLANG_CPU_PACKAGES)]
    assert environment["OMP_NUM_THREADS"] == "2"
    assert "PYTHONDONTWRITEBYTECODE" not in environment and "WORLD_SIZE" not in environment


@pytest.mark.parametrize(("is_colocated", "segments"), [(True, "False"), (False, "True")])
def test_a_server_that_releases_memory_has_no_expandable_segments(is_colocated, segments, tmp_path, monkeypatch):
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        monkeypatch.setenv(name, "max_split_size_mb:64,expandable_segments:True")
    publication = "ipc" if is_colocated else "group"
    options = config(backend="sglang", colocated=is_colocated, publication=publication)
    found = Supervisor(options, "model", tmp_path)._launcher.environment(0)
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        assert found[name] == f"max_split_size_mb:64,expandable_segments:{segments}"


def test_each_server_has_its_devices(tmp_path):
    supervisor = Supervisor(config(server_count=2), "model", tmp_path, devices=[["0", "1"], ["2", "3"]])
    assert [supervisor._launcher.environment(number)["CUDA_VISIBLE_DEVICES"] for number in (0, 1)] == ["0,1", "2,3"]
    with pytest.raises(ValueError, match="rollout.server_count = 2: 1 lists of devices"):
        Supervisor(config(server_count=2), "model", tmp_path, devices=[["0"]])
