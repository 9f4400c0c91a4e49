"""Packages that a few tests need, imported when the first of these runs: some take seconds, and workers collect all."""

from __future__ import annotations

import importlib
import importlib.util
from typing import Any

import pytest


class Later:
    """A module that is imported when something in it is asked for."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, attribute: str) -> Any:
        if attribute.startswith("_"):  # pytest looks whether it is a fixture
            raise AttributeError(attribute)
        return getattr(importlib.import_module(self._name), attribute)


def later(name: str, *, reason: str) -> Later:
    """Return the module, to be imported later; skip the file of the caller if its package is not installed."""
    if importlib.util.find_spec(name.partition(".")[0]) is None:
        pytest.skip(reason, allow_module_level=True)
    return Later(name)
