"""Task folders of Harbor and Terminal-Bench 2: task.toml, instruction.md, environment/Dockerfile, tests/test.sh.

The policy works in a container without docker. The verifier runs after the policy has finished. By then all of the
policy's processes are dead. The home folder, the temporary folder and the folders of tests and reward are new. So the
policy can affect the verifier only through the files that it has written. If a verifier executes such a file, the file
has the verifier's rights.
"""

from __future__ import annotations

import json
import math
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megatron_rl.agents.worlds.dockerfile import read_dockerfile
from megatron_rl.agents.worlds.shell import Container, ContainerFailed, Shell, memory_kills
from megatron_rl.agents.worlds.shown_paths import ShownPaths
from megatron_rl.workflows.environments import Score, ToolUse, Turn

TASK = "task.toml"
FRESH = {
    "HOME": "/logs/home",
    "TMPDIR": "/logs/tmp",
    # Python would import modules from the working folder, or from a home that the policy prepared.
    "PYTHONSAFEPATH": "1",
    "PYTHONNOUSERSITE": "1",
}
VERIFY = "mkdir -p /logs/home /logs/tmp /logs/verifier /logs/agent; exec bash /tests/test.sh"


def task_prompts(folder: str, first: int = 0, count: int | None = None) -> list[dict[str, Any]]:
    """Return one prompt per task under a folder, sorted by path. Use this as data.train."""
    paths = sorted(path.parent for path in Path(folder).rglob(TASK))
    chosen = paths[first:][:count]
    if not chosen:
        raise ValueError(f"folder = {folder!r}: has {len(paths)} folders with a task.toml, and none from {first} on.")
    shown = ShownPaths([])
    for path in chosen:
        refuse_shown(path, shown)
    texts = [(path / "instruction.md").read_text() for path in chosen]
    return [{"messages": [{"role": "user", "content": t}], "task": str(p)} for t, p in zip(texts, chosen, strict=True)]


class TaskFolder(ToolUse):
    """The task in the folder data["task"], on which the policy works with a shell.

    A reply without a call, or the last turn, ends the episode.

    For example:

        MultiTurnWorkflow(reward, gconfig, tokenizer, TaskFolder, max_tokens=8192, environment_args={
            "images": ["ubuntu:*", "python:3*"]})
    """

    def __init__(
        self,
        data: dict[str, Any],
        *,
        images: Sequence[str],
        skips: Sequence[str] = (),
        visible: Sequence[str] = (),
        reward: str = "reward",
        command_time_s: float = 60.0,
        characters: int = 4000,
        disk_mib: int = 256,
        memory_mib: int = 2048,
    ) -> None:
        """images: patterns of base images that this host's system may replace.

        skips: texts; a RUN line that contains one of them is skipped.
        visible: host paths shown read-only in the container, such as a Python installation.
        reward: key of the reward in a verifier's reward.json.
        disk_mib: size of the container's disk, which is held in memory.
        memory_mib: memory limit of each process.
        """
        super().__init__(data, tools=())
        self.path, self.reward, self.visible = Path(data["task"]).resolve(), reward, list(visible)
        refuse_visible(self.visible)
        refuse_shown(self.path, ShownPaths(self.visible))
        self.settings = tomllib.loads((self.path / TASK).read_text())
        context = self.path / "environment"
        self.recipe = read_dockerfile(context / "Dockerfile", context, images=images, skips=skips)
        left_s = float(self.settings.get("agent", {}).get("timeout_sec", 600.0))
        self.of_shell = command_time_s, left_s, characters
        self.limits = {"disk_mib": disk_mib, "memory_mib": memory_mib}
        self.container = self._new_container()

    def _new_container(self) -> Container:
        return Container(writable=sorted(self.recipe.folders), visible=self.visible, **self.limits)

    async def opening(self) -> dict[str, Any]:
        await self._build(self.container)
        shell = Shell(self.container, self.recipe.cwd, self.recipe.env, *self.of_shell)
        self.tools = {shell.name: shell}
        return self.data | {"tools": [shell.schema]}

    async def _build(self, container: Container) -> None:
        await container.__aenter__()
        await container.begin()
        time_s = float(self.settings.get("environment", {}).get("build_timeout_sec", 600.0))
        for step in self.recipe.steps:
            if step.files:
                await container.put(step.files, step.folder)
                continue
            code, output = await container.run(step.command, step.folder, self.recipe.env, time_s=time_s)
            if code != 0:
                raise ValueError(f"{self.path}: RUN {step.command[:200]}: exit status {code}: {output[-500:]}")

    async def step(self, reply: str, score: Score) -> Turn:
        return await super().step(reply, no_score)

    async def ended(self) -> float:
        """Return the verifier's reward; 0 if the verifier gives none because of what the policy did.

        Raises ContainerFailed if the verifier gives no reward even for a container that the policy has not touched.
        """
        verdict = await self._verify(self.container)
        if verdict is not None:
            return verdict
        # An untouched container shows whether the policy broke the verifier or the verifier is broken itself.
        untouched = self._new_container()
        try:
            await self._build(untouched)
            verdict = await self._verify(untouched)
        finally:
            await untouched.__aexit__()
        if verdict is None:
            said = self.said[-500:]
            raise ContainerFailed(f"{self.path}: its verifier gives no reward, whatever the policy did: {said}")
        return 0.0

    async def _verify(self, container: Container) -> float | None:
        """Return the reward; None if the verifier failed, was killed or did not end.

        Raises ContainerFailed if the host ran out of memory while the verifier ran, whatever its result.
        """
        settings = self.settings.get("verifier", {})
        await container.begin(["tests", "logs"])
        await container.put({"tests": self.path / "tests"}, "/")
        env = self.recipe.trusted_env | settings.get("env", {}) | FRESH
        time_s, kills = float(settings.get("timeout_sec", 600.0)), memory_kills()
        code, self.said = await container.run(VERIFY, self.recipe.cwd, env, time_s=time_s)
        await container.end()
        if (killed := memory_kills() - kills) > 0:
            raise ContainerFailed(
                f"{self.path}: the kernel killed {killed} of this host's processes for want of memory while the "
                f"verifier ran; run fewer episodes at a time (rollout.max_concurrent_episodes)."
            )
        if code is None or code < 0:
            return None
        text = await container.read("/logs/verifier/reward.txt")
        if text is None:
            text = await container.read("/logs/verifier/reward.json")
        return as_number(text, self.reward)

    async def close(self) -> None:
        await self.container.__aexit__()


def refuse_visible(visible: Sequence[str]) -> None:
    """Raise ValueError if a path in `visible` is in the folder of any task, or contains such a folder."""
    for name in visible:
        path = Path(name).resolve()
        tasks = [place for place in (path, *path.parents) if (place / TASK).exists()]
        tasks += [found.parent for found in path.glob(f"*/{TASK}")]
        if tasks:
            raise ValueError(f"visible: {name} shows the policy what is in the task folder {tasks[0]}; leave it out.")


def refuse_shown(task: Path, shown: ShownPaths) -> None:
    """Raise ValueError if a container would show this task's tests or solution to the policy."""
    secret = [task / name for name in ("tests", "solution")]
    links = [path for folder in secret for path in folder.rglob("*") if path.is_symlink()]
    for path in (task, *secret, *links):
        if (holder := shown.holder(path)) is not None:
            raise ValueError(
                f"{path}: is in {holder}, which containers can read, so the policy would see tests and solution; copy "
                f"the tasks to another folder, or remove {holder} from visible if it is listed there."
            )


async def no_score() -> float:
    return 0.0  # the verifier's reward is used


def as_number(text: str | None, name: str) -> float | None:
    """Parse a verifier's reward; return None for anything but a finite number."""
    try:
        value = json.loads(text or "")
        value = float(value[name] if isinstance(value, dict) else value)
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError):
        return None
    return value if math.isfinite(value) else None
