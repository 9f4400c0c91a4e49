"""The teachers of on-policy distillation: models that score each token of the policy's replies."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from megatron_rl.config.rules import Section, above, at_least, one_of, ruled

POLICY = "policy"
"""The path of a teacher that is the policy itself."""


@dataclass(frozen=True)
class Teacher:
    """One teacher: an engine of the model at `path`, or else servers."""

    path: str = ""
    servers: tuple[str, ...] = ()
    hint: str = ""

    @property
    def has_own_engine(self) -> bool:
        return self.path not in ("", POLICY)


def are_teachers(by_source: dict[str, Any]) -> bool:
    """Return whether every source has {path: ...} or {servers: [...]}, and no more than a hint beside it."""
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
    """On-policy distillation: what a teacher says of the tokens that the policy has sampled, in the policy's layout, or
    from servers."""

    path: str = ""
    """Hugging Face folder of a model with the policy's tokens; or policy, the policy itself before a step's updates,
    which says something else only with a hint. Empty: no such teacher."""
    servers: list[str] = field(default_factory=list)
    """In place of a path, URLs of servers of the teacher, which score tokens as SGLang does."""
    token_file: str = ""
    """A file with the bearer token that those servers ask for."""
    hint: str = ""
    """Text that the teacher alone reads in front of the prompt, or of a dialogue's last message; the prompt's fields
    stand in braces, such as `The answer is {answer}.`"""
    by_source: dict[str, Any] = ruled(
        "must map sources to {path: ...} or {servers: [...]}, each with a hint or without", are_teachers, default={}
    )
    """Several teachers, by the prompts' field `source`, which a mixture writes, in place of the keys above: {math:
    {path: ..., hint: ...}, code: {servers: [...]}}."""
    coefficient: float = above(0, default=1.0)
    """Weight of the teacher: what is added to each token's advantage, or to its loss, is this times a number of nats.
    The task's advantages stay as they are; algo.advantage = none leaves the teacher alone."""
    kl_in: str = one_of("advantage", "loss", default="advantage")
    """The place of the reverse KL divergence from the teacher. advantage: log p(teacher) - log p of the token that was
    sampled, which is less it on average. loss: the divergence itself, over all tokens that could have been."""
    top_k: int = at_least(0, default=0)
    """Of kl_in = loss: the teacher's most likely tokens one by one, and all others as if they were one, of which few
    numbers are kept for each token. 0: the whole vocabulary, of which the teacher's last state is kept."""

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
            self.refuse(
                "hint", "nobody reads it; set teacher.path, to policy for the policy itself, or teacher.servers"
            )
        for name, teacher in self.teachers.items():
            if teacher.path == POLICY and not teacher.hint:
                key = f"by_source.{name}.path" if name else "path"
                rule = "the policy's own log-probabilities are no signal; give it a hint, or another model's folder"
                raise ValueError(f"teacher.{key} = {POLICY!r}: {rule}.")

    @property
    def teachers(self) -> dict[str, Teacher]:
        """The teachers by the prompts' source; one of all prompts is that of the source ''."""
        if self.path or self.servers:
            return {"": Teacher(self.path, tuple(self.servers), self.hint)}
        return {
            name: Teacher(part.get("path", ""), tuple(part.get("servers", ())), part.get("hint", ""))
            for name, part in self.by_source.items()
        }

    @property
    def engine_paths(self) -> list[str]:
        """The folders of the teachers that are engines of their own, each once."""
        return list(dict.fromkeys(it.path for it in self.teachers.values() if it.has_own_engine))

    @property
    def is_there(self) -> bool:
        return bool(self.teachers)

    @property
    def shapes_advantages(self) -> bool:
        return self.is_there and self.kl_in == "advantage"
