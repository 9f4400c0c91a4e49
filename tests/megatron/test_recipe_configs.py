"""Every recipe's config passes all checks, with a tiny model and a few rows in place of the real ones."""

import json
from pathlib import Path

import pytest

from megatron_rl import platform

platform.prepare()
from megatron_rl.config import load_config  # noqa: E402
from megatron_rl.run.checks import check  # noqa: E402
from tests.kit.served_models import make_tiny_model  # noqa: E402

CONFIGS = Path(__file__).parents[2] / "configs"
ROWS = {
    "gsm8k": {"question": "What is 12 + 30?", "answer": "#### 42"},
    "math": {"problem": "What is 12 + 30?", "solution": r"\boxed{42}", "level": "Level 1"},
    "code": {"text": "Double a number.", "test_list": ["assert twice(2) == 4"]},
}
RECIPES = ["gsm8k_smollm2", "gsm8k_qwen3_4b", "math_smollm2", "math_qwen3_4b", "countdown_smollm2"]
RECIPES += ["countdown_qwen3_4b", "code_smollm2", "code_qwen3_4b"]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_tiny_model(tmp_path_factory.mktemp("model"))


@pytest.mark.slow
@pytest.mark.parametrize("name", RECIPES)
def test_recipe_passes_the_checks(model, tmp_path, name):
    overrides = [f"model.path={model}", "generation.max_new_tokens=16"]
    overrides += ["reward_shaping.overlong_buffer=0"]
    if name == "countdown_qwen3_4b":
        overrides += ["data.train_args.hard.args.count=50", "rollout.workflow_args.max_tokens=256"]
    if row := ROWS.get(name.partition("_")[0]):
        (tmp_path / "rows.jsonl").write_text(json.dumps(row) + "\n")
        for part in ("train_args", "evaluation_args"):
            overrides.append(f"data.{part}.source={tmp_path / 'rows.jsonl'}")
            overrides.append(f"data.{part}.split=")
    _, train, held_out = check(load_config(CONFIGS / f"{name}.yaml", overrides))
    assert train and held_out["held_out"]


def test_data_without_prompts_short_enough_is_refused(model):
    overrides = [f"model.path={model}", "generation.max_new_tokens=16", "data.max_prompt_tokens=5"]
    with pytest.raises(ValueError, match="data.max_prompt_tokens = 5: all 1000 prompts of data.train have more"):
        check(load_config(CONFIGS / "countdown_smollm2.yaml", overrides))


def test_workflow_arguments_that_are_import_paths_are_allowed_like_all_others(model):
    overrides = [f"model.path={model}", "generation.max_new_tokens=16", "data.train_args.count=3"]
    overrides += ["rollout.workflow_args.environment=json:dumps"]
    with pytest.raises(ValueError, match="rollout.workflow_args.environment = 'json:dumps': .*run.import_from"):
        check(load_config(CONFIGS / "countdown_smollm2.yaml", overrides))
