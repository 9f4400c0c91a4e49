"""The tracker of a loop of one's own: numerators and denominators by scope, seconds by name."""

import asyncio
import contextvars

import pytest
import torch

from megatron_rl import stats_tracker
from megatron_rl.telemetry.rollout_metrics import is_counted
from megatron_rl.telemetry.stats_tracker import StatsTracker, means_of
from tests.unit.telemetry.test_timers import Clock


def test_timings_scopes_and_means_are_exported_once():
    clock = Clock()
    tracker = StatsTracker(clock)
    for step in (1.0, 3.0):
        with tracker.record_timing("train_step"), tracker.scope("actor"):
            clock.now += step
            with tracker.scope("loss"):
                tracker.scalar(value=step)
    tracker.scalar(lr=0.5)
    seconds = {"time/train_step": 4.0, "time/step": 4.0}
    assert tracker.export() == {"actor/loss/value": 2.0, "lr": 0.5} | seconds
    assert tracker.export() == {"time/step": 0.0}


def test_a_mean_is_divided_once_whatever_the_parts_lengths():
    tracker = StatsTracker()
    with tracker.scope("actor"):
        for mask, values in (([True, False, True], [1.0, 100.0, 2.0]), ([True], [6.0]), ([False], [9.0])):
            tracker.denominator(tokens=torch.tensor(mask))
            tracker.stat(denominator="tokens", entropy=torch.tensor(values, requires_grad=True))
    tracker.denominator(none=torch.zeros(2))
    tracker.stat(denominator="none", nothing=torch.ones(2))
    exported = tracker.export()
    assert (exported["actor/tokens"], exported["actor/entropy"], exported["none"]) == (3.0, 3.0, 0.0)
    assert "nothing" not in exported


def test_a_mean_without_its_denominator_is_refused():
    tracker = StatsTracker()
    with tracker.scope("actor"):
        tracker.denominator(tokens=torch.ones(2))
        with pytest.raises(ValueError, match=r"stat\(loss=...\) has shape \(3,\), and its denominator 'tokens' \(2,\)"):
            tracker.stat(denominator="tokens", loss=torch.ones(3))
    with pytest.raises(ValueError, match=r"stat\(denominator='tokens'\): is not known in the scope ''"):
        tracker.stat(denominator="tokens", loss=torch.ones(2))


def test_the_package_offers_the_tracker_of_the_process():
    stats_tracker.export()
    with stats_tracker.record_timing("rollout"), stats_tracker.scope("actor"):
        stats_tracker.scalar(loss=2.0)
    exported = stats_tracker.export()
    assert exported["actor/loss"] == 2.0 and exported["time/rollout"] <= exported["time/step"]


def test_a_metric_is_the_mean_over_numbers_and_entries_of_tensors():
    tracker = StatsTracker()
    tracker.log_metric("length", 5)
    tracker.log_metric("length", torch.tensor([1.0, 2.0, 4.0], requires_grad=True))
    tracker.log_metric("right", torch.tensor([True, False]))
    tracker.log_metric("none", torch.zeros(0))
    tracker.scalar(loss=torch.tensor(3.0))
    first, second = tracker.take(), {"length": (8.0, 1.0), "loss": (1.0, 1.0)}
    assert first["length"] == (12.0, 4.0) and tracker.take() == {}
    assert means_of([first, second]) == {"length": 4.0, "right": 0.5, "loss": 2.0}
    for wrong in ("1", None, [1.0, 2.0]):
        with pytest.raises(ValueError, match=r"log_metric\('x', .*\): must be a number or a tensor"):
            tracker.log_metric("x", wrong)


def test_a_tensor_is_not_read_before_the_step_ends():
    StatsTracker().log_metric("far", torch.empty(3, device="meta"))  # has no value to read


def test_scopes_of_tasks_that_run_beside_each_other_do_not_mix():
    tracker = StatsTracker()

    async def episode(name):
        with tracker.scope(name):
            await asyncio.sleep(0)
            tracker.log_metric("turns", 1)

    async def both():
        await asyncio.gather(episode("a"), episode("b"))

    asyncio.run(both())
    assert tracker.take().keys() == {"a/turns", "b/turns"}


def test_an_evaluation_logs_nothing():
    tracker = StatsTracker()

    def evaluate():
        is_counted.set(False)
        tracker.log_metric("turns", 1)
        tracker.add({"calls": [1.0, 1.0]})

    contextvars.copy_context().run(evaluate)
    assert tracker.take() == {}


def test_a_scope_and_a_timing_that_raise_end_too():
    tracker = StatsTracker()
    for _ in range(2):
        with pytest.raises(KeyError), tracker.record_timing("a"), tracker.scope("b"):
            raise KeyError
    tracker.scalar(c=1.0)
    assert set(tracker.export()) == {"c", "time/a", "time/step"}
