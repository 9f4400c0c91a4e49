"""Finds out which paths of this host are visible inside a container, by any name or mount."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from megatron_rl.sandbox.container import SYSTEM

MOUNTS = Path("/proc/self/mountinfo")


class ShownPaths:
    """The paths that a container shows: the host's system, and the paths in `visible`.

    For example:

        ShownPaths(["/opt/python"]).holder("/usr/share/tasks/sum")  # "/usr"
    """

    def __init__(self, visible: Sequence[str]) -> None:
        # (mount point, device, path within the device's file system), the newest mount last.
        self._mounts = [mount_of(line) for line in MOUNTS.read_text(encoding="utf-8").splitlines()]
        self._shown = []
        for name in (*SYSTEM, *visible):
            path = Path(name).resolve()
            self._shown.append((name, path, *self._place(path)))
            # Mounts beneath a path are shown with it.
            self._shown += [(name, *mount) for mount in self._mounts if mount[0].is_relative_to(path)]

    def holder(self, path: str | Path) -> str | None:
        """Return the shown path that contains `path`; None if it is not shown."""
        path = Path(path).resolve()
        device, place = self._place(path)
        for name, shown, its_device, its_place in self._shown:
            if path.is_relative_to(shown) or (device == its_device and place.is_relative_to(its_place)):
                return name
        return None

    def _place(self, path: Path) -> tuple[str, Path]:
        """Return a path's device, and its path within the device's file system.

        For a file that is bind-mounted at several paths, all of these give the same result.
        """
        holding = [mount for mount in self._mounts if path.is_relative_to(mount[0])]
        if not holding:
            return "", path
        point, device, root = max(reversed(holding), key=lambda mount: len(mount[0].parts))
        return device, root / path.relative_to(point)


def mount_of(line: str) -> tuple[Path, str, Path]:
    """Parse a line of /proc/self/mountinfo into mount point, device and root."""
    device, root, point = (re.sub(r"\\(\d{3})", lambda m: chr(int(m[1], 8)), it) for it in line.split(" ")[2:5])
    return Path(point), device, Path(root)
