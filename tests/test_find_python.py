"""scripts/find_python.sh finds a Python that runs, and says how to get one where none does."""

import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]


def find_python(tmp_path, *versions: str, path: str) -> subprocess.CompletedProcess:
    variables = {"PATH": path, "HOME": str(tmp_path), "PYENV_ROOT": str(tmp_path / "pyenv")}
    command = [ROOT / "scripts" / "find_python.sh", *versions]
    return subprocess.run(command, env=variables, capture_output=True, text=True)


def program(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/bash\n{text}\n")
    path.chmod(0o755)
    return path


def test_python_that_runs_is_found_behind_a_shim_that_does_not(tmp_path):
    version = f"{sys.version_info[0]}.{sys.version_info[1]}"
    shim = program(tmp_path / "bin" / f"python{version}", "echo 'pyenv: command not found' >&2; exit 127")
    program(
        tmp_path / "pyenv" / "versions" / f"{version}.9" / "bin" / f"python{version}", f'exec {sys.executable} "$@"'
    )
    for name in ("bash", "env", "ls", "sort"):  # and no Python of the system's
        (shim.parent / name).symlink_to(shutil.which(name))
    found = find_python(tmp_path, "3.99", version, path=str(shim.parent))
    assert found.stdout.strip() == sys.executable, found.stderr


def test_where_no_python_runs_the_message_says_how_to_get_one(tmp_path):
    found = find_python(tmp_path, "3.99", path="/usr/bin:/bin")
    assert found.returncode == 1 and not found.stdout
    assert "no Python of version 3.99 runs here: install one" in found.stderr and "make PYTHON=" in found.stderr
