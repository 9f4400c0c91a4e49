"""How a section says what is wrong in it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


def check(section: str, **rules: tuple[Any, bool, str]) -> None:
    """Raise for the first `key=(value, holds, "rule; way out")` that does not hold."""
    for key, (value, holds, rule) in rules.items():
        if not holds:
            raise ValueError(f"{section}.{key} = {value!r}: {rule}.")


@contextmanager
def as_part_of(name: str) -> Iterator[None]:
    """Let an error of a section that is known under a shorter name as well, such as `parallel`, say this one."""
    short = name.rpartition(".")[2]
    try:
        yield
    except ValueError as error:
        raise ValueError(re.sub(rf"(?<![\w.]){short}(?=[.:])", name, str(error))) from error
