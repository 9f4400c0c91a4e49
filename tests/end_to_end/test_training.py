"""A tiny model really learns, in every layout the same way, and a run says what it did."""

import pytest
from training_runs import COUNT, evaluations_of, mean, steps_of, train

from megatron_rl.launch.run_token import token_in

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("runs")


@pytest.fixture(scope="module")
def warm(folder):
    """The kept warm start: one run makes it, all others start from its bits."""
    arguments = (f"warm_start.folder={folder}/warm",)
    train(COUNT, *arguments, "run.steps=2", f"run.folder={folder}/one")
    return arguments


@pytest.fixture(scope="module")
def four_ranks(folder, warm):
    layout = ("parallel.tensor=2", "parallel.pipeline=2", "run.steps=60")
    return train(COUNT, *warm, *layout, f"run.folder={folder}/four", ranks=4, timeout_s=280)


def test_count_task_is_learned_on_four_ranks_with_two_servers(four_ranks, folder):
    rewards = [step["reward/mean"] for step in steps_of(folder / "four")]
    assert len(rewards) == 60
    assert mean(rewards[-10:]) >= mean(rewards[:10]) + 0.25
    scores = [line["accuracy"] for line in evaluations_of(folder / "four")]
    assert scores[-1] >= scores[0] and "held-out accuracy" in four_ranks
    assert (folder / "four" / "report.html").stat().st_size > 10_000 and (folder / "four" / "report.png").exists()
    assert (folder / "four" / "final" / "model.safetensors").exists()


def test_first_step_of_four_ranks_is_that_of_one_process(four_ranks, folder):
    one, four = steps_of(folder / "one")[0], steps_of(folder / "four")[0]
    assert one["reward/mean"] == four["reward/mean"], "both sampled the same replies"
    assert four["policy/first_loss"] == pytest.approx(one["policy/first_loss"], abs=1e-5)
    assert four["policy/first_grad_norm"] == pytest.approx(one["policy/first_grad_norm"], abs=1e-5, rel=1e-5)


def test_two_data_parallel_replicas_take_the_same_first_step(folder, warm):
    arguments = ("run.steps=1", "optimizer.distributed=true", "rollout.publication=ipc", f"run.folder={folder}/two")
    train(COUNT, *warm, *arguments, ranks=2)
    one, two = steps_of(folder / "one")[0], steps_of(folder / "two")[0]
    assert one["reward/mean"] == two["reward/mean"], "the replicas' executors sampled the same replies"
    assert one["publish/verified_tensors"] == two["publish/verified_tensors"] > 0, "whatever the transport"
    assert two["policy/first_loss"] == pytest.approx(one["policy/first_loss"], abs=1e-5)
    assert two["policy/first_grad_norm"] == pytest.approx(one["policy/first_grad_norm"], abs=1e-5, rel=1e-5)


def test_first_update_of_every_step_has_ratio_one(four_ranks, folder):
    # Two updates per step: the first is the proximal policy's own.
    for step in steps_of(folder / "four"):
        assert step["policy/first_ratio_deviation"] == 0
    assert max(step["policy/ratio_deviation"] for step in steps_of(folder / "four")) > 1e-3, "the second one moves"


def test_servers_sample_from_the_published_policy(four_ranks, folder):
    for step in steps_of(folder / "four"):
        # Per token, on average: what the trainer computes and what the server reported.
        assert step["mismatch/mean"] < 1e-4
        assert step["rollout/staleness"] == 0


def test_token_of_a_run_is_in_no_file_but_its_own(four_ranks, folder):
    own = folder / "four" / "token"
    token = token_in(own)
    others = [path for path in (folder / "four").rglob("*") if path.is_file() and path != own]
    assert {"server-0.log", "config.yaml", "metrics.jsonl", "rollout.log", "report.html"} <= {p.name for p in others}
    assert not [path for path in others if token.encode() in path.read_bytes()] and token not in four_ranks


@pytest.mark.parametrize("name", ["count_ppo_kl", "count_remax", "count_reinforce"])
def test_other_algorithms_learn_too(name, folder, warm):
    target = folder / name
    # Without n_samples the kept warm start would be another one.
    train(f"configs/{name}.yaml", f"warm_start.folder={folder}/{name}-warm", "run.steps=40", f"run.folder={target}")
    steps = steps_of(target)
    assert mean(s["reward/mean"] for s in steps[-8:]) >= mean(s["reward/mean"] for s in steps[:8]) + 0.1
    if name == "count_ppo_kl":
        assert all(step["policy/reference_kl"] > 1e-3 for step in steps[-8:]), "the policy left its reference"


@pytest.fixture(scope="module")
def with_critic(folder):
    target, warm_start = folder / "critic", f"warm_start.folder={folder}/count_ppo_kl-warm"
    arguments = ("parallel.tensor=2", "critic.parallel.pipeline=2", "run.steps=25", f"run.folder={target}")
    train("configs/count_ppo_critic.yaml", warm_start, *arguments, ranks=2)
    return target


def test_ppo_learns_with_its_critic_in_another_layout(with_critic):
    steps = steps_of(with_critic)
    assert mean(s["reward/mean"] for s in steps[-8:]) >= mean(s["reward/mean"] for s in steps[:8]) + 0.1
    assert not any("policy/loss" in step for step in steps[:5]) and "policy/loss" in steps[5], "the critic warms up"
    assert mean(s["critic/explained_variance"] for s in steps[-8:]) > 0.3
    assert mean(s["critic/explained_variance"] for s in steps[:2]) < 0.2, "it started from a head of zeros"


def test_a_critic_that_was_saved_scores_as_a_reward_model(with_critic, folder, warm):
    model = (f"reward_model.path={with_critic}/final-critic", "reward_model.coefficient=0.5")
    train(COUNT, *warm, *model, "run.steps=1", f"run.folder={folder}/scored")
    plain, scored = steps_of(folder / "one")[0], steps_of(folder / "scored")[0]
    # It was trained on states in which a token is chosen; what it makes of a finished reply is only of that order.
    assert 0.0 < abs(scored["reward/model"]) < 1.0
    assert scored["reward/mean"] == pytest.approx(plain["reward/mean"] + 0.5 * scored["reward/model"])


def test_demo_config_passes_its_checks_where_the_model_is(folder, warm):
    # The demo's own model may not be there; everything else of its config is checked against the kept warm start.
    out = train("configs/demo.yaml", f"model.path={folder}/warm", "generation.max_new_tokens=4", "--dry-run")
    assert "prompts_per_step: 8" in out and "path:" in out


def test_one_started_run_can_be_followed_by_another_from_its_weights(folder, warm):
    train(
        COUNT,
        "warm_start.updates=0",
        f"model.path={folder}/warm",
        "model.init=hf",
        "run.steps=1",
        "rollout.publication=delta",
        f"run.folder={folder}/again",
    )
    # What the step changed, to two servers: less than the weights, which were sent before it.
    step = steps_of(folder / "again")[0]
    assert 0 < step["publish/sent_bytes"] < 2 * step["publish/bytes"]
    first = evaluations_of(folder / "again")[0]["accuracy"]
    assert first == evaluations_of(folder / "one")[0]["accuracy"]


# Two updates a step, the config's own: the bound counts policies that were published, and a step publishes one.
# Two updates a step: the bound counts policies that were published, and a step publishes one.
@pytest.mark.parametrize("eta, proximal", [(1, "recompute"), (2, "loglinear")])
def test_asynchronous_run_learns_and_trains_no_token_older_than_the_bound(folder, warm, eta, proximal):
    folder = folder / f"async-{eta}"
    arguments = (f"rollout.max_staleness={eta}", f"correction.proximal={proximal}", "correction.weight=mask")
    arguments += ("run.steps=30", "run.evaluate_every_steps=10")
    train(COUNT, *warm, *arguments, f"run.folder={folder}")
    steps = steps_of(folder)
    assert [step["policy/version"] for step in steps] == list(range(1, 31))
    assert mean(s["reward/mean"] for s in steps[-8:]) >= mean(s["reward/mean"] for s in steps[:8]) + 0.1
    assert max(step["rollout/staleness"] for step in steps) > 0, "it ran ahead"
    assert max(step["rollout/staleness_max"] for step in steps) <= eta
    evaluations = evaluations_of(folder)
    assert [line["step"] for line in evaluations] == [0, 10, 20, 30], "none was lost, though nobody waited"
    assert all(line["oldest_version"] >= line["step"] for line in evaluations)
