"""A server of real OpenEnv environments: `python openenv_worlds.py PORT FILE`, at /guess and /shop."""

import os
import sys
import time

import uvicorn
from fastmcp import FastMCP
from openenv.core.env_server import Action, Environment, MCPEnvironment, Observation, State, create_fastapi_app
from openenv.core.env_server.mcp_types import CallToolAction, CallToolObservation
from starlette.applications import Starlette
from starlette.routing import Mount


class Guess(Action):
    number: int


class Hint(Observation):
    hint: str = ""


class Guessing(Environment):
    """Hides the seed of its reset. Of -1 it crashes, of -2 it dies, and of -3 it hangs until FILE is there."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def reset(self, seed=None, episode_id=None, **kwargs):
        self.hidden, self.tries = seed, 0
        return Hint(hint="guess from 0 to 99")

    def step(self, action, timeout_s=None, **kwargs):
        self.tries += 1
        if action.number == -1:
            raise OSError("its disk is full")
        if action.number == -2:
            os._exit(1)
        if action.number == -3:
            while not os.path.exists(sys.argv[2]):
                time.sleep(0.01)
        if action.number == self.hidden:
            return Hint(hint="right", reward=1.0 / self.tries, done=True)
        return Hint(hint="more" if action.number < self.hidden else "less", reward=0.0)

    @property
    def state(self):
        return State(step_count=self.tries)


class Shop(MCPEnvironment):
    """A basket, to be filled by calls of tools; each fruit earns 0.5, and the second ends it."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self):
        server, self.basket = FastMCP("shop"), []

        @server.tool
        def put(item: str) -> str:
            """Put a fruit into the basket."""
            if item not in ("apple", "pear"):
                raise ValueError(f"{item} is no fruit")
            self.basket.append(item)
            return ", ".join(self.basket)

        super().__init__(server)

    def reset(self, seed=None, episode_id=None, **kwargs):
        self.basket.clear()
        return Observation(done=False, metadata={})

    async def step_async(self, action, timeout_s=None, **kwargs):
        before = len(self.basket)
        found = await super().step_async(action, timeout_s=timeout_s, **kwargs)
        return found.model_copy(update={"reward": (len(self.basket) - before) / 2, "done": len(self.basket) == 2})

    def _step_impl(self, action, timeout_s=None, **kwargs):
        raise ValueError(f"no action: {action}")

    @property
    def state(self):
        return State(step_count=len(self.basket))


if __name__ == "__main__":
    app = Starlette(
        routes=[
            Mount("/guess", create_fastapi_app(Guessing, Guess, Hint, max_concurrent_envs=1)),
            Mount("/shop", create_fastapi_app(Shop, CallToolAction, CallToolObservation, max_concurrent_envs=1)),
        ]
    )
    uvicorn.run(app, host="127.0.0.1", port=int(sys.argv[1]), log_level="warning")
