"""One Slurm for all tests of a session that need it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from cluster import Cluster, missing, running_cluster


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    reason = missing()
    if reason:
        pytest.skip(reason)
    folder = tmp_path_factory.mktemp("slurm")
    with running_cluster(folder / "cluster") as environment:
        yield Cluster(environment, folder)
