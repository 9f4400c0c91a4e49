"""Options for prompts: training, evaluation and warm start."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import inf
from typing import Any

from megatron_rl.config.rules import Section, above, at_least, one_of, refuse, ruled, within

MIXTURE = "mixture"
TAKEN = frozenset(
    "messages conversation tools tokenize add_generation_prompt continue_final_message chat_template padding "
    "truncation max_length return_tensors return_dict return_assistant_tokens_mask tokenizer_kwargs".split()
)
"""Arguments of `apply_chat_template` that are not template variables, or that the trainer sets itself."""
BLOCK = 1000
"""Number of prompts in one block of a mixture, in which each part's number of prompts is proportional to its weight."""


def are_sets(sets: dict[str, Any]) -> bool:
    """Return whether every set of eval.sets has the form {source: ..., args: {...}}, and none has a reserved name."""
    # held_out is the name of data.evaluation; two sets with one name would share their metrics.
    return "held_out" not in sets and all(
        isinstance(part, dict) and isinstance(part.get("source"), str) and set(part) <= {"source", "args"}
        for part in sets.values()
    )


@dataclass(kw_only=True)
class DataConfig(Section, name="data"):
    """Prompts for training and for evaluation."""

    train: str = "???"
    """Source of the training prompts: a .jsonl or .parquet file, a folder saved by Hugging Face's `datasets`,
    hf:NAME[:CONFIG] on their hub, the import path of a function that returns a list of prompts, or `mixture` for
    several of these sources, which train_args lists."""
    train_args: dict[str, Any] = field(default_factory=dict)
    """Arguments of `train`. For a function: its keyword arguments. For a folder or hub name: `split`. For a mixture:
    its parts by name, each as {source: ..., args: {...}, weight: 1.0}."""
    evaluation: str = ""
    """Held-out prompts, in any form that `train` can have. Empty: no evaluation on held-out prompts."""
    evaluation_args: dict[str, Any] = field(default_factory=dict)
    """Arguments of `evaluation`, in the form of train_args."""
    template_args: dict[str, Any] = ruled(
        "must be arguments of the model's chat template, such as enable_thinking; the trainer gives it messages, tools "
        "and whether a reply follows",
        lambda args: all(isinstance(name, str) for name in args) and not TAKEN & set(args),
        default={},
    )
    """Arguments for the model's chat template. The field `chat_template_kwargs` of a row takes precedence."""
    shuffle: bool = True
    max_prompt_tokens: int = at_least(0, default=0, hint="0 keeps all")
    """Discard training prompts with more tokens than this. With 0, a prompt longer than the context is an error."""
    max_tokens: int = at_least(0, default=0, hint="0 keeps all")
    """Discard rows with more tokens than this, counting the prompt plus its answer or, in a pair, the longer reply."""
    success_rates: str = ruled(
        "must be an eval.jsonl, or empty", lambda path: not path or path.endswith(".jsonl"), default=""
    )
    """Path of an eval.jsonl that `megatron-rl eval` wrote, with the training prompts as one of its sets. With
    `sampling` = all, only prompts whose success rate is in success_band are trained, without `shuffle` the highest
    rates first. With any other `sampling`, the file gives the initial success rates, and no prompt is discarded."""
    success_band: list[float] = field(default_factory=lambda: [0.0, 1.0])
    """Lowest and highest mean reward of the prompts to train, for success_rates or `sampling` = band."""
    sampling: str = one_of("all", "band", "failures", "variance", default="all")
    """Probability that a prompt is trained when the run reaches it, by the mean reward r of its recent groups. all: 1.
    band: 1 if r is in success_band. failures: 1 - r (Kimi k1.5, arXiv 2501.12599). variance: 4 r (1 - r). Prompts
    without a known r are always trained. A mixture's weights apply to the prompts reached, trained or not."""
    least_chance: float = within("(0, 1]", default=0.1)
    """Minimum probability under `sampling`, by which every prompt's success rate is measured again now and then."""

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
        # A separate loop: the weights can be summed only after all of them were found to be numbers.
        for name, weight in self.weights.items():
            if weight * BLOCK < sum(self.weights.values()):
                rule = f"has none of every {BLOCK} prompts beside the others' weights; raise it, or leave the part out"
                refuse(f"data.train_args.{name}.weight", weight, rule)

    @property
    def weights(self) -> dict[str, float]:
        """The weight of each part of a mixture, by name; empty if data.train is not a mixture."""
        if self.train != MIXTURE:
            return {}
        parts = self.train_args.items()
        return {name: part.get("weight", 1.0) if isinstance(part, dict) else 1.0 for name, part in parts}


@dataclass(kw_only=True)
class EvalConfig(Section, name="eval"):
    """Evaluation of the policy on data.evaluation, which is the set named held_out, and on further sets, during
    training (run.evaluate_every_steps) or by `megatron-rl eval`."""

    sets: dict[str, Any] = ruled("must map names to {source: ..., args: ...}", are_sets, default={})
    """Further sets of evaluation prompts by name, as {source: ..., args: {...}} with a source as for data.train."""
    samples_per_prompt: int = at_least(1, default=1)
    """Replies sampled per prompt. With 2 or more, pass@k and majority vote are reported."""
    temperature: float = at_least(0, default=0.0, hint="0 is greedy")
    """Sampling temperature; 0 is greedy decoding."""
    top_p: float = within("(0, 1]", default=1.0, hint="1.0 keeps all tokens")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.samples_per_prompt > 1 and self.temperature == 0:
            self.refuse(
                "samples_per_prompt", "must be 1, or more with eval.temperature > 0: greedy replies are all the same"
            )


@dataclass(kw_only=True)
class WarmStartConfig(Section, name="warm_start"):
    """Supervised training on the prompts' own answers before RL begins."""

    updates: int = at_least(0, default=0, hint="0 skips the warm start")
    """Number of updates; 0 disables the warm start."""
    prompts_per_update: int = at_least(1, default=128)
    lr: float = above(0, default=2e-3)
    stop_at_reward: float = within("(0, 1]", default=1.0)
    """Stop early once the mean reward of replies sampled for held-out prompts reaches this value."""
    check_every_updates: int = at_least(1, default=20)
    """Number of updates between two measurements of the mean reward for stop_at_reward."""
    folder: str = ""
    """Folder for the result, which a later run with the same warm start loads. Empty: every run repeats it."""
