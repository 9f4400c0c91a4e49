"""Agents that stand in a test's own process, where they see what the test sees: their worker only relays the call."""

import asyncio
import inspect
import secrets
import threading
from multiprocessing.connection import Client, Listener


def relay(base_url, api_key, data, address):
    """The agent of the worker process."""
    with Client(address) as test:
        test.send((base_url, api_key, data))
        outcome = test.recv()
    if isinstance(outcome, BaseException):
        raise outcome
    return outcome


def here(agent):
    """The arguments of an AgentWorkflow whose agent is called here, in a thread for each run."""
    address = f"\0agent-{secrets.token_hex(16)}"  # in no folder, so that none is left
    listener = Listener(address, backlog=256)

    def accept():
        while True:
            threading.Thread(target=answer, args=[listener.accept()], daemon=True).start()

    def answer(worker):
        try:
            found = agent(*worker.recv())
            outcome = asyncio.run(found) if inspect.iscoroutine(found) else found
        except BaseException as error:
            outcome = error if isinstance(error, KeyError | OSError) else RuntimeError(repr(error))
        try:
            worker.send(outcome)
        except OSError:  # it was killed
            pass

    threading.Thread(target=accept, daemon=True).start()
    return {"agent": relay, "agent_args": {"address": address}}
