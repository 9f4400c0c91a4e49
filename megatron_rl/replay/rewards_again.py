"""Computes the rewards of a recorded step again, from the prompts' rows and the replies that the record has."""

from __future__ import annotations

import asyncio
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from megatron_rl.config import TrainConfig
from megatron_rl.replay.differences import Compared, compare_sequences
from megatron_rl.replay.records import StepRecord
from megatron_rl.rollout.factory import serve_rewards
from megatron_rl.types import LLMResponse
from megatron_rl.workflows.scoring import RewardCall

SINGLE_TURN = "megatron_rl.workflows:RLVRWorkflow"


def compare_rewards(
    record: StepRecord, config: TrainConfig, tokenizer: PreTrainedTokenizerBase, *, tolerance: float
) -> Compared:
    """Compute the reward of each reply again and compare it with the recorded one.

    Raises ValueError for a workflow whose rewards depend on more than prompt and reply, and for a record without rows.
    """
    if config.rollout.workflow != SINGLE_TURN:
        raise ValueError(
            f"--rewards: rollout.workflow = {config.rollout.workflow!r}: only rewards of {SINGLE_TURN} follow from "
            f"prompt and reply alone; leave --rewards out."
        )
    if "prompt_index" not in record.consumed or not record.rows:
        raise ValueError("--rewards: the record has no rows of its prompts; leave it out.")
    return compare_sequences(record, "rewards", asyncio.run(_rewards(record, config, tokenizer)), tolerance)


async def _rewards(record: StepRecord, config: TrainConfig, tokenizer: PreTrainedTokenizerBase) -> torch.Tensor:
    recipe = serve_rewards(config)
    try:
        timeout_s = float(config.rollout.workflow_args.get("reward_timeout_s", 60.0))
        call = RewardCall(recipe, tokenizer, timeout_s=timeout_s)
        found = [await call(reply, row) for reply, row in _replies(record)]
    finally:
        await recipe.close()
    return torch.tensor(found, dtype=torch.float32)


def _replies(record: StepRecord) -> list[tuple[LLMResponse, dict[str, Any]]]:
    batch, found = record.consumed, []
    bounds = batch.cu_seqlens.tolist()
    for number, place in enumerate(batch["prompt_index"].tolist()):
        first, end = bounds[number], bounds[number + 1]
        ids = batch["input_ids"][first:end].tolist()
        begin = int((batch["versions"][first:end] >= 0).int().argmax())  # the first sampled token
        reply = LLMResponse(
            input_tokens=ids[:begin],
            output_tokens=ids[begin:],
            output_logprobs=batch["logprobs"][first + begin : end].tolist(),
            output_versions=batch["versions"][first + begin : end].tolist(),
            stop_reason="stop",
        )
        found.append((reply, record.rows[str(place)]))
    return found
