"""The simulated loop against clocks worked out by hand, and against what bounds it."""

import dataclasses
import itertools

import pytest

from megatron_rl.tools.plan.simulation import Run, Workload, simulate


def work(groups, **changes):
    options = {
        "servers": 1,
        "slots": 2,
        "token_s": lambda replies, tokens: 1.0,
        "read_s": 0.0,
        "prompt_tokens": 0,
        "groups_per_step": 2,
        "groups_at_once": 100,
        "max_staleness": 0,
        "update_s": 1.0,
        "publish_s": 0.5,
    }
    return Workload(groups=itertools.cycle(groups), **options | changes)


# Together: as long as the longer. One after the other. At n seconds for a token of n replies: 3 tokens of two replies,
# then 2 of one. On two servers. With prompts of 10 tokens, 0.1 s each, which are read before anything is decoded.
@pytest.mark.parametrize(
    "changes,wait_s",
    [
        ({}, 5),
        ({"slots": 1}, 8),
        ({"token_s": lambda replies, tokens: replies}, 8),
        ({"token_s": lambda replies, tokens: replies, "servers": 2}, 5),
        ({"prompt_tokens": 10, "read_s": 0.1}, 7),
        ({"groups_at_once": 1}, 8),
    ],
)
def test_a_synchronous_step_by_hand(changes, wait_s):
    outcome = simulate(work([[3], [5]], **changes), steps=3)
    assert outcome.wait_s == pytest.approx(wait_s) and outcome.step_s == pytest.approx(wait_s + 1.5)
    assert outcome.tokens == 8


def test_busy_and_slots_by_hand():
    outcome = simulate(work([[3], [5]], servers=2, slots=1), steps=2)
    assert outcome.busy == outcome.slots == pytest.approx((3 + 5) / 2 / 6.5)
    outcome = simulate(work([[3], [5]]), steps=2)
    assert outcome.busy == pytest.approx(5 / 6.5) and outcome.slots == pytest.approx((3 + 5) / 2 / 6.5)


def test_tokens_that_cost_more_the_longer_their_reply_is():
    # Of one reply: token t costs t seconds, 0.5 + 1.5 + ... on average over each; the mean is taken halfway.
    outcome = simulate(work([[10]], groups_per_step=1, token_s=lambda replies, tokens: tokens), steps=1)
    assert outcome.wait_s == pytest.approx(10 * 5)


def test_interrupted_replies_are_read_again():
    # Groups 0 and 1 end at 10. Step 0 updates until 14 and publishes until 15, when group 2 begins. Step 1 has group 1
    # and waits for nothing; it publishes from 19 to 20, when group 2 has 4 tokens. They are read until 20.4, and its
    # other 6 end at 26.4.
    run = Run(work([[10]], groups_per_step=1, max_staleness=1, update_s=4.0, publish_s=1.0, read_s=0.1))
    waited = [run.step()[0] for _ in range(3)]
    assert waited == [pytest.approx(10), 0, pytest.approx(6.4)]


@pytest.mark.parametrize("staleness,at_once", [(0, 100), (2, 100), (3, 5)])
def test_no_more_groups_exist_than_staleness_and_concurrency_allow_and_no_fewer(staleness, at_once):
    run = Run(work([[1], [9], [4]], max_staleness=staleness, groups_at_once=at_once))
    for version in range(6):
        run.step()
        run.gate.begin_step(2, run.version, waiting=len(run.done))
        run.admit()
        exist = len(run.done) + len(run.with_servers)
        assert len(run.with_servers) == at_once or exist == (staleness + 1) * 2, version


def test_a_group_that_is_too_old_is_sampled_again_and_then_waited_for():
    # A token takes a second. The group of 50 begins at version 0 and is done at 50. Until then the trainer has the
    # short ones: at 2 (a third begins only then), 4 and so on; with 50 it is far behind, and its prompt is sampled once
    # more. That is waited for as soon as it would be too old for the next step, which is at once.
    groups = itertools.chain([[50]], itertools.repeat([2]))
    endless = dataclasses.replace(
        work([[1]], groups_per_step=1, max_staleness=1, update_s=0.0, publish_s=0.0), groups=groups
    )
    run = Run(endless)
    waited = [run.step()[0] for _ in range(30)]
    assert max(waited) == pytest.approx(50) and waited.count(max(waited)) == 1
    kept = Run(dataclasses.replace(endless, drops_stale=False, groups=itertools.chain([[50]], itertools.repeat([2]))))
    assert max(kept.step()[0] for _ in range(30)) == pytest.approx(2)


def test_the_slower_of_both_decides_where_staleness_allows():
    lengths = [[length] for length in (1, 30, 7, 60, 15, 4, 22, 45)]
    steps = {"steps": 40, "first": 10}
    update = simulate(work(lengths, max_staleness=8, update_s=200.0), **steps)
    assert update.wait_s == 0 and update.step_s == 200.5
    # Servers that are never empty: two replies of 23 tokens on average, two at a time.
    decode = simulate(work(lengths, max_staleness=8, update_s=0.01, publish_s=0.0), **steps)
    assert decode.step_s == pytest.approx(sum(map(sum, lengths)) / 8, rel=0.05)
    assert decode.slots > 0.98
    apart = [simulate(work(lengths, max_staleness=eta, update_s=20.0), **steps).step_s for eta in (0, 1, 2, 8)]
    assert apart == sorted(apart, reverse=True) and apart[0] > 1.5 * apart[-1]
