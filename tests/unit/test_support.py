"""Supports: read whole or refused by name, shifted like the tokens that they belong to, and true to the sampler."""

import math

import pytest
import torch

from megatron_rl import ops
from megatron_rl.api import RequestRefused
from megatron_rl.batch.packing import to_microbatch
from megatron_rl.config import GenerationConfig
from megatron_rl.rollout.kept_replies import check_sampling
from megatron_rl.support import ADJUSTMENT, COLUMN, NO_TOKEN, Adjusting, check_complete, read, sizes, summed, whole
from megatron_rl.tools.embedded_server import sampling
from megatron_rl.tools.embedded_server.sampling import SamplingParams
from megatron_rl.types import LLMRequest, LLMResponse, SampledTokens, Trajectory, TrajectoryBatch
from megatron_rl.workflows.conversation import Conversation
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


def test_adjustments_by_hand():
    ids = torch.tensor([5, 5, 9, 5], dtype=torch.int32)
    rows = read([[5, 9], [5, 9], [9, 5, 7], [5, 9, 7]], ids, width=4, vocab_size=10)
    assert rows[2].tolist() == [9, 5, 7, NO_TOKEN] and sizes(rows).tolist() == [2, 2, 3, 3]
    only = Adjusting(frequency_penalty=0.5, presence_penalty=0.25, logit_bias=((7, 1.5), (5, -2.0), (900, 3.0)))
    found = only.adjustments(rows, ids)
    assert found.dtype == torch.float32 and found.shape == (4, 4, 1)
    # Of 5 there are 0, 1, 2, 2 before; of 9 there are 0, 0, 0, 1.
    assert found[:, :, 0].tolist() == [
        *([-2.0, 0.0, 0.0, 0.0], [-2.75, 0.0, 0.0, 0.0]),
        *([0.0, -3.25, 1.5, 0.0], [-3.25, 1.5, -0.75, 0.0]),  # places: 9, 5, 7 and 5, 7, 9
    ]
    scaled = Adjusting(repetition_penalty=1.5, presence_penalty=0.25, logit_bias=((5, -2.0),)).adjustments(rows, ids)
    assert scaled.shape == (4, 4, 3)
    assert scaled[0].tolist() == [[0.0, 0.0, -2.0], *[[0.0] * 3] * 3], "nothing came before"
    assert scaled[3].tolist() == [[-0.25, 1.5, -2.0], [0.0] * 3, [-0.25, 1.5, 0.0], [0.0] * 3]
    assert Adjusting().adjustments(rows, ids) is None
    assert only.adjustments(rows[:0], ids[:0]).shape == (0, 4, 1)


def test_adjustments_of_random_replies_are_those_of_counting_token_by_token():
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, 12, (60,), generator=generator, dtype=torch.int32)
    rows = whole(60, 8)
    for row, token in enumerate(ids.tolist()):
        others = [other for other in torch.randperm(12, generator=generator).tolist() if other != token]
        chosen = [token, *others[: row % 8]]
        rows[row, : len(chosen)] = torch.tensor(chosen)
    options = Adjusting(repetition_penalty=1.25, frequency_penalty=0.5, presence_penalty=-1.0, logit_bias=((3, 2.0),))
    found, before = options.adjustments(rows, ids), []
    for row, (places, token) in enumerate(zip(rows.tolist(), ids.tolist(), strict=True)):
        for place, other in enumerate(places):
            count = before.count(other) if other != NO_TOKEN else 0
            right = [-0.5 * count + 1.0, 1.25] if count else [0.0, 0.0]
            assert found[row, place].tolist() == [*right, 2.0 * (other == 3)]
        before.append(token)


def test_changed_tokens_of_a_whole_vocabulary_by_hand():
    ids = torch.tensor([5, 5, 9], dtype=torch.int32)
    options = Adjusting(frequency_penalty=0.5, presence_penalty=0.25, logit_bias=((7, 1.5), (5, -2.0)))
    rows, found = options.changed(ids, 6)
    assert rows.tolist() == [[-1, 5, 7, -1, -1, -1], [-1, 5, 7, -1, -1, -1], [-1, 5, 7, -1, -1, -1]], "9 came last"
    assert found.shape == (3, 6, 1) and found.dtype == torch.float32 and rows.dtype == torch.int32
    assert found[:, :, 0].tolist() == [
        [0.0, -2.0, 1.5, 0.0, 0.0, 0.0],
        [0.0, -2.75, 1.5, 0.0, 0.0, 0.0],
        [0.0, -3.25, 1.5, 0.0, 0.0, 0.0],
    ]
    assert sizes(rows).tolist() == [0, 0, 0]
    with pytest.raises(ValueError, match="has 2 tokens that penalties and biases change, and 1 fit"):
        options.changed(ids, 2)
    assert options.changed(ids[:0], 6)[1].shape == (0, 6, 1)
    rows, found = Adjusting().changed(ids, 6)  # a greedy reply in a run whose others have penalties
    assert sizes(rows).tolist() == [0] * len(ids) and found.shape == (len(ids), 6, 0)


def test_changed_tokens_of_random_replies_are_those_of_supports_of_the_whole_vocabulary():
    ids = torch.randint(0, 12, (60,), generator=torch.Generator().manual_seed(0), dtype=torch.int32)
    options = Adjusting(repetition_penalty=1.25, frequency_penalty=0.5, presence_penalty=-1.0, logit_bias=((3, 2.0),))
    everything = whole(60, 12)
    everything[:] = torch.arange(12)
    right, (rows, found) = options.adjustments(everything, ids), options.changed(ids, 20)
    dense = torch.zeros(60, 13, 3)
    dense.scatter_(1, (rows.long() % 13)[:, :, None].expand(-1, -1, 3), found)
    assert torch.equal(dense[:, :12], right) and rows[:, 0].eq(NO_TOKEN).all()


def test_frequency_penalties_are_added_one_by_one_as_a_server_does():
    one, total = torch.tensor(0.1), torch.tensor(0.0)
    for count in range(2001):
        assert summed(0.1, 2000)[count] == total
        total = total + one
    assert summed(0.1, 2000)[2000] != torch.tensor(0.1) * 2000 and len(summed(0.1, 0)) == 1


def reply_with_support(tokens, supports, adjusting=None):
    ids = torch.tensor(tokens, dtype=torch.int32)
    sampled = SampledTokens.of(tokens, [-0.5] * len(tokens), [0] * len(tokens))
    found = read(supports, ids, width=4, vocab_size=100)
    more = {} if adjusting is None else {"adjustment": adjusting.adjustments(found, ids)}
    return LLMResponse(input_tokens=[1, 2], sampled=sampled, stop_reason="stop", support=found, **more)


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


SCALED = Adjusting(repetition_penalty=1.5, logit_bias=((5, 2.0),))


def test_adjustments_go_with_their_supports_into_trajectories_and_microbatches():
    reply = reply_with_support([5, 9, 5], [[5, 7], [9], [5, 9, 8]], SCALED)
    trajectories = [Trajectory.from_reply(reply, 1.0), Trajectory.from_reply(reply, 0.0)]
    batch = TrajectoryBatch.from_trajectories([trajectories])
    of_ids = {5: [0.0, 1.5, 2.0], 9: [0.0, 1.5, 0.0], 8: [0.0] * 3}
    for rows in (to_microbatch(batch, [0, 1]).rows, to_microbatch(batch, [1], share_prompts=True).rows):
        assert rows[ADJUSTMENT].shape == (*rows[COLUMN].shape, 3)
        assert rows[ADJUSTMENT][3, :3].tolist() == [of_ids[token] for token in rows[COLUMN][3, :3].tolist()]
        assert rows[ADJUSTMENT][1, 0].tolist() == [0.0, 0.0, 2.0], "the first token of the reply, before which is none"
        assert rows[ADJUSTMENT][rows["labels"] < 0].eq(0).all()
    assert to_microbatch(batch.select([]), []).rows[ADJUSTMENT].tolist() == [[[0.0] * 3] * 4]


def test_a_dialogue_keeps_its_adjustments_where_tokens_of_others_come_between():
    talk = Conversation([1, 2])
    talk.take(reply_with_support([5, 5], [[5, 7], [5]], SCALED))
    talk.add([30, 31])
    fork, column = talk.fork(3), talk.trajectory(1.0).tokens[ADJUSTMENT]
    assert column[:, 0, 1].tolist() == [0.0, 0.0, 0.0, 1.5, 0.0, 0.0]
    assert column[:, 0, 2].tolist() == [0.0, 0.0, 2.0, 2.0, 0.0, 0.0]
    assert torch.equal(fork.trajectory(1.0).tokens[ADJUSTMENT], column[:3])
    talk.take_back(4)
    assert torch.equal(talk.trajectory(1.0).tokens[ADJUSTMENT], column[:4])


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
    with pytest.raises(ValueError, match="no column 'adjustment'.*passes LLMResponse.adjustment on"):
        check_complete(good, ids, mask, is_adjusted=True)
    check_complete(good, ids, mask, is_adjusted=True, adjustment=torch.zeros(3, 2, 1))
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
        ({"frequency_penalty": 0.5}, ""),
        ({"logit_bias": {5: 1.0}}, ""),
        ({"frequency_penalty": 0.5, "min_p": 0.1}, "gconfig.min_p = 0.1"),
        ({"top_k": 20, "repetition_penalty": 1.1, "presence_penalty": 0.1, "logit_bias": {5: 1.0}}, ""),
        ({}, ""),
        ({"top_p": 0.9, "supports": "computed"}, ""),
        (
            {"top_p": 0.9, "supports": "computed", "min_new_tokens": 2},
            "gconfig.min_new_tokens = 2: with gener",
        ),
        ({"top_k": 20, "supports": "computed", "logit_bias": {5: 1.0}}, r"gconfig.logit_bias = \{5: 1.0\}: with gene"),
    ],
)
def test_a_workflow_cannot_train_on_a_cut_that_no_server_reports(options, words):
    request = LLMRequest(rid="r", input_ids=[1], gconfig=GenerationConfig(**options))
    if words:
        with pytest.raises(RequestRefused, match=words):
            check_sampling(request)
    else:
        check_sampling(request)


def test_a_workflow_cannot_change_logits_if_the_run_does_not():
    request = LLMRequest(rid="r", input_ids=[1], gconfig=GenerationConfig(frequency_penalty=0.5))
    for gconfig, of_run in ((request.gconfig, GenerationConfig()), (GenerationConfig(), request.gconfig)):
        words = f"gconfig.frequency_penalty = {gconfig.frequency_penalty}: either all .*; set both, or set both to 0.0"
        with pytest.raises(RequestRefused, match=words):
            check_sampling(LLMRequest(rid="r", input_ids=[1], gconfig=gconfig), of_run)
    check_sampling(request, GenerationConfig(presence_penalty=0.5))


def test_a_workflow_asks_with_the_runs_options_if_the_trainer_computes_supports():
    of_run = GenerationConfig(top_p=0.9, supports="computed")
    check_sampling(LLMRequest(rid="r", input_ids=[1], gconfig=of_run.new(max_new_tokens=5)), of_run)
    for options, words in (
        ({"top_p": 0.8}, "gconfig.top_p = 0.8: .* set it to generation.top_p = 0.9"),
        ({"temperature": 0.5}, "gconfig.temperature = 0.5"),
        ({"supports": "reported", "top_p": 1.0}, "gconfig.supports = reported"),
    ):
        with pytest.raises(RequestRefused, match=words):
            check_sampling(LLMRequest(rid="r", input_ids=[1], gconfig=of_run.new(**options)), of_run)


VOCAB = 50
DRAWS = 200_000 if IS_THOROUGH else 4_000
CUTS = {
    "top-k": SamplingParams(top_k=5, temperature=1.2),
    "top-p": SamplingParams(top_k=40, top_p=0.7),
    "min-p": SamplingParams(top_k=40, min_p=0.1, temperature=1.3),
    "repetition": SamplingParams(top_k=20, repetition_penalty=1.9),
    "frequency": SamplingParams(top_k=20, frequency_penalty=0.7),
    "presence": SamplingParams(top_k=20, presence_penalty=2.0),
    "bias": SamplingParams(top_k=20, logit_bias=((0, 2.5), (7, -2.0), (11, 3.0))),
    "all": SamplingParams(
        top_k=20,
        top_p=0.95,
        min_p=0.01,
        repetition_penalty=1.4,
        frequency_penalty=-0.6,
        presence_penalty=0.4,
        logit_bias=((3, 2.0), (11, -1.0)),
        temperature=1.3,
    ),  # fmt: skip
}
OLD, SHIFT, VALUES = torch.randn(3, VOCAB, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
OLD, NEW = 2 * OLD, 2 * OLD + 0.5 * SHIFT
"""Logits of the policy that samples, and of the one that is trained."""
LIKELY = OLD.argsort(descending=True).tolist()
HISTORY = [LIKELY[i] for i in (0, 2, 2, 0, 5, 0, 9, 40, 45, 49, 2)]
"""The tokens of the reply before those that are drawn."""


def draw(logits, params, count):
    """Return tokens that the embedded server sampled for a row of logits, their log-probabilities and supports."""
    tokens, logprobs, supports = [], [], []
    row = logits.float().clone()
    sampling.adjust_logits(row, params, HISTORY, frozenset())
    for begin in range(0, count, 1000):
        keys = [sampling.key_of(3, k) for k in range(begin, min(begin + 1000, count))]
        rows = row.repeat(len(keys), 1)
        ids, _, told = sampling.sample(rows, [params] * len(keys), keys, range(len(keys)))
        found, own = zip(*told, strict=True)
        tokens, logprobs, supports = tokens + ids, [*logprobs, *own], [*supports, *found]
    ids = torch.tensor(tokens, dtype=torch.int32)
    return ids, torch.tensor(logprobs).double(), read(supports, ids, width=2 * params.top_k, vocab_size=VOCAB)


MANY_DRAWS = 200_000 if IS_THOROUGH else 20_000
NO_TOP_K = {
    "top-k": SamplingParams(top_k=5, temperature=1.2),
    "top-p": SamplingParams(top_p=0.7, temperature=0.8),
    "min-p": SamplingParams(min_p=0.25, temperature=1.3),
    "all": SamplingParams(top_k=20, top_p=0.6, min_p=0.01, temperature=1.3),
}


@pytest.mark.parametrize("cut", NO_TOP_K)
def test_weighted_means_over_computed_supports_are_the_exact_ones_if_no_server_tells_its_own(cut):
    params, values = NO_TOP_K[cut], VALUES + 2.0
    keys = [sampling.key_of(3, k) for k in range(MANY_DRAWS)]
    ids, logprobs, _ = sampling.sample(OLD.float().repeat(MANY_DRAWS, 1), [params] * MANY_DRAWS, keys)
    labels, shard = torch.tensor(ids), ops.VocabShard(0, VOCAB, VOCAB)
    cut = ops.Cut(top_k=params.top_k, top_p=params.top_p, min_p=params.min_p, width=VOCAB)
    found = ops.kept_tokens(OLD.repeat(MANY_DRAWS, 1), labels, cut, shard, params.temperature)
    kept = found.ids[0][found.ids[0] >= 0].long()
    assert 2 < len(kept) < VOCAB / 2 and not found.is_outside.any()

    def logprobs_of(logits, support):
        given = torch.ones(MANY_DRAWS, 1, dtype=torch.float64), logits[:, None], labels
        return ops.lm_head_logprobs(*given, shard=shard, temperature=params.temperature, support=support)[0]

    # The behaviour policy's, of what the server reported over the whole vocabulary, in float32.
    old = logprobs_of(OLD, found.ids)
    torch.testing.assert_close(old, torch.tensor(logprobs).double() - found.log_mass, rtol=0, atol=3e-6)
    torch.testing.assert_close(old, logprobs_of(OLD, None) - found.log_mass, rtol=0, atol=1e-12)
    exact = float((NEW[kept] / params.temperature).softmax(0) @ values[kept])

    def weighted(new_logprobs, old_logprobs):
        weighed = (new_logprobs - old_logprobs).exp() * values[labels]
        return float(weighed.mean()), float(weighed.std()) / math.sqrt(MANY_DRAWS)

    mean, error = weighted(logprobs_of(NEW, found.ids), old)
    assert abs(mean - exact) < 4 * error
    # What the mean would be without supports.
    drawn = (OLD[kept] / params.temperature).softmax(0)
    ratios = [(logits / params.temperature).log_softmax(0)[kept] for logits in (NEW, OLD)]
    assert abs(float(drawn @ ((ratios[0] - ratios[1]).exp() * values[kept])) - exact) > 0.02


def adjusting_of(params):
    names = ("repetition_penalty", "frequency_penalty", "presence_penalty", "logit_bias")
    return Adjusting(**{name: getattr(params, name) for name in names})


def adjustments_of(support, params):
    """Return the adjustments of supports of the token after HISTORY, `[n, W, P]`, or None."""
    ids = torch.tensor([*HISTORY, 0], dtype=torch.int32)
    rows = whole(len(ids), VOCAB)
    rows[-1] = torch.arange(VOCAB)
    if (found := adjusting_of(params).adjustments(rows, ids)) is None:
        return None
    return found[-1][support.clamp_min(0).long()].masked_fill((support < 0)[:, :, None], 0.0)


def adjusted_by_definition(logits, params):
    """Return float64 logits `[VOCAB]` after the penalties and biases of the token after HISTORY."""
    found = []
    for token, logit in enumerate(logits.tolist()):
        count = HISTORY.count(token)
        logit -= params.frequency_penalty * count + params.presence_penalty * (count > 0)
        penalty = params.repetition_penalty if count else 1.0
        found.append((logit * penalty if logit < 0 else logit / penalty) + dict(params.logit_bias).get(token, 0.0))
    return torch.tensor(found, dtype=torch.float64)


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(repetition_penalty=1.9),
        SamplingParams(frequency_penalty=0.7, presence_penalty=1.0, logit_bias=((0, 2.5), (7, -2.0)), temperature=1.3),
    ],
)
def test_weighted_means_over_the_whole_vocabulary_are_the_exact_ones_with_penalties_and_biases(params):
    values, row = VALUES + 2.0, OLD.float().clone()
    sampling.adjust_logits(row, params, HISTORY, frozenset())
    keys = [sampling.key_of(5, k) for k in range(MANY_DRAWS)]
    ids, logprobs, _ = sampling.sample(row.repeat(MANY_DRAWS, 1), [params] * MANY_DRAWS, keys)
    labels, shard = torch.tensor(ids), ops.VocabShard(0, VOCAB, VOCAB)
    # The row of the token after HISTORY is the last one, whatever the token is.
    rows, changes = adjusting_of(params).changed(torch.tensor([*HISTORY, 0], dtype=torch.int32), VOCAB + 1)
    support, adjustment = rows[-1].repeat(MANY_DRAWS, 1), changes[-1].repeat(MANY_DRAWS, 1, 1)

    def logprobs_of(logits, **columns):
        given = torch.ones(MANY_DRAWS, 1, dtype=torch.float64), logits[:, None], labels
        return ops.lm_head_logprobs(*given, shard=shard, temperature=params.temperature, **columns)[0]

    of_whole = {"support": support, "adjustment": adjustment}
    old = logprobs_of(OLD, **of_whole)
    torch.testing.assert_close(old, torch.tensor(logprobs).double(), rtol=0, atol=3e-6)
    exact = float((adjusted_by_definition(NEW, params) / params.temperature).softmax(0) @ values)
    for new, is_right in ((logprobs_of(NEW, **of_whole), True), (logprobs_of(NEW), False)):
        weighed = (new - old).exp() * values[labels]
        error = float(weighed.std()) / math.sqrt(MANY_DRAWS)
        assert (abs(float(weighed.mean()) - exact) < 4 * error) == is_right


@pytest.mark.parametrize("cut", CUTS)
def test_weighted_means_over_samples_are_the_exact_ones_and_would_not_be_without_the_samplers_options(cut):
    params, old, new = CUTS[cut], OLD, NEW
    values = VALUES + 2.0  # a mean that wrong sums of probabilities would show
    ids, behavior, support = draw(old, params, DRAWS)
    assert 2 < support[0].ge(0).sum() < VOCAB / 2
    adjustment = adjustments_of(support, params)

    def logprobs_of(logits, support, adjustment=adjustment):
        """Through the trainer's head, in float64: the logits are the weight's products with one hidden state of 1."""
        options = {"shard": ops.VocabShard(0, VOCAB, VOCAB), "temperature": params.temperature}
        given = torch.ones(len(ids), 1, dtype=torch.float64), logits[:, None], ids.long()
        return ops.lm_head_logprobs(*given, **options, support=support, adjustment=adjustment)[0]

    # An unchanged policy has ratios of 1: the behaviour's are those that the server reported, in float32.
    torch.testing.assert_close(logprobs_of(old, support), behavior, rtol=0, atol=3e-6)

    kept = support[0][support[0] >= 0].long()
    target = torch.zeros(VOCAB, dtype=torch.float64)
    target[kept] = (adjusted_by_definition(new, params)[kept] / params.temperature).softmax(0)
    exact = float(target @ values)

    def weighted(new_logprobs, old_logprobs):
        weighed = (new_logprobs - old_logprobs).exp() * values[ids.long()]
        return float(weighed.mean()), float(weighed.std()) / math.sqrt(DRAWS)

    mean, error = weighted(logprobs_of(new, support), logprobs_of(old, support))
    assert abs(mean - exact) < 4 * error
    if adjustment is None:  # as it would be with log-probabilities over all tokens
        mean, error = weighted(logprobs_of(new, None), behavior)
    else:  # as it would be with those of logits that nothing changed
        mean, error = weighted(logprobs_of(new, support, adjustment=None), behavior)
    assert abs(mean - exact) > 5 * error
