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
"""Name of the file in a replay's folder that says what it found. It is missing if the replay could not compare."""
Verdict = Literal["good", "bad", "skip"]
SKIP, LEAST_ABORT = 125, 128
"""Special exit codes, as for `git bisect run`. A command that ends with SKIP cannot judge the revision. LEAST_ABORT and
larger codes abort the search."""
FIRST_BAD = re.compile(r"^([0-9a-f]{40}) is the first bad commit$", re.MULTILINE)


class Revisions:
    """A worktree that can be set to any revision of a checkout.

    Its compiled operators are those of the checkout, unless the revision's sources of them differ.

    with Revisions() as revisions:
        revisions.check_out("v0.1.0")
        code = revisions.run([sys.executable, "-m", "megatron_rl.replay", "runs/demo", "--step", "3"])
    """

    def __init__(self, root: Path | None = None) -> None:
        """root: the git checkout; None takes the one that this package is in. Raises ValueError if there is none."""
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
        """Return the commit that a revision names. Raises ValueError if the checkout has no such revision."""
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
        """Set the worktree to a revision. Return the revision's commit."""
        commit = self.named(revision)
        self._git("checkout", "--quiet", "--force", "--detach", commit, inside=True)
        return commit

    def build(self) -> None:
        """Provide the worktree's compiled operators: the checkout's if their sources are equal, else newly built ones.

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
        """Run a command, and all Python processes that it starts, with the worktree's code. Return its exit code.

        The modules of the current folder are found only after the worktree's, because they may be those of another
        revision.
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
        """Return the first revision after `good` that `judge` calls bad.

        `judge` is called after the worktree was set to a revision and its operators were built. Raises ValueError if
        `good` is not good or `bad` not bad, or if too many revisions were skipped to decide.
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
        """Run git and return what it prints. Raises RuntimeError with git's message if it fails.

        inside: run it in the worktree, not in the checkout.
        """
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
    """Turn SIGTERM into SystemExit during the block, so that `finally` blocks are run."""

    def end(number: int, frame: FrameType | None) -> None:
        sys.exit(128 + number)

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def replay_command(words: list[str], folder: Path) -> list[str]:
    """Return the command line of a replay, which any revision can run. words: arguments without --at and --bisect."""
    own = ["--folder", str(folder), "--exit-with", str(os.getpid())]
    return [sys.executable, "-m", "megatron_rl.replay", *words, *own]


def replay_at(revision: str, words: list[str], folder: Path, *, root: Path | None = None) -> int:
    """Replay a step with the code of a revision. Return the replay's exit code.

    words: arguments of the replay without --at.
    """
    with Revisions(root) as revisions:
        commit = revisions.check_out(revision)
        if not (revisions.tree / "megatron_rl" / "replay" / "__main__.py").is_file():
            raise ValueError(f"--at {revision}: {revisions.about(commit)} cannot replay; give a later revision.")
        revisions.build()
        print(f"with the code of {revisions.about(commit)}", flush=True)
        return revisions.run(replay_command(words, folder))


def bisect_replay(good: str, bad: str, words: list[str], *, root: Path | None = None) -> str:
    """Find the first revision whose replay of a step differs from the record. Return a line that names it.

    words: arguments of the replay without --bisect.
    """
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
    """Find the first revision with which a command fails. Return a line that names it.

    The command is run in the top folder of the worktree. Raises RuntimeError if it was killed, or ended with an exit
    code of LEAST_ABORT or more.
    """
    with Revisions(root) as revisions:

        def judge() -> Verdict:
            code = revisions.run(command, cwd=revisions.tree)
            if code < 0 or code >= LEAST_ABORT:
                raise RuntimeError(f"--bisect: {command[0]} ended with {code}, which judges nothing; see its output.")
            return "good" if code == 0 else "skip" if code == SKIP else "bad"

        return f"the first bad revision: {revisions.about(revisions.bisect(good, bad, judge))}"
