"""The workflow that a config names."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING

from megatron_rl.api import RolloutWorkflow
from megatron_rl.config import GenerationConfig, TrainConfig
from megatron_rl.import_path import resolve

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def make_workflow(
    config: TrainConfig, tokenizer: PreTrainedTokenizerBase, gconfig: GenerationConfig
) -> RolloutWorkflow:
    """Build the configured workflow; ValueError where its constructor does not take the arguments."""
    options = config.rollout
    allowed = config.run.import_from
    factory = resolve(options.workflow, key="rollout.workflow", import_from=allowed)
    reward_fn = resolve(options.reward, key="rollout.reward", import_from=allowed)
    arguments = {"reward_fn": reward_fn, "gconfig": gconfig, "tokenizer": tokenizer}
    try:
        inspect.signature(factory).bind(**arguments, **options.workflow_args)
    except TypeError as error:
        raise ValueError(
            f"rollout.workflow = {options.workflow!r}: {error}; its signature is {inspect.signature(factory)} and it "
            f"is called "
            f"with reward_fn, gconfig, tokenizer and rollout.workflow_args = {options.workflow_args}."
        ) from error
    return factory(**arguments, **options.workflow_args)
