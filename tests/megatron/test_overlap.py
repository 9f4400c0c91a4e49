"""Overlapped communication changes when bytes travel, and nothing else."""

import functools

import pytest
import torch
from test_theorems import LOSSES, batch_of

from megatron_rl.engine import optimizer
from tests.kit.models import LAYOUTS, make_engine, make_model, share_of
from tests.kit.ranks import run_ranks


def engine_with_small_buckets(folder, layout, **options):
    """Upstream's buckets hold 40 million parameters; overlapping shows with several of them only."""
    ddp = optimizer.DistributedDataParallelConfig
    optimizer.DistributedDataParallelConfig = functools.partial(ddp, bucket_size=5_000)
    # Buckets decide the order in which a norm is summed, so clipping would round differently.
    options |= {"distributed": True, "clip_grad": 0.0}
    engine = make_engine(folder, LAYOUTS[layout][1], **options)
    if options.get("overlap") and engine.groups.is_first_stage:
        assert len(engine.wrapped[0].bucket_groups) > 3
    return engine.train()


def three_updates(folder, layout, overlap):
    engine = engine_with_small_buckets(folder, layout, overlap=overlap)
    share = share_of(batch_of("full"), engine)
    stats, logprobs = [], []
    for tokens_per_microbatch in (24, 1000, 48):  # upstream counts a bucket's gradients in its first batch
        engine.config.tokens_per_microbatch = tokens_per_microbatch
        stats.append(engine.train_batch(share, *LOSSES["policy"]))
        if len(stats) == 2:
            logprobs.append(engine.forward(share))  # the first to read the new weights
    return stats, logprobs, {name: tensor.clone() for name, tensor in engine.hf_tensors()}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("qwen3")
    make_model("qwen3", path)  # untied: the head's weight is in no module that runs forward
    return path


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["dp2", pytest.param("pp2_vpp2_dp2", marks=pytest.mark.thorough)])
def test_overlap_gives_the_same_bits(layout, folder):
    plain, overlapped = (run_ranks(LAYOUTS[layout][0], three_updates, folder, layout, o) for o in (False, True))
    for (stats, logprobs, weights), (stats_o, logprobs_o, weights_o) in zip(plain, overlapped, strict=True):
        assert [s.loss for s in stats] == [s.loss for s in stats_o] and weights.keys() == weights_o.keys()
        assert all(map(torch.equal, logprobs, logprobs_o))
        assert all(torch.equal(weights[name], weights_o[name]) for name in weights)


def stale_and_exported(folder):
    engine = engine_with_small_buckets(folder, "dp2", overlap=True)
    other = make_engine(folder, LAYOUTS["dp2"][1])
    engine.train_batch(share_of(batch_of("full"), engine), *LOSSES["policy"])
    name = "model.embed_tokens.weight"
    weight = engine.chunks[0].embedding.word_embeddings.weight
    before = weight.detach().clone()
    other.copy_weights(engine)
    exported = {key: tensor.clone() for key, tensor in engine.hf_tensors()}
    return (
        before,
        weight.detach().clone(),
        exported.get(name),
        other.chunks[0].embedding.word_embeddings.weight.detach(),
    )


def test_weights_are_read_after_they_were_gathered(folder):
    ranks = run_ranks(2, stale_and_exported, folder)
    assert not all(torch.equal(stale, current) for stale, current, _, _ in ranks), "the gathering had work to do"
    for _, current, _, copied in ranks:
        assert torch.equal(current, ranks[0][2]) and torch.equal(copied, current)
