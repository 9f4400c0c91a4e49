"""Supports: read whole or refused by name, shifted like the tokens that they belong to, and true to the sampler."""

import math

import pytest
import torch

from megatron_rl import ops
from megatron_rl.api import RequestRefused
from megatron_rl.batch.packing import to_microbatch
from megatron_rl.config import GenerationConfig
from megatron_rl.support import COLUMN, NO_TOKEN, check_complete, read
from megatron_rl.tools.embedded_server import sampling
from megatron_rl.tools.embedded_server.sampling import SamplingParams
from megatron_rl.types import LLMRequest, LLMResponse, SampledTokens, Trajectory, TrajectoryBatch
from megatron_rl.workflows.conversation import Conversation
from megatron_rl.workflows.episode_engine import check_sampling
from tests.kit.examples import IS_THOROUGH

IDS = torch.tensor([5, 9], dtype=torch.int32)


def test_a_support_is_read_with_the_sampled_token_first_and_the_others_by_id():
    found = read([[7, 5, 2], [9]], IDS, width=4, vocab_size=10)
    assert found.tolist() == [[5, 2, 7, NO_TOKEN], [9, NO_TOKEN, NO_TOKEN, NO_TOKEN]] and found.dtype == torch.int32
    assert read([], IDS[:0], width=4, vocab_size=10).shape == (0, 4)


@pytest.mark.parametrize(
    ("masks", "words"),
    [
        ([[5]], "has 1 entries for 2 tokens"),
        ([[5], []], r"\[1\] = \[\]: must be a list of token ids"),
        ([[5], None], r"\[1\] = None: must be a list of token ids"),
        ([[5, True], [9]], r"\[0\] = \[5, True\]: must be a list of token ids"),
        ([[5, 10], [9]], "has the id 10: must be an id of the vocabulary of 10"),
        ([[5, -1], [9]], "has the id -1"),
        ([[5, 2**80], [9]], f"has the id {2**80}"),
        ([[5], [5]], r"\[1\] has the token 9 that was sampled 0 times"),
        ([[5, 2, 2], [9]], r"\[0\] has the id 2 twice"),
        ([[5, 5], [9]], r"\[0\] has the token 5 that was sampled 2 times"),
        ([[5], [9, 1, 2, 3, 4]], r"\[1\] has 5 ids, and 4 fit.*; set another generation.top_k"),
    ],
)
def test_other_supports_are_refused_by_name(masks, words):
    with pytest.raises(ValueError, match=words):
        read(masks, IDS, width=4, vocab_size=10)


def reply_with_support(tokens, supports):
    ids = torch.tensor(tokens, dtype=torch.int32)
    sampled = SampledTokens.of(tokens, [-0.5] * len(tokens), [0] * len(tokens))
    found = read(supports, ids, width=4, vocab_size=100)
    return LLMResponse(input_tokens=[1, 2], sampled=sampled, stop_reason="stop", support=found)


def test_a_trajectory_and_a_microbatch_have_each_tokens_own_support():
    reply = reply_with_support([5, 9, 3], [[5, 7], [9], [4, 3, 8]])
    trajectories = [Trajectory.from_reply(reply, 1.0), Trajectory.from_reply(reply, 0.0)]
    batch = TrajectoryBatch.from_trajectories([trajectories])
    check_complete(batch[COLUMN], batch["input_ids"], batch["loss_mask"])
    for rows in (to_microbatch(batch, [0, 1]).rows, to_microbatch(batch, [1], share_prompts=True).rows):
        has_label = rows["labels"] >= 0
        assert torch.equal(rows[COLUMN][has_label, 0].long(), rows["labels"][has_label])
        assert rows[COLUMN][~has_label].eq(NO_TOKEN).all()
    assert to_microbatch(batch.select([]), []).rows[COLUMN].tolist() == [[NO_TOKEN] * 4]


def test_a_dialogue_keeps_its_supports_where_tokens_of_others_come_between():
    talk = Conversation([1, 2])
    talk.take(reply_with_support([5, 9], [[5, 7], [9]]))
    talk.add([30, 31])
    fork = talk.fork(3)
    tokens = talk.trajectory(1.0).tokens[COLUMN]
    assert tokens[:, 0].tolist() == [NO_TOKEN, NO_TOKEN, 5, 9, NO_TOKEN, NO_TOKEN]
    assert torch.equal(fork.trajectory(1.0).tokens[COLUMN], tokens[:3])
    talk.take_back(4)
    assert torch.equal(talk.trajectory(1.0).tokens[COLUMN], tokens[:4])


def test_missing_and_moved_supports_are_refused_with_the_token():
    ids, mask = torch.tensor([1, 5, 9]), torch.tensor([False, True, True])
    good = torch.tensor([[NO_TOKEN, NO_TOKEN], [5, 7], [9, NO_TOKEN]], dtype=torch.int32)
    check_complete(good, ids, mask)
    with pytest.raises(ValueError, match="no column 'support'.*passes LLMResponse.support on"):
        check_complete(None, ids, mask)
    with pytest.raises(ValueError, match="2 trained tokens .* token 1 of the batch, 5, with the support of token 9"):
        check_complete(good.roll(-1, 0), ids, mask)
    good[2] = NO_TOKEN
    with pytest.raises(ValueError, match="1 trained tokens .* token 2 of the batch, 9, with no support"):
        check_complete(good, ids, mask)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"top_p": 0.9}, "gconfig.top_p = 0.9: .*set gconfig.top_k from 2 to 256 too"),
        ({"min_p": 0.1}, "gconfig.min_p = 0.1"),
        ({"top_k": 300}, "gconfig.top_k = 300"),
        ({"top_k": 256, "top_p": 0.9, "min_p": 0.1}, ""),
        ({"top_p": 0.9, "greedy": True}, ""),
        ({}, ""),
    ],
)
def test_a_workflow_cannot_train_on_a_cut_that_no_server_reports(options, words):
    request = LLMRequest(rid="r", input_ids=[1], gconfig=GenerationConfig(**options))
    if words:
        with pytest.raises(RequestRefused, match=words):
            check_sampling(request)
    else:
        check_sampling(request)


VOCAB = 50
DRAWS = 200_000 if IS_THOROUGH else 4_000
CUTS = {
    "top-k": SamplingParams(top_k=5, temperature=1.2),
    "top-p": SamplingParams(top_k=40, top_p=0.7),
    "min-p": SamplingParams(top_k=40, min_p=0.1, temperature=1.3),
}


def draw(logits, params, count):
    """Return tokens that the embedded server sampled for a row of logits, their log-probabilities and supports."""
    tokens, logprobs, supports = [], [], []
    for begin in range(0, count, 1000):
        uniforms = [sampling.uniform(3, k) for k in range(begin, min(begin + 1000, count))]
        rows = logits.float().repeat(len(uniforms), 1)
        ids, _, told = sampling.sample(rows, [params] * len(uniforms), uniforms, range(len(uniforms)))
        found, own = zip(*told, strict=True)
        tokens, logprobs, supports = tokens + ids, [*logprobs, *own], [*supports, *found]
    ids = torch.tensor(tokens, dtype=torch.int32)
    return ids, torch.tensor(logprobs).double(), read(supports, ids, width=2 * params.top_k, vocab_size=VOCAB)


@pytest.mark.parametrize("cut", CUTS)
def test_weighted_means_over_samples_are_the_exact_ones_and_would_not_be_over_the_whole_vocabulary(cut):
    params, generator = CUTS[cut], torch.Generator().manual_seed(0)
    old, shift, values = torch.randn(3, VOCAB, generator=generator, dtype=torch.float64)
    old, new = 2 * old, 2 * old + 0.5 * shift
    values = values + 2.0  # a mean that wrong sums of probabilities would show
    ids, behavior, support = draw(old, params, DRAWS)
    assert 2 < support[0].ge(0).sum() < VOCAB / 2

    def logprobs_of(logits, support):
        """Through the trainer's head, in float64: the logits are the weight's products with one hidden state of 1."""
        shard = ops.VocabShard(0, VOCAB, VOCAB)
        given = torch.ones(len(ids), 1, dtype=torch.float64), logits[:, None], ids.long()
        return ops.lm_head_logprobs(*given, shard=shard, temperature=params.temperature, support=support)[0]

    # An unchanged policy has ratios of 1: the behaviour's are those that the server reported, in float32.
    torch.testing.assert_close(logprobs_of(old, support), behavior, rtol=0, atol=3e-6)

    kept = support[0][support[0] >= 0].long()
    target = torch.zeros(VOCAB, dtype=torch.float64)
    target[kept] = (new[kept] / params.temperature).softmax(0)
    exact = float(target @ values)

    def weighted(new_logprobs, old_logprobs):
        weighed = (new_logprobs - old_logprobs).exp() * values[ids.long()]
        return float(weighed.mean()), float(weighed.std()) / math.sqrt(DRAWS)

    mean, error = weighted(logprobs_of(new, support), logprobs_of(old, support))
    assert abs(mean - exact) < 4 * error
    mean, error = weighted(logprobs_of(new, None), behavior)  # as it would be with log-probabilities over all tokens
    assert abs(mean - exact) > 5 * error
