"""Built-in workflows: what one episode generates."""

from megatron_rl.rollout.workflows.remax import ReMaxWorkflow
from megatron_rl.rollout.workflows.rlvr import RLVRWorkflow

__all__ = ["RLVRWorkflow", "ReMaxWorkflow"]
