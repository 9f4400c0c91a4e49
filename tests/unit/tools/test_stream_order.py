"""Uses of a rehearsed device's memory in no order between its streams are found, with both lines."""

import inspect
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.kit import stream_programs
from tests.kit.stream_programs import ELSEWHERE, PROGRAMS

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture(scope="module")
def found(rehearsals, tmp_path_factory):
    """{program: what is found in it with its fault, and what without}."""
    return rehearsals.run_programs(tmp_path_factory.mktemp("programs"))


def lines_of(name):
    """Return the two lines of a program's fault, as a rehearsal writes them."""
    if name in ELSEWHERE:
        return [f"{file}:{line_with(text, file)}" for file, text in ELSEWHERE[name]]
    source, first = inspect.getsourcelines(PROGRAMS[name])
    marked = [first + n for n, line in enumerate(source) if line.rstrip().endswith(("# one", "# other"))]
    return [f"{Path(stream_programs.__file__).name}:{line}" for line in marked]


def line_with(text, file):
    root = ROOT if file.startswith("megatron_rl") else Path(find_spec("megatron.core").origin).parents[2]
    (line,) = [number for number, line in enumerate((root / file).read_text().splitlines(), 1) if text in line]
    return line


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_fault_of_streams_is_found_with_both_lines_and_its_mended_form_has_none(name, found):
    faulty, mended = found[name]
    lines = set(lines_of(name))
    assert any(lines <= set(text.replace(",", " ").split()) for text in faulty), (faulty, lines)
    assert mended == {}
