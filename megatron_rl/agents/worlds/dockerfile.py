"""Interprets the part of a Dockerfile that works without docker: files, variables, working folder, and commands.

The host's system replaces the base image. An unsupported line is rejected with an error that quotes it.
"""

from __future__ import annotations

import fnmatch
import json
import re
import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath

Refuse = Callable[[str], ValueError]

PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
WRITABLE = ("app", "data", "home", "media", "mnt", "opt", "output", "root", "run", "srv", "tmp", "var", "workspace")
CALLING = ("BASH_ENV", "ENV", "LD_LIBRARY_PATH", "LD_PRELOAD", "PYTHONHOME", "PYTHONPATH", "PYTHONSTARTUP")
HARMLESS = ("CMD", "EXPOSE", "HEALTHCHECK", "LABEL", "MAINTAINER", "STOPSIGNAL")
"""Instructions that are ignored. In particular, an image's own program (CMD) is not run."""
INSTALLS = re.compile(
    r"\b(apt(-get)?|apk|yum|dnf|curl|wget|npm|uv|pip3?|conda|git)\s+(-\S+\s+)*(add|update|install|clone|https?:)"
)


@dataclass(frozen=True, kw_only=True)
class Step:
    """One build step: a bash command with its working folder, or files with their target folder.

    files: {name in the target folder: path on the host}.
    """

    folder: str
    command: str = ""
    files: dict[str, Path] = field(default_factory=dict)


@dataclass
class Dockerfile:
    """The instructions of a Dockerfile that take effect, in order. Paths are absolute."""

    cwd: str = "/"
    env: dict[str, str] = field(default_factory=lambda: {"PATH": PATH, "HOME": "/root", "LANG": "C.UTF-8"})
    steps: list[Step] = field(default_factory=list)
    folders: set[str] = field(default_factory=lambda: set(WRITABLE))
    """Names under / that are writable."""

    @property
    def trusted_env(self) -> dict[str, str]:
        """The environment variables, without those that could make system programs execute writable files."""
        folders = [f for f in self.env["PATH"].split(":") if f.strip("/").split("/")[0] in ("usr", "bin", "sbin")]
        return {k: v for k, v in self.env.items() if k not in CALLING} | {"PATH": ":".join(folders)}


def read_dockerfile(path: Path, context: Path, *, images: Sequence[str], skips: Sequence[str]) -> Dockerfile:
    """Read a Dockerfile. Raises ValueError for the first unsupported line.

    images: patterns of base images that the host's system may replace. skips: RUN lines that contain one of these texts
    are skipped, because the host has what they install.
    """
    found, arguments, stages = Dockerfile(), dict[str, str](), 0
    for line in lines_of(path.read_text(encoding="utf-8")):
        word, _, rest = line.partition(" ")
        word, rest = word.upper(), rest.strip()

        def refuse(rule: str, line: str = line) -> ValueError:
            return ValueError(f"{path}: {line[:200]}: {rule}")

        def filled(text: str) -> str:
            known = arguments | found.env
            return re.sub(r"\$(?:(\w+)|{(\w+)(?::-([^}]*))?})", lambda m: known.get(m[1] or m[2], m[3] or ""), text)

        match word:
            case "FROM":
                image, stages = filled(rest).split()[0], stages + 1
                if stages > 1:
                    raise refuse("begins a second stage, and only one can be had.")
                if not any(fnmatch.fnmatch(image, pattern) for pattern in images):
                    raise refuse(f"there is no docker here; name {image} in images if this host's system does for it.")
            case "WORKDIR":
                found.cwd = str(PurePosixPath(found.cwd, filled(rest)))
                found.folders.add(top(found.cwd, refuse))
            case "ENV":
                pairs = shlex.split(rest)
                if "=" not in pairs[0]:
                    pairs = [f"{pairs[0]}={' '.join(pairs[1:])}"]
                found.env |= {name: filled(value) for name, _, value in (pair.partition("=") for pair in pairs)}
            case "ARG":
                name, _, value = rest.partition("=")
                arguments[name] = filled(value.strip("\"'"))
            case "RUN":
                if any(text in rest for text in skips):
                    continue
                if INSTALLS.search(rest):
                    raise refuse("installs over the network, which is not there; name it in skips if this host has it.")
                if rest.startswith(("<<", "--")):
                    raise refuse("is of a form that only docker knows.")
                command = shlex.join(json.loads(rest)) if rest.startswith("[") else rest
                found.steps.append(Step(folder=found.cwd, command=command))
            case "COPY" | "ADD":
                folder, files = copied(filled(rest), found.cwd, context, refuse)
                found.folders.add(top(folder, refuse))
                found.steps.append(Step(folder=folder, files=files))
            case "USER" if rest in ("root", "0"):
                pass
            case _ if word not in HARMLESS:
                raise refuse("cannot be had without docker.")
    return found


def lines_of(text: str) -> list[str]:
    text = re.sub(r"^\s*#.*\n?", "", text, flags=re.MULTILINE)
    return [line.strip() for line in text.replace("\\\n", " ").splitlines() if line.strip()]


def top(path: str, refuse: Refuse) -> str:
    """Return the top-level folder of a path. Raise `refuse(..)` if that folder must not be written."""
    name = PurePosixPath(path).parts[1:2]
    if not name or name[0] in ("usr", "bin", "sbin", "lib", "lib64", "etc", "dev", "proc", "sys"):
        raise refuse("writes into a system folder of the host, which is read-only.")
    if name[0] in ("tests", "logs", "solution"):
        raise refuse("writes into a folder of the verifier.")
    return name[0]


def copied(rest: str, cwd: str, context: Path, refuse: Refuse) -> tuple[str, dict[str, Path]]:
    """Return the target folder of a COPY instruction, and its source files by their names in that folder."""
    words = shlex.split(rest) if not rest.startswith("[") else json.loads(rest)
    if any(word.startswith(("--from", "<<", "http:", "https:", "git@")) for word in words):
        raise refuse("copies from elsewhere than the task's own files.")
    *sources, target = [word for word in words if not word.startswith("--")]
    place, files = PurePosixPath(cwd, target), dict[str, Path]()
    is_folder = target.endswith(("/", ".")) or len(sources) > 1
    for source in sources:
        found = sorted(context.glob(source.lstrip("/"))) if source.strip("./") else [context]
        if not found:
            raise refuse(f"there is no {source} in the Dockerfile's folder.")
        for path in found:
            if not path.resolve().is_relative_to(context.resolve()):
                raise refuse("copies from outside of the task's environment.")
            if path.is_dir():
                files |= {inner.name: inner for inner in sorted(path.iterdir())}
            elif is_folder:
                files[path.name] = path
            else:
                return str(place.parent), {place.name: path}
    return str(place), files
