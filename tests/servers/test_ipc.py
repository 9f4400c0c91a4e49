"""Weights in memory that the trainer shares with servers on its host: what the servers hold, what is left behind."""

import base64
import os
import pickle
import re
import signal
from types import SimpleNamespace

import pytest
import torch

from megatron_rl.api import NoServerLeft
from megatron_rl.config import RolloutConfig
from megatron_rl.parallel import first_ranks_of_nodes
from megatron_rl.rollout.sglang_engine import RemoteSGLangEngine
from megatron_rl.servers import weight_receiver
from megatron_rl.servers.server_http import CommandRefused
from megatron_rl.servers.supervisor import Supervisor
from megatron_rl.servers.weight_receiver import is_on_this_host
from megatron_rl.weights.ipc import IPCPublisher, NodesOfServers
from megatron_rl.weights.shared_bucket import SHARED_FILES, SharedBucket, open_bucket
from tests.kit.client_calls import PROMPT, greedy, pid_of
from tests.kit.in_process import specs_of
from tests.kit.models import LAYOUTS, make_engine
from tests.kit.ranks import run_ranks
from tests.kit.reference import BUCKET_BYTES, reference_greedy
from tests.kit.run_tokens import TOKEN_FILE
from tests.kit.servers import NEVER_LATE
from tests.kit.waiting import LATE_S, LIMIT_S

CPU = torch.device("cpu")


def shared_files():
    return {path for path in SHARED_FILES.iterdir() if path.name.startswith(f"torch_{os.getpid()}_")}


def test_embedded_servers_read_what_was_put_into_shared_memory(
    embedded_servers, connect, weights, other_tiny_model, put_back
):
    put_back(embedded_servers)
    engine = connect(embedded_servers)
    publisher, seen = IPCPublisher(engine, bucket_bytes=BUCKET_BYTES, timeout_s=LATE_S), []

    def stream():
        for item in weights.items():
            seen.append(sum(path.stat().st_size for path in shared_files()))
            yield item

    for version in (3, 4):
        publisher.publish(specs_of(weights), stream(), version)
        assert publisher.last.verified == 2 * len(weights) and publisher.last.paused_s < publisher.last.seconds
        assert not shared_files()
    largest = max(BUCKET_BYTES, *(tensor.nbytes for tensor in weights.values()))
    assert largest < max(seen) <= 2 * (largest + 4096), "two buckets, whatever the size of the model"
    reply = greedy(engine)
    assert reply.output_tokens == reference_greedy(other_tiny_model, PROMPT, 12)
    assert reply.output_versions == [4] * 12


def test_server_that_reads_late_finds_the_bytes_that_were_sent(scripted, connect):
    # As on a GPU: SGLang answers when the copies of a bucket are asked for, and they may be under way for long.
    server, held = scripted(), []

    def hold(body):
        (entry,) = body["serialized_named_tensors"]
        held.append(pickle.loads(base64.b64decode(entry)))
        return {"success": True}

    server.answers["/update_weights_from_tensor"] = hold
    weights = {f"w{number}": torch.full((5000,), float(number)) for number in range(8)}
    publisher = IPCPublisher(connect(server.url), bucket_bytes=BUCKET_BYTES, timeout_s=LATE_S)
    publisher.publish(specs_of(weights), weights.items(), 1)
    found = {}
    for bucket in held:
        for part in bucket["metadata"]:
            tensor = bucket["flattened_tensor"][part.start_idx : part.end_idx].view(part.dtype)
            found[part.name] = tensor.unique().tolist()
    assert len(held) == 4 and found == {name: [float(number)] for number, name in enumerate(weights)}
    del bucket, tensor
    held.clear()
    publisher.close()
    assert not shared_files()


def test_server_killed_in_the_middle_is_dropped_and_leaves_no_memory_behind(connect, weights, tiny_model, tmp_path):
    config = RolloutConfig(backend="embedded", server_count=2, server_restarts=0, token_file=TOKEN_FILE, **NEVER_LATE)
    with Supervisor(config, tiny_model, tmp_path) as supervisor:
        engine = connect(supervisor.urls)
        publisher = IPCPublisher(engine, bucket_bytes=BUCKET_BYTES, timeout_s=LATE_S)
        victim, other = supervisor.urls

        def stream():
            for number, item in enumerate(weights.items()):
                if number == len(weights) // 2:
                    os.kill(pid_of(supervisor, victim), signal.SIGKILL)
                yield item

        publisher.publish(specs_of(weights), stream(), 8)
        assert engine.serving == [other] and publisher.last.verified == len(weights)
        publisher.close()
        assert not shared_files()


def test_servers_elsewhere_are_refused(embedded_servers, connect, weights, monkeypatch, put_back):
    assert is_on_this_host("http://127.0.0.1:30000") and is_on_this_host("http://localhost:1")
    assert not is_on_this_host("http://192.0.2.7:30000") and not is_on_this_host("http://no-such-host.invalid:1")
    put_back(embedded_servers)
    engine = connect(embedded_servers)
    publisher = IPCPublisher(engine, bucket_bytes=BUCKET_BYTES, timeout_s=LATE_S)
    monkeypatch.setattr(weight_receiver, "is_on_this_host", lambda url: url != embedded_servers[0])
    publisher.publish(specs_of(weights), weights.items(), 5)
    assert engine.serving == embedded_servers[1:]
    monkeypatch.setattr(weight_receiver, "is_on_this_host", lambda url: False)
    assert engine.shared_memory_forms() == {embedded_servers[1]: None}
    assert engine.shared_memory_forms(embedded_servers) == {embedded_servers[1]: "handle"}
    with pytest.raises(NoServerLeft, match="is on another host. .*set rollout.publication=group"):
        publisher.publish(specs_of(weights), weights.items(), 6)
    assert not shared_files()


def publish_from_two_nodes(folder, urls, layout):
    """Publish three versions from ranks on two nodes, with a server each; the second server fails in the last one.

    Returns this rank's pid, how many tensors were proved in each, which processes' buckets each server was told of, and
    what is left in shared memory.
    """
    os.environ["LOCAL_WORLD_SIZE"] = "2"
    engine, receiver, verified, told = make_engine(folder, LAYOUTS[layout][1]), None, [], {url: set() for url in urls}
    engine.config.publication = "ipc"  # as a run says it on all ranks, of which some have no part below
    first_ranks = first_ranks_of_nodes(engine.groups, timeout_s=LATE_S)
    if engine.groups.is_main:
        receiver = RemoteSGLangEngine(RolloutConfig(token_file=TOKEN_FILE))
        receiver.initialize(urls)
        load_shared = receiver.load_shared

        def load(*, buckets, **rest):
            if len(verified) == 2 and urls[1] in receiver.server_ranks:
                receiver.drop(urls[1], "it was killed")
            for url, handle in buckets.items():
                names = b"".join(map(base64.b64decode, handle)) if isinstance(handle, list) else handle["file"].encode()
                told[url] |= {int(pid) for pid in re.findall(rb"torch_(\d+)_", names)}
            return load_shared(buckets=buckets, **rest)

        receiver.load_shared = load
    if first_ranks is not None:
        nodes = NodesOfServers(first_ranks, [[url] for url in urls], CPU)
        engine.publisher = IPCPublisher(receiver, bucket_bytes=BUCKET_BYTES, timeout_s=LATE_S, nodes=nodes)
    for version in (3, 4, 5):
        engine.update_weights(receiver, version)
        verified.append(engine.publisher.last.verified if receiver is not None else 0)
    engine.close_publisher()
    if receiver is not None:
        receiver.destroy()
    return os.getpid(), verified, told, shared_files()


@pytest.mark.parametrize("layout", ["tp2_pp2", "dp4"])  # the second node's first rank gives its shards, or has no part
def test_servers_of_each_node_read_the_buckets_of_a_rank_of_their_own(
    layout, embedded_servers, other_tiny_model, weights, connect, put_back
):
    put_back(embedded_servers)
    (main, verified, told, _), _, (second, *_), _ = ranks = run_ranks(
        4, publish_from_two_nodes, other_tiny_model, embedded_servers, layout if layout in LAYOUTS else "1"
    )
    assert [told[url] for url in embedded_servers] == [{main}, {second}]
    assert verified == [2 * len(weights), 2 * len(weights), len(weights)], "every tensor of both servers, and of one"
    assert not any(left for *_, left in ranks)
    reply = greedy(connect(embedded_servers[0]))
    assert reply.output_tokens == reference_greedy(other_tiny_model, PROMPT, 12)


def test_embedded_server_takes_handles_of_buckets_and_nothing_else(embedded_servers, connect, weights, put_back):
    url = embedded_servers[0]
    put_back(url)
    engine = connect(url)
    name, tensor = "model.norm.weight", weights["model.norm.weight"]
    names = {"names": [name], "dtypes": ["float32"], "shapes": [list(tensor.shape)]}
    bucket = SharedBucket(tensor.nbytes, CPU)

    def refusal(handle, names=names):
        answer = engine.load_shared(**names, buckets={url: handle}, version=1)[url]
        with pytest.raises(CommandRefused) as refused:
            answer.result(LIMIT_S)
        return str(refused.value)

    good = bucket.handle()
    assert "must run between begin_weight_update" in refusal(good)
    engine.pause()
    engine.begin_weight_update(1)
    assert "the embedded server unpickles nothing" in refusal([bucket.pickled(specs_of({name: tensor}))])
    for file in ("../../etc/passwd", "/etc/passwd", "sem.x", "", 5):
        assert "must be a handle that the trainer made" in refusal(good | {"file": file})
    assert "must be a handle" in refusal(good | {"offset": -1}) and "must be a handle" in refusal({})
    assert "No such file" in refusal(good | {"file": "torch_1_2_3"})
    assert f"{good['offset'] + 1} + {tensor.nbytes} are announced" in refusal(good | {"offset": good["offset"] + 1})
    assert "shape [7] must be [64]" in refusal(good, names | {"shapes": [[7]]})
    bucket.flat.copy_(tensor.view(torch.uint8))
    engine.load_shared(**names, buckets={url: good}, version=1)[url].result(LIMIT_S)
    engine.end_weight_update(1)
    bucket.close().unlink()  # SGLang would have let go of the pickled one


@pytest.mark.parametrize("nodes", [[["a"], ["b"]], None], ids=["two nodes", "one node"])
def test_a_failure_on_one_node_is_heard_at_once_where_the_others_wait_for_more_than_the_stream(nodes, monkeypatch):
    def fails(*_, **__):
        raise RuntimeError("2 MB are free")

    def counted():
        for item in tensors.items():
            taken.append(item[0])
            yield item

    tensors, taken = {name: torch.zeros(4) for name in "abcdef"}, []
    monkeypatch.setattr("megatron_rl.weights.ipc.dist.broadcast_object_list", fails)
    ranks = SimpleNamespace(group=None, rank=1, size=2)
    publisher = IPCPublisher(
        None, bucket_bytes=32, timeout_s=LATE_S, nodes=NodesOfServers(ranks, nodes, CPU) if nodes else None
    )
    if nodes is None:
        publisher.publish(specs_of(tensors), counted(), 1)
        assert taken == list(tensors), "every rank takes part in the stream"
        return
    with pytest.raises(RuntimeError, match="2 MB are free"):
        publisher.publish(specs_of(tensors), counted(), 1)
    assert taken == ["a", "b"], "a rank that went on with the stream would wait for the others, and they for it"


def test_a_reader_sees_the_bucket_and_cannot_change_it():
    bucket = SharedBucket(100, CPU)
    bucket.flat.copy_(torch.arange(100))
    read = open_bucket(bucket.handle(), 60)
    assert torch.equal(read, torch.arange(60, dtype=torch.uint8))
    read.zero_()
    assert torch.equal(bucket.flat, torch.arange(100, dtype=torch.uint8))
    assert bucket.close() is None and not shared_files(), "readers do not hold the file"


def test_more_than_there_is_is_refused_before_it_kills_the_process(monkeypatch):
    monkeypatch.setattr("shutil.disk_usage", lambda _: type("Usage", (), {"free": 10**6}))
    with pytest.raises(RuntimeError, match="/dev/shm: 1 MB are free, and a bucket .* takes 2 MB; make it larger"):
        SharedBucket(2 * 10**6, CPU)


def test_real_sglang_reads_shared_memory_and_is_checked(real_sglang, connect, weights, other_tiny_model, put_back):
    put_back(real_sglang)
    engine = connect(real_sglang)
    publisher = IPCPublisher(engine, bucket_bytes=BUCKET_BYTES, timeout_s=LATE_S)
    for version in (3, 4):
        publisher.publish(specs_of(weights), weights.items(), version)
        assert publisher.last.verified == len(weights) - 2 * 3  # q, k and v are one there, and gate and up
        assert not shared_files()
    reply = greedy(engine)
    assert reply.output_tokens == reference_greedy(other_tiny_model, PROMPT, 12)
    assert reply.output_versions == [4] * 12


# Two nodes are served in the test of embedded servers above, and pickles are read in the one before this.
@pytest.mark.thorough
def test_real_sglang_reads_pickles_of_a_rank_on_its_own_node(
    real_sglang, embedded_servers, other_tiny_model, weights, put_back
):
    put_back(urls := [embedded_servers[0], real_sglang])
    ranks = run_ranks(4, publish_from_two_nodes, other_tiny_model, urls, "tp2_pp2")
    (main, verified, told, _), _, (second, *_), _ = ranks
    assert [told[url] for url in urls] == [{main}, {second}] and not any(left for *_, left in ranks)
    both = len(weights) + len(weights) - 2 * 3  # q, k and v are one in SGLang, and gate and up
    assert verified == [both, both, len(weights)]
