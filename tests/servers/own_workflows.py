"""A workflow as a user writes it."""

import os
import time

from megatron_rl.workflows import RLVRWorkflow


class Blocking(RLVRWorkflow):
    """Does not await what takes long, and so keeps the event loop from all else: until a file is there."""

    async def arun_episode(self, engine, data):
        while not os.path.exists(os.environ["BLOCKED_UNTIL"]):
            time.sleep(0.01)
        return await super().arun_episode(engine, data)
