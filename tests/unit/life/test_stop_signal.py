"""A notice is heard whatever the main thread does, and a process that does not stop in time is ended."""

import os
import signal
import threading

import pytest

from megatron_rl.launch import rank
from megatron_rl.life.stop_signal import EXIT_INTERRUPTED, SIGNALS, StopSignal
from tests.kit.interpreters import start_python
from tests.kit.waiting import LATE_S, LIMIT_S, wait_until

WAITS_IN_C = """
import ctypes
from megatron_rl.life.stop_signal import StopSignal
notice = StopSignal({grace_s}, on_half_time=lambda: print("half time", flush=True))
notice.listen()
print("ready", flush=True)
libc = ctypes.CDLL(None)
while True:  # no instruction of Python's in between that could run a handler for long
    libc.poll(None, 0, 500)
"""


@pytest.fixture(autouse=True)
def signals_as_before():
    before = {number: signal.getsignal(number) for number in SIGNALS}
    yield before
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("number", SIGNALS)
def test_a_process_that_does_not_stop_within_its_grace_is_ended(number):
    with start_python(WAITS_IN_C.format(grace_s=0.6)) as process:
        assert process.stdout.readline() == "ready\n"
        process.send_signal(number)
        out, said = process.communicate(timeout=LATE_S)
    assert process.returncode == 1 and out == "half time\n"
    assert f"{signal.Signals(number).name}: no checkpoint within run.grace_s = 0.6 s" in said


def test_sigterm_leaves_most_of_half_a_minute_to_save(monkeypatch):
    monkeypatch.setattr("megatron_rl.life.stop_signal.FINISH_ON_TERM_S", 0.1)
    for number, is_early in ((signal.SIGTERM, True), (signal.SIGUSR1, False)):
        half_time = threading.Event()
        notice = StopSignal(2 * LATE_S, on_half_time=half_time.set)
        notice.listen()
        os.kill(os.getpid(), number)
        assert notice.came(within_s=LIMIT_S)
        assert half_time.wait(LIMIT_S if is_early else 0.3) == is_early
        notice.close()


def test_a_stop_in_time_is_left_alone_and_the_next_signal_does_not_end_what_is_about_to_end():
    late, before = [], set(threading.enumerate())
    notice = StopSignal(LATE_S, on_half_time=lambda: late.append(1))
    notice.listen()
    assert not notice.came()
    os.kill(os.getpid(), signal.SIGUSR1)
    assert notice.came(within_s=LIMIT_S) and notice.signal_name == "SIGUSR1"
    notice.close()
    notice.close()
    for number in SIGNALS:
        os.kill(os.getpid(), number)
    wait_until(lambda: set(threading.enumerate()) <= before)
    assert not late, "its thread has ended without"


def test_without_a_notice_the_signals_are_given_back(signals_as_before):
    notice = StopSignal(1.0, on_half_time=lambda: None)
    notice.listen()
    assert not notice.came()
    notice.close()
    assert {number: signal.getsignal(number) for number in SIGNALS} == signals_as_before


def test_without_listening_nothing_came():
    notice = StopSignal(1.0, on_half_time=lambda: None)
    assert not notice.came()
    notice.close()


def test_ctrl_c_while_the_config_is_read_ends_with_one_line(monkeypatch, capsys):
    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setattr(rank, "load_config", interrupted)
    monkeypatch.setattr(rank.open_files, "raise_limit", lambda: 0)
    with pytest.raises(SystemExit) as ended:
        rank.main("", lambda config: None, ["configs/demo.yaml"])
    assert ended.value.code == EXIT_INTERRUPTED
    assert capsys.readouterr().err == "megatron_rl.train: interrupted, with nothing saved.\n"
