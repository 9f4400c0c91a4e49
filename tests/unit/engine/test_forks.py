"""Attention that reads shared keys where they lie: which it sees, which blocks it computes, and what comes of it."""

import pytest
import torch
import torch.nn.attention.flex_attention as flex
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_rl import platform
from megatron_rl.engine import forks
from megatron_rl.engine.forks import BLOCK, Forks
from tests.kit.examples import max_examples


@pytest.fixture(autouse=True)
def plain_flex_attention(monkeypatch):
    """torch's own definition of FlexAttention in place of its kernel, which has gradients on a GPU alone."""
    monkeypatch.setattr(flex, "_validate_device", lambda *tensors: None)
    monkeypatch.setattr(forks, "compiled", lambda: forks.flex_attention)


def packed(steps):
    """Segments `(rows, of the dialogues that are open how many end)`, depth first; the sequence of each of its rows."""
    segments, sequences, opened = [], [], []
    count = 0
    for rows, ended in steps:
        del opened[len(opened) - min(ended, len(opened)) :]
        parent = opened[-1] if opened else -1
        before = sequences[parent] if opened else []
        segments.append([count, rows, parent, len(before)])
        opened.append(len(sequences))
        sequences.append([*before, *range(count, count + rows)])
        count += rows
    own = {row: sequence[: sequence.index(row) + 1] for sequence in sequences for row in sequence}
    return torch.tensor(segments), [own[row] for row in range(count)]


def mask_of(seen_by_row, window):
    mask = torch.zeros(len(seen_by_row), len(seen_by_row), dtype=torch.bool)
    for row, seen in enumerate(seen_by_row):
        mask[row, seen[-window:] if window else seen] = True
    return mask


def forks_of(segments, seen_by_row, queries=None, keys=None):
    positions, rows = torch.tensor([len(seen) - 1 for seen in seen_by_row]), torch.arange(len(seen_by_row))
    return Forks.of(segments, positions, rows if queries is None else queries, rows if keys is None else keys)


STEPS = st.lists(st.tuples(st.integers(1, 90), st.integers(0, 3)), min_size=1, max_size=12)
WINDOWS = st.sampled_from([None, 1, 7, 200])


@settings(deadline=None, max_examples=max_examples(25, 60))
@given(STEPS, WINDOWS, st.booleans())
def test_a_query_sees_the_rows_of_its_dialogue_up_to_its_own_and_blocks_are_counted_right(steps, window, is_shared_out):
    segments, seen_by_row = packed(steps)
    mask, rows = mask_of(seen_by_row, window), torch.arange(len(seen_by_row))
    queries, keys = rows, rows
    if is_shared_out:  # as context ranks have them: some of the rows ask, and keys come in another order
        queries, keys = torch.cat([rows[: len(rows) // 4], rows[-(len(rows) // 4) - 1 :]]), rows.roll(len(rows) // 3)
    found = forks_of(segments, seen_by_row, queries, keys)
    expected = mask[queries][:, keys]
    query, key = torch.arange(len(queries))[:, None], torch.arange(len(keys))
    assert torch.equal(found.seen(window)(None, None, query, key), expected)

    blocks = found.blocks(window)
    padded = torch.nn.functional.pad(expected, (0, -len(keys) % BLOCK, 0, -len(queries) % BLOCK))
    tiles = padded.unflatten(1, (-1, BLOCK)).unflatten(0, (-1, BLOCK)).transpose(1, 2)
    inside = torch.nn.functional.pad(torch.ones_like(expected), (0, -len(keys) % BLOCK, 0, -len(queries) % BLOCK))
    whole = (tiles | ~inside.unflatten(1, (-1, BLOCK)).unflatten(0, (-1, BLOCK)).transpose(1, 2)).all(-1).all(-1)
    for q in range(len(tiles)):
        partial = blocks.kv_indices[0, 0, q, : blocks.kv_num_blocks[0, 0, q]].tolist()
        full = blocks.full_kv_indices[0, 0, q, : blocks.full_kv_num_blocks[0, 0, q]].tolist()
        assert not set(partial) & set(full)
        assert set(full) <= set(whole[q].nonzero()[:, 0].tolist()), "no score of a full block is asked for"
        assert set(tiles[q].any(-1).any(-1).nonzero()[:, 0].tolist()) <= {*partial, *full}
        if window is None and not is_shared_out:
            assert set(tiles[q].any(-1).any(-1).nonzero()[:, 0].tolist()) == {*partial, *full}, "and none in vain"


@pytest.mark.slow
@pytest.mark.parametrize("window", [None, 40])
def test_result_log_sum_and_gradients_are_those_of_each_dialogue_alone(window):
    segments, seen_by_row = packed([(150, 0), (60, 0), (30, 1), (200, 0), (10, 2), (5, 9), (70, 0)])
    generator, rows = torch.Generator().manual_seed(0), len(seen_by_row)
    draw = lambda *shape: torch.randn(rows, *shape, generator=generator, dtype=torch.float64)  # noqa: E731
    given_tensors = [draw(4, 24), draw(2, 24), draw(2, 16)]
    slope, slope_of_sum = draw(4, 16), draw(4)
    blocks = forks_of(segments, seen_by_row).blocks(window)

    ours = [x.clone().requires_grad_() for x in given_tensors]
    out, log_sum = forks.attend(*ours, blocks, 0.3)
    ((out * slope).sum() + (log_sum * slope_of_sum).sum()).backward()

    theirs = [x.clone().requires_grad_() for x in given_tensors]
    key, value = (x.repeat_interleave(2, dim=1) for x in theirs[1:])
    scores = 0.3 * torch.einsum("qhd,khd->qhk", theirs[0], key)
    scores = scores.masked_fill(~mask_of(seen_by_row, window)[:, None], -torch.inf)
    expected, sums = torch.einsum("qhk,khd->qhd", scores.softmax(-1), value), scores.logsumexp(-1)
    ((expected * slope).sum() + (sums * slope_of_sum).sum()).backward()
    torch.testing.assert_close(out, expected)
    torch.testing.assert_close(log_sum.double(), sums, rtol=1e-6, atol=1e-6)
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a.grad, b.grad, rtol=1e-6, atol=1e-6)


@pytest.mark.slow
def test_most_blocks_of_a_forked_dialogue_are_left_out():
    """Ten turns, each with four branches of thoughts that are dropped: keys copied before each segment were 5 times."""
    steps = [(512, 0)]
    for _ in range(10):
        steps += [(256, 0), (256, 1), (256, 1), (256, 1), (128, 1)]
    segments, seen_by_row = packed(steps)
    blocks = forks_of(segments, seen_by_row).blocks(None)
    computed = int(blocks.kv_num_blocks.sum() + blocks.full_kv_num_blocks.sum())
    least = sum(rows // BLOCK * (before // BLOCK) for _, rows, _, before in segments.tolist())
    triangles = sum(n * (n + 1) // 2 for n in (segments[:, 1] // BLOCK).tolist())
    assert computed == least + triangles


@pytest.mark.skipif(platform.has_cuda(), reason="needs a machine without CUDA")
def test_it_is_refused_where_torch_cannot_compile_it():
    platform.check_shared_keys("copied")
    with pytest.raises(ValueError, match="model.shared_keys = 'flex': there is no CUDA device.*set model.shared_keys="):
        platform.check_shared_keys("flex")
