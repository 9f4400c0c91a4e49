"""Chooses training prompts by their success rate.

Rates from `megatron-rl eval` filter and order the prompts once. Rates measured during the run decide whether a prompt
is trained each time the stream of prompts reaches it.
"""

from __future__ import annotations

import hashlib
import json
import math
import random
from collections.abc import Iterable, Sequence
from typing import Any

from megatron_rl.config import DataConfig
from megatron_rl.data.data_files import read_rows


def digest_of(prompt: dict[str, Any]) -> str:
    """Return a digest of a prompt's content. It does not depend on the data set or mixture that has the prompt."""
    # A mixture adds `source`, but the measured data set may be one of its parts alone.
    own = {name: value for name, value in prompt.items() if name != "source"}
    return hashlib.sha256(json.dumps(own, sort_keys=True, default=str).encode()).hexdigest()[:32]


def by_success(prompts: list[dict[str, Any]], path: str, band: list[float]) -> list[dict[str, Any]]:
    """Return the prompts whose mean reward in the eval.jsonl at `path` is in `band`, sorted by falling reward.

    Prompts with equal rewards keep their order. Raises ValueError if a prompt was not measured, or if none is in the
    band.
    """
    rates = measured_rates(prompts, path)
    low, high = band
    kept = [number for number, rate in enumerate(rates) if low <= rate <= high]
    if not kept:
        raise ValueError(f"data.success_band = {band}: no prompt has a success rate in it; widen it.")
    return [prompts[number] for number in sorted(kept, key=lambda number: -rates[number])]


def measured_rates(prompts: list[dict[str, Any]], path: str) -> list[float]:
    """Return each prompt's mean reward in the eval.jsonl at `path`. Raises ValueError if a prompt was not measured."""
    rates = {}
    for number, row in enumerate(read_rows(path, key="data.success_rates"), start=1):
        if not (isinstance(row.get("prompt"), str) and row.get("rewards")):
            raise ValueError(
                f"data.success_rates = {path!r}, line {number}: has no prompt and rewards; give an eval.jsonl that "
                f"megatron-rl eval wrote."
            )
        rates[row["prompt"]] = sum(row["rewards"]) / len(row["rewards"])
    names = [digest_of(prompt) for prompt in prompts]
    unknown = sum(name not in rates for name in names)
    if unknown:
        raise ValueError(
            f"data.success_rates = {path!r}: has no replies to {unknown} of the {len(prompts)} training prompts; "
            f"evaluate them: megatron-rl eval CONFIG eval.sets.train.source=..., with data.train's source and args."
        )
    return [rates[name] for name in names]


Outcome = Sequence[float]
"""Outcome of a prompt: its position in the stream of prompts, its index in the list, and its group's mean reward."""


class SuccessRates:
    """Recent mean reward of each prompt in this run, which determines how often the prompt is trained.

    A prompt's rate starts as the mean reward of its first group. Each further group moves the rate halfway to its own
    mean. A prompt without a rate is always trained. Choices depend only on the rates, the seed and the prompt's number,
    so that rollout ranks agree and a resumed run makes the same choices.

        rates = SuccessRates(DataConfig(train="my.jsonl", sampling="variance"), seed=1)
        rates.add([(40, 17, 0.5), (41, 4, 1.0)])
        rates.chance(17), rates.chance(4), rates.chance(5)  # 1.0, 0.1, 1.0
    """

    def __init__(self, options: DataConfig, *, seed: int, measured: Sequence[float] = ()) -> None:
        """measured: initial rates of all prompts, in the list's order.

        `rates` maps a prompt's index in the list to its rate.
        """
        self.options, self.seed = options, seed
        self.rates: dict[int, float] = dict(enumerate(measured))

    def add(self, outcomes: Iterable[Outcome]) -> None:
        """Update the rates with the outcomes, in the given order.

        They are those of groups that were trained, or discarded because their rewards were equal.
        """
        for _, place, reward in outcomes:
            place = int(place)
            self.rates[place] = (self.rates[place] + reward) / 2 if place in self.rates else float(reward)

    def chance(self, place: int) -> float:
        """Return the probability, in (0, 1], with which this index's prompt is trained when it comes up.

        place: the prompt's index in the list.
        """
        rate = self.rates.get(place)
        if rate is None:
            return 1.0
        low, high = self.options.success_band
        found = {"band": float(low <= rate <= high), "failures": 1 - rate, "variance": 4 * rate * (1 - rate)}
        return min(max(found[self.options.sampling], self.options.least_chance), 1.0)

    def takes(self, prompt: dict[str, Any]) -> bool:
        """Return True if a prompt that a PromptIterator yields is to be trained this time."""
        draw = random.Random(f"{self.seed} chance {prompt['prompt_number']}").random()
        return draw < self.chance(prompt["prompt_index"])

    def metrics(self) -> dict[str, float]:
        mean = {"data/mean_rate": sum(self.rates.values()) / len(self.rates)} if self.rates else {}
        return {"data/rated_prompts": len(self.rates)} | mean

    def state_dict(self) -> dict[str, Any]:
        return {"places": list(self.rates), "rates": list(self.rates.values())}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.rates = dict(zip(state["places"], state["rates"], strict=True))


def are_rates(state: Any) -> bool:
    """Return whether `state` has the form of SuccessRates.state_dict."""
    if not (isinstance(state, dict) and all(isinstance(state.get(name), list) for name in ("places", "rates"))):
        return False
    are_places = all(type(place) is int and place >= 0 for place in state["places"])
    are_numbers = all(type(rate) in (int, float) and math.isfinite(rate) for rate in state["rates"])
    return are_places and are_numbers and len(state["places"]) == len(state["rates"])
