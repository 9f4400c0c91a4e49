"""SIGKILL at random points: nothing is lost, nothing is trained twice. `make soak` does the same for longer."""

import pytest
from kills import soak

pytestmark = pytest.mark.slow


def test_runs_that_are_killed_again_and_again_end_as_if_nobody_had(tmp_path):
    results = list(soak(tmp_path, points=6, seed=4))
    kills = [place for result in results for place in result.kills]
    assert len(kills) == 6 and {"in a checkpoint", "in a step"} <= set(kills)
    for result in results:
        assert result.is_good, result
    assert {result.is_same for result in results} == {True, None}, "of synchronous runs the losses are compared too"
