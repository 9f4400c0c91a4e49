"""Every advantage estimator against loops over its definition, and what does not change it: order, other groups."""

import inspect
from itertools import combinations
from statistics import mean, pstdev, stdev

import pytest
import torch

from megatron_rl.algo import registry
from megatron_rl.algo.actor import PolicyActor
from megatron_rl.algo.catalogue import find_estimator
from megatron_rl.algo.normalize import normalize
from megatron_rl.algo.reward_shaping import KLController, RewardShaper, add_scores, take_out_greedy
from megatron_rl.algo.turns import first_of_turn, spread_over_turns, turns_of
from megatron_rl.config import COMPARE_GROUP, ESTIMATORS, AlgorithmConfig, RewardShapingConfig
from megatron_rl.rollout.groups import is_uniform, mask_older
from megatron_rl.run.step_metrics import batch_metrics
from megatron_rl.types import Trajectory, TrajectoryBatch
from tests.unit import turn_definitions
from tests.unit.ragged import GROUPS, LENGTHS, parts_of, ragged_batch


def advantages(batch, name="group_norm", **options):
    """What PolicyActor makes of a copy of the batch, float64."""
    args = options.pop("args", {})
    copy = batch.select(range(len(batch)))
    actor = PolicyActor(None, AlgorithmConfig(advantage=name, advantage_args=args, **options), temperature=1.0)
    actor.compute_advantages(copy)
    return copy["advantages"].double()


def others(i):
    return [j for j in range(len(GROUPS)) if GROUPS[j] == GROUPS[i] and j != i]


def group_of(i):
    return [j for j in range(len(GROUPS)) if GROUPS[j] == GROUPS[i]]


def trained(batch, i):
    return [t for t in range(*parts_of(batch)[i].indices(10**9)) if batch["loss_mask"][t]]


def by_token(batch, values):
    """Each trajectory's value on its trained tokens."""
    result = torch.zeros(len(batch["input_ids"])).double()
    for i, value in enumerate(values):
        result[trained(batch, i)] = float(value)
    return result


def whitened(batch, values):
    """values: `[N]`; mean and population deviation over all trained tokens."""
    kept = [float(values[t]) for i in range(len(batch)) for t in trained(batch, i)]
    result = torch.zeros(len(values)).double()
    for i in range(len(batch)):
        for t in trained(batch, i):
            result[t] = (float(values[t]) - mean(kept)) / (pstdev(kept) + 1e-6)
    return result


def discounted(batch, discount):
    """The reward stands on the last trained token."""
    result = torch.zeros(len(batch["input_ids"])).double()
    for i, reward in enumerate(batch["rewards"].tolist()):
        for distance, t in enumerate(reversed(trained(batch, i))):
            result[t] = reward * discount**distance
    return result


def at_the_end(batch):
    """Each trajectory's reward on its last trained token, `[N]` float64."""
    result = torch.zeros(len(batch["input_ids"])).double()
    for i, reward in enumerate(batch["rewards"].tolist()):
        result[trained(batch, i)[-1:]] = reward
    return result


def reinforce_by_turn(batch, discount):
    turns = turn_definitions.turns_of_batch(batch, at_the_end(batch), discount)
    return turn_definitions.by_turn(batch, turns, lambda turn: turn.returned)


def gae_by_turn(batch, discount, trace_decay):
    result = torch.zeros(len(batch["input_ids"])).double()
    for i, reward in enumerate(batch["rewards"].tolist()):
        turns = []
        for t in trained(batch, i):
            if turns and turns[-1][-1] == t - 1:
                turns[-1].append(t)
            else:
                turns.append([t])
        advantage, value = 0.0, 0.0
        for turn in reversed(turns):
            own = float(batch["values"][turn[0]])
            delta = (reward if turn is turns[-1] else 0.0) + discount * value - own
            advantage, value = delta + discount * trace_decay * advantage, own
            result[turn] = advantage
    return result


def gae_by_token(batch, discount, trace_decay, length_factor=0.0):
    result = torch.zeros(len(batch["input_ids"])).double()
    for i, reward in enumerate(batch["rewards"].tolist()):
        advantage, value = 0.0, 0.0
        if length_factor:
            trace_decay = max(0.0, 1 - 1 / (length_factor * max(len(trained(batch, i)), 1)))
        for number, t in enumerate(reversed(trained(batch, i))):
            own = float(batch["values"][t])
            delta = (reward if number == 0 else 0.0) + discount * value - own
            advantage, value = delta + discount * trace_decay * advantage, own
            result[t] = advantage
    return result


def best_of(batch, k):
    """Over all subsets of k (all of a smaller group), by listing them."""
    result, rewards = [0.0] * len(batch), batch["rewards"].double().tolist()
    for i in range(len(batch)):
        size = min(k, len(group_of(i)))
        subsets = list(combinations(group_of(i), size))
        best = [max(rewards[j] for j in subset) for subset in subsets]
        with_it = [b for b, subset in zip(best, subsets, strict=True) if i in subset]
        if len(set(best)) > 1:
            result[i] = (mean(with_it) - mean(best)) / (pstdev(best) + 1e-6)
    return result


def decoupled(batch, weights):
    """Each part's difference from its group's mean over its deviation, and of their weighted sum those of the batch."""
    sums = [0.0] * len(batch)
    for part, weight in weights.items():
        values = batch[f"part/{part}"].double().tolist()
        for i in range(len(batch)):
            own = [values[j] for j in group_of(i)]
            if len(set(own)) > 1:
                sums[i] += weight * (values[i] - mean(own)) / (stdev(own) + 1e-6)
    return by_token(batch, [(one - mean(sums)) / (pstdev(sums) + 1e-6) for one in sums])


def expected(name, batch, args):
    """The definitions, trajectory by trajectory."""
    r, group = batch["rewards"].double().tolist(), [group_of(i) for i in range(len(batch))]
    count, center = (
        range(len(batch)),
        [mean(batch["rewards"].double()[group_of(i)].tolist()) for i in range(len(batch))],
    )
    length = [len(trained(batch, i)) for i in count]

    def deviation(i):
        values = [r[j] for j in group[i]]
        return stdev(values) if len(set(values)) > 1 else 0.0

    def by_length(i):
        weights = [length[j] for j in group[i]]
        weights = weights if any(weights) else [1] * len(weights)
        return sum(w * r[j] for w, j in zip(weights, group[i], strict=True)) / sum(weights)

    def per_std(i):
        return (r[i] - center[i]) / (deviation(i) + 1e-6) if deviation(i) else 0.0

    def from_mean_of_others(i):
        return r[i] - mean(r[j] for j in others(i)) if others(i) else 0.0

    def per_std_of_others(i):
        rest = [r[j] for j in others(i)]
        return from_mean_of_others(i) / (stdev(rest) + 1e-6) if len(set(rest)) > 1 else 0.0

    groups = {tuple(g) for g in group}
    informative = [g for g in groups if deviation(g[0])]
    if name == "cpgd":
        factor = min(len(groups) / max(len(informative), 1), args.get("most", 3.0))
        weight = {"equal": 1.0, "clip_filter": factor, "std": None}[args.get("weight", "std")]
        return by_token(batch, [per_std(i) if weight is None else weight * (r[i] - center[i]) for i in count])
    return {
        "group_norm": lambda: by_token(batch, map(per_std, count)),
        "dr_grpo": lambda: by_token(batch, [r[i] - center[i] for i in count]),
        "rloo": lambda: by_token(batch, map(per_std_of_others if args.get("over_std") else from_mean_of_others, count)),
        "reinforce": lambda: (reinforce_by_turn if args.get("level") == "turn" else discounted)(
            batch, args.get("discount", 1.0)
        ),
        "reinforce++": lambda: whitened(batch, discounted(batch, args.get("discount", 1.0))),
        "reinforce++-baseline": lambda: whitened(batch, by_token(batch, [r[i] - center[i] for i in count])),
        "remax": lambda: by_token(batch, [r[i] - float(batch["greedy_reward"][i]) for i in count]),
        "opo": lambda: by_token(batch, [r[i] - by_length(i) for i in count]),
        "otb": lambda: from_optimal_baseline(batch, r),
        "none": lambda: torch.zeros(len(batch["input_ids"])).double(),
        "maxrl": lambda: by_token(batch, [(r[i] - center[i]) / center[i] if center[i] > 0 else 0.0 for i in count]),
        "pass@k": lambda: by_token(batch, best_of(batch, args.get("k", 4))),
        "turn_norm": lambda: turn_definitions.turn_norm(batch, at_the_end(batch), **args),
        "gigpo": lambda: turn_definitions.gigpo(batch, at_the_end(batch), r, **args),
        "agent_norm": lambda: by_token(batch, turn_definitions.agent_norm(batch, r, **args)),
        "gdpo": lambda: decoupled(batch, {"right": 1.0, "form": 1.0}),
        "gae": lambda: whitened(
            batch,
            gae_by_turn(batch, args.get("discount", 1.0), args.get("trace_decay", 1.0))
            if args.get("level") == "turn"
            else gae_by_token(
                batch, args.get("discount", 1.0), args.get("trace_decay", 1.0), args.get("length_factor", 0.0)
            ),
        ),
    }[name]()


def from_optimal_baseline(batch, rewards):
    """rewards: of trajectories, whose tokens all have the same return."""
    result, weights = torch.zeros(len(batch["input_ids"])).double(), []
    for i in range(len(batch)):
        names, own = ("proximal_logprobs", "cold_logprobs"), trained(batch, i)
        p, q = (batch[name].double()[own].exp().tolist() for name in names)
        squares = [max(1 - 2 * one + one**2 / other, 0.0) for one, other in zip(p, q, strict=True)]
        weights.append([sum(squares[: t + 1]) for t in range(len(squares))])
    for i in range(len(batch)):
        for t, token in enumerate(trained(batch, i)):
            there = [j for j in group_of(i) if len(weights[j]) > t]
            total = sum(weights[j][t] for j in there)
            baseline = sum(weights[j][t] * rewards[j] for j in there) / total if total else rewards[i]
            result[token] = rewards[i] - baseline
    return result


def test_the_squared_probabilities_of_a_vocabulary_come_from_one_token_at_two_temperatures():
    logits = torch.randn(50, 31, generator=torch.Generator().manual_seed(1), dtype=torch.float64) * 3
    labels = torch.arange(50) % 31
    warm, cold = ((logits / t).log_softmax(-1)[torch.arange(50), labels] for t in (0.7, 0.35))
    probabilities = (logits / 0.7).softmax(-1)
    torch.testing.assert_close((2 * warm - cold).exp(), probabilities.square().sum(-1))
    gradients = torch.nn.functional.one_hot(labels, 31) - probabilities  # of log p by the logits
    torch.testing.assert_close(
        1 - 2 * warm.exp() + (2 * warm - cold).exp(), gradients.square().sum(-1), rtol=1e-9, atol=1e-12
    )


ARGS = [(name, {}) for name in ESTIMATORS] + [
    ("rloo", {"over_std": True}),
    ("reinforce", {"discount": 0.9}),
    ("reinforce", {"discount": 0.9, "level": "turn"}),
    ("reinforce++", {"discount": 0.8}),
    ("turn_norm", {"discount": 0.5}),
    ("turn_norm", {"discount": 0.9, "std": False}),
    ("gigpo", {"discount": 0.5, "weight": 2.0}),
    ("gigpo", {"discount": 1.0, "std": False, "anchor": "history"}),
    ("agent_norm", {"std": False}),
    ("cpgd", {"weight": "equal"}),
    ("cpgd", {"weight": "clip_filter"}),
    ("cpgd", {"weight": "clip_filter", "most": 1.1}),
    ("pass@k", {"k": 1}),
    ("pass@k", {"k": 2}),
    ("pass@k", {"k": 3}),
    ("gae", {"discount": 0.9, "trace_decay": 0.7}),
    ("gae", {"discount": 0.9, "length_factor": 0.5}),
    ("gae", {"discount": 0.9, "trace_decay": 0.7, "level": "turn"}),
]


@pytest.mark.parametrize(("name", "args"), ARGS, ids=lambda value: str(value))
@pytest.mark.parametrize("binary", [False, True], ids=["any reward", "0 and 1"])
def test_estimator_is_its_definition_on_ragged_batches(name, args, binary):
    for seed in range(3):
        batch = ragged_batch(seed, binary)
        torch.testing.assert_close(
            advantages(batch, name, args=args), expected(name, batch, args), rtol=2e-6, atol=2e-6
        )


@pytest.mark.parametrize(("name", "args"), ARGS, ids=lambda value: str(value))
def test_the_order_of_trajectories_changes_nothing(name, args):
    """As gathered from another number of data-parallel heads: in another order, with other group numbers."""
    batch = ragged_batch()
    before = advantages(batch, name, args=args)
    order = [4, 0, 8, 2, 6, 7, 1, 3, 5]
    shuffled = batch.select(order)
    shuffled.sequences["group"] = 20 - 2 * shuffled["group"]
    after = advantages(shuffled, name, args=args)
    parts = parts_of(batch)
    torch.testing.assert_close(after, torch.cat([before[parts[i]] for i in order]), rtol=1e-6, atol=1e-6)


# reinforce++-baseline moves every advantage by the batch's mean
@pytest.mark.parametrize("name", [name for name in COMPARE_GROUP if name != "reinforce++-baseline"])
def test_a_group_of_one_and_one_without_variance_have_no_advantage(name):
    batch = ragged_batch()
    rewards = torch.where(batch["group"] == 4, 0.3, batch["rewards"])
    rewards[3] = rewards[3].nextafter(torch.tensor(1.0))  # another rounding of the same reward
    batch.sequences["rewards"] = rewards
    batch.sequences["part/right"] = torch.where(batch["group"] == 4, 0.1, batch["part/right"])
    batch.sequences["part/form"] = rewards - batch["part/right"]
    found, parts = advantages(batch, name, args={"k": 2} if name == "pass@k" else {}), parts_of(batch)
    assert all(found[parts[i]].abs().max() < 1e-6 for i in (0, 2, 3, 6)) and found.abs().max() > 0.1


def test_gdpo_weighs_parts_and_tells_apart_what_has_one_sum():
    batch = ragged_batch()
    weights = {"right": 2.0, "form": -0.5}
    right, form = batch["part/right"], batch["part/form"]
    batch.sequences["rewards"] = 2.0 * right - 0.5 * form
    found = advantages(batch, "gdpo", args={"weights": weights})
    torch.testing.assert_close(found, decoupled(batch, weights), rtol=2e-6, atol=2e-6)
    # Parts of one function have its weight, but for those with their own.
    for name, column in (("right", right), ("form", form)):
        batch.sequences[f"part/graded/{name}"] = column
        del batch.sequences[f"part/{name}"]
    torch.testing.assert_close(
        advantages(batch, "gdpo", args={"weights": {"graded": 2.0, "graded/form": -0.5}}), found, rtol=0, atol=0
    )
    # What is rarer counts for more, where the sums are the same to GRPO.
    four = batch.select([1, 4, 7, 8])
    four.sequences = {"group": torch.zeros(4, dtype=torch.int64), "rewards": torch.tensor([1.0, 1.0, 1.0, 0.0])}
    four.sequences |= {"part/a": torch.tensor([1.0, 0, 0, 0]), "part/b": torch.tensor([0.0, 1, 1, 0])}
    plain, apart = (
        [float(advantages(four, name)[trained(four, i)[0]]) for i in range(4)] for name in ("group_norm", "gdpo")
    )
    assert plain[0] == plain[1] == plain[2] and apart[0] > 1.5 * apart[1] == 1.5 * apart[2] > 0


def test_gdpo_refuses_rewards_that_are_not_their_parts_sum():
    batch = ragged_batch()
    with pytest.raises(ValueError, match=r"the shaped reward of trajectory \d is .*, but its parts .*'form': 2"):
        advantages(batch, "gdpo", args={"weights": {"form": 2.0}})
    plain = batch.select(range(len(batch)))
    del plain.sequences["part/right"], plain.sequences["part/form"]
    with pytest.raises(ValueError, match="no parts of a reward; name several rewards in rollout.recipe"):
        advantages(plain, "gdpo")


def test_the_log_has_each_parts_mean():
    batch = ragged_batch()
    metrics = batch_metrics(batch, version=0)
    assert metrics["reward/part/right"] == pytest.approx(float(batch["part/right"].mean()))
    assert "reward/part/form" in metrics


def test_group_norm_by_hand():
    rewards, group = torch.tensor([1.0, 5.0, 3.0, 2.0]), torch.tensor([7, 4, 7, 4])
    # group 7: mean 2, sample std sqrt(2); group 4: mean 3.5, sample std sqrt(4.5)
    by_hand = torch.tensor([-1 / 2**0.5, 1.5 / 4.5**0.5, 1 / 2**0.5, -1.5 / 4.5**0.5]).double()
    torch.testing.assert_close(normalize(rewards, group, mean="group", std="group"), by_hand, rtol=1e-5, atol=1e-5)


def test_rloo_is_grpo_without_std_times_n_over_n_minus_1():
    batch = ragged_batch()
    n = torch.tensor([float(len(group_of(i))) for i in range(len(batch))])
    factor = batch.spread(n / (n - 1).clamp_min(1))
    torch.testing.assert_close(advantages(batch, "rloo"), advantages(batch, "dr_grpo") * factor, rtol=1e-6, atol=1e-6)


def test_pass_at_1_is_grpo_with_the_populations_deviation():
    batch = ragged_batch()
    n = torch.tensor([float(len(group_of(i))) for i in range(len(batch))])
    factor = batch.spread((n / (n - 1).clamp_min(1)).sqrt())
    found = advantages(batch, "pass@k", args={"k": 1})
    torch.testing.assert_close(found, advantages(batch) * factor, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("k", range(1, 7))
def test_pass_at_k_of_a_group_of_six_is_that_of_its_listed_subsets(k):
    rewards = [0.5, -1.0, 2.0, 0.5, 0.0, 3.0]
    subsets = list(combinations(range(6), k))
    best = [max(rewards[j] for j in subset) for subset in subsets]
    wanted = [0.0] * 6
    if k < 6:
        with_it = [[b for b, subset in zip(best, subsets, strict=True) if i in subset] for i in range(6)]
        wanted = [(mean(own) - mean(best)) / pstdev(best) for own in with_it]
    tokens = {"input_ids": torch.arange(6), "loss_mask": torch.ones(6, dtype=torch.bool)}
    sequences = {"rewards": torch.tensor(rewards), "group": torch.zeros(6, dtype=torch.int64)}
    found = advantages(TrajectoryBatch(tokens, sequences, torch.arange(7)), "pass@k", args={"k": k})
    torch.testing.assert_close(found, torch.tensor(wanted).double(), rtol=1e-5, atol=1e-5)


def of_samples(*samples):
    """A batch of two-token trajectories from (group, sample, reward)."""
    group, sample, rewards = (torch.tensor(column) for column in zip(*samples, strict=True))
    tokens = {"input_ids": torch.arange(2 * len(samples)), "loss_mask": torch.tensor([False, True] * len(samples))}
    tokens |= {"versions": torch.zeros(2 * len(samples), dtype=torch.int64)}
    sequences = {"rewards": rewards.float(), "group": group, "sample": sample.float()}
    return TrajectoryBatch(tokens, sequences, torch.arange(0, 2 * len(samples) + 1, 2))


IN_THREE_DIALOGUES = of_samples((0, 0, 1.0), (0, 0, 1.0), (0, 1, 0.0), (0, 0, 1.0))
# one sample with reward 1 in three dialogues against one failure
BY_HAND = {"rloo": 1.0, "dr_grpo": 0.5, "group_norm": 0.5**0.5, "maxrl": 1.0, "cpgd": 0.5**0.5, "pass@k": 1.0}


@pytest.mark.parametrize("name", BY_HAND)
def test_a_sample_that_led_three_dialogues_counts_once_in_the_baseline(name):
    found = advantages(IN_THREE_DIALOGUES, name, args={"k": 1} if name == "pass@k" else {})
    wanted = torch.tensor([0.0, 1.0] * 2 + [0.0, -1.0] + [0.0, 1.0]).double() * BY_HAND[name]
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)


def one_trajectory_for_each_sample(batch):
    """The same samples as replies: their mean rewards. Returns them and each trajectory's place among them."""
    pairs = list(zip(batch["group"].tolist(), batch["sample"].tolist(), strict=True))
    names = sorted(set(pairs))
    rewards = [mean(r for r, pair in zip(batch["rewards"].tolist(), pairs, strict=True) if pair == n) for n in names]
    replies = of_samples(*((g, 0, r) for (g, _), r in zip(names, rewards, strict=True)))
    del replies.sequences["sample"]
    return replies, [names.index(pair) for pair in pairs]


# reinforce++-baseline gives back what a token's own dialogue earned, opo weighs by length
@pytest.mark.parametrize("name", ["group_norm", "dr_grpo", "rloo", "cpgd", "maxrl", "pass@k"])
@pytest.mark.parametrize("seed", range(3))
def test_dialogues_of_samples_have_the_advantages_of_as_many_replies(name, seed):
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randint(0, 4, (2, 40), generator=generator).tolist()
    earned = torch.randint(0, 4, (4, 4), generator=generator).tolist()  # by each sample of each group
    batch = of_samples(*((g, 5 * s - 3, 0.25 * earned[g][s]) for g, s in zip(*drawn, strict=True)))
    replies, place = one_trajectory_for_each_sample(batch)
    for options in ({}, {"advantage_mean": "batch", "advantage_std": "batch"}):
        single = advantages(replies, name, **options).reshape(-1, 2)
        torch.testing.assert_close(
            advantages(batch, name, **options).reshape(-1, 2), single[place], rtol=1e-5, atol=1e-5
        )


# two debates of two agents: one agent of the first is right
@pytest.mark.parametrize(
    ("name", "wanted"), [("dr_grpo", [0.75, -0.25, -0.25, -0.25]), ("rloo", [1.0, 0.0, -0.5, -0.5])]
)
def test_agents_of_one_debate_keep_their_own_credit(name, wanted):
    debates = of_samples((0, 0, 1.0), (0, 0, 0.0), (0, 1, 0.0), (0, 1, 0.0))
    assert advantages(debates, name).reshape(-1, 2)[:, 1].tolist() == wanted
    assert not is_uniform(of_samples((0, 0, 1.0), (0, 0, 0.0), (0, 1, 0.5))), "agents differ where debates do not"


@pytest.mark.parametrize(("name", "args"), ARGS, ids=lambda value: str(value))
def test_samples_of_one_dialogue_each_change_no_bit(name, args):
    batch = ragged_batch()
    before = advantages(batch, name, args=args)
    batch.sequences["sample"] = torch.arange(len(batch)).flip(0).float()
    if name != "pass@k":  # sums in another order
        assert torch.equal(advantages(batch, name, args=args), before)
    torch.testing.assert_close(advantages(batch, name, args=args), before)


def test_the_lengths_of_a_samples_dialogues_add_up_in_opos_baseline():
    batch = of_samples((0, 0, 1.0), (0, 0, 1.0), (0, 1, 0.0))
    found = advantages(batch, "opo").reshape(-1, 2)[:, 1]
    torch.testing.assert_close(found, torch.tensor([1 / 3, 1 / 3, -2 / 3]).double())
    batch.tokens["loss_mask"] = torch.zeros(6, dtype=torch.bool)  # nothing is trained, and nothing divides by 0
    assert not advantages(batch, "opo").any()


def test_reinforce_plus_plus_takes_off_the_mean_of_samples():
    found = advantages(IN_THREE_DIALOGUES, "reinforce++-baseline", advantage_mean="none", advantage_std="none")
    torch.testing.assert_close(found.reshape(-1, 2)[:, 1], torch.tensor([0.5, 0.5, -0.5, 0.5]).double())


def test_a_users_own_estimator_compares_samples_too():
    found = advantages(IN_THREE_DIALOGUES, f"{__name__}:compares_best")
    torch.testing.assert_close(found.reshape(-1, 2)[:, 1], torch.tensor([0.5, 0.5, -0.5, 0.5]).double())


def test_rewards_of_samples_are_the_runs_rewards_however_many_dialogues_they_had():
    batch = of_samples((0, 0, 1.0), (0, 0, 1.0), (0, 0, 1.0), (0, 1, 0.0), (1, 0, 2.0), (1, 1, 2.0))
    metrics = batch_metrics(batch, version=0)
    assert metrics["reward/mean"] == (1 + 0 + 2 + 2) / 4 and metrics["reward/groups_without_variance"] == 0.5
    shaper = RewardShaper(RewardShapingConfig(running="mean_std"), AlgorithmConfig(), longest_reply=8)
    shaper(batch)
    assert (shaper.moments.count, shaper.moments.mean) == (4, 1.25)
    assert not is_uniform(IN_THREE_DIALOGUES)


def infinite(batch):
    return batch["scores"] / 0


@pytest.mark.parametrize("name", ["group_norm", "reinforce++"])
def test_a_reward_that_is_no_number_is_not_an_advantage_of_0(name):
    batch = ragged_batch()
    batch.sequences["rewards"][2] = float("nan")
    with pytest.raises(ValueError, match=r"the shaped reward: scores\[2\] = nan, and 1 of 9 are not finite"):
        advantages(batch, name)
    with pytest.raises(ValueError, match=r":infinite': advantages\[\d+\] = -?inf"):
        advantages(ragged_batch(), f"{__name__}:infinite")


def test_turns_are_runs_of_trained_tokens_and_end_with_their_sequence():
    mask = torch.tensor([False, True, True, True, False, True, True, False, False])
    turn, bounds = turns_of(mask, torch.tensor([0, 3, 6, 6, 7, 9]))
    assert turn.tolist() == [-1, 0, 0, 1, -1, 2, 3, -1, -1] and bounds.tolist() == [0, 1, 3, 3, 4, 4]
    assert first_of_turn(turn).tolist() == [1, 3, 5, 6]
    assert spread_over_turns(torch.arange(4.0) + 1, turn).tolist() == [0, 1, 1, 2, 0, 3, 4, 0, 0]
    none, empty = turns_of(torch.zeros(0, dtype=torch.bool), torch.tensor([0]))
    assert len(none) == len(first_of_turn(none)) == 0 and empty.tolist() == [0]


def test_opo_is_grpo_without_std_where_all_replies_have_one_length():
    tokens = {"input_ids": torch.arange(12), "loss_mask": torch.tensor([False, True, True] * 4)}
    sequences = {"rewards": torch.tensor([1.0, 0.0, 0.5, 2.0]), "group": torch.tensor([0, 0, 1, 1])}
    batch = TrajectoryBatch(tokens, sequences, torch.arange(0, 13, 3))
    torch.testing.assert_close(advantages(batch, "opo"), advantages(batch, "dr_grpo"))


MEANS = {
    "none": lambda r, i: 0.0,
    "group": lambda r, i: mean(r[j] for j in group_of(i)),
    "batch": lambda r, i: mean(r),
}
STDS = {
    "none": lambda r, i: 1.0 - 1e-6,
    "group": lambda r, i: stdev(r[j] for j in group_of(i)) if others(i) else float("inf"),
    "batch": lambda r, i: pstdev(r),
}


@pytest.mark.parametrize("center", MEANS)
@pytest.mark.parametrize("scale", STDS)
def test_mean_and_deviation_are_chosen_apart(center, scale):
    batch = ragged_batch()
    r = batch["rewards"].double().tolist()
    wanted = [(r[i] - MEANS[center](r, i)) / (STDS[scale](r, i) + 1e-6) for i in range(len(r))]
    found = advantages(batch, "dr_grpo", advantage_mean=center, advantage_std=scale)
    torch.testing.assert_close(found, by_token(batch, wanted), rtol=1e-5, atol=1e-5)


def test_advantages_are_clipped_after_they_are_normalised():
    batch = ragged_batch()
    torch.testing.assert_close(advantages(batch, advantage_clip=0.5), advantages(batch).clamp(-0.5, 0.5))


def test_rewards_by_token_stand_where_the_workflow_put_them():
    batch = ragged_batch()
    given = torch.where(batch["loss_mask"], batch["values"], 99.0)  # what an untrained token got is nobody's
    batch.tokens["rewards"] = given
    del batch.sequences["rewards"]
    found = advantages(batch, "reinforce", args={"discount": 0.5})
    result = torch.zeros(len(given)).double()
    for i in range(len(batch)):
        after = 0.0
        for t in reversed(trained(batch, i)):
            after = float(given[t]) + 0.5 * after
            result[t] = after
    torch.testing.assert_close(found, result, rtol=1e-5, atol=1e-6)


def test_an_estimator_gets_the_columns_that_it_needs_whatever_else_the_run_asks_for():
    actor = PolicyActor(None, AlgorithmConfig(advantage="tests.unit.algo.test_estimators:uncertain"), temperature=1.0)
    assert actor.columns_needed == ["entropies"]


@pytest.mark.parametrize("name", ["none", "group_norm"])
def test_a_teacher_adds_its_log_ratio_to_what_the_rewards_say_and_the_clip_bounds_both(name):
    batch = ragged_batch()
    alone = advantages(batch, name)
    batch.tokens["teacher_logprobs"] = -torch.rand(len(batch["input_ids"])) * 3
    del batch.tokens["proximal_logprobs"]
    mask, ratio = batch["loss_mask"], batch["teacher_logprobs"].double() - batch["logprobs"].double()
    options = AlgorithmConfig(advantage=name, advantage_clip=0.9)
    actor = PolicyActor(None, options, temperature=1.0, teacher_coefficient=0.5)
    assert actor.columns_needed == ["teacher_logprobs"]
    actor.compute_advantages(batch)
    wanted = ((alone + 0.5 * ratio).clamp(-0.9, 0.9) * mask).float()
    torch.testing.assert_close(batch["advantages"], wanted, rtol=0, atol=1e-6)
    assert ((wanted.abs() - 0.9).abs() < 1e-6).any() and actor.metrics["teacher/reverse_kl"] == pytest.approx(
        -float(ratio[mask].mean())
    )
    # The policy's own log-probabilities before the step, where a pass has computed them, and not the server's.
    batch.tokens["proximal_logprobs"] = batch["logprobs"] - 1.0
    actor.compute_advantages(batch)
    wanted = ((alone + 0.5 * (ratio + 1.0)).clamp(-0.9, 0.9) * mask).float()
    torch.testing.assert_close(batch["advantages"], wanted, rtol=0, atol=1e-6)


def test_scores_of_a_reward_model_join_the_rewards_of_trajectories_and_those_of_tokens():
    whole, split = ragged_batch(), ragged_batch()
    scores, rewards = torch.linspace(-1, 1, len(whole)), whole["rewards"].clone()
    add_scores(whole, scores, coefficient=0.5)
    assert torch.equal(whole["rewards"], rewards + 0.5 * scores) and torch.equal(whole["model_rewards"], scores)
    given = split.tokens["rewards"] = torch.where(split["loss_mask"], split["values"], 99.0)
    add_scores(split, scores, coefficient=0.5)
    added = torch.zeros(len(given))
    for i in range(len(split)):
        for place in trained(split, i)[-1:]:  # of a trajectory without a trained token none
            added[place] = 0.5 * float(scores[i])
    assert torch.equal(split["rewards"], given + added), "no other token's reward has changed"
    wanted = [float((given + added)[trained(split, i)].sum()) for i in range(len(split))]
    assert shaped(split).tolist() == pytest.approx(wanted, abs=1e-5)


def test_remax_without_greedy_reward_names_the_workflow():
    batch = ragged_batch()
    del batch.sequences["greedy_reward"]
    with pytest.raises(ValueError, match="no greedy_reward.*ReMaxWorkflow"):
        advantages(batch, "remax")


def test_arguments_and_names_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match="algo.advantage_args = {'lambda': 1}: .* are discount=1.0"):
        find_estimator("reinforce", {"lambda": 1})
    with pytest.raises(ValueError, match="algo.advantage = 'tests.unit.nowhere:f': module .* cannot be imported"):
        find_estimator("tests.unit.nowhere:f", {})
    with pytest.raises(ValueError, match="algo.advantage = 'tests.unit.ragged:f': module .* has no 'f'"):
        find_estimator("tests.unit.ragged:f", {})
    with pytest.raises(ValueError, match="algo.advantage_args.weight = 'x': must be equal, std or clip_filter"):
        advantages(ragged_batch(), "cpgd", args={"weight": "x"})
    with pytest.raises(ValueError, match="algo.advantage_args.k = 0: must be at least 1"):
        advantages(ragged_batch(), "pass@k", args={"k": 0})
    for name, args, message in (
        ("reinforce", {"discount": 1.5}, r"discount = 1.5: must be in \(0, 1\]"),
        ("reinforce++", {"discount": "0.9"}, r"discount = '0.9': must be in \(0, 1\]"),
        ("cpgd", {"most": 0.5}, "most = 0.5: must be at least 1"),
        ("cpgd", {"weight": ["std"]}, r"weight = \['std'\]: must be equal, std or"),
        ("pass@k", {"k": 2.5}, "k = 2.5: must be at least 1"),
        ("pass@k", {"k": "4"}, "k = '4': must be at least 1"),
        ("reinforce", {"level": "word"}, "level = 'word': must be token or turn"),
        ("turn_norm", {"discount": 0.0}, r"discount = 0.0: must be in \(0, 1\]"),
        ("turn_norm", {"std": "group"}, "std = 'group': must be true or false"),
        ("gigpo", {"anchor": "state"}, "anchor = 'state': must be observation or history"),
        ("gigpo", {"weight": -1}, "weight = -1: must be at least 0"),
    ):
        with pytest.raises(ValueError, match=f"algo.advantage_args.{message}"):
            find_estimator(name, args)
    with pytest.raises(ValueError, match=r"returned \[1\]; must be one number for each of 9 trajectories, or .* 61"):
        advantages(ragged_batch(), f"{__name__}:wrong_shape")

    line = without_a_column.__code__.co_firstlineno
    words = rf"without_a_column \({__file__}:{line}\) raised KeyError: 'bonus' \({__file__}:{line + 1}\); the batch has"
    with pytest.raises(ValueError, match=f"algo.advantage = '{__name__}:without_a_column': {words} .*scores"):
        advantages(ragged_batch(), f"{__name__}:without_a_column")


def wrong_shape(batch):
    return torch.zeros(1)


def without_a_column(batch):
    return batch["bonus"] * batch["scores"]


def best_reply_only(batch, *, margin=0.0):
    """1 for the best reply of a group, 0 for the others."""
    best = torch.stack([batch["scores"][batch["group"] == g].max() for g in batch["group"]])
    return (batch["scores"] >= best - margin).double()


@registry.estimator(needs=("entropies",))
def uncertain(batch):
    return batch["entropies"]


compares_best = registry.estimator(mean="group", compares_group=True)(best_reply_only)


def test_a_users_own_estimator_is_found_by_its_import_path():
    batch = ragged_batch()
    plain, decorated = (advantages(batch, f"{__name__}:{name}") for name in ("best_reply_only", "compares_best"))
    best = [float(batch["rewards"][i] == max(batch["rewards"][j] for j in group_of(i))) for i in range(len(batch))]
    torch.testing.assert_close(plain, by_token(batch, best))
    center = [mean(best[j] for j in group_of(i)) for i in range(len(batch))]
    torch.testing.assert_close(decorated, by_token(batch, [b - c for b, c in zip(best, center, strict=True)]))
    all_of_them = advantages(batch, f"{__name__}:best_reply_only", args={"margin": 100.0})
    torch.testing.assert_close(all_of_them, by_token(batch, [1.0] * len(batch)))


def test_the_config_knows_the_catalogues_names():
    assert tuple(sorted(registry.ESTIMATORS)) == tuple(sorted(ESTIMATORS))
    assert {name for name, entry in registry.ESTIMATORS.items() if entry.compares_group} == set(COMPARE_GROUP)


# -- reward shaping ---------------------------------------------------------------------------------------------------


def shaped(batch, *, algo=None, longest_reply=8, shaper=None, **options):
    algo = algo or AlgorithmConfig()
    shaper = shaper or RewardShaper(RewardShapingConfig(**options), algo, longest_reply=longest_reply)
    shaper(batch)
    return batch["scores"]


def test_an_overlong_reply_loses_what_it_is_into_the_buffer():
    lengths = (3, 6, 7, 8, 11)
    mask = torch.cat([torch.arange(n + 1) > 0 for n in lengths])
    sequences = {"rewards": torch.ones(5), "group": torch.zeros(5, dtype=torch.int64)}
    starts = torch.tensor([0, *(n + 1 for n in lengths)]).cumsum(0)
    tokens = {"input_ids": torch.arange(len(mask)), "loss_mask": mask, "versions": mask.long() - 1}
    batch = TrajectoryBatch(tokens, sequences, starts)
    # longest 8, buffer 4: free up to 4 tokens, then a quarter a token
    found = shaped(batch, overlong_buffer=4, overlong_penalty=2.0)
    assert found.tolist() == [1.0, 1.0 - 2 * 0.5, 1.0 - 2 * 0.75, 1.0 - 2.0, 1.0 - 2.0]
    last = batch.cu_seqlens[1:] - 1
    assert batch["token_rewards"][last].tolist() == found.tolist(), "the token's reward is the shaped one"
    assert batch["token_rewards"].count_nonzero() == found.count_nonzero()


def dialogues(*versions):
    """Trajectories of reward 1, all of whose tokens with a version are trained."""
    group = []
    for version in map(torch.tensor, versions):
        parts = {"input_ids": version, "loss_mask": version >= 0, "logprobs": torch.zeros(len(version))}
        group.append(Trajectory(**parts, versions=version, reward=1.0))
    return TrajectoryBatch.from_trajectories([group])


SAID = [-1]
"""One token of a user, a tool or the prompt."""


def test_a_dialogue_is_overlong_by_its_longest_reply():
    three_short, short_and_long = [*SAID, 0, 0, 0, 0] * 3, [*SAID, 0, 0, *SAID, 1, 1, 1, 1, 1, 1, *SAID]
    # longest 8, buffer 4: 4 tokens in a reply cost nothing, 6 half; the two versions of the last reply are one reply
    batch = dialogues(three_short, short_and_long, [*SAID, 0, 0, 0, 1, 1, 1], SAID)
    assert shaped(batch, overlong_buffer=4).tolist() == [1.0, 0.5, 0.5, 1.0]


def test_a_reply_that_was_cut_off_keeps_a_share_of_its_reward():
    batch = dialogues([*SAID, *[0] * 7], [*SAID, *[0] * 8], [*SAID, 0, *SAID, *[0] * 8, *SAID, 0], SAID)
    assert shaped(batch, cut_off_share=0.25).tolist() == [1.0, 0.25, 0.25, 1.0]
    # With a buffer of 4 and a penalty of 1, of which 7 tokens cost three quarters.
    assert shaped(batch, cut_off_share=0.25, overlong_buffer=4).tolist() == [0.25, -0.75, -0.75, 1.0]


@pytest.mark.parametrize("options", [{"overlong_buffer": 4}, {"per_token": True}], ids=str)
def test_tokens_that_are_too_old_to_be_trained_count_in_the_length(options):
    versions = [*SAID, 0, 0, 0, 3, 3, 3, *SAID, 3, 3]
    young, old = dialogues(versions), dialogues(versions)
    assert mask_older(old, 2) == 3
    assert shaped(old, **options).tolist() == shaped(young, **options).tolist() != [1.0]


def test_a_reward_per_token_and_its_clip():
    batch = ragged_batch()
    lengths = torch.tensor([max(len(trained(batch, i)), 1) for i in range(len(batch))])
    wanted = (batch["rewards"].double() / lengths).clamp(-0.1, 0.1)
    torch.testing.assert_close(shaped(batch, per_token=True, clip=0.1), wanted)


@pytest.mark.parametrize("running", ["std", "mean_std"])
def test_running_normalisation_knows_all_rewards_so_far_also_after_a_checkpoint(running):
    batches = [ragged_batch(seed) for seed in range(3)]
    options = RewardShapingConfig(running=running)
    shaper = RewardShaper(options, AlgorithmConfig(), longest_reply=8)
    for number, batch in enumerate(batches):
        found = shaped(batch, shaper=shaper)
        seen = torch.cat([b["rewards"] for b in batches[: number + 1]]).double()
        center = seen.mean() if running == "mean_std" else 0.0
        torch.testing.assert_close(found, (batch["rewards"].double() - center) / seen.std(correction=0))
        state, shaper = shaper.state_dict(), RewardShaper(options, AlgorithmConfig(), longest_reply=8)
        shaper.load_state_dict(state)


def test_reused_trajectories_do_not_move_the_running_moments_as_an_earlier_step_has_counted_them():
    batch, options = ragged_batch(), RewardShapingConfig(running="mean_std")
    alone = RewardShaper(options, AlgorithmConfig(), longest_reply=8)
    found = [shaped(batch, shaper=alone), alone.last["reward/shaped"]]
    again = TrajectoryBatch.cat([batch, batch.select([0, 1])])
    again.sequences["rewards"][-2:] = 7.0
    again.sequences["is_reused"] = (torch.arange(len(again)) >= len(batch)).long()
    shaper = RewardShaper(options, AlgorithmConfig(), longest_reply=8)
    torch.testing.assert_close(shaped(again, shaper=shaper)[: len(batch)], found[0])
    assert shaper.state_dict() == alone.state_dict() and shaper.last["reward/shaped"] == found[1]


SHAPINGS = [
    {"overlong_buffer": 4, "overlong_penalty": 2.0},
    {"per_token": True},
    {"cut_off_share": 0.5},
    {"running": "std"},
    {"running": "mean_std", "clip": 0.7},
    {"overlong_buffer": 6, "per_token": True, "running": "mean_std", "clip": 1.5},
]


def remax(batch, **options):
    algo = AlgorithmConfig(advantage="remax")
    shaper = RewardShaper(RewardShapingConfig(**options), algo, longest_reply=8)
    PolicyActor(None, algo, temperature=1.0, shaper=shaper).compute_advantages(batch)
    return batch["advantages"], shaper


@pytest.mark.parametrize("options", SHAPINGS, ids=str)
def test_a_reply_like_the_greedy_one_has_no_advantage_however_rewards_are_shaped(options):
    batch = ragged_batch()
    first = batch.cu_seqlens[:-1]
    batch.tokens["loss_mask"] = torch.ones(len(batch["loss_mask"]), dtype=torch.bool).index_fill(0, first, False)
    batch["versions"] = batch["loss_mask"].long() - 1  # one reply each, as the greedy one
    likes = torch.tensor([True, False, True, False, True, True, False, True, False])
    lengths = torch.tensor([float(len(trained(batch, i))) for i in range(len(batch))])
    batch.sequences["greedy_tokens"] = torch.where(likes, lengths, lengths + 1)
    batch.sequences["greedy_reward"] = torch.where(likes, batch["rewards"], batch["rewards"] - 0.5)
    found, shaper = remax(batch, **options)
    assert not found[batch.spread(likes)].any() and found[~batch.spread(likes)].any()
    assert shaper.moments.count == (len(batch) if "running" in options else 0), "the baseline is not one of the rewards"


def test_the_greedy_reply_is_overlong_by_its_own_length():
    mask = torch.arange(7) > 0
    tokens = {"input_ids": torch.arange(7), "loss_mask": mask, "versions": mask.long() - 1}
    sequences = {"rewards": torch.ones(1), "group": torch.zeros(1, dtype=torch.int64)}
    sequences |= {"greedy_reward": torch.ones(1), "greedy_tokens": torch.tensor([8.0])}
    batch = TrajectoryBatch(tokens, sequences, torch.tensor([0, 7]))
    # longest 8, buffer 4: the 6 sampled tokens cost half of the penalty 2, the greedy reply's 8 all of it
    found, _ = remax(batch, overlong_buffer=4, overlong_penalty=2.0)
    assert found.tolist() == [0.0] + [1.0] * 6


def test_a_greedy_reply_of_unknown_length_is_refused_where_the_length_counts():
    batch = ragged_batch()
    del batch.sequences["greedy_tokens"]
    with pytest.raises(ValueError, match="per_token = True: the trajectories carry .* and no greedy_tokens.*ReMax"):
        remax(batch, per_token=True)


@pytest.mark.parametrize("options", [{}, *SHAPINGS], ids=str)
def test_the_greedy_reply_has_the_score_of_the_reward_model_and_is_not_trained(options):
    sampled, kept = ragged_batch(), ragged_batch()
    generator = torch.Generator().manual_seed(5)
    # Of each group the first trajectory is taken for the greedy reply, which the others are compared with.
    groups = kept["group"].tolist()
    is_greedy = torch.tensor([group not in groups[:place] for place, group in enumerate(groups)])
    scores = torch.randn(len(kept), generator=generator)
    others = [place for place in range(len(kept)) if not is_greedy[place]]
    tokens = {group: 1.0 + 2 * group for group in groups}
    for batch in (sampled, kept):
        batch.sequences["greedy_tokens"] = torch.tensor([tokens[group] for group in groups])
    kept.sequences["is_greedy"] = is_greedy.float()
    add_scores(kept, scores, coefficient=0.5)
    taken = take_out_greedy(kept)
    assert len(taken) == len(others) and take_out_greedy(taken) is taken

    sampled = sampled.select(others)
    rewards, model = ragged_batch()["rewards"].double(), scores.double()
    total = {place: float(rewards[place] + 0.5 * model[place]) for place in range(len(groups))}
    sampled.sequences["rewards"] = torch.tensor([total[place] for place in others], dtype=torch.float64)
    baseline = [total[groups.index(groups[place])] for place in others]
    sampled.sequences["greedy_reward"] = torch.tensor(baseline, dtype=torch.float64)
    wanted, _ = remax(sampled, **options)
    found, shaper = remax(taken, **options)
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-6)
    assert found[taken["loss_mask"]].any() and not (found.abs() > 0)[~taken["loss_mask"]].any()
    assert shaper.moments.count == (len(others) if "running" in options else 0)


@pytest.mark.parametrize("estimate", ["k1", "k2", "k3"])
def test_a_kl_penalty_in_the_reward_stands_on_each_token(estimate):
    batch = ragged_batch()
    algo = AlgorithmConfig(kl_coefficient=0.3, kl_in="reward", kl_estimator=estimate)
    scores = shaped(batch, algo=algo)
    d = batch["proximal_logprobs"].double() - batch["ref_logprobs"].double()
    penalty = 0.3 * {"k1": d, "k2": d * d / 2, "k3": (-d).exp() - 1 + d}[estimate]
    for i, reward in enumerate(batch["rewards"].double().tolist()):
        places = trained(batch, i)
        wanted = [-float(penalty[t]) for t in places]
        wanted[-1:] = [wanted[-1] + reward] if places else []
        assert batch["token_rewards"][places].tolist() == pytest.approx(wanted, rel=1e-5, abs=1e-6)
        assert float(scores[i]) == pytest.approx(reward - float(penalty[places].sum()), abs=1e-6)
    assert not batch["token_rewards"][~batch["loss_mask"]].any()


def test_the_kl_coefficient_is_steered_to_its_target_and_checkpointed():
    algo = AlgorithmConfig(kl_coefficient=0.1, kl_in="reward", kl_estimator="k3", kl_target=0.05, kl_horizon=90.0)
    shaper, batch = RewardShaper(RewardShapingConfig(), algo, longest_reply=8), ragged_batch()
    shaped(batch, shaper=shaper)
    assert shaper.last["reward/kl"] > 0.06  # more than a fifth above the target
    assert shaper.kl.coefficient == pytest.approx(0.1 * (1 + 0.2 * len(LENGTHS) / 90))
    batch.tokens["proximal_logprobs"] = batch["ref_logprobs"]
    again = RewardShaper(RewardShapingConfig(), algo, longest_reply=8)
    again.load_state_dict(shaper.state_dict())
    shaped(batch, shaper=again)
    assert again.kl.coefficient == pytest.approx(0.1 * (1 + 0.2 * len(LENGTHS) / 90) * (1 - 0.2 * len(LENGTHS) / 90))


def test_a_step_longer_than_the_horizon_changes_the_kl_coefficient_by_a_fifth_at_most():
    options = AlgorithmConfig(kl_coefficient=0.1, kl_in="reward", kl_target=0.05, kl_horizon=90.0)
    for kl, factor in ((0.0, 0.8), (1.0, 1.2)):
        controller = KLController(options)
        controller.update(kl, 90 * 16)
        assert controller.coefficient == pytest.approx(0.1 * factor)


def test_a_fixed_kl_coefficient_is_the_configs_after_a_resume_with_another():
    controller = KLController(AlgorithmConfig(kl_coefficient=0.3))
    controller.load_state_dict(KLController(AlgorithmConfig(kl_coefficient=0.1)).state_dict())
    assert controller.coefficient == 0.3


def test_every_entry_says_its_formula_and_source():
    for entry in (*registry.ESTIMATORS.values(), *registry.LOSSES.values(), *registry.PAIR_LOSSES.values()):
        lines = inspect.getdoc(entry.function).splitlines()
        assert lines[0].endswith(".") and any(line.startswith("Source: ") for line in lines)
