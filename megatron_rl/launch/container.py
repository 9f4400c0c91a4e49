"""Wraps a command so that it runs in a container: by pyxis, a plugin of srun, or by apptainer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

RUNTIMES = ("pyxis", "apptainer")
PYTHON = "python3"
"""In the image."""


@dataclass(frozen=True, kw_only=True)
class Container:
    """An image and what starts it. The working folder and `mounts` are the same inside as outside."""

    image: str
    runtime: str
    mounts: Sequence[str] = ()

    @property
    def _folders(self) -> list[str]:
        return list(dict.fromkeys([str(Path.cwd()), *self.mounts]))

    def srun_options(self) -> list[str]:
        if self.runtime != "pyxis":
            return []
        mounts = ",".join(f"{folder}:{folder}" for folder in self._folders)
        return [
            f"--container-image={self.image}",
            f"--container-mounts={mounts}",
            f"--container-workdir={Path.cwd()}",
        ]

    def command(self, arguments: Sequence[str], *, has_gpus: bool) -> list[str]:
        """The command that runs the image's Python on these arguments."""
        python = [PYTHON, *arguments]
        if self.runtime == "pyxis":
            return python
        binds = [word for folder in self._folders for word in ("--bind", folder)]
        return ["apptainer", "exec", *(["--nv"] * has_gpus), *binds, "--pwd", str(Path.cwd()), self.image, *python]
