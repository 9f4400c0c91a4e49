"""Options for the teachers of on-policy distillation: models that score each token of the policy's replies."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from megatron_rl.config.rules import Section, above, at_least, one_of, ruled

POLICY = "policy"
"""Teacher path that stands for the policy itself."""


@dataclass(frozen=True)
class Teacher:
    """One teacher: an engine for the model at `path`, or servers."""

    path: str = ""
    servers: tuple[str, ...] = ()
    hint: str = ""

    @property
    def has_own_engine(self) -> bool:
        return self.path not in ("", POLICY)


def are_teachers(by_source: dict[str, Any]) -> bool:
    """Return True if every source has either {path: ...} or {servers: [...]}, and at most a hint in addition."""
    return all(
        isinstance(part, dict)
        and set(part) <= {"path", "servers", "hint"}
        and bool(part.get("path")) != bool(part.get("servers"))
        and isinstance(part.get("path", ""), str)
        and isinstance(part.get("hint", ""), str)
        and isinstance(part.get("servers", []), list)
        for part in by_source.values()
    )


@dataclass(kw_only=True)
class TeacherConfig(Section, name="teacher"):
    """On-policy distillation from a teacher, which scores the tokens that the policy has sampled. The teacher runs in
    the policy's parallel layout or on servers."""

    path: str = ""
    """Hugging Face folder of a model with the policy's tokenizer. `policy`: the policy itself before a step's updates,
    which needs a hint to give other log-probabilities. Empty: no teacher in the policy's layout."""
    servers: list[str] = field(default_factory=list)
    """URLs of servers that run the teacher and score tokens as SGLang does. Set either `path` or `servers`."""
    token_file: str = ""
    """File with the bearer token for the teacher's servers."""
    hint: str = ""
    """Text that only the teacher reads, before the prompt or, in a dialogue, before the last message's text. It may
    contain the prompt's fields in braces, such as `The answer is {answer}.`"""
    by_source: dict[str, Any] = ruled(
        "must map sources to {path: ...} or {servers: [...]}, each with a hint or without", are_teachers, default={}
    )
    """Several teachers, instead of `path`, `servers` and `hint`, by the prompts' field `source`, which data.train =
    mixture sets. Example: {math: {path: ..., hint: ...}, code: {servers: [...]}}."""
    coefficient: float = above(0, default=1.0)
    """Weight of the teacher's term, which is in nats, in each token's advantage or loss. To learn from the teacher
    alone, without the task's own rewards, set algo.advantage = none."""
    kl_in: str = one_of("advantage", "loss", default="advantage")
    """Where the reverse KL divergence from the teacher enters. advantage: log p(teacher) - log p of each sampled token,
    whose mean is the negative divergence, is added to its advantage. loss: the divergence over all tokens is added."""
    top_k: int = at_least(0, default=0)
    """For kl_in = loss: compare only the teacher's top_k most likely tokens, and treat all others as one, which stores
    few numbers per token. 0: compare the whole vocabulary, and store the teacher's last hidden state."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.path and self.servers:
            self.refuse("servers", f"teacher.path = {self.path!r} is a teacher too; leave one of them out")
        if self.kl_in == "loss" and any(it.servers for it in self.teachers.values()):
            self.refuse("kl_in", "servers score the sampled tokens alone; take advantage, or teachers by their paths")
        if self.kl_in == "advantage" and self.top_k > 0:
            self.refuse("top_k", "advantages know the sampled token alone; set teacher.kl_in=loss, or leave it out")
        if self.by_source and (self.path or self.servers or self.hint):
            self.refuse("by_source", "each source's own path, servers and hint hold; leave the section's own out")
        if self.hint and not (self.path or self.servers):
            rule = "nobody reads it; set teacher.path, to policy for the policy itself, or teacher.servers"
            self.refuse("hint", rule)
        for name, teacher in self.teachers.items():
            if teacher.path == POLICY and not teacher.hint:
                key = f"by_source.{name}.path" if name else "path"
                rule = "the policy's own log-probabilities are no signal; give it a hint, or another model's folder"
                raise ValueError(f"teacher.{key} = {POLICY!r}: {rule}.")

    @property
    def teachers(self) -> dict[str, Teacher]:
        """Teachers by the prompts' source. A single teacher for all prompts has the key ''."""
        if self.path or self.servers:
            return {"": Teacher(self.path, tuple(self.servers), self.hint)}
        return {
            name: Teacher(part.get("path", ""), tuple(part.get("servers", ())), part.get("hint", ""))
            for name, part in self.by_source.items()
        }

    @property
    def engine_paths(self) -> list[str]:
        """Folders of the teachers that need their own engine, without duplicates."""
        return list(dict.fromkeys(it.path for it in self.teachers.values() if it.has_own_engine))

    @property
    def is_there(self) -> bool:
        return bool(self.teachers)

    @property
    def shapes_advantages(self) -> bool:
        return self.is_there and self.kl_in == "advantage"
