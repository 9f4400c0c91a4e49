"""A whole run of a mixture replays the routes of the servers that it starts, the embedded one and real SGLang."""

import json
import shutil

import pytest

from tests.kit.runs import COUNT, ROOT, steps_of, train_forked

pytestmark = pytest.mark.slow

TINY = ROOT / "configs" / "models" / "count_tiny"
MIXTURE = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "num_key_value_heads": 2,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "norm_topk_prob": True,
    "initializer_range": 0.2,
}
SERVERS = {
    "embedded": [],
    "sglang": ["--max-total-tokens", "4096", "--random-seed", "1", "--mem-fraction-static", "0.5"],
}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("mixture") / "model"
    shutil.copytree(TINY, folder)
    (folder / "config.json").write_text(json.dumps(json.loads((TINY / "config.json").read_text()) | MIXTURE))
    return folder


# Real SGLang, which takes half a minute to start, says its routes in the form that the embedded server has from it.
@pytest.mark.parametrize("backend", ["embedded", pytest.param("sglang", marks=pytest.mark.thorough)])
def test_a_run_trains_stale_tokens_on_the_experts_that_its_servers_chose(backend, model, tmp_path, request):
    if backend == "sglang":
        request.getfixturevalue("needs_sglang")
    train_forked(
        COUNT,
        f"model.path={model}",
        f"run.folder={tmp_path}/run",
        "run.steps=3",
        "run.save_at_end=false",
        "data.evaluation=",
        "warm_start.updates=0",
        "rollout.reward=tests.end_to_end.parity_reward:even",
        "run.import_from=[tests]",
        "algo.routing_replay=experts_and_weights",
        "batch.prompts_per_step=8",
        "generation.n_samples=4",
        "batch.updates_per_step=1",
        "optimizer.lr=5e-3",  # a version's router is soon another than the last one's
        "rollout.max_staleness=1",
        "rollout.interruption=abort",
        "rollout.server_count=1",
        f"rollout.backend={backend}",
        f"rollout.server_args={json.dumps(SERVERS[backend])}",
    )
    steps = steps_of(tmp_path / "run")
    assert len(steps) == 3
    assert steps[0]["policy/changed_routes"] < 0.001, "the first replies are of the trainer's own version"
    assert max(step["policy/changed_routes"] for step in steps[1:]) > 0.01, "later ones are not"
    assert steps[0]["mismatch/max"] < 1e-4
