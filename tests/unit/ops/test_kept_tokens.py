"""The tokens that sampling options leave of rows' own logits, against their definitions."""

import math

import pytest
import torch

from megatron_rl.ops import Cut, VocabShard, kept_tokens
from megatron_rl.support import NO_TOKEN

VOCAB = 23


def kept(logits, labels, temperature=1.0, **options):
    shard = VocabShard(0, logits.shape[1], logits.shape[1])
    return kept_tokens(logits.clone(), torch.tensor(labels), Cut(**options), shard, temperature)


def test_supports_by_hand():
    logits = torch.tensor([[0.4, 0.3, 0.2, 0.1]], dtype=torch.float64).log().repeat(4, 1)
    found = kept(logits, [1, 0, 3, 2], top_p=0.65, width=3)
    # 0.4 comes before 0.3 and 0.7 before 0.2, so that 0 and 1 are kept. 3 and 2 are outside, and added.
    assert found.ids.tolist() == [[1, 0, NO_TOKEN], [0, 1, NO_TOKEN], [3, 0, 1], [2, 0, 1]]
    assert found.ids.dtype == torch.int32 and found.is_outside.tolist() == [False, False, True, True]
    torch.testing.assert_close(
        found.log_mass.exp(), torch.tensor([0.7, 0.7, 0.8, 0.9], dtype=torch.float64), rtol=1e-12, atol=0
    )
    assert kept(logits, [0, 0, 0, 0], top_k=1, width=2).ids[0].tolist() == [0, NO_TOKEN]
    # 0.2 is half of 0.4.
    assert kept(logits, [0, 0, 0, 0], min_p=0.45, width=4).ids[0].tolist() == [0, 1, 2, NO_TOKEN]
    assert kept(logits, [0, 0, 0, 0], min_p=0.55, width=4).ids[0].tolist() == [0, 1, NO_TOKEN, NO_TOKEN]


def test_a_support_that_does_not_fit_stands_for_the_whole_vocabulary():
    logits = torch.tensor([[0.4, 0.3, 0.2, 0.1], [0.97, 0.01, 0.01, 0.01]], dtype=torch.float64).log()
    found = kept(logits, [0, 0], top_p=0.75, width=2)
    assert found.ids.tolist() == [[NO_TOKEN] * 2, [0, NO_TOKEN]]
    assert found.log_mass.tolist() == [0.0, pytest.approx(math.log(0.97), abs=1e-12)]
    outside = kept(logits, [2, 2], top_p=0.65, width=2)  # with the sampled token there are three, and two
    assert outside.ids.tolist() == [[NO_TOKEN] * 2, [2, 0]] and outside.is_outside.tolist() == [False, True]


@pytest.mark.parametrize(
    "options",
    [{"top_k": 5}, {"top_p": 0.8}, {"min_p": 0.2}, {"top_k": 9, "top_p": 0.7, "min_p": 0.05}, {}],
    ids=str,
)
def test_supports_of_random_rows_are_those_of_sorting_each_row(options):
    generator = torch.Generator().manual_seed(0)
    logits = 2 * torch.randn(300, VOCAB, generator=generator, dtype=torch.float64)
    labels = torch.randint(0, VOCAB, (300,), generator=generator).tolist()
    found = kept(logits, labels, temperature=0.8, **options, width=VOCAB)
    for row, label in enumerate(labels):
        probs = (logits[row] / 0.8).softmax(0).tolist()
        chosen, before = set(), 0.0
        for rank, token in enumerate(sorted(range(VOCAB), key=lambda it: -probs[it])):
            is_likely = before <= options.get("top_p", 1.0) and probs[token] >= options.get("min_p", 0.0) * max(probs)
            if is_likely and rank < options.get("top_k", VOCAB):
                chosen.add(token)
            before += probs[token]
        assert bool(found.is_outside[row]) == (label not in chosen)
        whole = chosen | {label}
        right = [label, *sorted(whole - {label})]
        assert found.ids[row].tolist() == right + [NO_TOKEN] * (VOCAB - len(right))
        assert float(found.log_mass[row].exp()) == pytest.approx(sum(probs[token] for token in whole), rel=1e-12)


def test_no_row_has_no_support():
    assert kept(torch.zeros(0, 5), [], top_p=0.5, width=3).ids.shape == (0, 3)
