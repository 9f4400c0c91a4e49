"""What a message says of a model folder that is not there."""

from pathlib import Path

import pytest

from megatron_rl.config import load_config
from megatron_rl.weights.architecture import read_architecture
from megatron_rl.weights.published_models import how_to_fetch

CONFIGS = sorted((Path(__file__).parents[3] / "configs").glob("*.yaml"))


@pytest.mark.parametrize(
    "path, words",
    [
        ("models/qwen3-4b", "hf download Qwen/Qwen3-4B --local-dir models/qwen3-4b fetches it"),
        ("/mnt/models/Qwen3-4B", "hf download Qwen/Qwen3-4B --local-dir /mnt/models/Qwen3-4B fetches it"),
        (
            "Qwen/Qwen3-4B",
            "hf download Qwen/Qwen3-4B --local-dir models/qwen3-4b fetches it, for model.path=models/qwen",
        ),
        ("models/mine", "hf download OWNER/NAME --local-dir models/mine fetches it, with its own name on the hub"),
        ("here/mine", "hf download OWNER/NAME --local-dir here/mine fetches it"),
        ("./mine", "hf download OWNER/NAME --local-dir ./mine fetches it"),
        ("mine", "hf download OWNER/NAME --local-dir mine fetches it"),
        ("a/b/mine", "hf download OWNER/NAME --local-dir a/b/mine fetches it"),
        (
            "allenai/OLMo-2",
            "correct the path, or if allenai/OLMo-2 is its name on the hub, hf download allenai/OLMo-2 ",
        ),
        ("models/smollm2-135m-instruct", "megatron-rl convert smollm2 models/smollm2-135m-instruct makes it"),
    ],
)
def test_a_path_with_a_slash_is_taken_for_no_name_of_the_hub(path, words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "here").mkdir()
    assert how_to_fetch(path).startswith(words)
    with pytest.raises(ValueError, match="no config.json there; give a Hugging Face model folder"):
        read_architecture(path)


@pytest.mark.parametrize("config", CONFIGS, ids=lambda it: it.stem)
def test_the_model_of_every_config_can_be_fetched_as_its_message_says(config):
    path = load_config(config).model.path
    assert not path.startswith("models/") or "OWNER" not in how_to_fetch(path)
