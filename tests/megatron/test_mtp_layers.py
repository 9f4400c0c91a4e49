"""Multi-token-prediction layers of the model's folder: carried where they are not trained, and trained as a draft."""

import json
import logging.handlers

import pytest
import torch

from megatron_rl.algo.loss import supervised
from megatron_rl.api import LogprobLoss
from megatron_rl.config import LoraConfig, ParallelConfig
from megatron_rl.tools.convert import convert_folder
from tests.kit.models import make_batch, make_engine, make_model
from tests.kit.mtp import add_mtp_layer, assert_same_bytes, in_shards, mtp_tensors
from tests.kit.ranks import run_ranks

SFT = LogprobLoss(supervised)
COUNTS = {"glm4_moe": "num_nextn_predict_layers", "qwen3_5": "mtp_num_hidden_layers"}
"""A family of each naming, and the key with which it counts its layers."""


def train_and_save(folder, target, lora):
    options = {} if lora is None else {"lora": LoraConfig(rank=lora)}
    engine = make_engine(folder, ParallelConfig(), **options)
    engine.train().train_batch(make_batch(), SFT)
    engine.save(target / "exported")
    engine.save(target / "checkpoint", with_optimizer=True)
    if lora is None:
        convert_folder(target / "checkpoint", target / "converted")


# -- carried -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "family, lora",
    [("glm4_moe", None), pytest.param("qwen3_5", None, marks=pytest.mark.slow),
     pytest.param("glm4_moe", 2, marks=pytest.mark.thorough), pytest.param("qwen3_5", 2, marks=pytest.mark.slow)],
)  # fmt: skip
def test_a_trained_model_is_saved_with_its_layer_byte_for_byte(family, lora, tmp_path):
    folder = tmp_path / "model"
    make_model(family, folder, layers=2)
    # In bfloat16, next to a model in float32: what is carried keeps its own dtype.
    expected = add_mtp_layer(folder, torch.bfloat16)
    in_shards(folder)
    run_ranks(1, train_and_save, folder, tmp_path, lora)
    for name in ("exported",) if lora else ("exported", "converted"):
        assert_same_bytes(mtp_tensors(tmp_path / name, expected), expected)
        assert json.loads((tmp_path / name / "config.json").read_text())[COUNTS[family]] == 1
    trained, first = (mtp_tensors(path, {"model.norm.weight": None}) for path in (tmp_path / "exported", folder))
    assert lora or not torch.equal(trained["model.norm.weight"], first["model.norm.weight"])


def published_twice(folder, publication):
    said = logging.handlers.BufferingHandler(1000)
    logging.getLogger("megatron_rl.engine").addHandler(said)
    engine = make_engine(folder, ParallelConfig())
    engine.config.publication = publication
    said.buffer.clear()
    for version in (1, 2):
        engine.update_weights(None, version)
    return [record.getMessage() for record in said.buffer]


@pytest.mark.slow
def test_a_publication_that_does_not_send_the_layer_says_so_once(tmp_path):
    make_model("qwen3_5", tmp_path, layers=2)
    add_mtp_layer(tmp_path)
    (said,) = run_ranks(1, published_twice, tmp_path, "group")[0]
    assert "rollout.publication = group sends no tensors that the model is not made of" in said
    assert "mtp.fc.weight" in said and "rollout.publication=disk writes them" in said
    assert run_ranks(1, published_twice, tmp_path, "disk")[0] == []
