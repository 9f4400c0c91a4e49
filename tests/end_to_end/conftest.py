"""The programs that these tests' runs start are forked from the processes that start them, and import nothing."""

import pytest

from tests.kit.programs import fork_programs


@pytest.fixture(scope="module", autouse=True)
def programs_are_forked():
    with pytest.MonkeyPatch.context() as patch:
        fork_programs(patch)
        yield
