"""What the runs of these tests start is forked from the processes that start it: they need not import anything."""

import pytest

from tests.forked_programs import fork_programs


@pytest.fixture(scope="module", autouse=True)
def programs_are_forked():
    with pytest.MonkeyPatch.context() as patch:
        fork_programs(patch)
        yield
