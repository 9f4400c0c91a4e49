"""Agents that call the policy through an HTTP API, and adapters for environments of other packages.

No other core package imports this one. A config names what it uses, such as `megatron_rl.agents:AgentWorkflow`.
"""

from megatron_rl.agents.agent import AgentWorkflow

__all__ = ["AgentWorkflow"]
