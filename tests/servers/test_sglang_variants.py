"""Real SGLang in other shapes than one current server: two tensor-parallel ranks, and the protocol without sessions."""

import asyncio
import os

import pytest

from megatron_rl.config import GenerationConfig, RolloutConfig
from megatron_rl.serving import supervisor as supervisors
from megatron_rl.serving.supervisor import SGLANG_CPU_PACKAGES, Supervisor
from megatron_rl.types import LLMRequest
from tests.servers.reference import interrupt, publish, reference_greedy, reference_logprobs, weight_group

PROMPT = [11, 200, 37, 5]
LONG = 300
OLDER = SGLANG_CPU_PACKAGES.with_name("sglang-cpu-0.5.19")
ARGUMENTS = ["--max-total-tokens", "8192", "--random-seed", "1"]


@pytest.fixture(scope="module", params=["tensor-parallel", "0.5.19"])
def server(request, tiny_model, tmp_path_factory):
    arguments = list(ARGUMENTS)
    with pytest.MonkeyPatch.context() as patch:
        packages = [SGLANG_CPU_PACKAGES]
        if request.param == "0.5.19":
            packages.insert(0, OLDER)
            patch.setattr(supervisors, "SGLANG_CPU_PACKAGES", os.pathsep.join(map(str, packages)))
        else:
            arguments += ["--tp-size", "2"]
            patch.setenv("SGLANG_CPU_OMP_THREADS_BIND", "0|1")  # SGLang asks for one NUMA node per rank otherwise
        for folder in packages:
            if not (folder / "sglang").is_dir():
                pytest.skip(f"{folder} has no SGLang; run scripts/install_sglang_cpu.sh with this interpreter")
        config = RolloutConfig(backend="sglang", start_timeout_s=400, server_args=arguments)
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
