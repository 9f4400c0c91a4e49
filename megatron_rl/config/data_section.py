"""Prompts to train on, to evaluate with and to start from."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import inf
from typing import Any

from megatron_rl.config.rules import check

MIXTURE = "mixture"
BLOCK = 1000
"""Prompts over which a mixture has its shares."""


@dataclass(kw_only=True)
class DataConfig:
    train: str = "???"
    """Prompts: a .jsonl or .parquet file, a folder that Hugging Face's `datasets` saved, hf:NAME[:CONFIG] of their hub,
    the import path of a function that returns a list of them, or `mixture`."""
    train_args: dict[str, Any] = field(default_factory=dict)
    """Keyword arguments of that function; `split` of a folder or hub name; a mixture's parts, by name: {source: ...,
    args: {...}, weight: 1.0}."""
    evaluation: str = ""
    """Held-out prompts, named like `train`; empty evaluates nothing."""
    evaluation_args: dict[str, Any] = field(default_factory=dict)
    shuffle: bool = True
    max_prompt_tokens: int = 0
    """Leave out training prompts with more; 0 leaves out none, and one that does not fit the context is an error."""
    max_tokens: int = 0
    """The same of a prompt with its answer, or with the longer reply of a pair."""
    success_rates: str = ""
    """An eval.jsonl that `megatron-rl eval` wrote with the training prompts in one of its sets: those in success_band
    are trained, and with `shuffle: false` in the order of falling success."""
    success_band: list[float] = field(default_factory=lambda: [0.0, 1.0])
    """Lowest and highest mean reward."""

    def __post_init__(self) -> None:
        band = self.success_band
        rule = "must be two numbers, the lower one first, with data.success_rates; e.g. [0.1, 0.9]"
        is_band = len(band) == 2 and band[0] <= band[1] and (bool(self.success_rates) or band == [0.0, 1.0])
        check("data", success_band=(band, is_band, rule))
        is_file = not self.success_rates or self.success_rates.endswith(".jsonl")
        check("data", success_rates=(self.success_rates, is_file, "must be an eval.jsonl, or empty"))
        for key in ("max_prompt_tokens", "max_tokens"):
            value = getattr(self, key)
            check("data", **{key: (value, value >= 0, "must be at least 0; 0 leaves out none")})
        for name, part in self.train_args.items() if self.train == MIXTURE else ():
            is_known = not isinstance(part, dict) or set(part) <= {"source", "args", "weight"}
            check("data.train_args", **{name: (part, is_known, "must have source, and may have args and weight")})
        for name, weight in self.weights.items():
            is_share = isinstance(weight, int | float) and 0 < weight < inf
            check(f"data.train_args.{name}", weight=(weight, is_share, "must be above 0; leave out what has no share"))
        for name, weight in self.weights.items():
            is_served = weight * BLOCK >= sum(self.weights.values())
            rule = f"has none of every {BLOCK} prompts beside the others' weights; raise it, or leave the part out"
            check(f"data.train_args.{name}", weight=(weight, is_served, rule))

    @property
    def weights(self) -> dict[str, float]:
        """A mixture's, by the names of its parts; empty for anything else."""
        if self.train != MIXTURE:
            return {}
        parts = self.train_args.items()
        return {name: part.get("weight", 1.0) if isinstance(part, dict) else 1.0 for name, part in parts}


@dataclass(kw_only=True)
class EvalConfig:
    """How the policy is evaluated: on data.evaluation, called held_out, and on further sets, during training at the
    steps that run.evaluate_every_steps names, or by `megatron-rl eval`."""

    sets: dict[str, Any] = field(default_factory=dict)
    """Further prompts by name: {source: ..., args: {...}}, as data.train names them."""
    samples_per_prompt: int = 1
    """With 2 or more pass@k and a majority vote are reported."""
    temperature: float = 0.0
    """0 is greedy."""
    top_p: float = 1.0

    def __post_init__(self) -> None:
        parts = {
            name: isinstance(part, dict) and isinstance(part.get("source"), str) and set(part) <= {"source", "args"}
            for name, part in self.sets.items()
        }
        check(
            "eval",
            sets=(
                self.sets,
                all(parts.values()) and "held_out" not in parts,
                "must map names to {source: ..., args: ...}",
            ),
            samples_per_prompt=(
                self.samples_per_prompt,
                self.samples_per_prompt == 1 or (self.samples_per_prompt > 1 and self.temperature > 0),
                "must be 1, or more with eval.temperature > 0: greedy replies are all the same",
            ),
            temperature=(self.temperature, self.temperature >= 0, "must be at least 0; 0 is greedy"),
            top_p=(self.top_p, 0 < self.top_p <= 1, "must be in (0, 1]; 1.0 keeps all tokens"),
        )


@dataclass(kw_only=True)
class WarmStartConfig:
    """Supervised training on the prompts' own answers before RL begins."""

    updates: int = 0
    """0 leaves it out."""
    prompts_per_update: int = 128
    lr: float = 2e-3
    stop_at_reward: float = 1.0
    """End early once the mean reward of sampled replies to held-out prompts reaches this."""
    check_every_updates: int = 20
    folder: str = ""
    """Keep the result here as a HF folder and start from it when the same warm start is asked for again.

    Empty repeats it.
    """

    def __post_init__(self) -> None:
        check(
            "warm_start",
            updates=(self.updates, self.updates >= 0, "must be at least 0; 0 leaves the warm start out"),
            prompts_per_update=(self.prompts_per_update, self.prompts_per_update >= 1, "must be at least 1"),
            lr=(self.lr, self.lr > 0, "must be above 0"),
            stop_at_reward=(self.stop_at_reward, 0 < self.stop_at_reward <= 1, "must be in (0, 1]"),
            check_every_updates=(self.check_every_updates, self.check_every_updates >= 1, "must be at least 1"),
        )
