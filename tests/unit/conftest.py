"""Pools of workers fork their processes."""

import pytest


@pytest.fixture(autouse=True)
def pools_fork(forked_workers):
    pass
