"""Recipes of the package tinker-cookbook: its own files, started by their command lines, on the training server.

The package wants other versions of transformers than ours, so it is installed into a folder of its own:

    .venv/bin/python -m pip install --target build/tinker-cookbook --no-deps tinker-cookbook \
        blobfile chz lxml pycryptodomex pylatexenc termcolor tiktoken tml-renderers

The recipes know models and data sets by their names on the Hugging Face hub. Here they find folders of these names in
the folder in which they run: the model is a tiny one, or SmolLM2 if `make demo` has written it, and the data is a few
rows.
"""

import importlib.util
import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.kit.models import make_model
from tests.kit.runs import ROOT
from tests.kit.tokenizers import make_tokenizer
from tests.kit.training_servers import serving
from tests.kit.waiting import LATE_S, SLOWNESS

COOKBOOK = ROOT / "build" / "tinker-cookbook"
SMOLLM2 = ROOT / "models" / "smollm2-135m-instruct"
if importlib.util.find_spec("tinker") is None:
    pytest.skip("needs the package tinker; make installs it", allow_module_level=True)
if not (COOKBOOK / "tinker_cookbook").is_dir() and importlib.util.find_spec("tinker_cookbook") is None:
    pytest.skip("needs tinker-cookbook in build/tinker-cookbook, see this file's docstring", allow_module_level=True)
pytestmark = [pytest.mark.thorough, pytest.mark.timeout(1800 * SLOWNESS)]
MODEL = "Qwen/Qwen3-8B-Base"
"""The name by which recipes know the model. It decides that they write dialogues as `User: ...`, `Assistant: ...`."""
RATES = {"tiny": 1e-2, "smollm2": 1e-3}
EPOCHS = {"tiny": 6, "smollm2": 2}
"""Learning rates, and passes of sl_basic over its rows. A model that knows nothing must move further."""
NO_ROBOTS = "tinker_cookbook.recipes.chat_sl.chat_datasets:NoRobotsBuilder"
GSM8K = "tinker_cookbook.recipes.math_rl.math_env:Gsm8kDatasetBuilder"


def dialogues(count):
    """Return dialogues in which each answer is 42."""
    questions = [f"What is {number} in the end?" for number in range(count)]
    return [{"messages": [said("user", question), said("assistant", "42")]} for question in questions]


def said(role, content):
    return {"role": role, "content": content}


def preferences(count):
    """Return pairs of replies to questions, of which the same one is always preferred."""
    asked = [f"\n\nHuman: What is {number}+1?\n\nAssistant:" for number in range(count)]
    return [{"chosen": f"{question} yes", "rejected": f"{question} no"} for question in asked]


def sums(count):
    return [{"question": f"{n} + 2?", "answer": f"#### {n + 2}", "final_answer": str(n + 2)} for n in range(count)]


def write_data(folder, name, rows, config="default"):
    """Write a data set where `datasets.load_dataset(name, config)` finds it from `folder`."""
    own = folder / name
    own.mkdir(parents=True)
    for split in ("train", "test"):
        (own / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    files = [f"  - split: {split}\n    path: {split}.jsonl\n" for split in ("train", "test")]
    (own / "README.md").write_text(f"---\nconfigs:\n- config_name: {config}\n  data_files:\n{''.join(files)}---\n")


@pytest.fixture(scope="module", params=["tiny", "smollm2"])
def shop(request, tmp_path_factory):
    """The folder in which recipes run, with a server of the model in its environment."""
    folder = tmp_path_factory.mktemp("shop")
    model = folder / MODEL
    model.parent.mkdir()
    if request.param == "tiny":
        make_model("qwen3", model, 2, vocab_size=512, max_position_embeddings=1024)
        make_tokenizer().save_pretrained(model)
    elif SMOLLM2.is_dir():
        model.symlink_to(SMOLLM2)
    else:
        pytest.skip(f"{SMOLLM2} is missing; make demo writes it")
    write_data(folder, "HuggingFaceH4/no_robots", dialogues(32))
    write_data(folder, "openai/gsm8k", sums(8), "main")
    write_data(folder, "Anthropic/hh-rlhf", preferences(64))
    write_data(folder, "zwhe99/DeepMath-103K", sums(16))
    options = ["--model-name", MODEL, "lora.rank=32", "lora.alpha=64", "batch.tokens_per_microbatch=1024"]
    with serving(folder, model, *options) as (url, _), pytest.MonkeyPatch.context() as patch:
        patch.setenv("TINKER_BASE_URL", url)
        patch.setenv("TINKER_API_KEY", (folder / "run" / "api_key").read_text().strip())
        patch.setenv("TINKER_TELEMETRY", "0")
        patch.setenv("HF_HUB_OFFLINE", "1")
        patch.setenv("HF_HOME", str(folder / "cache"))
        patch.setenv("PYTHONPATH", os.pathsep.join([str(COOKBOOK), os.environ.get("PYTHONPATH", "")]))
        yield folder


@pytest.fixture(scope="module")
def name(shop):
    return "smollm2" if (shop / MODEL).is_symlink() else "tiny"


@pytest.fixture(scope="module")
def rate(name):
    return RATES[name]


def run(shop: Path, recipe: str, *words: str) -> list[dict]:
    """Run a recipe's own file to its end, and return the metrics of its steps."""
    log = shop / recipe
    command = [sys.executable, "-m", f"tinker_cookbook.recipes.{recipe}", f"model_name={MODEL}", f"log_path={log}"]
    done = subprocess.run([*command, *words], cwd=shop, capture_output=True, text=True, timeout=LATE_S)
    assert done.returncode == 0, f"{done.stdout[-3000:]}\n{done.stderr[-6000:]}"
    return [json.loads(line) for line in (log / "metrics.jsonl").read_text().splitlines()]


def of(steps, name):
    found = [step[name] for step in steps if name in step]
    assert found, f"no step has {name}: {sorted(steps[-1])}"
    return found


@pytest.fixture(scope="module")
def taught(shop, name, rate):
    """The steps of sl_basic."""
    builder = [f"dataset_builder={NO_ROBOTS}", "dataset_builder.common_config.batch_size=8"]
    common = {"model_name_for_tokenizer": MODEL, "renderer_name": "role_colon", "max_length": 120}
    builder += [f"dataset_builder.common_config.{key}={value}" for key, value in common.items()]
    return run(shop, "sl_basic", *builder, f"learning_rate={rate}", f"num_epochs={EPOCHS[name]}")


def test_sl_basic_learns(taught, name):
    losses = of(taught, "train_mean_nll")
    assert len(losses) == 4 * EPOCHS[name] and losses[-1] < losses[0] - 1


def test_rl_basic_runs_and_agrees_with_its_sampler(shop):
    builder = {"batch_size": 4, "group_size": 4, "model_name_for_tokenizer": MODEL, "renderer_name": "role_colon"}
    words = [f"dataset_builder={GSM8K}", *(f"dataset_builder.{key}={value}" for key, value in builder.items())]
    steps = run(shop, "rl_basic", *words, "max_tokens=8", "learning_rate=1e-3", "lora_rank=8")
    assert len(steps) >= 2
    assert max(map(abs, of(steps, "optim/kl_sample_train_v1"))) < 1e-4


def test_preference_dpo_learns_from_the_loss_of_equal_replies(shop, rate):
    steps = run(shop, "preference.dpo.train", f"learning_rate={rate}", "dpo_beta=1.0", "batch_size=8")
    losses = of(steps, "dpo_loss")
    assert losses[0] == pytest.approx(0.693147, abs=1e-4) and len(losses) == 8
    assert max(losses[-3:]) < 0.3


def test_on_policy_distillation_runs_with_the_teacher_that_sl_basic_has_made(shop, taught, rate):
    checkpoints = [json.loads(line) for line in (shop / "sl_basic" / "checkpoints.jsonl").read_text().splitlines()]
    teacher = [f"teacher_model={MODEL}", f"teacher_checkpoint={checkpoints[-1]['sampler_path']}"]
    sizes = ["groups_per_batch=4", "group_size=4", "max_tokens=8", "lora_rank=8", f"learning_rate={rate}"]
    steps = run(shop, "distillation.on_policy_distillation", *teacher, *sizes, "save_every=2")
    away = of(steps, "teacher_kl")
    assert len(away) == 4 and away[0] != 0 and all(map(math.isfinite, away))
    assert max(map(abs, of(steps, "optim/kl_sample_train_v1"))) < 1e-4
