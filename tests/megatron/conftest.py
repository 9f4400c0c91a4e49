from collections.abc import Iterator

import pytest


@pytest.fixture(scope="module")
def programs_are_forked() -> Iterator[None]:
    """Let runs start the program of their report as a fork, which need not import anything."""
    from tests.kit.programs import fork_programs

    with pytest.MonkeyPatch.context() as patch:
        fork_programs(patch)
        yield
