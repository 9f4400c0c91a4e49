"""Agents of smolagents, unmodified. Worker processes import them, without what a test needs."""

import smolagents


@smolagents.tool
def add(x: int, y: int) -> int:
    """Add two numbers.

    Args:
        x: the first
        y: the second
    """
    return x + y


def calling(base_url, api_key, data):
    model = smolagents.OpenAIServerModel("policy", api_base=base_url, api_key=api_key)
    agent = smolagents.ToolCallingAgent([add], model, max_steps=3, verbosity_level=0)
    return float(str(agent.run("What is 12 + 30?")).strip() == "42")


def in_code(base_url, api_key, data):
    model = smolagents.OpenAIServerModel("policy", api_base=base_url, api_key=api_key)
    agent = smolagents.CodeAgent([add], model, max_steps=3, verbosity_level=0)
    return float(agent.run("What is 12 + 30?") == 42)
