"""Rewards of turns: worked examples by hand, and what becomes of them on their way to an advantage."""

import pytest
import torch

from megatron_rl.algo.actor import PolicyActor
from megatron_rl.algo.reward_shaping import RewardShaper, add_scores, token_rewards
from megatron_rl.batch import packing
from megatron_rl.config import AlgorithmConfig, RewardShapingConfig
from megatron_rl.rollout.groups import as_group, join_groups, mask_older
from megatron_rl.types import Trajectory, TrajectoryBatch
from tests.unit import turn_definitions
from tests.unit.ragged import parts_of

PROMPT, LEFT, RIGHT = (1, 2), (8,), (9, 9)
"""Tokens of what an environment shows."""


def dialogue(*turns, reply=(5, 6), version=0, **sequence):
    """turns: (what is shown, the reward of the reply to it); each reply has the tokens `reply`."""
    ids, mask, rewards = [], [], []
    for shown, reward in turns:
        ids += [*shown, *reply]
        mask += [False] * len(shown) + [True] * len(reply)
        rewards += [0.0] * (len(shown) + len(reply) - 1) + [reward]
    mask = torch.tensor(mask)
    return Trajectory(
        input_ids=torch.tensor(ids),
        loss_mask=mask,
        logprobs=-0.5 * mask,
        versions=torch.where(mask, version, -1),
        reward=sum(reward for _, reward in turns),
        tokens={"turn_rewards": torch.tensor(rewards)},
        sequence=sequence,
    )


def advantages(batch, name, *, shaping=None, **args):
    """What the estimator gives each turn of each trajectory; all tokens of a turn have the same."""
    algo = AlgorithmConfig(advantage=name, advantage_args=args)
    shaper = RewardShaper(RewardShapingConfig(**(shaping or {})), algo, longest_reply=8)
    PolicyActor(None, algo, temperature=1.0, shaper=shaper).compute_advantages(batch)
    found = []
    for part in parts_of(batch):
        own, mask = batch["advantages"][part], batch["loss_mask"][part]
        assert not own[~mask].any()
        replies = own[mask].reshape(-1, 2)
        assert torch.equal(replies[:, 0], replies[:, 1]), "one advantage for all tokens of a turn"
        found.append(replies[:, 0].tolist())
    return found


def approx(rows):
    return [pytest.approx(row, abs=2e-5) for row in rows]


def test_turn_norm_by_hand():
    group = [
        dialogue((PROMPT, 0.0), (LEFT, 1.0)),
        dialogue((PROMPT, 1.0), (RIGHT, 0.0)),
        dialogue((PROMPT, 0.0)),
    ]
    # With a discount of a half the first turns return 0 + 1/2, 1 + 0 and 0: their mean is a half, their deviation too.
    # The second turns return 1 and 0, and nobody has a third.
    root = 0.5**0.5
    plain = advantages(as_group(group), "turn_norm", discount=0.5, std=False)
    assert plain == approx([[0.0, 0.5], [0.5, -0.5], [-0.5]])
    scaled = advantages(as_group(group), "turn_norm", discount=0.5)
    assert scaled == approx([[0.0, root], [1.0, -root], [-1.0]])
    # Of other prompts, and of turns that nobody else has had, nothing is said.
    other = as_group([dialogue((PROMPT, 5.0)), dialogue((PROMPT, 5.0), (LEFT, 7.0))])
    both = join_groups([as_group(group), other])
    assert advantages(both, "turn_norm", discount=0.5, std=False) == approx([*plain, [-1.75], [1.75, 0.0]])


def test_gigpo_by_hand():
    group = [
        dialogue((PROMPT, 0.0), (LEFT, 1.0)),
        dialogue((PROMPT, 0.0), (RIGHT, 0.0)),
        dialogue((PROMPT, 0.0), (LEFT, 0.0), reply=(5, 7)),
    ]
    # Episodes: 1, 0, 0 about their mean 1/3. Turns that begin with the prompt return 1/2, 0, 0, about 1/6; those that
    # begin with LEFT 1 and 0, about 1/2; one alone begins with RIGHT. With a weight of 2:
    found = advantages(as_group(group), "gigpo", discount=0.5, weight=2.0, std=False)
    assert found == approx([[2 / 3 + 2 / 3, 2 / 3 + 1.0], [-1 / 3 - 1 / 3, -1 / 3], [-2 / 3, -1 / 3 - 1.0]])
    # By their whole history no two second turns begin alike: the third dialogue's first reply was another one.
    found = advantages(as_group(group), "gigpo", discount=0.5, weight=2.0, std=False, anchor="history")
    assert found == approx([[4 / 3, 2 / 3], [-2 / 3, -1 / 3], [-2 / 3, -1 / 3]])
    # Deviations: of 1, 0, 0 it is 1 / sqrt 3, of 1/2, 0, 0 half of that, of 1 and 0 the root of a half.
    third, half = 3**0.5 / 3, 0.5**0.5
    found = advantages(as_group(group), "gigpo", discount=0.5)
    assert found == approx(
        [[4 * third, 2 * third + half], [-2 * third, -third], [-2 * third, -third - half]],
    )
    assert advantages(as_group(group), "gigpo", weight=0) == approx([[2 * third] * 2, [-third] * 2, [-third] * 2])


def test_a_state_that_a_dialogue_comes_back_to_is_compared_with_itself():
    back = [dialogue((PROMPT, 0.0), (LEFT, 0.0), (LEFT, 4.0)), dialogue((PROMPT, 4.0))]
    # Both earn 4. In the state LEFT it returned 2, and then 4. The first turns returned 1 and 4.
    found = advantages(as_group(back), "gigpo", discount=0.5, std=False)
    assert found == approx([[-1.5, -1.0, 1.0], [1.5]])


def test_agents_are_compared_with_themselves_by_hand():
    def debate(sample, *rewards):
        return [dialogue((PROMPT, r), agent=agent, sample=sample) for agent, r in enumerate(rewards)]

    group = [*debate(0, 1.0, 10.0), *debate(1, 0.0, 30.0)]
    # Agent 0 earns 1 and 0, agent 1 ten and thirty: whoever they debate with, each is as good as it has been itself.
    root = 0.5**0.5
    assert advantages(as_group(group), "agent_norm") == approx([[root], [-root], [-root], [root]])
    assert advantages(as_group(group), "agent_norm", std=False) == approx([[0.5], [-10.0], [-0.5], [10.0]])
    for name in ("turn_norm", "gigpo"):
        args = {"weight": 0.0} if name == "gigpo" else {}
        assert advantages(as_group(group), name, std=False, **args) == approx([[0.5], [-10.0], [-0.5], [10.0]])
    # A sample in which an agent led two dialogues counts once for it: 1 and 3 against 0 are 2 against 0.
    group = [dialogue((PROMPT, r), agent=0, sample=sample) for sample, r in ((0, 1.0), (0, 3.0), (1, 0.0))]
    for name in ("agent_norm", "turn_norm"):
        assert advantages(as_group(group), name, std=False) == approx([[0.0], [2.0], [-1.0]])
    plain = as_group([dialogue((PROMPT, 1.0)), dialogue((PROMPT, 0.0))])
    with pytest.raises(
        ValueError, match=r"agent_norm: the trajectories have the columns .*, but not agent; .*DebateWorkflow"
    ):
        advantages(plain, "agent_norm")


def test_reinforce_sees_rewards_where_they_arose_and_discounts_turns_or_tokens():
    group = as_group([dialogue((PROMPT, 1.0), (LEFT, 0.0), (RIGHT, 4.0))])
    assert advantages(group, "reinforce") == approx([[5.0, 4.0, 4.0]])
    assert advantages(group, "reinforce", level="turn", discount=0.5) == approx([[2.0, 2.0, 4.0]])
    algo = AlgorithmConfig(advantage="reinforce", advantage_args={"discount": 0.5})
    PolicyActor(None, algo, temperature=1.0).compute_advantages(group)
    # Six tokens: 1 on the second, 4 on the sixth, half of it for each token before.
    assert group["advantages"][group["loss_mask"]].tolist() == [0.5 + 0.125, 1.25, 0.5, 1.0, 2.0, 4.0]


def test_gae_by_turn_sees_rewards_where_they_arose():
    group = as_group([dialogue((PROMPT, 1.0), (LEFT, 4.0))])
    group.tokens["values"] = torch.tensor([0.0, 0.0, 2.0, 9.0, 0.0, 3.0, 9.0])
    # Values in front of the turns: 2 and 3. d = 1 + 0.5 * 3 - 2 = 0.5 and 4 - 3 = 1, A = 0.5 + 0.5 * 1 = 1 and 1.
    algo = AlgorithmConfig(advantage="gae", advantage_mean="none", advantage_std="none")
    actor = PolicyActor(None, algo, temperature=1.0, advantage_args={"level": "turn", "discount": 0.5})
    actor.compute_advantages(group)
    assert group["advantages"].tolist() == pytest.approx([0, 0, 1, 1, 0, 1, 1], abs=1e-5)
    assert group["returns"].tolist() == pytest.approx([0, 0, 3, 3, 0, 4, 4], abs=1e-5)


@pytest.mark.parametrize("name", ["group_norm", "rloo", "opo", "maxrl", "reinforce++-baseline"])
def test_what_looks_at_trajectories_alone_does_not_change_by_a_bit(name):
    def batch(with_turns):
        group = [dialogue((PROMPT, 0.1), (LEFT, 0.2 * n), (RIGHT, 0.0)) for n in range(4)]
        for trajectory in group if not with_turns else []:
            del trajectory.tokens["turn_rewards"]
        found = as_group(group)
        PolicyActor(None, AlgorithmConfig(advantage=name), temperature=1.0).compute_advantages(found)
        return found

    split, whole = batch(True), batch(False)
    assert torch.equal(split["scores"], whole["scores"])
    # A return that stops at what is past is no number of a trajectory.
    if name != "reinforce++-baseline":
        assert torch.equal(split["advantages"], whole["advantages"])
    else:
        assert not torch.equal(split["advantages"], whole["advantages"])


def random_dialogues(seed):
    """Dialogues of three prompts whose tokens a policy of versions 0 to 2 wrote, with rewards of all turns."""
    generator = torch.Generator().manual_seed(seed)

    def draw(most):
        return int(torch.randint(0, most, (1,), generator=generator))

    groups = []
    for _ in range(3):
        group = []
        for _ in range(5 + draw(3)):
            turns = [((PROMPT, LEFT, RIGHT)[draw(3)] if n else PROMPT, draw(5) / 4) for n in range(1 + draw(4))]
            found = dialogue(*turns, reply=[5, 6, 7][: 1 + draw(3)], agent=draw(2))
            found.versions = torch.where(found.loss_mask, torch.arange(len(found.loss_mask)) // 4, -1)
            group.append(found)
        groups.append(as_group(group))
    return join_groups(groups)


ESTIMATORS = [
    ("turn_norm", {"discount": 0.5}),
    ("turn_norm", {"std": False}),
    ("gigpo", {}),
    ("gigpo", {"anchor": "history", "weight": 0.5, "std": False}),
]


@pytest.mark.parametrize(("name", "args"), ESTIMATORS, ids=str)
@pytest.mark.parametrize("oldest", [0, 1], ids=["all trained", "old tokens masked"])
def test_turns_are_compared_as_defined_also_where_some_are_too_old_to_be_trained(name, args, oldest):
    for seed in range(5):
        batch = random_dialogues(seed)
        masked = mask_older(batch, oldest)
        assert (masked > 0) == (oldest > 0)
        actor = PolicyActor(None, AlgorithmConfig(advantage=name, advantage_args=args), temperature=1.0)
        actor.compute_advantages(batch)
        given = (batch, batch["token_rewards"])
        if name == "gigpo":
            wanted = turn_definitions.gigpo(*given, batch["scores"].tolist(), **args)
        else:
            wanted = turn_definitions.turn_norm(*given, **args)
        assert wanted.count_nonzero() > 3
        torch.testing.assert_close(batch["advantages"].double(), wanted, rtol=2e-6, atol=2e-6)


def test_nothing_to_train_is_no_advantage():
    batch = as_group([dialogue((PROMPT, 1.0)), dialogue((PROMPT, 0.0))])
    batch.tokens["loss_mask"] = torch.zeros_like(batch["loss_mask"])
    for name in ("turn_norm", "gigpo"):
        PolicyActor(None, AlgorithmConfig(advantage=name), temperature=1.0).compute_advantages(batch)
        assert not batch["advantages"].any()


# -- on their way -----------------------------------------------------------------------------------------------------


def places(batch):
    """The rewards by token that are not 0, and their places."""
    found = token_rewards(batch)
    return {int(t): round(float(found[t]), 6) for t in found.nonzero()[:, 0]}


def test_the_reward_of_a_reply_that_is_too_old_to_be_trained_is_that_of_the_one_before():
    # Replies end at tokens 3, 6 and 10.
    batch = as_group([dialogue((PROMPT, 1.0), (LEFT, 2.0), (RIGHT, 4.0)), dialogue((PROMPT, 8.0))])
    assert places(batch) == {3: 1.0, 6: 2.0, 10: 4.0, 14: 8.0}
    batch.tokens["loss_mask"][5:7] = False
    assert places(batch) == {3: 3.0, 10: 4.0, 14: 8.0}
    batch.tokens["loss_mask"][10] = False
    assert places(batch) == {3: 3.0, 9: 4.0, 14: 8.0}
    # What nothing trained has earned is no token's; the trajectory's score has it.
    batch.tokens["loss_mask"][:4] = False
    assert places(batch) == {9: 4.0, 14: 8.0}
    batch.tokens["loss_mask"][13:] = False
    assert places(batch) == {9: 4.0}
    RewardShaper(RewardShapingConfig(), AlgorithmConfig(), longest_reply=8)(batch)
    assert batch["scores"].tolist() == [7.0, 8.0]


@pytest.mark.parametrize(
    ("options", "wanted"),
    [
        ({}, [1.0, 3.0]),
        ({"per_token": True}, [0.25, 0.75]),
        ({"clip": 3.5}, [1.0, 2.5]),
        ({"cut_off_share": 0.5}, [0.5, 1.5]),
        ({"overlong_buffer": 1, "overlong_penalty": 2.0}, [1.0, 1.0]),
        # Of 4 and 0 the mean is 2 and the deviation too: what is subtracted stands on the last turn.
        ({"running": "std"}, [0.5, 1.5]),
        ({"running": "mean_std"}, [0.5, 0.5]),
        ({"per_token": True, "overlong_buffer": 1, "overlong_penalty": 2.0}, [0.25, 0.25]),
    ],
    ids=str,
)
def test_shaping_multiplies_each_turns_reward_and_puts_the_rest_at_the_end(options, wanted):
    batch = as_group([dialogue((PROMPT, 1.0), (LEFT, 3.0)), dialogue((PROMPT, 0.0))])
    shaper = RewardShaper(RewardShapingConfig(**options), AlgorithmConfig(), longest_reply=2)
    shaper(batch)
    found = batch["token_rewards"][:7]
    assert found[[3, 6]].tolist() == wanted and found.count_nonzero() == 2
    assert float(batch["scores"][0]) == pytest.approx(sum(wanted))


def test_a_reward_models_score_is_the_last_turns():
    batch = as_group([dialogue((PROMPT, 1.0), (LEFT, 3.0)), dialogue((PROMPT, 0.0))])
    add_scores(batch, torch.tensor([10.0, 20.0]), coefficient=0.5)
    assert batch["rewards"].tolist() == [9.0, 10.0] and places(batch) == {3: 1.0, 6: 8.0, 10: 10.0}


def test_a_microbatch_has_a_turns_reward_where_its_last_token_is_predicted():
    batch = as_group([dialogue((PROMPT, 1.0), (LEFT, 3.0)), dialogue((PROMPT, 0.5))])
    rows = packing.to_microbatch(batch, [1, 0]).rows
    assert rows["turn_rewards"].tolist() == [0, 0, 0.5, 0, 0, 0, 1, 0, 0, 3, 0]
    assert rows["labels"][[2, 6, 9]].tolist() == [6, 6, 6]


def changed(column=(0.0, 0.0, 0.0, 1.0), reward=1.0, **fields):
    found = dialogue((PROMPT, 1.0))
    found.tokens, found.reward = {"turn_rewards": torch.tensor(column), **fields}, reward
    return [dialogue((PROMPT, 0.0)), found]


def by_sequence():
    batch = as_group([dialogue((PROMPT, 1.0))])
    batch.sequences["turn_rewards"] = batch.tokens.pop("turn_rewards")[-1:]
    return batch


NAN = float("nan")
UNFIT = {
    "another sum": (
        changed(reward=2.0),
        "trajectory 1 with turn_rewards that add up to 1 and reward = 2: must be equal",
    ),
    "on the prompt": (changed((0, 1, 0, 0)), "trajectory 1 .* that hold 1.0 at token 1: .* 0 for a token that is not"),
    "no number": (changed((0, 0, NAN, 1)), "turn_rewards that hold nan at token 2: must be finite"),
    "for each trajectory": (by_sequence(), "turn_rewards that are not per token, or rewards that are"),
    "a length": (changed((0.0, 1.0)), r"trajectory 1 with turn_rewards of shape \(2,\)"),
}


@pytest.mark.parametrize("what", UNFIT)
def test_rewards_of_turns_that_are_not_those_of_their_dialogue_are_refused_by_name(what):
    result, message = UNFIT[what]
    with pytest.raises(ValueError, match=message):
        as_group(result)


def test_rewards_of_tokens_and_of_turns_are_not_both_given():
    both = dialogue((PROMPT, 1.0))
    both.tokens["rewards"] = both.tokens["turn_rewards"].clone()
    with pytest.raises(ValueError, match=r"give tokens\['turn_rewards'\] and .*, or tokens\['rewards'\] alone"):
        as_group([both])


def test_rewards_that_differ_by_rounding_alone_are_taken():
    turns = [(LEFT, 0.1 + 1e6 * (-1) ** n) for n in range(10)]
    assert as_group([dialogue((PROMPT, 0.3), *turns)])["turn_rewards"].dtype == torch.float32
    nothing_trained = dialogue((PROMPT, 0.0))
    nothing_trained.loss_mask, nothing_trained.reward = torch.zeros(4, dtype=torch.bool), 1.0
    group = as_group([nothing_trained, dialogue((PROMPT, 1.0))])
    assert isinstance(group, TrajectoryBatch) and group["rewards"].tolist() == [1.0, 1.0]
