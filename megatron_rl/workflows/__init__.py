"""Built-in workflows. A workflow defines what one episode generates."""

from megatron_rl.workflows.best_of_n import BestOfNWorkflow
from megatron_rl.workflows.judged import JudgedWorkflow
from megatron_rl.workflows.multi_agent import DebateWorkflow
from megatron_rl.workflows.multi_turn import MultiTurnWorkflow, ToolUseWorkflow
from megatron_rl.workflows.remax import ReMaxWorkflow
from megatron_rl.workflows.rlvr import RLVRWorkflow

__all__ = [
    "BestOfNWorkflow",
    "DebateWorkflow",
    "JudgedWorkflow",
    "MultiTurnWorkflow",
    "RLVRWorkflow",
    "ReMaxWorkflow",
    "ToolUseWorkflow",
]
