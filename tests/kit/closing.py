"""Clients, listeners and sockets that nobody else closes: they are closed when their test ends."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol, TypeVar

import pytest


class Closes(Protocol):
    def close(self) -> object: ...


T = TypeVar("T", bound=Closes)
OPEN: list[Closes] = []


def closed_at_end(one: T) -> T:
    """Return `one`, which is closed at the end of the test. Callable from any thread."""
    OPEN.append(one)
    return one


@pytest.fixture(autouse=True)
def what_is_left_open_is_closed() -> Iterator[None]:
    yield
    while OPEN:
        OPEN.pop().close()
