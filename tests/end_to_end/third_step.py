"""Workflows to which something happens in the third step or later; a step has 8 prompts."""

import asyncio
import os
import resource
from pathlib import Path

from megatron_rl.workflows import RLVRWorkflow


class StuckInTheThirdStep(RLVRWorkflow):
    """Answers 16 prompts and then never again, unless TEST_NOT_STUCK is set."""

    answered = 0

    async def arun_episode(self, engine, data):
        if self.answered >= 16 and "prompt_index" in data and "TEST_NOT_STUCK" not in os.environ:
            await asyncio.Event().wait()
        self.answered += 1
        return await super().arun_episode(engine, data)


class StuckInAnEvaluation(RLVRWorkflow):
    """Answers TEST_STUCK_FROM of the held-out prompts, and then none; TEST_STUCK_FILE is there from then on."""

    answered = 0

    async def arun_episode(self, engine, data):
        if "prompt_index" not in data and "TEST_STUCK_FROM" in os.environ:
            if self.answered >= int(os.environ["TEST_STUCK_FROM"]):
                Path(os.environ["TEST_STUCK_FILE"]).touch()
                await asyncio.Event().wait()
            self.answered += 1
        return await super().arun_episode(engine, data)


class RewardsHangFromTheThirdStepOn(RLVRWorkflow):
    """Answers 16 prompts and gets replies to the others, but no reward for them, unless TEST_NOT_STUCK is set."""

    answered = 0

    async def arun_episode(self, engine, data):
        if self.answered >= 16 and "prompt_index" in data and "TEST_NOT_STUCK" not in os.environ:
            await asyncio.gather(*map(engine.agenerate, self.sample_requests(data)))
            await asyncio.Event().wait()
        self.answered += 1
        return await super().arun_episode(engine, data)


class DiskFullFromTheThirdStepOn(RLVRWorkflow):
    """Lets the trainer write small files only: the log, but neither checkpoints nor weights."""

    answered = 0

    async def arun_episode(self, engine, data):
        if self.answered >= 16:
            hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
            resource.prlimit(os.getppid(), resource.RLIMIT_FSIZE, (200_000, hard))
        self.answered += "prompt_index" in data
        return await super().arun_episode(engine, data)


class JournalFullFromTheFifthStepOn(RLVRWorkflow):
    """From then on the disk takes 100 bytes of a group, unless TEST_DISK_HAS_ROOM is set."""

    answered = 0

    async def arun_episode(self, engine, data):
        if self.answered == 32 and "TEST_DISK_HAS_ROOM" not in os.environ:
            write = os.writev
            os.writev = lambda file, parts: write(
                file, [b"".join(parts)[:100]] if bytes(parts[0])[4:5] == b"G" else parts
            )
        self.answered += "prompt_index" in data
        return await super().arun_episode(engine, data)
