"""Prompts to train on, to evaluate with and to start from."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import inf
from typing import Any

from megatron_rl.config.rules import Section, above, at_least, one_of, refuse, ruled, within

MIXTURE = "mixture"
TAKEN = frozenset(
    (
        *("messages", "conversation", "tools", "tokenize", "add_generation_prompt", "continue_final_message"),
        *("chat_template", "padding", "truncation", "max_length", "return_tensors", "return_dict"),
        *("return_assistant_tokens_mask", "tokenizer_kwargs"),
    )
)
"""Arguments of a template's rendering that are no variable of the template, or the trainer's own."""
BLOCK = 1000
"""Prompts over which a mixture has its shares."""


def are_sets(sets: dict[str, Any]) -> bool:
    """Return whether every further set of prompts is {source: ..., args: {...}} under a name of its own."""
    # held_out is the name of data.evaluation: two sets of one name would share their metrics.
    return "held_out" not in sets and all(
        isinstance(part, dict) and isinstance(part.get("source"), str) and set(part) <= {"source", "args"}
        for part in sets.values()
    )


@dataclass(kw_only=True)
class DataConfig(Section, name="data"):
    """The prompts of training, and held-out ones."""

    train: str = "???"
    """Prompts: a .jsonl or .parquet file, a folder that Hugging Face's `datasets` saved, hf:NAME[:CONFIG] of their hub,
    the import path of a function that returns a list of them, or `mixture`."""
    train_args: dict[str, Any] = field(default_factory=dict)
    """Keyword arguments of that function; `split` of a folder or hub name; a mixture's parts, by name: {source: ...,
    args: {...}, weight: 1.0}."""
    evaluation: str = ""
    """Held-out prompts, named like `train`; empty evaluates nothing."""
    evaluation_args: dict[str, Any] = field(default_factory=dict)
    template_args: dict[str, Any] = ruled(
        "must be arguments of the model's chat template, such as enable_thinking; the trainer gives it messages, tools "
        "and whether a reply follows",
        lambda args: all(isinstance(name, str) for name in args) and not TAKEN & set(args),
        default={},
    )
    """Arguments that the model's chat template is given wherever messages are rendered: prompts, answers, pairs,
    evaluation and agents. A row's `chat_template_kwargs` win over them."""
    shuffle: bool = True
    max_prompt_tokens: int = at_least(0, default=0, hint="0 leaves out none")
    """Leave out training prompts with more; 0 leaves out none, and one that does not fit the context is an error."""
    max_tokens: int = at_least(0, default=0, hint="0 leaves out none")
    """The same of a prompt with its answer, or with the longer reply of a pair."""
    success_rates: str = ruled(
        "must be an eval.jsonl, or empty", lambda path: not path or path.endswith(".jsonl"), default=""
    )
    """An eval.jsonl that `megatron-rl eval` wrote with the training prompts in one of its sets: those in success_band
    are trained, and with `shuffle: false` in the order of falling success. With `sampling` none is left out: these are
    the rates that the run begins with."""
    success_band: list[float] = field(default_factory=lambda: [0.0, 1.0])
    """Lowest and highest mean reward."""
    sampling: str = one_of("all", "band", "failures", "variance", default="all")
    """Chance that a prompt is trained at its turn, from the mean reward r of its recent groups. all: 1; band: 1 where r
    is in success_band; failures: 1 - r (Kimi k1.5, arXiv 2501.12599); variance: 4 r (1 - r). Unsampled prompts are
    trained. A mixture's shares are those of turns."""
    least_chance: float = within("(0, 1]", default=0.1)
    """The least chance of a prompt under `sampling`, by which its rate is measured again."""

    def __post_init__(self) -> None:
        super().__post_init__()
        band = self.success_band
        has_rates = self.sampling == "band" or (self.success_rates and self.sampling == "all")
        if not (len(band) == 2 and band[0] <= band[1] and (has_rates or band == [0.0, 1.0])):
            rule = "must be two numbers, the lower one first, with data.success_rates or data.sampling = band"
            self.refuse("success_band", f"{rule}; e.g. [0.1, 0.9]")
        for name, part in self.train_args.items() if self.train == MIXTURE else ():
            if isinstance(part, dict) and not set(part) <= {"source", "args", "weight"}:
                refuse(f"data.train_args.{name}", part, "must have source, and may have args and weight")
        for name, weight in self.weights.items():
            if not (isinstance(weight, int | float) and 0 < weight < inf):
                refuse(f"data.train_args.{name}.weight", weight, "must be above 0; leave out what has no share")
        # A loop of its own: the sum is only known to be one once every weight was found to be a number.
        for name, weight in self.weights.items():
            if weight * BLOCK < sum(self.weights.values()):
                rule = f"has none of every {BLOCK} prompts beside the others' weights; raise it, or leave the part out"
                refuse(f"data.train_args.{name}.weight", weight, rule)

    @property
    def weights(self) -> dict[str, float]:
        """A mixture's, by the names of its parts; empty for anything else."""
        if self.train != MIXTURE:
            return {}
        parts = self.train_args.items()
        return {name: part.get("weight", 1.0) if isinstance(part, dict) else 1.0 for name, part in parts}


@dataclass(kw_only=True)
class EvalConfig(Section, name="eval"):
    """Evaluation of the policy on data.evaluation, called held_out, and on further sets: during training at the
    steps that run.evaluate_every_steps names, or by `megatron-rl eval`."""

    sets: dict[str, Any] = ruled("must map names to {source: ..., args: ...}", are_sets, default={})
    """Further prompts by name: {source: ..., args: {...}}, as data.train names them."""
    samples_per_prompt: int = at_least(1, default=1)
    """With 2 or more pass@k and a majority vote are reported."""
    temperature: float = at_least(0, default=0.0, hint="0 is greedy")
    """0 is greedy."""
    top_p: float = within("(0, 1]", default=1.0, hint="1.0 keeps all tokens")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.samples_per_prompt > 1 and self.temperature == 0:
            rule = "must be 1, or more with eval.temperature > 0: greedy replies are all the same"
            self.refuse("samples_per_prompt", rule)


@dataclass(kw_only=True)
class WarmStartConfig(Section, name="warm_start"):
    """Supervised training on the prompts' own answers before RL begins."""

    updates: int = at_least(0, default=0, hint="0 leaves the warm start out")
    """0 leaves it out."""
    prompts_per_update: int = at_least(1, default=128)
    lr: float = above(0, default=2e-3)
    stop_at_reward: float = within("(0, 1]", default=1.0)
    """End early once the mean reward of sampled replies to held-out prompts reaches this."""
    check_every_updates: int = at_least(1, default=20)
    folder: str = ""
    """Keep the result here as a HF folder and start from it when the same warm start is asked for again.

    Empty repeats it.
    """
