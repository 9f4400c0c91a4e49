"""Calls over a socket are calls: what they give and raise is what a call here would."""

import asyncio
import logging
import os
import socket
import threading
import time
from concurrent.futures import CancelledError, Future
from functools import partial

import pytest
import torch

from megatron_rl.api import RequestRefused
from megatron_rl.rollout.rollout_rank import ToTrainer
from megatron_rl.rollout.rpc import RpcClient, RpcServer, RpcSocket
from tests.kit.closing import closed_at_end
from tests.kit.tokenizers import make_tokenizer
from tests.kit.waiting import LATE_S, LIMIT_S, wait_until


class Servant:
    """What the calls of these tests reach, in a thread."""

    def __init__(self):
        self.futures: dict[str, Future] = {}
        self.heard = []
        self.going = {}

    async def goes_on(self, name, fails=False):
        """Last until `let_go(name)`."""
        self.going[name] = asyncio.Event()
        try:
            await self.going[name].wait()
        except asyncio.CancelledError:
            self.heard.append(f"{name} was cancelled")
            raise
        if fails:
            raise KeyError(name)
        return name

    def let_go(self, name):
        self.going[name].set()

    def echo(self, *args, **kwargs):
        return args, kwargs

    def note(self, word):
        self.heard.append(word)
        return list(self.heard)

    def fail(self, error):
        raise error

    def promise(self, *names):
        self.futures |= {name: Future() for name in names}
        return {name: self.futures[name] for name in names}


def call(caller, name, /, *args, **kwargs):
    return caller.start(name, *args, **kwargs).result()


class Unspeakable(Exception):
    """An error that pickle cannot take."""

    def __init__(self):
        super().__init__("a lock is in it")
        self.lock = threading.Lock()


@pytest.fixture
def ends():
    return tuple(map(closed_at_end, socket.socketpair()))


@pytest.fixture
def servant():
    return Servant()


@pytest.fixture
def told():
    return []


@pytest.fixture
def caller(ends, servant, told):
    ours, theirs = ends
    wire = RpcSocket(theirs)

    server = RpcServer(wire, partial(getattr, servant), beside={"goes_on"})
    serving = threading.Thread(target=lambda: asyncio.run(server.serve()))
    serving.start()
    on_end = lambda fault: fault or RuntimeError("it is gone")  # noqa: E731
    caller = RpcClient(RpcSocket(ours), on_told=lambda *call: told.append(call), on_end=on_end)
    caller.servant_wire = wire
    yield caller
    caller.close()
    serving.join()


# Every size class of a frame: nothing, one number, a view with gaps, more than the socket holds at once.
TENSORS = {
    "bool": torch.tensor([True, False, True]),
    "int64": torch.arange(5),
    "float32": torch.randn(3, 4),
    "bfloat16": torch.randn(7).bfloat16(),
    "empty": torch.empty(0, 3),
    "scalar": torch.tensor(2.5, dtype=torch.float64),
    "strided": torch.arange(24).reshape(4, 6)[:, ::2],
    "large": torch.randn(1 << 20),
}


@pytest.mark.parametrize("name", TENSORS)
def test_tensors_arrive_bit_for_bit_and_belong_to_whoever_got_them(name, caller):
    (there_and_back,), _ = call(caller, "echo", TENSORS[name])
    assert there_and_back.dtype == TENSORS[name].dtype and torch.equal(there_and_back, TENSORS[name])
    there_and_back.zero_()
    assert name == "empty" or TENSORS[name].any()


def test_tensors_do_not_go_through_pickle(ends):
    ours, theirs = ends
    ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 20)
    RpcSocket(ours).send(torch.zeros(10_000))
    count, head, content = (int.from_bytes(theirs.recv(size), "little") for size in (4, 8, 8))
    assert (count, content) == (2, 40_000) and head < 300


def test_a_tokenizer_that_crossed_is_the_one_that_was_sent(caller):
    sent = make_tokenizer()
    (given,), _ = call(caller, "echo", sent)
    text = "What is 12 + 30?<eos>  The quick brown fox"
    messages = [{"role": "user", "content": text}, {"role": "assistant", "content": "42"}]
    options = {"add_generation_prompt": True, "enable_thinking": True}
    assert given is not sent and given(text) == sent(text)
    assert given.apply_chat_template(messages, **options) == sent.apply_chat_template(messages, **options)
    ids = range(len(sent))
    assert [given.decode([i], skip_special_tokens=True) for i in ids] == [
        sent.decode([i], skip_special_tokens=True) for i in ids
    ]
    assert (given.eos_token_id, given.pad_token_id) == (sent.eos_token_id, sent.pad_token_id)


def test_keywords_cross_whatever_their_name(caller):
    assert call(caller, "echo", 1, name="group", args=2) == ((1,), {"name": "group", "args": 2})


@pytest.mark.parametrize("error", [RequestRefused("no such token"), TimeoutError("late"), KeyError("key")])
def test_an_error_keeps_type_and_words_and_says_where_it_was_raised(error, caller):
    with pytest.raises(type(error)) as raised:
        call(caller, "fail", error)
    assert raised.value.args == error.args
    assert "in fail\n" in str(raised.value.__cause__)


def test_an_error_that_cannot_cross_is_told_in_words(caller, servant):
    servant.hurt = lambda: servant.fail(Unspeakable())
    with pytest.raises(RuntimeError, match="Unspeakable: a lock is in it"):
        call(caller, "hurt")


def test_futures_in_an_answer_end_as_their_originals_do(caller, servant):
    promised = call(caller, "promise", "good", "bad", "late")
    assert not any(future.done() for future in promised.values())
    servant.futures["bad"].set_exception(RequestRefused("no"))
    servant.futures["good"].set_result(torch.ones(2))
    assert torch.equal(promised["good"].result(5), torch.ones(2))
    with pytest.raises(RequestRefused, match="no"):
        promised["bad"].result(5)
    assert not promised["late"].done()


def test_a_future_that_was_over_before_its_answer_left_is_over_here_too(caller, servant):
    done: Future = Future()
    done.set_result(3)
    servant.over = lambda: {"server": done}
    assert [call(caller, "over")["server"].result(5) for _ in range(50)] == [3] * 50


def test_to_cancel_a_future_cancels_the_original(caller, servant):
    promised = call(caller, "promise", "slow")
    assert promised["slow"].cancel()
    call(caller, "note", "after it")
    assert servant.futures["slow"].cancelled()
    with pytest.raises(CancelledError):
        promised["slow"].result(5)


def test_calls_are_served_in_their_order_whether_they_wait_or_not(caller):
    for number in range(20):
        caller.tell("note", number)
    assert call(caller, "note", "last") == [*range(20), "last"]


def test_what_is_answered_beside_others_holds_none_of_them_up(caller):
    first, second = caller.start(Servant.goes_on, "first"), caller.start(Servant.goes_on, "second", fails=True)
    assert call(caller, "echo", 1) == ((1,), {}) and not first.done()
    call(caller, "let_go", "second")
    with pytest.raises(KeyError, match="second"):
        second.result(LIMIT_S)
    call(caller, "let_go", "first")
    assert first.result(LIMIT_S) == "first"


def test_to_cancel_what_is_answered_beside_others_cancels_it(caller, servant):
    asked = caller.start(Servant.goes_on, "it")
    wait_until(lambda: "it" in servant.going)
    assert asked.cancel() and asked.cancelled()
    wait_until(lambda: servant.heard == ["it was cancelled"])
    assert call(caller, "echo", 1) == ((1,), {})


def test_what_is_told_unasked_comes_before_the_answer_that_follows_it(caller, servant, told):
    servant.drop = lambda: caller.servant_wire.send((None, ("dropped", ("server",)), None))
    for number in range(1, 20):
        call(caller, "drop")
        assert told == [("dropped", ("server",))] * number


def test_when_the_other_end_is_gone_all_calls_say_so(caller):
    waiting = call(caller, "promise", "never")["never"]
    caller.servant_wire.hang_up()
    with pytest.raises(RuntimeError, match="it is gone"):
        waiting.result(5)
    with pytest.raises(RuntimeError, match="it is gone"):
        call(caller, "echo")
    caller.tell("note", "nobody hears it")


class Unloadable:
    """Pickles, and raises that error where it is read."""

    def __init__(self, error):
        self.error = error

    def __reduce__(self):
        return raise_error, (self.error,)


def raise_error(error):
    raise error


# EOFError is what a broken pickle raises too, and would look like the end of the process.
@pytest.mark.parametrize("error", [AttributeError("no such class"), EOFError("ran out of input"), OSError("no disk")])
def test_a_message_that_cannot_be_read_fails_all_calls_at_once_with_its_reason(error, caller, servant):
    waiting = call(caller, "promise", "never")["never"]
    servant.bad = lambda: Unloadable(error)
    with pytest.raises(RuntimeError, match=f"a message cannot be read: {type(error).__name__}: {error}"):
        call(caller, "bad")
    with pytest.raises(RuntimeError, match="cannot be read"):
        waiting.result(5)
    with pytest.raises(RuntimeError, match="cannot be read"):
        call(caller, "echo")


def test_what_is_told_and_cannot_be_handled_fails_all_calls_at_once(caller, servant, told):
    servant.drop = lambda: caller.servant_wire.send((None, ("dropped", ("server",)), None))
    caller._on_told = lambda *call: raise_error(OSError("no room"))
    with pytest.raises(RuntimeError, match="'dropped' was told, and led to OSError: no room"):
        call(caller, "drop")
        call(caller, "echo")


@pytest.mark.parametrize("is_promised", [True, False], ids=["later", "at once"])
def test_an_answer_that_pickle_cannot_take_is_an_error_for_who_waits_for_it(is_promised, caller, servant):
    with pytest.raises(RuntimeError, match="the answer cannot be sent: TypeError: cannot pickle"):
        if is_promised:
            promised = call(caller, "promise", "lock")
            servant.futures["lock"].set_result(threading.Lock())
            promised["lock"].result(5)
        else:
            servant.lock = threading.Lock
            call(caller, "lock")
    assert call(caller, "echo", 1) == ((1,), {}), "and the next one is answered"


def test_what_a_future_gives_is_packed_by_a_thread_of_its_own(caller, servant):
    packed_by = []

    class Large:
        def __reduce__(self):
            packed_by.append(threading.current_thread().name)
            return str, ()

    promised = call(caller, "promise", "evaluation")
    servant.futures["evaluation"].set_result(Large())  # as the event loop does, which has other things to do
    assert promised["evaluation"].result(5) == "" and packed_by == ["answers"]


def test_a_log_record_crosses_without_what_users_put_into_it(caller, servant, told):
    handler = ToTrainer(caller.servant_wire)
    record = logging.makeLogRecord({"name": "user", "levelno": logging.WARNING, "msg": "%d of %s", "args": (1, "it")})
    record.episode, record.number = Unloadable(KeyError("no such class")), 7
    handler.handle(record)
    call(caller, "echo")
    ((name, (content,)),) = told
    heard = logging.makeLogRecord(content)
    assert (name, heard.getMessage(), heard.name, heard.number) == ("log", "1 of it", "user", 7)
    assert not hasattr(heard, "episode")


def test_a_forked_process_does_not_keep_the_connection_open(ends):
    ours, theirs = ends
    wire, other = RpcSocket(ours), RpcSocket(theirs)
    pid = os.fork()
    if pid == 0:
        time.sleep(LATE_S)
        os._exit(0)
    try:
        wire.close()
        theirs.settimeout(LIMIT_S)
        with pytest.raises(EOFError):
            other.receive()
    finally:
        os.kill(pid, 9)
        os.waitpid(pid, 0)
