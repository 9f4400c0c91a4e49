"""Workflows for tests that need a rollout to take its time."""

import asyncio
import os

from megatron_rl.rollout.workflows import RLVRWorkflow


class StuckInTheThirdStep(RLVRWorkflow):
    """Answers 16 prompts and then never again, unless TEST_STUCK says otherwise."""

    answered = 0

    async def arun_episode(self, engine, data):
        if self.answered >= 16 and "prompt_index" in data and "TEST_NOT_STUCK" not in os.environ:
            await asyncio.sleep(1000)
        self.answered += 1
        return await super().arun_episode(engine, data)
