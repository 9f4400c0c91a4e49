"""Fixtures that the runs of a session share: imported programs, servers, and a warm start.

The programs that runs start are forked from the processes that start them, and import nothing.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest

from megatron_rl.servers.supervisor import Supervisor
from tests.kit.programs import fork_programs
from tests.kit.runs import rollout_servers, served_by


@pytest.fixture(scope="module", autouse=True)
def programs_are_forked():
    with pytest.MonkeyPatch.context() as patch:
        fork_programs(patch)
        yield


@pytest.fixture(scope="session")
def two_servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Supervisor]:
    """Servers of the counting model, for one run after the other."""
    servers = rollout_servers(tmp_path_factory.mktemp("servers"), 2)
    # The patch ends before any test does: tests of other folders start real programs.
    with contextlib.ExitStack() as at_end:
        with pytest.MonkeyPatch.context() as patch:
            fork_programs(patch)
            at_end.enter_context(servers)
        yield servers


@pytest.fixture(scope="session")
def server(two_servers: Supervisor) -> tuple[str, ...]:
    """The settings of a run that one of them serves."""
    servers, token_file = served_by(two_servers)
    return f"{servers.partition(',')[0].rstrip(']')}]", token_file


@pytest.fixture(scope="session")
def warm_start(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, ...]:
    """The settings of runs that learn to count, whose warm start is the same: the first of them makes it.

    128 replies a step are enough to learn. With another n_samples or another evaluation it would be another one.
    """
    folder = tmp_path_factory.mktemp("warm")
    return f"warm_start.folder={folder}/count", "batch.prompts_per_step=16", "generation.n_samples=8"
