"""Embedded servers and rollout processes are forked from the process that starts them, and import nothing.

That they start from a command line as well is proven in test_supervisor.py and test_coming_and_going.py.
"""

import pytest

from tests.kit.programs import fork_programs


@pytest.fixture(scope="module", autouse=True)
def programs_are_forked():
    with pytest.MonkeyPatch.context() as patch:
        fork_programs(patch)
        yield
