"""Real SGLang in other shapes than one current server: two tensor-parallel ranks, and the protocol without sessions."""

import os

import pytest

from megatron_rl.api import NoServerLeft
from megatron_rl.config import RolloutConfig
from megatron_rl.servers import server_process
from megatron_rl.servers.server_process import SGLANG_CPU_PACKAGES
from megatron_rl.servers.supervisor import Supervisor
from megatron_rl.weights.ipc import IPCPublisher
from megatron_rl.weights.update_group import unpack_bucket
from tests.kit.client_calls import PROMPT, greedy
from tests.kit.in_process import specs_of
from tests.kit.reference import interrupt, publish, reference_greedy, reference_logprobs, weight_group
from tests.kit.run_tokens import TOKEN_FILE
from tests.kit.servers import NEVER_LATE, SGLANG_ARGUMENTS
from tests.kit.waiting import LATE_S

# Each starts a server; the client of every version's protocol is held against scripted ones in test_client.py.
pytestmark = [pytest.mark.slow, pytest.mark.thorough]
LONG = 300
OLDER = SGLANG_CPU_PACKAGES.with_name("sglang-cpu-0.5.19")


@pytest.fixture(scope="module", params=["tensor-parallel", "0.5.19"])
def server(request, tiny_model, tmp_path_factory):
    arguments = list(SGLANG_ARGUMENTS)
    with pytest.MonkeyPatch.context() as patch:
        packages = [SGLANG_CPU_PACKAGES]
        if request.param == "0.5.19":
            packages.insert(0, OLDER)
            patch.setattr(server_process, "SGLANG_CPU_PACKAGES", os.pathsep.join(map(str, packages)))
        else:
            arguments += ["--tp-size", "2"]
            patch.setenv("SGLANG_CPU_OMP_THREADS_BIND", "0|1")  # SGLang asks for one NUMA node per rank otherwise
        for folder in packages:
            if not (folder / "sglang").is_dir():
                pytest.skip(f"{folder} has no SGLang; run scripts/install_sglang_cpu.sh with this interpreter")
        config = RolloutConfig(backend="sglang", server_args=arguments, token_file=TOKEN_FILE, **NEVER_LATE)
        with Supervisor(config, tiny_model, tmp_path_factory.mktemp("variant")) as supervisor:
            yield supervisor.urls[0]


def test_publication_goes_through_a_running_reply(server, connect, tiny_model, other_tiny_model):
    engine = connect(server, seed=1)
    engine.update_weights(tiny_model, 4)
    assert greedy(engine, 8).output_tokens == reference_greedy(tiny_model, PROMPT, 8)
    with weight_group(engine) as group:
        reply = interrupt(engine, server, PROMPT, LONG, lambda: publish(engine, group, other_tiny_model, version=5))
    before = reply.output_versions.count(4)
    assert 0 < before < LONG and reply.output_versions == [4] * before + [5] * (LONG - before)
    old = reference_logprobs(tiny_model, PROMPT, reply.output_tokens)
    new = reference_logprobs(other_tiny_model, PROMPT, reply.output_tokens)
    assert reply.output_logprobs == pytest.approx(old[:before] + new[before:], abs=1e-3)
    assert greedy(engine, 8).output_tokens == reference_greedy(other_tiny_model, PROMPT, 8)


class Careless(IPCPublisher):
    """Changes the last row of one tensor before the servers read it, which is the last rank's."""

    def _show(self, specs, bucket, forms):
        tensors = unpack_bucket(bucket.flat[: sum(spec.nbytes for spec in specs)], specs)
        for spec, tensor in zip(specs, tensors, strict=True):
            if spec.name == "model.layers.0.mlp.up_proj.weight":
                tensor[-1, 0] += 1.0
        return super()._show(specs, bucket, forms)


def test_every_rank_reads_shared_memory_and_is_checked(server, connect, tiny_model, other_tiny_model, weights):
    engine = connect(server)
    (ranks,) = engine.server_ranks.values()
    publisher = IPCPublisher(engine, bucket_bytes=40_000, timeout_s=LATE_S)
    publisher.publish(specs_of(weights), weights.items(), 6)
    assert publisher.last.verified == ranks * (len(weights) - 2 * 3)  # q, k and v are one there, and gate and up
    assert greedy(engine, 8).output_tokens == reference_greedy(other_tiny_model, PROMPT, 8)
    wrong = "model.layers.0.mlp.gate_up_proj.weight" + (" .rank 1." if ranks == 2 else "")
    with pytest.raises(NoServerLeft, match=f"holds other weights than were sent: {wrong}$"):
        Careless(engine, bucket_bytes=40_000, timeout_s=LATE_S).publish(specs_of(weights), weights.items(), 7)
    restored = connect(server)
    restored.resume()
    restored.update_weights(tiny_model, 0)
