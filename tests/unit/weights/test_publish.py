"""The publisher with servers in this process: what it sends when, what it compares, whom it drops, what it costs."""

import gc
import os
import socket
import threading
import weakref
from concurrent.futures import Future, ThreadPoolExecutor

import psutil
import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import _create_work_from_future

from megatron_rl.launch.ports import free_port
from megatron_rl.ops import CHECKSUM_COLUMNS, count_of_word_sums, word_sums
from megatron_rl.tools.embedded_server.weight_endpoints import Arrival, arriving
from megatron_rl.weights import publish
from megatron_rl.weights.checksums import ExpectedChecksums, differences
from megatron_rl.weights.publish import fill_buckets, plan_buckets
from megatron_rl.weights.update_group import TensorSpec, checksum, join_update_group, leave_update_group
from tests.kit import operators as reference
from tests.kit.in_process import InProcessPublisher, InProcessServers, done, some_tensors, specs_of
from tests.kit.ranks import run_ranks
from tests.kit.waiting import LATE_S, LIMIT_S, wait_until

# -- checksums

ROW = 8 * CHECKSUM_COLUMNS


# Nothing, less than a word, no whole row, whole rows, a rest of whole words, a rest of bytes, more than one block.
@pytest.mark.parametrize("nbytes", [0, 3, 4096, ROW, 3 * ROW + 64, 3 * ROW + 67, 130 * ROW + 5])
def test_a_checksum_depends_on_every_byte_and_on_nothing_else(nbytes):
    data = torch.randint(0, 256, (nbytes,), dtype=torch.uint8)
    first = checksum(data)
    shifted = torch.cat([torch.zeros(3, dtype=torch.uint8), data])[3:]  # elsewhere in memory, at an odd address
    assert checksum(shifted) == first
    for position in {0, 1, nbytes // 2, nbytes - 1} & set(range(nbytes)):
        for bit in (1, 128):
            data[position] ^= bit
            assert checksum(data) != first
            data[position] ^= bit
    assert checksum(data) == first
    if nbytes:
        assert checksum(data[:-1]) != first


# Nothing, a scalar, odd sizes, more than one thread's rows with a rest; every dtype that is published.
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(0,), (), (3,), (1, 4095), (3 * 4096 + 5,), (701, 1537), (1030, 2048)], ids=str)
def test_the_sums_are_those_of_their_definition(shape, dtype):
    tensor = torch.randn(shape).to(dtype)
    views = [tensor, tensor.T, tensor[:, ::2], tensor.flatten()[1:]] if tensor.ndim == 2 else [tensor]
    sums = [reference.word_sums(view.contiguous()) for view in views]
    assert torch.equal(word_sums(views), torch.cat(sums))
    assert [count_of_word_sums(view.nbytes) for view in views] == [len(own) for own in sums]


def test_moved_blocks_change_a_checksum():
    data = torch.arange(4 * CHECKSUM_COLUMNS, dtype=torch.int64).view(4, CHECKSUM_COLUMNS)
    sums = [checksum(data), checksum(data[[1, 0, 2, 3]]), checksum(data.roll(1, dims=1)), checksum(data.flatten()[1:])]
    sums += [checksum(torch.cat([data[:2], data[:2]])), checksum(-data), checksum(data.float()), checksum(data[:2])]
    assert len(set(sums)) == len(sums)
    assert checksum(data) == checksum(data.flatten()), "the bytes count, not the shape"


def test_differences_name_what_is_other_missing_or_too_much():
    sent, held = {"a": "1", "b": "2", "c": "3"}, {"a": "1", "b": "9", "d": "4"}
    assert differences(sent, held, complete=True) == ["b", "c", "d"]
    assert differences(sent, held, complete=False) == ["b"]


# -- buckets


def test_buckets_are_runs_of_one_dtype_within_the_limit():
    sizes = [4, 4, 9, 2, 2, 3]
    specs = [TensorSpec(str(i), torch.bfloat16 if i < 4 else torch.float32, (n,)) for i, n in enumerate(sizes)]
    # 16 bytes: 4 + 4 numbers of two bytes; the ninth makes a bucket of its own; a new dtype starts a new one.
    assert [[spec.name for spec in bucket] for bucket in plan_buckets(specs, 16)] == [
        ["0", "1"],
        ["2"],
        ["3"],
        ["4"],
        ["5"],
    ]


def test_large_tensors_are_sent_from_where_they_lie():
    large, small = torch.randn(3, 1 << 16), torch.randn(5, 7)
    tensors = {"a": large, "b": large.T, "c": small, "d": small + 1, "e": large.bfloat16()}
    buckets = plan_buckets(specs_of(tensors), 2 * large.nbytes)
    names = [[spec.name for spec in bucket] for bucket in buckets]
    assert names == [["a", "b"], ["c", "d"], ["e"]], "a new dtype, and what fits no more, begins a bucket"
    (a, b), (cd,), (e,) = (list(pieces) for _, pieces in fill_buckets(buckets, tensors.items()))
    assert a.data_ptr() == large.data_ptr() and e.data_ptr() == tensors["e"].data_ptr()
    assert b.is_contiguous() and torch.equal(b, large.T)
    assert torch.equal(cd.view(torch.float32), torch.cat([small.flatten(), small.flatten() + 1]))


@pytest.mark.parametrize("flat_below", [0, 1 << 18])
def test_a_stream_other_than_planned_is_refused(flat_below, monkeypatch):
    monkeypatch.setattr(publish, "FLAT_BELOW_BYTES", flat_below)
    tensors = some_tensors(3)
    buckets = plan_buckets(specs_of(tensors), 1 << 20)
    swapped = [(name, tensors[name]) for name in ("layer.0.weight", "layer.2.weight", "layer.1.weight")]
    for stream, message in (
        (swapped, r"layer.1.weight, .*\(11, 7\) was planned, but layer.2.weight, .* came"),
        (swapped[:1], "layer.1.weight, .* was planned, but nothing came"),
        ([*tensors.items(), *swapped], "layer.0.weight, .* came after the last planned tensor"),
        ([(name, tensor.double()) for name, tensor in tensors.items()], "float64.* came"),
    ):
        with pytest.raises(ValueError, match=message):
            for _, pieces in fill_buckets(buckets, stream):
                list(pieces)


@pytest.fixture(params=[0, 1 << 18], ids=["tensors", "flat"])
def servers(request, monkeypatch):
    """Two servers that are sent tensors, and the same two with flat buckets."""
    monkeypatch.setattr(publish, "FLAT_BELOW_BYTES", request.param)
    return InProcessServers("http://a", "http://b")


def publisher_of(servers, tensors, *, per_bucket=2):
    return InProcessPublisher(servers, bucket_bytes=per_bucket * max(t.nbytes for t in tensors.values()))


def assert_held(servers, server, tensors):
    assert servers.held[server].keys() == tensors.keys()
    assert all(torch.equal(servers.held[server][name], tensor) for name, tensor in tensors.items())


def test_all_servers_hold_what_was_sent_and_stand_still_until_it_is_proved(servers):
    tensors = some_tensors()
    publisher = publisher_of(servers, tensors)
    held = servers.held_weights
    servers.held_weights = lambda: servers.calls.append("held") or held()
    publisher.publish(specs_of(tensors), tensors.items(), 7)
    assert servers.calls == ["pause", "begin", "load", "load", "load", "end", "held", "resume"]
    assert servers.version == 7 and not servers.dropped
    for server in servers.held:
        assert_held(servers, server, tensors)
    assert publisher.last.verified == 2 * len(tensors)
    assert publisher.last.nbytes == sum(tensor.nbytes for tensor in tensors.values())
    assert 0 < publisher.last.paused_s < publisher.last.seconds


def test_the_next_bucket_is_gathered_while_one_is_on_the_wire(servers):
    """Each bucket arrives only once a tensor of the next one was asked for: in turn, they would wait for each other."""
    tensors, waiting, take = some_tensors(), [], servers.take

    def arrive():
        for future in waiting:
            future.set_result(None)
        waiting.clear()

    def slow_take(specs, pieces, version):
        answers = {server: publish.Future() for server in take(specs, pieces, version)}
        waiting.extend(answers.values())
        return answers

    def stream():
        for number, item in enumerate(tensors.items()):
            if number % 2 == 0:  # the first of a bucket
                arrive()
            yield item
        arrive()

    servers.take = slow_take
    publisher_of(servers, tensors).publish(specs_of(tensors), stream(), 1)
    assert not servers.dropped and servers.version == 1


def test_extra_memory_is_two_buckets(servers):
    tensors = some_tensors(12)
    publisher, buffers, most = publisher_of(servers, tensors), weakref.WeakSet(), []
    take = servers.take

    def watching_take(specs, pieces, version):
        buffers.update(piece.untyped_storage() for piece in pieces)
        most.append(sum(storage.nbytes() for storage in buffers))
        return take(specs, pieces, version)

    servers.take = watching_take
    gathered = ((name, tensor.clone()) for name, tensor in tensors.items())
    publisher.publish(specs_of(tensors), gathered, 1)
    assert len(most) > 4 and publisher.bucket_bytes <= max(most) <= 2 * publisher.bucket_bytes
    assert not buffers, "and nothing is kept between publications"


# -- servers that fail


def test_a_server_that_holds_something_else_is_named_with_the_tensor_and_dropped(servers):
    tensors = some_tensors()

    def flip(name, tensor):
        if name == "layer.3.weight":
            tensor.view(torch.int32)[4, 2] ^= 1  # one bit of one weight
        return tensor

    servers.corrupt["http://b"] = flip
    publisher_of(servers, tensors).publish(specs_of(tensors), tensors.items(), 3)
    assert servers.dropped == {"http://b": "holds other weights than were sent: layer.3.weight"}
    assert servers.version == 3
    assert_held(servers, "http://a", tensors)


def test_a_server_that_missed_a_bucket_or_the_version_is_dropped(servers):
    tensors = some_tensors()
    publisher, take = publisher_of(servers, tensors), servers.take

    def forgetful_take(specs, pieces, version):
        answers = take(specs, pieces, version)
        servers.held["http://a"].pop("layer.2.weight", None)
        servers.held["http://a"].pop("layer.4.weight", None)
        return answers

    servers.take = forgetful_take
    publisher.publish(specs_of(tensors), tensors.items(), 3)
    assert servers.dropped["http://a"].endswith("layer.2.weight, layer.4.weight")
    servers.take = lambda specs, pieces, version: take(specs, pieces, 2)
    with pytest.raises(RuntimeError, match="publication 4: no rollout server is left.*b: has weight version 2, 4 was"):
        publisher.publish(specs_of(tensors), tensors.items(), 4)


@pytest.mark.parametrize("call", ["pause", "begin", "load", "end", "resume"])
def test_a_server_that_fails_anywhere_costs_the_others_nothing(servers, call):
    tensors = some_tensors()
    servers.faults["http://a", call] = "no"
    publisher_of(servers, tensors).publish(specs_of(tensors), tensors.items(), 5)
    assert servers.dropped == {"http://a": "no"} and servers.calls[-1] == "resume" and servers.version == 5
    assert_held(servers, "http://b", tensors)


def test_a_server_that_never_answers_is_dropped_at_the_deadline(servers, monkeypatch):
    monkeypatch.setattr(publish, "AFTERMATH_S", 0.05)
    tensors, take = some_tensors(), servers.take
    publisher = publisher_of(servers, tensors)
    publisher.timeout_s = 0.2

    def silent_take(specs, pieces, version):
        return {name: publish.Future() if name == "http://b" else f for name, f in take(specs, pieces, version).items()}

    servers.take = silent_take
    publisher.publish(specs_of(tensors), tensors.items(), 5)
    assert servers.dropped == {"http://b": "did not finish within 0.2 s"}
    assert_held(servers, "http://a", tensors)


def test_the_stream_is_exhausted_even_where_no_server_is_left(servers):
    """It is a collective: other ranks would wait for this one."""
    tensors = some_tensors()
    for server in servers.held:
        servers.faults[server, "load"] = f"{server} is full"
    stream = iter(tensors.items())
    with pytest.raises(RuntimeError, match="no rollout server is left. .*http://a is full.*http://b is full"):
        publisher_of(servers, tensors).publish(specs_of(tensors), stream, 5)
    assert next(stream, None) is None


def test_checksums_are_of_the_dtype_that_the_server_holds():
    from megatron_rl.api import ChecksumForm

    tensors = some_tensors(2)
    forms = [ChecksumForm("embedded", dtype) for dtype in (None, "bfloat16")]
    expected = ExpectedChecksums(forms)
    assert dict(expected.watch(tensors.items())) == tensors
    for form, dtype in zip(forms, (torch.float32, torch.bfloat16), strict=True):
        assert expected.of(form) == {name: checksum(tensor.to(dtype)) for name, tensor in tensors.items()}


def test_a_bucket_is_kept_off_the_cpu_until_its_checksums_are_taken_and_not_where_nobody_takes_any(monkeypatch):
    from megatron_rl.api import ChecksumForm

    taken = []
    monkeypatch.setattr("megatron_rl.weights.checksums.word_sums", lambda given: taken.append(len(given)))
    for forms, kept in (([ChecksumForm("embedded", None)], 3), ([], 1)):
        alive = weakref.WeakSet()

        def stream(alive=alive):
            for name in "abcd":
                tensor = torch.empty(3, device="meta")
                alive.add(tensor)
                yield name, tensor

        most = max(len(alive) for _ in ExpectedChecksums(forms).watch(stream(), ["abc", "d"]))
        assert most <= kept + 1, "the one that passes, besides"
    assert taken == [3, 1]


def test_a_small_tensor_is_summed_while_it_is_in_the_cache_and_a_large_one_while_it_is_on_the_wire(monkeypatch):
    from megatron_rl.api import ChecksumForm

    monkeypatch.setattr("megatron_rl.weights.checksums.CACHED_BYTES", 8)
    events, form = [], ChecksumForm("embedded", None)
    expected = ExpectedChecksums([form])
    add = expected.add
    monkeypatch.setattr(expected, "add", lambda given: events.append([name for name, _ in given]) or add(given))
    tensors = {"large": torch.arange(3.0), "small": torch.ones(2), "other": torch.ones(1)}
    for name, _ in expected.watch(tensors.items(), ["ab", "c"]):
        events.append(name)
    assert events == ["large", ["large"], ["small"], "small", ["other"], "other"]
    assert expected.of(form) == {name: checksum(tensor) for name, tensor in tensors.items()}


# -- a group of NCCL's kind


class StuckGroup(dist.ProcessGroup):
    """NCCL's: its first broadcast returns when all servers take part, each ends when they do, shutting down when all
    that was sent has, and `abort` at once."""

    made, is_broken, group_name = [], False, "stuck"

    def __init__(self, rank, size):
        super().__init__(rank, size)
        StuckGroup.is_broken = False
        self.ended, self.is_connected = threading.Event(), False
        self.has_watchdog = os.environ.get("TORCH_NCCL_BLOCKING_WAIT") != "1"
        StuckGroup.made.append(self)

    def getBackendName(self):  # noqa: N802  torch's name
        return "stuck"

    def broadcast(self, tensors, options):
        future = torch.futures.Future()
        if self.is_broken and not self.is_connected:
            self.ended.wait(LATE_S)
        self.is_connected = True
        if not self.is_broken:
            future.set_result(tensors)
        return _create_work_from_future(future)

    def shutdown(self):
        self.ended.wait(LATE_S)

    def abort(self):
        self.ended.set()


class ServersOfGroup(InProcessServers):
    """Servers that join a process group's store. The second one dies as it is sent a bucket, the `dies_at`-th, and the
    first one waits for it as long as the group lasts."""

    def trainer_address(self):
        return "127.0.0.1"

    def join_weight_group(self, *, address, port, name, backend):
        size = 1 + len(self.server_ranks)
        threads = ThreadPoolExecutor(size)
        return {server: threads.submit(dist.TCPStore, address, port, size, False) for server in self.server_ranks}

    def leave_weight_group(self, *, name):
        return {}

    def load_bucket(self, *, names, **_):
        self.calls.append("load")
        if len(self.server_ranks) == 1 or self.calls.count("load") < self.dies_at:
            return {server: done() for server in self.server_ranks}
        first, second = self.server_ranks
        StuckGroup.is_broken = True
        return {first: Future(), second: done(error="its connection is lost")}


@pytest.mark.parametrize("dies_at", [1, 2])
def test_a_server_that_died_in_a_broadcast_over_nccl_held_up_the_trainer(dies_at, monkeypatch):
    if "stuck" not in dist.Backend.backend_list:
        dist.Backend.register_backend("stuck", lambda _, rank, size, __: StuckGroup(rank, size), devices=["cpu"])
    monkeypatch.setattr(publish, "AFTERMATH_S", 0.05)
    monkeypatch.setattr(publish.WeightPublisher, "_confirm", lambda *_: None)  # these servers hold nothing
    servers, tensors = ServersOfGroup("http://a", "http://b"), some_tensors()
    servers.dies_at, StuckGroup.made = dies_at, []
    publisher = publish.GroupPublisher(servers, bucket_bytes=800, backend="stuck", timeout_s=LATE_S)
    publisher.publish(specs_of(tensors), tensors.items(), 5)
    publisher.close()
    assert servers.dropped == {"http://b": "its connection is lost"} and servers.version == 5
    assert len(StuckGroup.made) == 2 and all(group.ended.is_set() for group in StuckGroup.made)
    # Torch's watchdog would end the process as soon as NCCL hears of the lost connection.
    assert not any(group.has_watchdog for group in StuckGroup.made)
    assert "TORCH_NCCL_BLOCKING_WAIT" not in os.environ


# -- the group's store


def test_update_group_listens_at_its_address_alone():
    port = free_port("127.0.0.1")
    group = join_update_group(address="127.0.0.1", port=port, rank=0, world_size=1, name="alone")
    listening = [c.laddr for c in psutil.Process().net_connections() if c.status == "LISTEN" and c.laddr.port == port]
    leave_update_group(group)
    assert listening == [("127.0.0.1", port)]


def test_a_rank_that_will_not_come_ends_the_waiting_of_all_that_came():
    # Open before any rank joins, as the publisher's: torch tries a refused connection again only after a second.
    listener = socket.create_server(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    where = {"address": "127.0.0.1", "port": port, "world_size": 3, "name": "in vain", "timeout_s": LATE_S}
    ends, may_end = {}, threading.Event()

    def join(rank, **options):
        try:
            join_update_group(rank=rank, **where, **options)
        except (RuntimeError, TimeoutError) as error:
            ends[rank] = error

    def have_come():
        connections = psutil.Process().net_connections("tcp")
        return sum(one.laddr.port == port and one.status == psutil.CONN_ESTABLISHED for one in connections)

    threads = [
        threading.Thread(target=join, args=(0,), kwargs={"listener": listener, "is_hopeless": may_end.is_set}),
        threading.Thread(target=join, args=(1,)),
    ]  # rank 2 has died
    for thread in threads:
        thread.start()
    wait_until(lambda: have_come() == 2)
    threads[0].join(0.5)
    assert not ends, "they wait as long as there is hope"
    may_end.set()
    for thread in threads:
        thread.join(LIMIT_S)
    assert isinstance(ends[0], TimeoutError) and "a rank will not come" in str(ends[0])
    assert isinstance(ends[1], RuntimeError)


def broken_broadcast(listener):
    """Rank 0 leaves without sending. Return the number of groups that live on in rank 1 after it has left too."""
    port = listener.getsockname()[1]
    where = {"address": "127.0.0.1", "port": port, "world_size": 2, "name": "broken", "timeout_s": LATE_S}
    if os.environ["RANK"] == "0":
        leave_update_group(join_update_group(rank=0, listener=listener, **where))
        return 0
    groups = [join_update_group(rank=1, **where)]
    alive = weakref.WeakSet(groups)
    specs = [TensorSpec("a", torch.float32, (4,)), TensorSpec("b", torch.float32, (2, 2))]
    gc.disable()  # it would release the group at some time
    with pytest.raises(RuntimeError) as error:
        list(arriving([Arrival(specs, groups[0], torch.device("cpu"), flattened=False)], {}))
    error.value.own = error  # a cycle, as where a future's error refers to the frame that set it
    leave_update_group(groups.pop())
    return len(alive)


def test_the_error_of_a_broken_broadcast_does_not_keep_its_group_connected():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        assert run_ranks(2, broken_broadcast, listener) == [0, 0]
