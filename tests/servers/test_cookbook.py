"""Training loops of the package tinker-cookbook, unmodified, with a tiny model on the training server.

The package is not among those that make installs: pip install tinker tinker-cookbook
"""

import asyncio
import json

import pytest

from tests.kit.models import make_model
from tests.kit.optional import later
from tests.kit.tokenizers import make_tokenizer
from tests.kit.training_servers import RANK, serving

WHY = "needs the package tinker-cookbook: pip install tinker tinker-cookbook"
chz = later("chz", reason=WHY)
supervised = later("tinker_cookbook.supervised.train", reason=WHY)
supervised_data = later("tinker_cookbook.supervised.data", reason=WHY)
supervised_types = later("tinker_cookbook.supervised.types", reason=WHY)
rl = later("tinker_cookbook.rl.train", reason=WHY)
arithmetic = later("tinker_cookbook.recipes.math_rl.arithmetic_env", reason=WHY)
dpo = later("tinker_cookbook.preference.train_dpo", reason=WHY)
dpo_data = later("tinker_cookbook.preference.dpo_datasets", reason=WHY)
preferences = later("tinker_cookbook.preference.preference_datasets", reason=WHY)
pytestmark = pytest.mark.thorough


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A tiny model whose folder is also its name, so that the client finds its tokenizer."""
    folder = tmp_path_factory.mktemp("models") / "qwen3"
    make_model("qwen3", folder, 2, vocab_size=512, max_position_embeddings=512)
    make_tokenizer().save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="module", autouse=True)
def server(model, tmp_path_factory):
    folder = tmp_path_factory.mktemp("server")
    with (
        serving(folder, model, "--model-name", model, "batch.tokens_per_microbatch=512") as (url, _),
        pytest.MonkeyPatch.context() as patch,
    ):
        patch.setenv("TINKER_BASE_URL", url)
        patch.setenv("TINKER_API_KEY", (folder / "run" / "api_key").read_text().strip())
        patch.setenv("TINKER_TELEMETRY", "0")
        yield


def options(model, folder, name):
    common = {"model_name": model, "renderer_name": "role_colon", "lora_rank": RANK, "eval_every": 0}
    return common | {"log_path": str(folder), "recipe_name": name}


def common_of(model):
    return supervised_types.ChatDatasetBuilderCommonConfig(
        model_name_for_tokenizer=model, renderer_name="role_colon", max_length=120, batch_size=4
    )


def metrics_in(folder, name):
    steps = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return [step[name] for step in steps if name in step]


def test_supervised_training_learns(model, tmp_path):
    pairs = [
        {"messages": [{"role": "user", "content": f"{n}?"}, {"role": "assistant", "content": "42"}]} for n in range(16)
    ]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    data = supervised_data.FromConversationFileBuilder(
        common_config=common_of(model), file_path=str(tmp_path / "rows.jsonl")
    )
    config = supervised.Config(
        **options(model, tmp_path / "log", "recipe_sl_basic"),
        **{"dataset_builder": data, "learning_rate": 1e-2, "num_epochs": 3, "save_every": 4},
        **{"evaluator_builders": [], "infrequent_evaluator_builders": []},
    )
    asyncio.run(supervised.main(config))
    losses = metrics_in(tmp_path / "log", "train_mean_nll")
    assert len(losses) == 12 and losses[-1] < losses[0] - 1


def test_rl_on_arithmetic_runs_and_agrees_with_its_sampler(model, tmp_path):
    data = arithmetic.ArithmeticDatasetBuilder(
        batch_size=2,
        model_name_for_tokenizer=model,
        renderer_name="role_colon",
        n_batches=2,
        group_size=4,
        include_fewshot=False,
    )
    config = rl.Config(
        **options(model, tmp_path / "log", "recipe_rl_basic"),
        **{"dataset_builder": data, "learning_rate": 1e-3, "max_tokens": 8, "save_every": 1},
    )
    asyncio.run(rl.main(config))
    assert max(map(abs, metrics_in(tmp_path / "log", "optim/kl_sample_train_v1"))) < 1e-5


def test_preferences_learn_from_the_loss_of_equal_replies(model, tmp_path):
    def said(role, content):
        return [{"role": role, "content": content}]

    pairs = [
        {
            "comparison": {
                "prompt_conversation": said("user", f"What is {n}+1?"),
                "completion_A": said("assistant", str(n + 1)),
                "completion_B": said("assistant", str(n + 5)),
            },
            "label": "A",
        }
        for n in range(16)
    ]
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    data = dpo_data.DPODatasetBuilderFromComparisons(
        common_config=common_of(model),
        comparison_builder=preferences.ComparisonBuilderFromJsonl(train_path=str(tmp_path / "pairs.jsonl")),
    )
    config = dpo.Config(
        **options(model, tmp_path / "log", "recipe_dpo"),
        **{"dataset_builder": data, "learning_rate": 1e-2, "num_epochs": 4, "dpo_beta": 1.0},
        **{"infrequent_eval_every": 0, "save_every": 0},
    )
    dpo.main(config)
    losses = metrics_in(tmp_path / "log", "dpo_loss")
    assert losses[0] == pytest.approx(0.693147, abs=1e-5) and losses[-1] < 0.5
