"""The first words of every error in docs/troubleshooting.md still stand in the code."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
ERRORS = re.findall(r"^### `(.+)`$", PAGE, re.MULTILINE)
GAP = "\0"
"""Stands for what an f-string puts in."""


def texts_of(tree: ast.AST) -> list[str]:
    """Return every text of a module's code, with a gap for each value that it puts in."""
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            parts = [str(part.value) if isinstance(part, ast.Constant) else GAP for part in node.values]
            found.append("".join(parts))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            found.append(node.value)
    return found


@pytest.fixture(scope="module")
def texts() -> list[str]:
    files = sorted((ROOT / "megatron_rl").rglob("*.py"))
    return [text for path in files for text in texts_of(ast.parse(path.read_text(encoding="utf-8")))]


def test_the_page_has_the_likeliest_errors_each_with_cause_and_remedy():
    assert len(set(ERRORS)) == len(ERRORS) >= 25
    for entry in PAGE.split("\n### ")[1:]:
        lines = entry.splitlines()
        assert lines[1].startswith("- **Cause:** "), lines[0]
        assert sum(line.startswith("- **Remedy:** ") for line in lines) == 1, lines[0]


@pytest.mark.parametrize("error", ERRORS)
def test_first_words_stand_in_the_code(error, texts):
    pieces = [re.escape(piece) for piece in re.split(r"\.\.\.\.?", error) if piece.strip()]
    assert max(map(len, pieces)) >= 10, f"{error}: has no words that tell it from others"
    pattern = re.compile(".*?".join(pieces), re.DOTALL)
    assert any(pattern.search(text) for text in texts), f"{error}: no message of the code has these words"
