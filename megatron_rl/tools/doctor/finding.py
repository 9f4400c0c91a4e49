"""A finding: the doctor's description of one error."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Finding:
    """Something that is wrong: who computes it, where, and why as far as is known."""

    who: str
    """`trainer`, `server`, `machine`, `hosts`, or the part of the config or data."""
    where: str
    cause: str

    def __str__(self) -> str:
        return f"{self.who}, {self.where}: {self.cause}"
