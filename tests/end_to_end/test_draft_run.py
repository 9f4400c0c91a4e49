"""A whole run trains and publishes a draft head: the same replies and rewards as without it, in fewer passes. Another
trains a model's own multi-token-prediction layer."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM

from megatron_rl.weights.architecture import read_architecture
from megatron_rl.weights.draft_files import shapes_for
from tests.kit.models import make_model
from tests.kit.mtp import add_mtp_layer
from tests.kit.runs import COUNT, COUNT_MODEL, ROOT, UNTAUGHT, steps_of, train_forked

pytestmark = pytest.mark.slow

SETTINGS = (
    *UNTAUGHT,
    "data.evaluation=",
    "batch.prompts_per_step=8",
    "generation.n_samples=4",
    "generation.max_new_tokens=12",
    "generation.ignore_eos=true",
)
EAGLE = ("draft.kind=eagle", "draft.lr=3e-3", "draft.tokens_per_pass=1024")
STEPS = 4
HEAD = len(shapes_for(read_architecture(COUNT_MODEL)))


def test_a_run_with_a_draft_head_is_that_without_it_in_ever_fewer_passes(server, tmp_path):
    plain, drafting = (*server, "run.save_at_end=false"), ("rollout.server_count=1", *EAGLE)
    for name, own in (("plain", plain), ("drafting", drafting)):
        train_forked(COUNT, *SETTINGS, *own, f"run.folder={tmp_path}/{name}", f"run.steps={STEPS}")
    plain, drafting = steps_of(tmp_path / "plain"), steps_of(tmp_path / "drafting")
    for one, other in zip(plain, drafting, strict=True):
        assert other["reward/mean"] == one["reward/mean"], "the servers sampled the same replies"
        assert other["policy/first_loss"] == pytest.approx(one["policy/first_loss"], abs=1e-5)
        assert other["policy/first_grad_norm"] == pytest.approx(one["policy/first_grad_norm"], rel=1e-3)
        assert other["mismatch/mean"] < 1e-4
        assert other["publish/verified_tensors"] == one["publish/verified_tensors"] + HEAD
        assert "rollout/right_guesses" not in one and "draft/loss" not in one
    first, last = drafting[0], drafting[-1]
    assert last["draft/loss"] < first["draft/loss"] and last["draft/acceptance"] > first["draft/acceptance"]
    assert last["rollout/right_guesses"] > first["rollout/right_guesses"]
    assert (tmp_path / "drafting" / "final" / "draft" / "model.safetensors").is_file()


@pytest.fixture(scope="module")
def tied(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tied") / "model"
    shutil.copytree(COUNT_MODEL, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": True}))
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder)).save_pretrained(folder)
    return folder


@pytest.mark.thorough
@pytest.mark.parametrize(
    "options",
    [
        ("rollout.publication=ipc",),
        ("rollout.publication=delta",),
        ("rollout.publication=disk",),
        ("parallel.pipeline=2",),
        ("parallel.tensor=2",),
        ("lora.rank=4", "optimizer.lr=1e-3"),
    ],
    ids=lambda options: options[0],
)
def test_a_head_is_published_by_every_transport_and_from_every_layout(tied, tmp_path, options):
    ranks = 2 if options[0].startswith("parallel.") else 1
    few = ("run.steps=3", "run.save_at_end=false", f"run.folder={tmp_path}/run", "rollout.server_count=1")
    model = (f"model.path={tied}", "model.init=hf")
    train_forked(COUNT, *SETTINGS, *EAGLE, *options, *few, *model, ranks=ranks)
    steps = steps_of(tmp_path / "run")
    own = 2 * 9 + 2  # two layers, embedding and final norm
    assert [step["publish/verified_tensors"] for step in steps] == [own + HEAD] * 3
    assert steps[-1]["draft/loss"] < steps[0]["draft/loss"]
    assert all(step["mismatch/mean"] < 1e-4 for step in steps)


@pytest.fixture(scope="module")
def with_layer(tmp_path_factory):
    """A model of random weights with a multi-token-prediction layer, which reads the tokens of the count task."""
    folder = tmp_path_factory.mktemp("mtp")
    make_model("glm4_moe", folder, layers=2, vocab_size=48)
    layer = add_mtp_layer(folder)
    for path in Path(COUNT_MODEL).glob("*token*"):
        shutil.copy(path, folder)
    return folder, layer


def test_a_models_own_layer_learns_on_data_and_is_saved_with_it(with_layer, tmp_path):
    folder, layer = with_layer
    # The policy hardly moves, so the layer can catch up.
    options = ("optimizer.lr=1e-5", "run.steps=8", "run.evaluate_every_steps=0", "draft.kind=mtp", "draft.lr=4e-3")
    model = (f"model.path={folder}", "model.init=hf", f"run.folder={tmp_path}/run")
    train_forked(str(ROOT / "configs/count_sft.yaml"), *model, *options)
    steps = steps_of(tmp_path / "run")
    assert steps[-1]["draft/acceptance"] > steps[0]["draft/acceptance"]
    found = load_file(tmp_path / "run" / "final" / "model.safetensors")
    assert layer.keys() <= found.keys()
    changed = [name for name, tensor in layer.items() if not torch.equal(found[name], tensor)]
    assert set(changed) >= {name for name in layer if name.endswith(("eh_proj.weight", "o_proj.weight"))}
    assert json.loads((tmp_path / "run" / "final" / "config.json").read_text())["num_nextn_predict_layers"] == 1
