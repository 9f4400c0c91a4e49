"""Agents that talk to the policy by an HTTP API, and worlds of other packages to act in.

No other room of the core imports this one: a config names what it takes, such as `megatron_rl.agents:AgentWorkflow`.
"""

from megatron_rl.agents.agent import AgentWorkflow

__all__ = ["AgentWorkflow"]
