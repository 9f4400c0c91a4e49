"""Every algorithm learns: the mean reward of a run's last ten steps is 0.25 above that of its first ten.

Where nothing else is asked of a run, it ends with the first step that shows it: ten standard deviations of such a
mean above its beginning. The runs are forked from this process and share a server, and for each task the warm start.
GRPO learns the count task in test_training.py, on four ranks, and here to copy letters from nothing.

`make test` has one asynchronous run. The other estimators, tasks and layouts are thorough: they differ in what
tests/unit/algo, tests/unit/data and tests/megatron compare with definitions.
"""

import functools

import pytest

from tests.kit.runs import COUNT, evaluations_of, mean, steps_of, train_forked, train_until

pytestmark = pytest.mark.slow

SMALL = ("run.save_at_end=false", "run.evaluate_every_steps=0", "rollout.reward_workers=1")
FEW_HELD_OUT = ("run.evaluate_every_steps=10", "data.evaluation_args.count=16")
STEPS, ASYNCHRONOUS_STEPS = 60, 200
"""At most. A run takes 20 to 45. One that samples ahead takes more or fewer each time, as the machine's load lets its
replies become older or younger: it ends by its last five steps, seven standard deviations above its first five."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("runs")


@pytest.fixture(scope="module")
def learn(folder, server, warm_start):
    """Runs a config until its steps show what is wanted, if anything is, unless a run of this name has done so.

    Returns the run's folder.
    """

    def run(name, config, *overrides, ranks=1, until=None):
        target, task = folder / name, config.removeprefix("configs/").partition("_")[0]
        if not target.exists():
            kept = warm_start if task == "count" else (f"warm_start.folder={folder}/{task}-warm",)
            settings = [*SMALL, *server, *(kept if task != "copy" else ()), f"run.folder={target}"]
            train = train_forked if until is None else functools.partial(train_until, until)
            train(config, *settings, f"run.steps={STEPS}", *overrides, ranks=ranks)
        return target

    return run


def rewards_of(steps):
    return [step["reward/mean"] for step in steps]


def in_band(steps, window=10):
    rewards = rewards_of(steps)
    return len(rewards) >= 2 * window and mean(rewards[-window:]) >= mean(rewards[:window]) + 0.25


soon_in_band = functools.partial(in_band, window=5)


def values_are_in_band(steps):
    return in_band(steps) and mean(step["critic/explained_variance"] for step in steps[-8:]) > 0.3


def check_band(run):
    assert in_band(steps_of(run)), rewards_of(steps_of(run))


FAST = "optimizer.lr=1e-3"
"""Twice the configs' own, with which a run takes half as many steps."""
RLOO = (COUNT, "algo.advantage=rloo", FAST)
ESTIMATORS = {
    "rloo": RLOO,
    "reinforce++": (COUNT, "algo.advantage=reinforce++", FAST),
    "reinforce": ("configs/count_reinforce.yaml", FAST),
    # Greedy replies are mostly right from the start, so most that it learns from are wrong ones.
    "remax": ("configs/count_remax.yaml", FAST),
}


@pytest.mark.thorough
@pytest.mark.parametrize("name", ESTIMATORS)
def test_counting_is_learned_with(name, learn):
    check_band(learn(name, *ESTIMATORS[name], until=in_band))


@pytest.mark.thorough
def test_counting_is_learned_beside_a_reference(learn):
    run = learn("kl", "configs/count_ppo_kl.yaml", FAST, until=in_band)
    check_band(run)
    assert all(step["policy/reference_kl"] > 1e-3 for step in steps_of(run)[-8:]), "the policy left its reference"


@pytest.fixture(scope="module")
def with_critic(learn):
    """The run's folder, with both models as they are after 20 steps, which it takes at least."""
    other_layout = ("critic.parallel.tensor=1", "critic.parallel.pipeline=2")
    arguments = ("parallel.tensor=2", *other_layout, "run.save_every_steps=20")
    return learn("ppo", "configs/count_ppo_critic.yaml", *arguments, FAST, ranks=2, until=values_are_in_band)


@pytest.mark.thorough
def test_counting_is_learned_by_ppo_with_its_critic_in_another_layout(with_critic):
    check_band(with_critic)
    steps = steps_of(with_critic)
    assert not any("policy/loss" in step for step in steps[:5]) and "policy/loss" in steps[5], "the critic warms up"
    assert values_are_in_band(steps), [step["critic/explained_variance"] for step in steps]
    assert mean(step["critic/explained_variance"] for step in steps[:2]) < 0.2, "it started from a head of zeros"


@pytest.mark.thorough
def test_a_critic_that_was_saved_scores_as_a_reward_model(with_critic, learn):
    plain = steps_of(learn("rloo", *ESTIMATORS["rloo"], until=in_band))[0]
    model = (f"reward_model.path={with_critic}/step-20-critic", "reward_model.coefficient=0.5")
    scored = steps_of(learn("scored", *RLOO, *model, "run.steps=1"))[0]
    # It was trained on states in which a token is chosen; what it makes of a finished reply is only of that order.
    assert 0.0 < abs(scored["reward/model"]) < 1.0
    assert scored["reward/mean"] == pytest.approx(plain["reward/mean"] + 0.5 * scored["reward/model"])


# Two updates a step: the bound counts policies that were published, and a step publishes one.
@pytest.mark.parametrize("eta, proximal", [pytest.param(1, "recompute", marks=pytest.mark.thorough), (2, "loglinear")])
def test_counting_is_learned_asynchronously_and_no_trained_token_is_older_than_the_bound(eta, proximal, learn):
    arguments = (f"rollout.max_staleness={eta}", f"correction.proximal={proximal}", "correction.weight=mask", FAST)
    arguments += FEW_HELD_OUT
    run = learn(f"async-{eta}", COUNT, *arguments, f"run.steps={ASYNCHRONOUS_STEPS}", until=soon_in_band)
    steps = steps_of(run)
    assert soon_in_band(steps), rewards_of(steps)
    assert [step["policy/version"] for step in steps] == list(range(1, len(steps) + 1))
    assert max(step["rollout/staleness"] for step in steps) > 0, "it ran ahead"
    assert max(step["rollout/staleness_max"] for step in steps) <= eta
    evaluations = evaluations_of(run)
    begun = list(range(0, ASYNCHRONOUS_STEPS, 10))[: len(evaluations)]
    assert [line["step"] for line in evaluations] == begun, "none was lost, though nobody waited"
    assert len(begun) >= 2, "those that the end of the run cut short were its last"
    assert all(line["oldest_version"] >= line["step"] for line in evaluations)


@pytest.mark.thorough
def test_sorting_is_learned_by_ppo(learn):
    few = "data.evaluation_args.count=32"  # the warm start asks for eight replies to each, every ten updates
    check_band(learn("sort", "configs/sort_ppo.yaml", few, "batch.updates_per_step=4", until=in_band))


@pytest.mark.thorough
def test_copying_is_learned_from_nothing_by_a_shaped_reward_and_an_entropy_bonus(learn):
    def is_learned(steps):
        return len(steps) >= 30 and mean(rewards_of(steps)[-10:]) > 0.5

    steps = steps_of(learn("copy", "configs/copy_entropy.yaml", "run.steps=85", until=is_learned))
    assert mean(rewards_of(steps)[:20]) < 0.1 and is_learned(steps), rewards_of(steps)


@pytest.mark.thorough
def test_ten_calls_of_a_tool_in_a_row_are_learned_from_the_first_of_them(learn):
    # The warm start's checks ask for two dialogues of each held-out trail.
    few = ("data.evaluation_args.count=16", "batch.prompts_per_step=4")
    run = learn("trail", "configs/trail_grpo.yaml", *few, until=in_band)
    check_band(run)
    assert mean(rewards_of(steps_of(run))[-5:]) > 0.6, "six calls of ten, of which the warm start had taught the first"
