"""GPU packages that belong together: what requirements/gpu.txt says, and what the packages demand of each other.

python tests/gpu_packages.py --write   # ask the package index again; five minutes

pip then chooses versions of all packages that an installation needs. tests/gpu_packages.json keeps those that have a
version in gpu.txt or constraints.txt, and which package demands what of them. The table of docs/gpu.md is written, too.
"""

from __future__ import annotations

import argparse
import ast
import json
import re
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[1]
LIST, RECORDS, PAGE = ROOT / "requirements" / "gpu.txt", ROOT / "tests" / "gpu_packages.json", ROOT / "docs" / "gpu.md"
TABLE = re.compile(r"(?<=<!-- from requirements/gpu.txt -->\n).*?(?=\n<!-- end -->)", re.DOTALL)
PLATFORM = {"python_version": "3.12", "python_full_version": "3.12.1", "sys_platform": "linux", "os_name": "posix"}
PLATFORM |= {"platform_machine": "x86_64", "platform_system": "Linux"}
"""Environment that the list is for, as the markers of its requirements see it."""
LEFT_OUT = "#:"
"""Stands in front of a package that is not installed with the others."""


@dataclass(frozen=True)
class Entry:
    """A package of the list, with the comment above it."""

    requirement: Requirement
    why: str
    is_left_out: bool

    @property
    def name(self) -> str:
        return canonicalize_name(self.requirement.name)

    @property
    def version(self) -> str:
        """The version, or what follows the last @ in an address."""
        return (self.requirement.url or str(self.requirement.specifier).removeprefix("==")).rpartition("@")[2]


def entries() -> list[Entry]:
    found, comment = [], list[str]()
    for line in LIST.read_text(encoding="utf-8").splitlines():
        if line.startswith("#") and not line.startswith(LEFT_OUT):
            comment.append(line.removeprefix("#").strip())
            continue
        if line:
            requirement = Requirement(line.removeprefix(LEFT_OUT))
            found.append(Entry(requirement, " ".join(comment), line.startswith(LEFT_OUT)))
        comment = []
    return found


def constraints() -> dict[str, str]:
    """Return the versions of constraints.txt for the Python that the list is for."""
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    wanted = [Requirement(line) for line in lines if line and line[0] != "#"]
    here = [it for it in wanted if it.marker is None or it.marker.evaluate(PLATFORM)]
    return {canonicalize_name(it.name): str(it.specifier).removeprefix("==") for it in here}


def setup_requirements() -> dict[str, list[Requirement]]:
    """Return what setup.py declares, by extra. The extra "" has what is always installed."""
    tree = ast.parse((ROOT / "setup.py").read_text(encoding="utf-8"))
    values = {target.id: it.value for it in tree.body if isinstance(it, ast.Assign) for target in it.targets}  # type: ignore[attr-defined]
    extras = ast.literal_eval(values["EXTRAS_REQUIRE"]) | {"": ast.literal_eval(values["INSTALL_REQUIRES"])}
    return {extra: list(map(Requirement, texts)) for extra, texts in extras.items()}


def versions() -> dict[str, str]:
    """Return the version of each package that has one in the list or in constraints.txt."""
    return constraints() | {it.name: it.version for it in entries() if not it.requirement.url}


def demands(requires: Iterable[str], extras: Iterable[str] = ()) -> list[str]:
    """Return what a package's metadata demands of those that have versions, on the list's platform."""
    known, found = versions(), set()
    for wanted in map(Requirement, requires):
        holds = wanted.marker is None or any(wanted.marker.evaluate(PLATFORM | {"extra": it}) for it in ("", *extras))
        if holds and canonicalize_name(wanted.name) in known and wanted.specifier:
            found.add(f"{canonicalize_name(wanted.name)}{wanted.specifier}")
    return sorted(found)


def record(report: dict[str, Any]) -> dict[str, Any]:
    """Return what is kept of a report of pip: versions that it chose, and demands by package."""
    chosen, demanded, known = {}, {}, versions()
    for package in report["install"]:
        metadata = package["metadata"]
        name = canonicalize_name(metadata["name"])
        if name in known:
            chosen[name] = metadata["version"]
        if found := demands(metadata.get("requires_dist", []), package.get("requested_extras") or extras_of(name)):
            demanded[f"{name}=={metadata['version']}"] = found
    return {"chosen": dict(sorted(chosen.items())), "demands": dict(sorted(demanded.items()))}


def extras_of(name: str) -> list[str]:
    """Return the extras with which torch demands a package: of CUDA's toolkit, all that name a package of the list."""
    return ["cublas"] if name == "cuda-toolkit" else []


def ask_pip() -> dict[str, Any]:
    """Let pip choose all packages of an installation for GPUs, of which it installs none; return its report."""
    own = [str(it) for extra in ("", "sglang", "data") for it in setup_requirements()[extra]]
    command = [sys.executable, "-m", "pip", "install", "--dry-run", "--ignore-installed", "--no-build-isolation", "-qq"]
    command += ["--report", "-", "-c", str(ROOT / "constraints.txt"), "-r", str(LIST), *own]
    return json.loads(subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout)


def table() -> str:
    """Return the table of docs/gpu.md."""
    lines = ["| package | version | why |", "|---|---|---|"]
    for entry in entries():
        name = f"`{entry.requirement.name}`" + (" (not installed with the others)" if entry.is_left_out else "")
        version = entry.version[:10] if entry.requirement.url else entry.version
        lines.append(f"| {name} | {version} | {entry.why} |")
    return "\n".join(lines)


def write(report: dict[str, Any]) -> None:
    RECORDS.write_text(json.dumps(record(report), indent=1) + "\n", encoding="utf-8")
    PAGE.write_text(TABLE.sub(lambda _: table(), PAGE.read_text(encoding="utf-8")), encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser("gpu_packages", description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--write", action="store_true", required=True, help="ask pip, and write both files")
    parser.parse_args()
    write(ask_pip())


if __name__ == "__main__":
    main()
