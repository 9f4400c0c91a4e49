"""Plants errors in a copy of the package, one after the other, and asks whether `make test` finds them.

python tests/mutations.py                 # all; half an hour on two cores
python tests/mutations.py packing journal # those whose file or text has one of these words
python tests/mutations.py --whole packing # by all tests of `make test` and not just those that should find it

Most were drawn at random from all places where a comparison, a sign, an index, a negation or an await could be another
one; those that change no result were left out. A mutation is found if one of the tests that it names fails.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import yaml

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "build" / "mutations"
FOLDERS = ("benchmarks", "configs", "csrc", "docs", "examples", "megatron_rl", "requirements", "scripts", "tests")
NOT_FOUND = 1
"""The exit status if a mutation is not found."""


@dataclass(frozen=True)
class Mutation:
    file: str
    text: str
    """Stands once in the file."""
    wrong: str
    tests: str
    """Paths below tests/, one of which finds it."""


def planted() -> list[Mutation]:
    rows = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8"))
    return [Mutation(**row) for row in rows]


def copied_tree() -> Path:
    """Return a copy of the sources; the compiled operators lie beside them."""
    shutil.rmtree(FOLDER, ignore_errors=True)
    for name in FOLDERS:
        shutil.copytree(ROOT / name, FOLDER / name, ignore=shutil.ignore_patterns("__pycache__"))
    for path in ROOT.iterdir():
        if path.is_file():
            shutil.copy2(path, FOLDER)
    return FOLDER


def is_found(mutation: Mutation, tree: Path, tests: list[str]) -> tuple[bool, str]:
    """Return whether a test fails, and the last line that pytest printed."""
    path = tree / "megatron_rl" / mutation.file
    right = path.read_text(encoding="utf-8")
    assert right.count(mutation.text) == 1, f"{mutation.file} has {mutation.text!r} {right.count(mutation.text)} times"
    path.write_text(right.replace(mutation.text, mutation.wrong), encoding="utf-8")
    command = [sys.executable, "-m", "pytest", "-x", "-m", "not thorough", *tests]
    environment = os.environ | {"PYTHONPATH": str(tree)}
    try:
        done = subprocess.run(command, cwd=tree, env=environment, capture_output=True, text=True)
    finally:
        path.write_text(right, encoding="utf-8")
    assert done.returncode in (0, 1, 2, 3, 4), done.stdout[-2000:]
    said = [line for line in done.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
    return done.returncode != 0, said[0] if said else done.stdout.splitlines()[-1]


def main() -> int:
    parser = argparse.ArgumentParser("mutations", description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("words", nargs="*", help="of the mutations to plant; left out, all are")
    parser.add_argument("--whole", action="store_true", help="ask all tests of `make test`")
    arguments = parser.parse_args()
    chosen = [it for it in planted() if not arguments.words or any(word in str(it) for word in arguments.words)]
    tree, missed = copied_tree(), []
    for mutation in chosen:
        tests = ["tests"] if arguments.whole else [f"tests/{path}" for path in mutation.tests.split()]
        found, said = is_found(mutation, tree, tests)
        print(f"{'found ' if found else 'MISSED'} {mutation.file}: {mutation.wrong}\n         {said}", flush=True)
        missed += [] if found else [mutation]
    print(f"{len(chosen) - len(missed)} of {len(chosen)} found")
    return NOT_FOUND if missed else 0


if __name__ == "__main__":
    sys.exit(main())
