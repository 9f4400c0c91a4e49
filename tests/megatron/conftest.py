from collections.abc import Iterator

import pytest


@pytest.fixture(scope="module")
def programs_are_forked() -> Iterator[None]:
    """For whole runs: what makes their report is forked from them, and imports nothing."""
    from tests.kit.programs import fork_programs

    with pytest.MonkeyPatch.context() as patch:
        fork_programs(patch)
        yield
