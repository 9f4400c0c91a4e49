"""A finding: the doctor's description of one error."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One error: which component has it, where, and the cause if known."""

    who: str
    """The component with the error: `trainer`, `server`, `data`, `reward`, `machine` or `hosts`."""
    where: str
    cause: str

    def __str__(self) -> str:
        return f"{self.who}, {self.where}: {self.cause}"
