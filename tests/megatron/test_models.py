"""A model is the same model in HF and in every Megatron layout."""

import pytest
import torch
from ranks import run_ranks
from safetensors.torch import load_file
from tiny import FAMILIES, LAYOUTS, make_batch, make_engine, make_model, share_of

from megatron_rl.ops import gather_logprobs
from megatron_rl.types import TrajectoryBatch


def full_logits(logits, rows):
    """Collect the vocabulary over the tensor axis, one column per pass of the label: all from gather_logprobs alone."""
    labels = torch.zeros(len(logits), dtype=torch.int64)
    return torch.stack([gather_logprobs(logits, labels + column) for column in range(logits.shard.size)], dim=1)


def by_sequence(ids: torch.Tensor, values: torch.Tensor, bounds: list[int]) -> dict[tuple[int, ...], torch.Tensor]:
    """Cut `[T, V]` values into sequences, named by their tokens: microbatches may come in any order."""
    return {tuple(ids[a:b].tolist()): values[a:b] for a, b in zip(bounds, bounds[1:], strict=False)}


def hf_logprobs(model, batch: TrajectoryBatch) -> dict[tuple[int, ...], torch.Tensor]:
    """`[length, V]` log-probabilities that transformers computes, one sequence at a time."""
    bounds = batch.cu_seqlens.tolist()
    with torch.no_grad():
        parts = [
            model(batch["input_ids"][a:b][None]).logits[0].log_softmax(-1)
            for a, b in zip(bounds, bounds[1:], strict=False)
        ]
    return by_sequence(batch["input_ids"], torch.cat(parts), bounds)


def all_logprobs_on_rank(folder, layout, batch):
    engine = make_engine(folder, LAYOUTS[layout][1])
    collected = {}

    def keep(logits, rows):
        collected.update(by_sequence(rows["input_ids"], full_logits(logits, rows), rows["cu_seqlens"].tolist()))
        return torch.zeros(len(logits))

    engine.eval().forward(share_of(batch, engine), keep)
    return collected


@pytest.mark.proves("families", "{family}", "{layout}")
@pytest.mark.parametrize("layout", ["1", "tp2_sp", "pp2", "pp2_vpp2", "tp2_pp2"])
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_equal_transformers(family, layout, tmp_path):
    model, batch = make_model(family, tmp_path), make_batch()
    ranks = run_ranks(LAYOUTS[layout][0], all_logprobs_on_rank, tmp_path, layout, batch)
    expected = hf_logprobs(model, batch)
    last = [collected for collected in ranks if collected]  # only the last pipeline stage has logits
    assert last
    for collected in last:
        for sequence, logprobs in expected.items():
            torch.testing.assert_close(collected[sequence], logprobs, rtol=0, atol=1e-5)


def separate_and_packed(folder, batch):
    engine = make_engine(folder, LAYOUTS["1"][1]).eval()
    packed = engine.forward(batch)
    separate = torch.cat([engine.forward(batch.select([i])) for i in range(len(batch))])
    return packed, separate


def test_packed_forward_equals_separate_forwards(tmp_path):
    make_model("qwen3", tmp_path)
    batch = make_batch()
    packed, separate = run_ranks(1, separate_and_packed, tmp_path, batch)[0]
    torch.testing.assert_close(packed, separate, rtol=0, atol=1e-6)
    assert (packed[batch["loss_mask"]] < 0).all() and (packed[~batch["loss_mask"]] == 0).all()


def export(folder, layout, target, hf_names):
    engine = make_engine(folder, LAYOUTS[layout][1])
    engine.save(target)
    return [name for name, _ in engine.hf_tensors()]


@pytest.mark.proves("layouts", "{layout}", "HF round trip")
@pytest.mark.parametrize("layout", ["1", "tp2_sp", "pp2_vpp2", "tp2_pp2"])
@pytest.mark.parametrize("family", ["llama", "llama_tied", "qwen2_tied", "qwen3_tied_one_kv_head"])
def test_hf_to_megatron_to_hf_returns_the_same_bytes(family, layout, tmp_path):
    make_model(family, tmp_path / "in")
    before = load_file(tmp_path / "in" / "model.safetensors")
    names = run_ranks(LAYOUTS[layout][0], export, tmp_path / "in", layout, tmp_path / "out", list(before))
    after = load_file(tmp_path / "out" / "model.safetensors")
    assert before.keys() == after.keys()
    for name, tensor in before.items():
        assert torch.equal(tensor.view(torch.uint8), after[name].view(torch.uint8)), name
    assert sorted(names[0]) == sorted(before) and not any(names[1:]), "only global rank 0 is given tensors"


def random_init(folder, layout):
    from megatron_rl.config import EngineConfig, ModelConfig
    from megatron_rl.engine.megatron_engine import MegatronEngine

    config = EngineConfig(model=ModelConfig(path=str(folder), init="random"), parallel=LAYOUTS[layout][1], seed=3)
    engine = MegatronEngine(config)
    engine.initialize()
    return {name: tensor.clone() for name, tensor in engine.hf_tensors()}


def test_random_initial_weights_do_not_depend_on_the_layout(tmp_path):
    make_model("llama", tmp_path)
    one = run_ranks(1, random_init, tmp_path, "1")[0]
    four = run_ranks(4, random_init, tmp_path, "tp2_pp2")[0]
    assert one.keys() == four.keys()
    assert all(torch.equal(one[name], four[name]) for name in one)
    assert one["model.layers.0.mlp.up_proj.weight"].std() == pytest.approx(0.02, rel=0.1)
