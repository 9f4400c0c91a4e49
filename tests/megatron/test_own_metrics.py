"""What a user's loss logs is one mean over the step in every layout, and a loss that trains nothing is told."""

from __future__ import annotations

import pytest

from megatron_rl import log_metric, parallel, stats_tracker
from megatron_rl.algo import actor as actor_module
from megatron_rl.algo import registry
from megatron_rl.algo.actor import PolicyActor
from megatron_rl.algo.loss import PolicyLoss
from megatron_rl.api import LogprobLoss
from megatron_rl.config import AlgorithmConfig
from megatron_rl.config.rules import ENTERED
from megatron_rl.run.step_metrics import user_metrics
from tests.kit.models import LAYOUTS, make_batch, make_engine, make_model, share_of
from tests.kit.ranks import run_each


def logging_loss(rows, options):
    log_metric("square", rows.behavior_logprobs[rows.trained].square())
    stats_tracker.scalar(seven=7)
    return -rows.advantages * rows.ratio


def detached(rows, options):
    return -rows.advantages * rows.ratio.detach()


def flat(rows, options):
    return -rows.advantages * (rows.logprobs - rows.logprobs)


@pytest.fixture(autouse=True, scope="module")
def entered():
    """Enter the losses for the tests of this file: later ones look at every entry of the catalogue."""
    named = {"logging": logging_loss, "detached": detached, "flat": flat}
    for name, function in named.items():
        registry.torch_loss(name)(function)
    yield
    for name in named:
        del registry.LOSSES[name]
        ENTERED["loss"].discard(name)


def logged(folder, layout, batch):
    """Return the metrics of an update whose loss sees rows one by one, and of one whose loss sees sequences."""
    groups, found = parallel.start(LAYOUTS[layout][1], seed=1), []
    engine = make_engine(folder, LAYOUTS[layout][1], tokens_per_microbatch=25, groups=groups).train()
    loss = PolicyLoss(AlgorithmConfig(loss="logging"))
    for by_row in (True, False):
        stats_tracker.take()
        engine.train_batch(share_of(batch, engine), LogprobLoss(loss, by_row=by_row))
        found.append(user_metrics(groups))
    return found


def warned(folder, names):
    """Return the warnings of three steps with each loss."""
    engine, words = make_engine(folder, LAYOUTS["1"][1]).train(), {}
    for name in names:
        actor, words[name] = PolicyActor(engine, AlgorithmConfig(loss=name), temperature=1.0), []
        actor_module.logger.warning = lambda form, *args, said=words[name]: said.append(form % args)
        for _ in range(3):
            actor.update([make_batch()])
    return words


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("qwen3")
    make_model("qwen3_tied_one_kv_head", folder)
    return folder


def test_numbers_of_a_loss_are_means_over_all_microbatches_and_ranks(folder):
    batch = make_batch(lengths=(5, 24, 7, 12, 3, 14))
    layouts = ("dp2", "pp2", "cp2")
    square = float(batch["logprobs"][batch["loss_mask"]].double().square().mean())
    for main, other in run_each(2, logged, {layout: (folder, layout, batch) for layout in layouts}).values():
        assert main == [{"user/square": pytest.approx(square), "user/seven": 7.0}] * 2
        assert other == [{}, {}]


def test_a_loss_without_a_gradient_is_told_once_by_its_name(folder):
    names = ("detached", "flat", "logging", "ppo_clip")
    ((words,),) = run_each(1, warned, {"": (folder, names)}).values()
    assert [len(words[name]) for name in names] == [1, 1, 0, 0]
    assert f"algo.loss = 'detached', detached ({__file__}:" in words["detached"][0]
    assert "does not depend on the policy" in words["detached"][0] and "the gradient is 0 though" in words["flat"][0]
