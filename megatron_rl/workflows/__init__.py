"""Built-in workflows. A workflow defines what one episode generates."""

from megatron_rl.workflows.multi_agent import DebateWorkflow
from megatron_rl.workflows.multi_turn import MultiTurnWorkflow, ToolUseWorkflow
from megatron_rl.workflows.rlvr import RLVRWorkflow
from megatron_rl.workflows.rlvr_variants import BestOfNWorkflow, JudgedWorkflow, ReMaxWorkflow

__all__ = ["BestOfNWorkflow", "DebateWorkflow", "JudgedWorkflow", "MultiTurnWorkflow", "RLVRWorkflow"]
__all__ += ["ReMaxWorkflow", "ToolUseWorkflow"]
