"""The rates of a run, and which prompts are taken for them: against the formulas, and as ledgers use them."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_rl.config.data_section import DataConfig
from megatron_rl.data.curriculum import SuccessRates, are_rates
from megatron_rl.data.prompts import PromptIterator
from megatron_rl.rollout.events import Episode
from megatron_rl.rollout.ledger import PromptLedger, Share
from tests.kit.examples import max_examples

COUNT, PER_STEP = 9, 4


def options(sampling="variance", **changes):
    return DataConfig(train="rows.jsonl", sampling=sampling, **changes)


def rates_of(places, sampling="variance", **changes):
    rates = SuccessRates(options(sampling, **changes), seed=3)
    rates.rates = dict(places)
    return rates


@settings(deadline=None, max_examples=max_examples(40, 100), derandomize=True, database=None)
@given(st.lists(st.tuples(st.integers(0, 3), st.floats(0, 1)), max_size=12))
def test_a_rate_is_the_first_reward_and_then_half_of_what_it_was_and_half_of_each_further_one(groups):
    rates = SuccessRates(options(), seed=1)
    rates.add((number, place, reward) for number, (place, reward) in enumerate(groups))
    for place in range(4):
        seen = [reward for other, reward in groups if other == place]
        weights = [0.5 ** (len(seen) - max(number, 1)) for number in range(len(seen))]  # n = 3: 1/4, 1/4, 1/2
        expected = sum(weight * reward for weight, reward in zip(weights, seen, strict=True))
        assert (rates.rates.get(place) is None) == (not seen)
        assert rates.rates.get(place, 0.0) == pytest.approx(expected)
    saved = json.loads(json.dumps(rates.state_dict()))
    assert are_rates(saved)
    other = SuccessRates(options(), seed=1)
    other.load_state_dict(saved)
    assert other.rates == rates.rates, "bit by bit"


@pytest.mark.parametrize(
    ("sampling", "expected"),
    [
        ("band", {0.0: 0.05, 0.2: 1.0, 0.5: 1.0, 0.9: 1.0, 1.0: 0.05}),
        ("failures", {0.0: 1.0, 0.25: 0.75, 0.5: 0.5, 1.0: 0.05, -1.0: 1.0, 3.0: 0.05}),
        ("variance", {0.0: 0.05, 0.25: 0.75, 0.5: 1.0, 0.75: 0.75, 1.0: 0.05, 3.0: 0.05}),
    ],
)
def test_the_chance_of_a_prompt_follows_its_rate_within_bounds(sampling, expected):
    rates = SuccessRates(
        options(sampling, least_chance=0.05, **({"success_band": [0.2, 0.9]} if sampling == "band" else {})), seed=1
    )
    rates.rates = dict(enumerate(expected))
    assert {rate: rates.chance(place) for place, rate in rates.rates.items()} == pytest.approx(expected)
    assert rates.chance(99) == 1.0, "one that was never sampled is taken"


def test_prompts_are_taken_as_often_as_their_chance_says():
    rates = rates_of({0: 0.5, 1: 0.9, 2: 1.0})  # chances of 1, 0.36 and 0.1
    prompts = PromptIterator([{"prompt": "p"}] * 4, seed=3)
    taken = [0] * 4
    for _ in range(8000):
        prompt = next(prompts)
        taken[prompt["prompt_index"]] += rates.takes(prompt)
    assert taken[0] == taken[3] == 2000
    assert taken[1] == pytest.approx(720, abs=90) and taken[2] == pytest.approx(200, abs=60)  # 4 standard deviations


class Run:
    """Steps of several ranks' ledgers, whose rewards depend on the prompt and the step."""

    def __init__(self, ranks, state=None):
        prompts = PromptIterator([{"prompt": "p"}] * COUNT, seed=5)
        self.step, self.rates = 0, SuccessRates(options(least_chance=0.2), seed=5)
        self.ledgers = []
        if state is not None:
            self.step = state["step"]
            self.rates.load_state_dict(state["rates"])
        for rank in range(ranks):
            own = SuccessRates(self.rates.options, seed=5)
            own.rates = dict(self.rates.rates)  # as a process of its own has them
            self.ledgers.append(PromptLedger(prompts, Share.of_rank(rank, ranks, per_step=PER_STEP), own))
        for ledger in self.ledgers if state is not None else []:
            ledger.load_state_dicts(state["ledgers"])

    def train(self):
        """One step; return what each rank took."""
        taken = []
        for ledger in self.ledgers:
            prompts = [next(ledger) for _ in range(len(ledger.share))]
            taken.append([prompt["prompt_number"] for prompt in prompts])
            for prompt in prompts:
                episode = Episode(number=0, data=prompt, workflow=None)
                episode.reward = (prompt["prompt_index"] * 37 + self.step * 11) % 5 / 4
                ledger.consumed([episode], version=self.step)
        self.step += 1
        return taken

    def save(self):
        states = [ledger.state_dict() for ledger in self.ledgers]
        outcomes = sorted(outcome for state in states for outcome in state.pop("outcomes"))
        self.rates.add(outcomes)
        for ledger in self.ledgers:
            ledger.add_outcomes(outcomes)
            assert ledger.rates.rates == self.rates.rates and not ledger.outcomes, "ranks agree"
        state = {"step": self.step, "rates": self.rates.state_dict(), "ledgers": states}
        return json.loads(json.dumps(state))


@settings(deadline=None, max_examples=max_examples(25, 60), derandomize=True, database=None)
@given(st.integers(1, 3), st.sets(st.integers(0, 19), max_size=4))
def test_a_run_that_is_killed_and_resumed_takes_the_prompts_of_one_that_was_not(ranks, kills):
    whole, killed = Run(ranks), Run(ranks)
    for step in range(20):
        saved = killed.save()
        if step in kills:
            killed.train()  # which is lost
            killed = Run(ranks, saved)
        whole.save()
        assert killed.train() == whole.train(), step
    assert sum(ledger.passed_over for ledger in whole.ledgers) > 10, "there was something to agree on"


@settings(deadline=None, max_examples=max_examples(25, 60), derandomize=True, database=None)
@given(st.lists(st.integers(1, 4), min_size=2, max_size=5))
def test_any_number_of_ranks_trains_no_turn_twice_and_passes_over_as_the_rates_say(counts):
    run, done, steps = Run(counts[0]), [], 0
    for ranks in counts:
        run = Run(ranks, run.save())
        for _ in range(5):
            rates = rates_of(run.rates.rates, least_chance=0.2)
            rates.seed = 5
            run.save()
            rates.rates = dict(run.rates.rates)
            for ledger, numbers in zip(run.ledgers, run.train(), strict=True):
                done += numbers
                assert all(number in ledger.share for number in numbers)
                assert all(rates.takes(ledger.prompts.at(number)) for number in numbers)
            steps += 1
    assert len(set(done)) == len(done) == PER_STEP * steps
