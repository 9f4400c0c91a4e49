"""Environments of the package verifiers, for test_verifiers.py and the processes of its rollouts."""

import asyncio

import verifiers
from datasets import Dataset

SUMS = [{"question": f"What is {a} + {b}?", "answer": str(a + b)} for a, b in ((12, 30), (1, 2), (5, 5))]


def right(completion, answer):
    return float(completion[-1]["content"].strip() == answer)


def polite(completion):
    return float("please" in completion[-1]["content"])


def broken(completion):
    raise OSError("no compiler here")


def unread(completion):
    raise OSError("a metric weighs nothing")


def sums(system_prompt="You add numbers."):
    rubric = verifiers.Rubric(funcs=[right, polite, unread], weights=[1.0, 0.25, 0.0])
    return verifiers.SingleTurnEnv(dataset=Dataset.from_list(SUMS), system_prompt=system_prompt, rubric=rubric)


def compared():
    def longest(completions):
        return [0.0] * len(completions)

    return verifiers.SingleTurnEnv(dataset=Dataset.from_list(SUMS), rubric=verifiers.Rubric(funcs=[longest]))


class Guessing(verifiers.MultiTurnEnv):
    """Says "more" or "less"; of the guess 0 its server is gone, and of 1 it hangs."""

    async def env_response(self, messages, state, **kwargs):
        guess = int(messages[-1]["content"])
        if guess == 0:
            raise verifiers.InfraError("its server is gone")
        if guess == 1:
            await asyncio.sleep(3600)
        if guess == int(state["answer"]):
            state["final_env_response"] = [{"role": "user", "content": "right"}]
            return state["final_env_response"]
        return [{"role": "user", "content": "more" if guess < int(state["answer"]) else "less"}]


def guessing(found, timeout_seconds=None):
    rows = Dataset.from_list([{"question": "Guess a number.", "answer": "42"}])
    rubric = verifiers.Rubric(funcs=[found])
    return Guessing(dataset=rows, rubric=rubric, max_turns=5, timeout_seconds=timeout_seconds)


def quickly(completion, state):
    return 1.0 / len(state["trajectory"])


def with_tools():
    async def add(x: int, y: int) -> int:
        """Add two numbers.

        Args:
            x: the first
            y: the second
        """
        return x + y

    return verifiers.ToolEnv(dataset=Dataset.from_list(SUMS), tools=[add], rubric=verifiers.Rubric(funcs=[right]))


def all_of_them():
    worlds = {
        "sums": sums(),
        "guessing": guessing(quickly),
        "tools": with_tools(),
        "late": guessing(quickly, timeout_seconds=2.0),
        "broken": guessing(broken),
    }
    return verifiers.EnvGroup(envs=list(worlds.values()), env_names=list(worlds))
