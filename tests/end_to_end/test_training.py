"""A tiny model really learns, in every layout the same way, and a run says what it did.

In `make test` two stages take a few steps; that a run learns is seen in test_learning.py, on one rank.
"""

import itertools

import pytest

from megatron_rl.algo.actor import PolicyActor
from megatron_rl.launch.run_token import token_in
from megatron_rl.train import main
from tests.kit.forks import check_end, start_ranks
from tests.kit.ranks import run_ranks
from tests.kit.runs import COUNT, evaluations_of, mean, served_by, steps_of, train_forked, train_under_torchrun
from tests.kit.waiting import LATE_S

pytestmark = pytest.mark.slow

STEPS = 36
"""Steps of the run on several ranks if the test that it learns is selected, on four of them; else FEW, on two."""
FEW = 2
FIRST_STEP = ("run.steps=1", "run.save_at_end=false")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("runs")


@pytest.fixture(scope="module")
def warm(folder, warm_start, servers):
    """The kept warm start, from whose bits all runs start, and one run that has done so."""
    train_forked(COUNT, *warm_start, *servers, *FIRST_STEP, f"run.folder={folder}/one")
    return warm_start


def policy_of(warm):
    return warm[0].removeprefix("warm_start.folder=")


@pytest.fixture(scope="module")
def servers(two_servers):
    """Two for one run after the other; that on several ranks starts its own."""
    return served_by(two_servers)


@pytest.fixture(scope="module")
def several_ranks(folder, warm, request):
    """The output of the run."""
    is_long = any(item.function is test_count_task_is_learned_on_four_ranks for item in request.session.items)
    ranks, steps = (4, STEPS) if is_long else (2, FEW)
    layout = (f"parallel.tensor={ranks // 2}", "parallel.pipeline=2", "optimizer.lr=1e-3", f"run.steps={steps}")
    settings, output = (COUNT, *warm, *layout, f"run.folder={folder}/several"), folder / "several.txt"
    check_end(start_ranks(ranks, lambda settings: main(list(settings)), settings, output), output)
    return output.read_text()


@pytest.mark.thorough
def test_count_task_is_learned_on_four_ranks(several_ranks, folder):
    rewards = [step["reward/mean"] for step in steps_of(folder / "several")]
    assert len(rewards) == STEPS
    assert mean(rewards[-10:]) >= mean(rewards[:10]) + 0.25
    scores = [line["accuracy"] for line in evaluations_of(folder / "several")]
    # The warm start's likeliest replies are mostly right already: what is learned shows in those that are sampled.
    # 0.17 are three standard errors of 64 prompts.
    assert len(scores) == 3 and scores[-1] >= scores[0] - 0.17 and "held-out accuracy" in several_ranks
    assert (folder / "several" / "report.html").stat().st_size > 10_000 and (folder / "several" / "report.svg").exists()
    assert (folder / "several" / "final" / "model.safetensors").exists()


def test_first_step_of_several_ranks_is_that_of_one_process(several_ranks, folder):
    one, several = steps_of(folder / "one")[0], steps_of(folder / "several")[0]
    assert one["reward/mean"] == several["reward/mean"], "both sampled the same replies"
    assert several["policy/first_loss"] == pytest.approx(one["policy/first_loss"], abs=1e-5)
    assert several["policy/first_grad_norm"] == pytest.approx(one["policy/first_grad_norm"], abs=1e-5, rel=1e-5)


@pytest.mark.thorough  # test_stopping.py compares two replicas with one
@pytest.mark.parametrize("start", [train_forked, train_under_torchrun], ids=lambda it: it.__name__)
def test_two_data_parallel_replicas_take_the_same_first_step(start, warm, servers, folder, tmp_path):
    arguments = (*FIRST_STEP, "optimizer.distributed=true", "rollout.publication=ipc", f"run.folder={tmp_path}/two")
    start(COUNT, *warm, *servers, *arguments, ranks=2)
    one, two = steps_of(folder / "one")[0], steps_of(tmp_path / "two")[0]
    assert one["reward/mean"] == two["reward/mean"], "the replicas' executors sampled the same replies"
    assert one["publish/verified_tensors"] == two["publish/verified_tensors"] > 0, "whatever the transport"
    assert two["policy/first_loss"] == pytest.approx(one["policy/first_loss"], abs=1e-5)
    assert two["policy/first_grad_norm"] == pytest.approx(one["policy/first_grad_norm"], abs=1e-5, rel=1e-5)


def test_first_update_of_every_step_has_ratio_one(several_ranks, folder):
    # Two updates per step: the first is the proximal policy's own.
    for step in steps_of(folder / "several"):
        assert step["policy/first_ratio_deviation"] == 0
    assert max(step["policy/ratio_deviation"] for step in steps_of(folder / "several")) > 1e-3, "the second one moves"


def test_servers_sample_from_the_published_policy(several_ranks, folder):
    for step in steps_of(folder / "several"):
        # Per token, on average: what the trainer computes and what the server reported.
        assert step["mismatch/mean"] < 1e-4
        assert step["rollout/staleness"] == 0


def test_token_of_a_run_is_in_no_file_but_its_own(several_ranks, folder):
    own = folder / "several" / "token"
    token = token_in(own)
    others = [path for path in (folder / "several").rglob("*") if path.is_file() and path != own]
    written = {"server-0.log", "config.yaml", "metrics.jsonl", "rollout.log", "report.html", "report.svg"}
    assert written | {"model.safetensors"} <= {path.name for path in others}
    assert not [path for path in others if token.encode() in path.read_bytes()] and token not in several_ranks


def first_step_skipped(arguments):
    """Train with advantages that are no number in the first step's updates."""
    update, steps = PolicyActor.update, itertools.count()

    def spoiled(self, shares, *more):
        if next(steps) == 0:
            for share in shares:
                share.tokens["advantages"][share["loss_mask"]] = float("nan")
        return update(self, shares, *more)

    PolicyActor.update = spoiled
    main(arguments)


def test_a_step_whose_updates_are_all_skipped_keeps_its_version_and_the_next_one_gets_its_prompts(
    folder, warm, servers
):
    more = ("run.steps=3", "run.save_at_end=false", "rollout.max_staleness=1", "rollout.publication=delta")
    more += (f"run.folder={folder}/skipped",)
    run_ranks(1, first_step_skipped, [COUNT, *warm, *servers, *more], timeout_s=LATE_S)
    steps = steps_of(folder / "skipped")
    assert [step["policy/skipped_updates"] for step in steps] == [2, 0, 0]
    assert [step["policy/version"] for step in steps] == [0, 1, 2]
    assert steps[0]["policy/loss"] is None and steps[2]["policy/loss"] is not None
    assert all(step["mismatch/max_age_0"] < 1e-3 for step in steps[:2]), "servers hold the weights of the version"


def test_demo_config_passes_its_checks_where_the_model_is(folder, warm, capfd):
    # The demo's own model may not be there; everything else of its config is checked against the kept warm start.
    train_forked("configs/demo.yaml", f"model.path={policy_of(warm)}", "generation.max_new_tokens=4", "--dry-run")
    out = capfd.readouterr().out
    assert "prompts_per_step: 8" in out and "path:" in out


def test_one_started_run_can_be_followed_by_another_from_its_weights(folder, warm, servers):
    train_forked(
        COUNT,
        *servers,
        "warm_start.updates=0",
        f"model.path={policy_of(warm)}",
        "model.init=hf",
        *FIRST_STEP,
        "rollout.publication=delta",
        f"run.folder={folder}/again",
    )
    # What the step changed, to two servers: less than the weights, which were sent before it.
    step = steps_of(folder / "again")[0]
    assert 0 < step["publish/sent_bytes"] < 2 * step["publish/bytes"]
    first = evaluations_of(folder / "again")[0]["accuracy"]
    assert first == evaluations_of(folder / "one")[0]["accuracy"]
