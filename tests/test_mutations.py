"""The errors that tests/mutations.py plants still have a place."""

from __future__ import annotations

import pytest

from tests.mutations import ROOT, Mutation, planted


@pytest.mark.parametrize("mutation", planted(), ids=lambda mutation: f"{mutation.file}: {mutation.wrong}")
def test_the_text_that_a_mutation_changes_stands_once(mutation: Mutation):
    assert (ROOT / "megatron_rl" / mutation.file).read_text(encoding="utf-8").count(mutation.text) == 1
    assert all((ROOT / "tests" / path).exists() for path in mutation.tests.split())
