"""Real SGLang in other shapes than one current server: two tensor-parallel ranks, and the protocol without sessions."""

import asyncio
import os

import pytest
from safetensors.torch import load_file

from megatron_rl.api import NoServerLeft
from megatron_rl.config import GenerationConfig, RolloutConfig
from megatron_rl.servers import server_process
from megatron_rl.servers.server_process import SGLANG_CPU_PACKAGES
from megatron_rl.servers.supervisor import Supervisor
from megatron_rl.types import LLMRequest
from megatron_rl.weights.ipc import IPCPublisher
from megatron_rl.weights.update_group import unpack_bucket
from tests.kit.in_process import specs_of
from tests.kit.run_tokens import TOKEN_FILE
from tests.servers.reference import interrupt, publish, reference_greedy, reference_logprobs, weight_group

PROMPT = [11, 200, 37, 5]
LONG = 300
OLDER = SGLANG_CPU_PACKAGES.with_name("sglang-cpu-0.5.19")
# What others take of the host's memory while it starts counts as taken by its weights.
ARGUMENTS = ["--max-total-tokens", "8192", "--random-seed", "1", "--mem-fraction-static", "0.5"]


@pytest.fixture(scope="module", params=["tensor-parallel", "0.5.19"])
def server(request, tiny_model, tmp_path_factory):
    arguments = list(ARGUMENTS)
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
        config = RolloutConfig(backend="sglang", start_timeout_s=400, server_args=arguments, token_file=TOKEN_FILE)
        with Supervisor(config, tiny_model, tmp_path_factory.mktemp("variant")) as supervisor:
            yield supervisor.urls[0]


def test_publication_goes_through_a_running_reply(server, connect, tiny_model, other_tiny_model):
    engine = connect(server, seed=1)
    greedy = LLMRequest(
        rid="r", input_ids=PROMPT, gconfig=GenerationConfig(max_new_tokens=8, greedy=True, ignore_eos=True)
    )
    engine.update_weights(tiny_model, 4)
    assert asyncio.run(engine.agenerate(greedy)).output_tokens == reference_greedy(tiny_model, PROMPT, 8)
    with weight_group(engine) as group:
        reply = interrupt(engine, server, PROMPT, LONG, lambda: publish(engine, group, other_tiny_model, version=5))
    before = reply.output_versions.count(4)
    assert 0 < before < LONG and reply.output_versions == [4] * before + [5] * (LONG - before)
    old = reference_logprobs(tiny_model, PROMPT, reply.output_tokens)
    new = reference_logprobs(other_tiny_model, PROMPT, reply.output_tokens)
    assert reply.output_logprobs == pytest.approx(old[:before] + new[before:], abs=1e-3)
    assert asyncio.run(engine.agenerate(greedy)).output_tokens == reference_greedy(other_tiny_model, PROMPT, 8)


class Careless(IPCPublisher):
    """Changes the last row of one tensor before the servers read it, which is the last rank's."""

    def _show(self, specs, bucket, forms):
        tensors = unpack_bucket(bucket.flat[: sum(spec.nbytes for spec in specs)], specs)
        for spec, tensor in zip(specs, tensors, strict=True):
            if spec.name == "model.layers.0.mlp.up_proj.weight":
                tensor[-1, 0] += 1.0
        return super()._show(specs, bucket, forms)


def test_every_rank_reads_shared_memory_and_is_checked(server, connect, tiny_model, other_tiny_model):
    engine = connect(server)
    (ranks,) = engine.server_ranks.values()
    weights = load_file(other_tiny_model / "model.safetensors")
    publisher = IPCPublisher(engine, bucket_bytes=40_000, timeout_s=60)
    publisher.publish(specs_of(weights), weights.items(), 6)
    assert publisher.last.verified == ranks * (len(weights) - 2 * 3)  # q, k and v are one there, and gate and up
    greedy = LLMRequest(
        rid="r", input_ids=PROMPT, gconfig=GenerationConfig(max_new_tokens=8, greedy=True, ignore_eos=True)
    )
    assert asyncio.run(engine.agenerate(greedy)).output_tokens == reference_greedy(other_tiny_model, PROMPT, 8)
    wrong = "model.layers.0.mlp.gate_up_proj.weight" + (" .rank 1." if ranks == 2 else "")
    with pytest.raises(NoServerLeft, match=f"holds other weights than were sent: {wrong}$"):
        Careless(engine, bucket_bytes=40_000, timeout_s=60).publish(specs_of(weights), weights.items(), 7)
    restored = connect(server)
    restored.resume()
    restored.update_weights(tiny_model, 0)
