"""Settings for every test: one thread per operation, no network, current operators, GPU tests only where a GPU is.

What the tests import is kept from the collector, in this process and in those that tests fork from it.
"""

import gc
import os
import runpy
from pathlib import Path

# Tests share cores with forked ranks and servers; spinning OpenMP threads of one would starve the others.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import pytest

gc.disable()

# Before anything imports megatron_rl.ops, which refuses operators built from other sources.
runpy.run_path(str(Path(__file__).parents[1] / "csrc" / "build.py"))["build"]()

pytest_plugins = ["tests.order", "tests.proofs", "tests.servers.fixtures"]


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop() -> None:
    gc.freeze()
    gc.enable()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    import torch

    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
