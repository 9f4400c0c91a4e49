"""Every pipeline stage sends its own weights to real servers' ranks over gloo: all of them arrive, and are proved."""

import os

import pytest
import torch
import torch.distributed as dist
from stage_servers import Servers, serve

from megatron_rl.api import NoServerLeft
from megatron_rl.config import ParallelConfig
from megatron_rl.launch.ports import free_port
from megatron_rl.weights import publish
from tests.kit.models import make_engine, make_model
from tests.kit.ranks import run_ranks

LAYOUTS = {
    "pp2": (2, ParallelConfig(pipeline=2)),
    "pp2_ep2": (4, ParallelConfig(pipeline=2, expert=2)),
    "pp4_ep2": (8, ParallelConfig(pipeline=4, expert=2)),
}


def publish_from_stages(folder, layout, port, faults, flat_below):
    publish.FLAT_BELOW_BYTES, publish.AFTERMATH_S = flat_below, 0.2
    trainers, parallel = LAYOUTS[layout]
    rank = int(os.environ["RANK"])
    store = dist.TCPStore("127.0.0.1", port, is_master=rank == 0, wait_for_workers=False)
    if rank >= trainers:
        return serve(store, rank - trainers, faults[rank - trainers])
    os.environ["WORLD_SIZE"] = str(trainers)
    engine = make_engine(folder, parallel)
    engine.config.bucket_bytes = 40_000
    servers = Servers(store, len(faults)) if rank == 0 else None
    failure = None
    try:
        engine.update_weights(servers, 7)
        if isinstance(faults[0], str):  # rank 0 has failed, which a run would tell the others
            return None
        engine.update_weights(servers, 7)  # in the groups of the first time
    except NoServerLeft as error:
        failure = str(error)
    streamed = {} if failure else {name: tensor.clone() for name, tensor in engine.hf_tensors()}
    engine.publisher.close()
    if servers is not None:
        servers.end()
        return streamed, servers.dropped, servers.calls, engine.publisher.last, failure
    return engine.publisher.sender.group is None and not streamed


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("qwen3_moe")
    make_model("qwen3_moe", folder)
    return folder


def run(folder, layout, faults, flat_below=1 << 18):
    count = LAYOUTS[layout][0]
    arguments = (folder, layout, free_port("127.0.0.1"), faults, flat_below)
    main, *others = run_ranks(count + len(faults), publish_from_stages, *arguments)
    return main, others[: count - 1], others[count - 1 :]


@pytest.mark.slow
@pytest.mark.parametrize("flat_below", [0, 1 << 18], ids=["tensors", "flat"])
@pytest.mark.parametrize(
    "layout", ["pp2", *(pytest.param(layout, marks=pytest.mark.thorough) for layout in ("pp2_ep2", "pp4_ep2"))]
)
def test_every_stage_sends_and_all_servers_hold_all_of_it(layout, flat_below, folder):
    (streamed, dropped, calls, last, _), others, held = run(folder, layout, [None, None], flat_below)
    assert all(others), "the other ranks are given no tensors, and have left"
    stages = LAYOUTS[layout][1].pipeline
    assert not dropped and calls.count("join") == stages, "groups last from one publication to the next"
    assert last.verified == 2 * len(streamed) and last.nbytes == sum(t.nbytes for t in streamed.values())
    for of_server in held:
        assert of_server.keys() == streamed.keys()
        assert all(torch.equal(of_server[name], tensor) for name, tensor in streamed.items())


@pytest.mark.slow
@pytest.mark.parametrize("flat_below", [0, 1 << 18], ids=["tensors", "flat"])
@pytest.mark.parametrize("layout", ["pp2", pytest.param("pp2_ep2", marks=pytest.mark.thorough)])
def test_a_server_that_dies_in_a_round_costs_the_other_nothing(layout, flat_below, folder):
    (streamed, dropped, calls, last, _), _, held = run(folder, layout, [None, 3], flat_below)
    assert list(dropped) == ["http://127.0.0.1:1"] and calls.count("join") == 4
    assert last.verified == len(streamed)
    assert all(torch.equal(held[0][name], tensor) for name, tensor in streamed.items())


@pytest.mark.slow
def test_a_wrong_number_of_another_stage_is_found(folder):
    wrong = "model.layers.3.mlp.experts.3.down_proj.weight"  # of the last stage, which rank 0 does not have
    (*_, failure), _, _ = run(folder, "pp2_ep2", [wrong])
    assert f"http://127.0.0.1:0: holds other weights than were sent: {wrong}" in failure
