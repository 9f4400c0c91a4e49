"""Settings for every test: one thread per operation, no network, current operators, GPU tests only where a GPU is.

What the tests import is kept from the collector, in this process and in those that tests fork from it. A limit of time
only ends a test that hangs, and is longer on a slow or busy machine.
"""

import gc
import os
import runpy
import sys
from pathlib import Path

# Tests share cores with forked ranks and servers; spinning OpenMP threads of one would starve the others.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

# `make` puts the packages of other people's worlds there; programs that tests start look for them as well.
WORLDS = str(Path(sys.prefix) / "share" / "worlds")
sys.path.append(WORLDS)
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH"), WORLDS]))

import pytest  # noqa: E402

gc.disable()

# Before anything imports megatron_rl.ops, which refuses operators built from other sources.
runpy.run_path(str(Path(__file__).parents[1] / "csrc" / "build.py"))["build"]()

from tests.kit.waiting import SLOWNESS  # noqa: E402

HANGS_S = 600.0
pytest_plugins = ["tests.kit.closing", "tests.kit.large_pages", "tests.order", "tests.progress", "tests.proofs"]


def runs_tests() -> bool:
    """Return False for a process that hands all tests to workers: it needs no torch, for which these would wait."""
    if "PYTEST_XDIST_WORKER" in os.environ:
        return True
    told = next((place for place, word in enumerate(sys.argv) if word in ("-n", "--numprocesses")), None)
    return told is None or sys.argv[told + 1] == "0"


if runs_tests():
    import hypothesis

    from megatron_rl import platform

    platform.prepare()  # before any test imports megatron.core
    # On a busy machine, drawing an example may take long.
    hypothesis.settings.register_profile(
        "any speed", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow]
    )
    hypothesis.settings.load_profile("any speed")
    pytest_plugins += [f"tests.kit.{name}" for name in ("tokenizers", "servers", "rehearsals", "worker_processes")]


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    if config.option.timeout is None:
        config.option.timeout = HANGS_S * SLOWNESS


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop() -> None:
    gc.freeze()
    gc.set_threshold(20_000, 50)  # the collector took 7 % of the tests' time; there is one collection after each file
    gc.enable()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    import torch

    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
