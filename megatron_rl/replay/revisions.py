"""Runs a replay, or another command, with the code of other revisions, and finds the first revision that goes wrong.

The code is in a temporary worktree of this package's checkout, which is removed at the end, also after Ctrl-C or
SIGTERM. The checkout's own files, index and branch do not change.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Literal

from megatron_rl.telemetry.provenance import ROOT

RESULT = "replay.json"
"""File in a replay's folder with what it found. A replay that could not judge leaves none."""
Verdict = Literal["good", "bad", "skip"]
SKIP, LEAST_ABORT = 125, 128
"""Exit codes of a command, as for `git bisect run`: this one cannot judge the revision; these and larger ones abort."""
FIRST_BAD = re.compile(r"^([0-9a-f]{40}) is the first bad commit$", re.MULTILINE)


class Revisions:
    """A worktree that can be set to any revision of a checkout. Its operators are compiled if their sources differ.

    with Revisions() as revisions:
        revisions.check_out("v0.1.0")
        code = revisions.run([sys.executable, "-m", "megatron_rl.replay", "runs/demo", "--step", "3"])
    """

    def __init__(self, root: Path | None = None) -> None:
        """root: the checkout, by default that of this package. Raises ValueError if the package has none."""
        self.root = root = root or ROOT
        if not (root / ".git").exists() or shutil.which("git") is None:
            what = "is no git checkout" if shutil.which("git") else "cannot be read without git, which is not on PATH"
            raise ValueError(
                f"--at, --bisect: {root}, from which megatron_rl is imported, {what}, so it has no other revisions; "
                f"clone the repository and install it with pip install -e."
            )

    def __enter__(self) -> Revisions:
        self._end = contextlib.ExitStack()
        with contextlib.ExitStack() as end:
            end.enter_context(_terminated_in_order())
            folder = Path(end.enter_context(tempfile.TemporaryDirectory(prefix="megatron_rl-revision-")))
            self.tree = folder / "tree"
            self._git("worktree", "prune")  # those of processes that were killed
            self._git("worktree", "add", "--detach", "--no-checkout", str(self.tree), "HEAD")
            end.callback(self._git, "worktree", "remove", "--force", "--force", str(self.tree))
            self._end = end.pop_all()
        return self

    def __exit__(self, *error: object) -> None:
        self._end.close()

    def named(self, revision: str) -> str:
        """Return a revision's commit. Raises ValueError if the checkout has none of this name."""
        try:
            return self._git("rev-parse", "--verify", "--quiet", f"{revision}^{{commit}}").strip()
        except RuntimeError:
            raise ValueError(
                f"--at, --bisect: {revision!r} is no revision of {self.root}; give a commit, tag or branch, and "
                f"git fetch it first if it is new."
            ) from None

    def about(self, commit: str) -> str:
        return self._git("log", "-1", "--format=%h (%cs, %s)", commit).strip()

    def check_out(self, revision: str) -> str:
        """Set the worktree to a revision. Return its commit."""
        commit = self.named(revision)
        self._git("checkout", "--quiet", "--force", "--detach", commit, inside=True)
        return commit

    def build(self) -> None:
        """Give the worktree its compiled operators: those of the checkout if their sources are the same.

        Raises RuntimeError if they cannot be compiled.
        """
        script = self.tree / "csrc" / "build.py"
        if not script.is_file():
            return
        for path in (self.root / "megatron_rl").glob("_C_*"):
            shutil.copy2(path, self.tree / "megatron_rl")
        objects = self.root / "build" / "csrc"
        if objects.is_dir() and not (self.tree / "build" / "csrc").exists():
            shutil.copytree(objects, self.tree / "build" / "csrc")
        # A checkout without kernels is used without them, and to compile them takes minutes.
        cuda = "auto" if (self.root / "megatron_rl" / "_C_cuda.so").is_file() else "no"
        command = [sys.executable, str(script), "--cuda", cuda]
        done = subprocess.run(command, cwd=self.tree, capture_output=True, text=True)
        if done.returncode:
            last = (done.stderr.strip().splitlines() or ["no message"])[-1]
            raise RuntimeError(f"the operators of {self.about('HEAD')} cannot be compiled: {last}")

    def run(self, command: list[str], *, cwd: Path | None = None) -> int:
        """Run a command, and every Python process below it, with the worktree's code. Return its exit code.

        The current folder's modules are found after the worktree's: they may be those of another revision.
        """
        paths = [str(self.tree), *filter(None, [os.environ.get("PYTHONPATH")]), os.getcwd()]
        # Bytecode is matched by its source's size and second, and the next revision's source may have both.
        own = {"PYTHONPATH": os.pathsep.join(paths), "PYTHONSAFEPATH": "1", "PYTHONDONTWRITEBYTECODE": "1"}
        process = subprocess.Popen(command, cwd=cwd, env=os.environ | own)
        try:
            return process.wait()
        finally:
            if process.poll() is None:  # after Ctrl-C, which the process has got too
                process.terminate()
                process.wait()

    def bisect(self, good: str, bad: str, judge: Callable[[], Verdict]) -> str:
        """Return the first revision after `good` at which `judge`, called with the worktree set and built, says bad.

        Raises ValueError if the ends are not as they should be, or if skipped revisions leave it open.
        """
        commits = self.named(good), self.named(bad)
        for name, commit, wanted in ((bad, commits[1], "bad"), (good, commits[0], "good")):
            self.check_out(commit)
            if (found := self._judged(judge)) != wanted:
                words = "cannot be judged" if found == "skip" else f"is {found}"
                raise ValueError(f"--bisect {good} {bad}: {name} {words}, and should be {wanted}; give other ends.")
        self._git("bisect", "start", commits[1], commits[0], inside=True)
        while True:
            done = self._told("bisect", self._judged(judge), inside=True)
            said = done.stdout + done.stderr
            if first := FIRST_BAD.search(said):
                return first[1]
            if done.returncode:
                raise ValueError(f"--bisect {good} {bad}: {' '.join(said.split())[-500:]}")

    def _judged(self, judge: Callable[[], Verdict]) -> Verdict:
        verdict: Verdict = "skip"
        try:
            self.build()
        except RuntimeError as error:
            print(error, file=sys.stderr)
        else:
            verdict = judge()
        print(f"{verdict}: {self.about(self._git('rev-parse', 'HEAD', inside=True).strip())}", flush=True)
        return verdict

    def _git(self, *command: str, inside: bool = False) -> str:
        """Return what git prints. Raises RuntimeError with git's words if it fails."""
        done = self._told(*command, inside=inside)
        if done.returncode:
            raise RuntimeError(f"git {' '.join(command)}: {' '.join(done.stderr.split())}")
        return done.stdout

    def _told(self, *command: str, inside: bool = False) -> subprocess.CompletedProcess[str]:
        whole = ["git", "-C", str(self.tree if inside else self.root), *command]
        # In a process group of its own: Ctrl-C must not end the command that removes the worktree.
        return subprocess.run(
            whole, capture_output=True, text=True, env=os.environ | {"LC_ALL": "C"}, start_new_session=True
        )


@contextlib.contextmanager
def _terminated_in_order() -> Iterator[None]:
    """Turn SIGTERM into SystemExit, so that what was begun is undone."""

    def end(number: int, frame: FrameType | None) -> None:
        sys.exit(128 + number)

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def replay_command(words: list[str], folder: Path) -> list[str]:
    """Return the command line of a replay by whatever revision runs it. words: arguments without --at and --bisect."""
    own = ["--folder", str(folder), "--exit-with", str(os.getpid())]
    return [sys.executable, "-m", "megatron_rl.replay", *words, *own]


def replay_at(revision: str, words: list[str], folder: Path, *, root: Path | None = None) -> int:
    """Take a step again with the code of a revision. Return the exit code of that replay."""
    with Revisions(root) as revisions:
        commit = revisions.check_out(revision)
        if not (revisions.tree / "megatron_rl" / "replay" / "__main__.py").is_file():
            raise ValueError(f"--at {revision}: {revisions.about(commit)} cannot replay; give a later revision.")
        revisions.build()
        print(f"with the code of {revisions.about(commit)}", flush=True)
        return revisions.run(replay_command(words, folder))


def bisect_replay(good: str, bad: str, words: list[str], *, root: Path | None = None) -> str:
    """Find the first revision whose replay of a step differs from the record. Return a line about it."""
    with Revisions(root) as revisions, tempfile.TemporaryDirectory(prefix="megatron_rl-replay-") as folder:

        def judge() -> Verdict:
            result = Path(folder) / RESULT
            result.unlink(missing_ok=True)
            revisions.run(replay_command(words, Path(folder)))
            if not result.is_file():
                return "skip"
            return "good" if json.loads(result.read_text())["differs"] is None else "bad"

        return f"the first bad revision: {revisions.about(revisions.bisect(good, bad, judge))}"


def bisect_command(good: str, bad: str, command: list[str], *, root: Path | None = None) -> str:
    """Find the first revision at which a command fails, run at the top of the worktree. Return a line about it.

    Raises RuntimeError for an exit code that judges nothing, or if the command was killed.
    """
    with Revisions(root) as revisions:

        def judge() -> Verdict:
            code = revisions.run(command, cwd=revisions.tree)
            if code < 0 or code >= LEAST_ABORT:
                raise RuntimeError(f"--bisect: {command[0]} ended with {code}, which judges nothing; see its output.")
            return "good" if code == 0 else "skip" if code == SKIP else "bad"

        return f"the first bad revision: {revisions.about(revisions.bisect(good, bad, judge))}"
