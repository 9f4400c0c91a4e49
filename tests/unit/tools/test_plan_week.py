"""A simulated week: without faults it is the plan's simulation and by-hand clocks, with them nothing is lost unseen."""

import dataclasses
import itertools
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_rl.cli import main
from megatron_rl.tools.plan import chances as drawn
from megatron_rl.tools.plan import week_text
from megatron_rl.tools.plan.chances import Chances
from megatron_rl.tools.plan.simulation import Workload, simulate
from megatron_rl.tools.plan.step_sizes import ReplyTokens
from megatron_rl.tools.plan.week import Days, Job

ROOT = Path(__file__).resolve().parents[3]
RESULTS = ROOT / "benchmarks" / "results" / "plan_weeks.txt"


def work(groups, **changes):
    options = {
        "servers": 2,
        "slots": 4,
        "token_s": lambda replies, tokens: 1.0,
        "read_s": 0.0,
        "prompt_tokens": 0,
        "groups_per_step": 4,
        "groups_at_once": 100,
        "max_staleness": 0,
        "update_s": 5.0,
        "publish_s": 0.5,
    }
    return Workload(groups=itertools.cycle(groups), **options | changes)


def job(**changes):
    options = {"server_gpus": 1, "trainer_gpus": 1, "interruption": "abort", "checkpoint_every": 2, "checkpoint_s": 0.0}
    return Job(**options | changes)


@pytest.fixture
def no_faults(monkeypatch):
    for name in ("GPU_FAILURES_PER_S", "SERVER_CRASHES_PER_S", "SLOW_SERVERS_PER_S", "UPDATE_SLOWNESS"):
        monkeypatch.setattr(drawn, name, 1e-18)
    monkeypatch.setattr(drawn, "PUBLICATION_SPREAD", 0.0)


# Lengths of 10 tokens, 4 groups of 2 replies a step on 2 servers of 4 slots: one wave, and of 2 slots two waves. Where
# staleness allows, the slower of trainer and servers decides: 8 replies of 10 s in 2 slots.
@pytest.mark.parametrize(
    "changes,step_s",
    [
        ({}, 10 + 5 + 0.5),
        ({"slots": 2}, 20 + 5 + 0.5),
        ({"prompt_tokens": 3, "read_s": 0.1}, 4 * 0.3 + 10 + 5 + 0.5),
        ({"max_staleness": 4, "update_s": 25.0}, 25 + 0.5),
        ({"max_staleness": 4, "update_s": 0.01, "slots": 1, "publish_s": 0.0}, 8 * 10 / 2),
    ],
)
def test_without_faults_and_with_one_length_the_rate_is_the_closed_form(no_faults, changes, step_s):
    record = Days(work([[10, 10]], **changes), job(), Chances(0)).run(40_000)
    assert record.groups_per_s == pytest.approx(4 / step_s, rel=2e-3)
    assert (record.server_deaths, record.trainer_deaths, record.lost_tokens, record.lost_time) == (0, 0, 0, 0)


@pytest.mark.parametrize("staleness", [0, 1, 3])
def test_without_faults_it_is_the_simulation_of_the_plan(no_faults, staleness):
    lengths = [[length, 2 * length] for length in (1, 30, 7, 60, 15, 4, 22, 45)]
    options = {"max_staleness": staleness, "prompt_tokens": 3, "read_s": 0.01}
    outcome = simulate(work(lengths, **options), steps=50)
    days = Days(work(lengths, **options), job(), Chances(0))
    waited = [days.step()[0] for _ in range(50)]
    assert days.now / 50 == pytest.approx(outcome.step_s) and sum(waited) / 50 == pytest.approx(outcome.wait_s)


class First:
    """Draws the first of several, and a hundred seconds."""

    def choice(self, servers):
        return servers[0]

    def lognormvariate(self, mu, sigma):
        return 100.0


@pytest.mark.parametrize("mode,lost", [("abort", 5), ("retract", 20), ("in_place", 20)])
def test_a_dead_server_costs_what_it_generated_since_the_last_publication_or_all(no_faults, mode, lost):
    # Step 0 takes the short group at 10, trains until 15 and publishes until 15.5. The long one has 15 tokens then, and
    # 20 when its server dies at 20.5. The other server goes on with what is left of it.
    options = {"groups_per_step": 1, "groups_at_once": 2, "max_staleness": 1, "slots": 1}
    run = Days(work([[40], [10], [1000]], **options), job(interruption=mode), Chances(0))
    run.step()
    (long,) = (group for group in run.with_servers if group.lengths == [40])
    run._at(20.5, lambda: run._server_dies(First()))
    run.go_on(21.0)
    assert run._lost == pytest.approx(lost) and not run.servers[0].running
    assert [(group, length, kept) for _, _, group, length, kept in run.servers[1].running] == [(long, 40, 20 - lost)]


def test_a_dead_trainer_goes_on_from_its_checkpoint_with_the_groups_that_were_finished(no_faults):
    # Steps take 15.5 s. There is a checkpoint after step 2, at 31, and step 3 ends at 46.5. The trainer dies at 50 and
    # is back at 150, with the groups of step 3: these are trained again until 155.5, and three more steps end at 202.
    run = Days(work([[10, 10]]), job(), Chances(0))
    run._at(50.0, lambda: run._trainer_dies(First()))
    record = run.run(200.0)
    assert record.trainer_deaths == 1 and run.version == 6 and run.now == pytest.approx(202.0)
    assert record.lost_time == pytest.approx((155.5 - 46.5) / 202)


RATES = {
    "GPU_FAILURES_PER_S": 1 / 300,
    "SERVER_CRASHES_PER_S": 1 / 200,
    "SLOW_SERVERS_PER_S": 1 / 100,
    "SERVER_RESTART_S": (60.0, 0.5),
    "TRAINER_RESTART_S": (50.0, 0.5),
    "SLOW_FOR_S": (30.0, 1.0),
}


@settings(max_examples=25, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    servers=st.integers(1, 3),
    staleness=st.integers(0, 3),
    mode=st.sampled_from(["abort", "retract"]),
    age=st.integers(0, 2),
)
def test_whatever_dies_every_reply_is_somewhere_and_no_group_is_trained_twice(seed, servers, staleness, mode, age):
    begun = []

    def days():
        chances = Chances(seed)
        begun.clear()
        groups = (begun.append(1) or group for group in chances.lengths(ReplyTokens.with_mean(20, 60), 3))
        options = {"servers": servers, "max_staleness": staleness, "prompt_tokens": 5, "read_s": 0.01}
        one = dataclasses.replace(work([[1]], **options), groups=groups, max_cache_age=age)
        return Days(one, job(interruption=mode), chances)

    with pytest.MonkeyPatch.context() as patch:
        for name, value in RATES.items():
            patch.setattr(drawn, name, value)
        first = days().run(1500.0)
        run = days()
        record = run.run(1500.0)
        assert first == record, "the seed is all that there is of chance"
    somewhere = [entry[2] for server in run.servers for entry in server.running]
    somewhere += [entry[1] for server in run.servers for entry in server.queue]
    somewhere += [group for group, replies in run._homeless.items() for _ in replies]
    assert all(somewhere.count(group) == group.left > 0 for group in run.with_servers)
    assert len(somewhere) == sum(group.left for group in run.with_servers)
    assert len(run.with_servers) == run.gate.running
    trained = set(run._since)
    assert len(trained) == len(run._since) == (run.version - run._checkpoint) * 4
    assert len(begun) == run.version * 4 + len(run.done) + len(run.with_servers) + len(run.again)
    assert not trained & {*run.done, *run.with_servers, *run.again}
    assert 0 <= record.lost_tokens + record.stale_tokens <= 1
    assert record.server_deaths > 0 and record.trainer_deaths >= 0


def test_lengths_are_as_they_say():
    groups = list(itertools.islice(Chances(3).lengths(ReplyTokens((10, 20, 30, 40)), 8), 2000))
    lengths = list(itertools.chain.from_iterable(groups))
    for length in (10, 20, 30, 40):
        assert lengths.count(length) / len(lengths) == pytest.approx(0.25, abs=0.02)
    # Of eight independent lengths, fewer than one group in 30,000 would be all alike.
    assert 0.005 < sum(len(set(group)) == 1 for group in groups) / len(groups) < 0.5


@pytest.mark.thorough
@pytest.mark.slow
def test_a_day_of_two_configs_is_what_the_results_say(monkeypatch, capsys):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import plan_weeks

    for only in ("math_llama3_70b_8nodes", "math_qwen3_30b_a3b_1node"):
        plan_weeks.main(["--only", only, "--days", "1", "--weeks", "1"])
        printed = capsys.readouterr().out.strip()
        command = f"$ python benchmarks/plan_weeks.py --only {only} --days 1 --weeks 1"
        assert f"{command}\n{printed}" in RESULTS.read_text(), f"{command[2:]} --write"


def test_settings_that_a_config_may_not_have_are_left_out(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import plan_weeks

    plan = plan_weeks.planned(ROOT / "configs" / "math_llama3_70b_lora_2nodes.yaml")
    assert plan.config.rollout.publication == "adapters", "which knows one way to interrupt"
    assert list(week_text.settings(plan)["interruption"]) == ["abort"]


@pytest.mark.thorough
def test_the_command_says_what_a_week_gives(capsys):
    models = ["--models", str(ROOT / "tests" / "model_configs")]
    main(["plan", str(ROOT / "configs" / "math_llama3_70b_8nodes.yaml"), *models, "--nodes", "8", "--week"])
    printed = capsys.readouterr().out
    assert "a week, simulated" in printed and "by max_staleness" in printed and "arXiv 2407.21783" in printed
