"""Runs microbatches through Megatron's pipeline schedule and collects what the last stage computes.

Each microbatch contributes a loss sum and an integer weight. Megatron divides the gradient once by the global weight
(`calculate_per_token_loss`), so nothing here divides the loss.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.distributed import finalize_model_grads
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
from megatron.core.pipeline_parallel.schedules import get_schedule_table
from megatron.core.process_groups_config import ProcessGroupCollection
from torch import Tensor

from megatron_rl.engine.packed_rows import PackedRows, own_rows, row_multiple
from megatron_rl.parallel import ParallelGroups
from megatron_rl.types import MicroBatch

LastStage = Callable[[Tensor, MicroBatch, PackedRows], tuple[Tensor, Tensor, Any]]
"""Function that computes a microbatch's loss on the last stage: (hidden states `[R, H]` of this context rank,
microbatch, its PackedRows) -> (loss sum, integer weight on the host, anything to keep)."""


class KnownShapes(P2PCommunicator):
    """Pipeline communicator for tensors whose shapes every stage already knows on the host.

    Megatron's communicator also sends the shape of each tensor, and waits for the device to read it. Tensors arrive in
    the order of Megatron's schedule table. For gradients, the order of the table's model chunks is reversed.
    """

    def __init__(self, pipeline: dist.ProcessGroup, config: Any, rows: list[int], chunks: int) -> None:
        """Prepare the shapes of one pass. rows: the number of rows that each microbatch has on this rank.

        chunks: the number of model chunks per rank.
        """
        super().__init__(pipeline, config)
        round_length = config.microbatch_group_size_per_vp_stage if chunks > 1 else len(rows)
        shapes = [
            ([rows[microbatch], 1, config.hidden_size], turn)
            for microbatch, turn in get_schedule_table(len(rows), chunks, round_length)
        ]
        # The first stage's first chunk receives no input, and the last stage's last chunk receives no gradient.
        is_first, is_last = pipeline.rank() == 0, pipeline.rank() == pipeline.size() - 1
        self.inputs = iter([shape for shape, turn in shapes if turn or not is_first])
        self.gradients = iter([shape for shape, turn in shapes if turn or not is_last])

    def _communicate_shapes(self, tensor_send_next, tensor_send_prev, recv_prev, recv_next):
        return next(self.inputs) if recv_prev else None, next(self.gradients) if recv_next else None


def divide_by_weight(groups: ParallelGroups) -> Callable[..., None]:
    """Return a `finalize_model_grads` that divides gradients by the global weight without waiting for the device.

    Megatron's function reads the weight on the host, to skip a division by 0. Here a weight of 0 counts as 1, because
    the gradients are then 0 too.
    """

    def finalize(chunks: list, weight: Tensor, **options: Any) -> None:
        finalize_model_grads(chunks, None, **options)
        if groups.pipeline.size > 1:  # only the last stage has the weight
            dist.broadcast(weight, group=groups.pipeline.group, group_src=groups.pipeline.size - 1)
        dist.all_reduce(weight, group=groups.data_context.group)
        for chunk in chunks:
            chunk.scale_gradients(1.0 / weight.clamp(min=1))

    return finalize


def run(
    chunks: list,
    microbatches: list[MicroBatch],
    last_stage: LastStage,
    *,
    forward_only: bool,
    groups: ParallelGroups,
    config: Any,
    device: torch.device,
    mixtures: list[int] | None = None,
    copies_shared_keys: bool = True,
    prepare: Callable[[MicroBatch], None] | None = None,
) -> list[Any]:
    """Run all microbatches through this rank's model chunks.

    On the last pipeline stage, returns what `last_stage` kept of each microbatch, in their order; on other stages, [].
    config: Megatron's config of the model.
    mixtures, copies_shared_keys: as in `own_rows`.
    prepare: called with the microbatch before each of its passes through a chunk. It is called before the backward pass
      too, because that may compute layers again.
    """
    split = groups.tensor.size if config.sequence_parallel else 1
    multiple = row_multiple(context=groups.context.size, sequence_split=split)
    prepared: dict[int, tuple[Tensor, PackedRows]] = {}

    def forward_step(iterator, model):
        number, microbatch = next(iterator)
        if number not in prepared:  # shared by the chunks of an interleaved pipeline
            prepared[number] = own_rows(
                microbatch,
                groups.context,
                multiple_of=multiple,
                device=device,
                dtype=config.params_dtype,
                parts=split if config.multi_latent_attention else 1,
                mixtures=mixtures,
                copies_shared_keys=copies_shared_keys,
            )
        ids, packed = prepared.pop(number) if model is chunks[-1] else prepared[number]
        if prepare is not None:
            prepare(microbatch)
        hidden = model(
            input_ids=ids[None], position_ids=packed.positions[None], attention_mask=None, packed_seq_params=packed
        )  # Megatron's shape is rows, batch (1), hidden
        if prepare is not None and hidden.grad_fn is not None:
            hidden.grad_fn.register_prehook(lambda _: prepare(microbatch))
        return hidden, lambda hidden: last_stage(hidden[:, 0], microbatch, packed)  # called on the last stage only

    rows = [-(-len(microbatch.computed) // multiple) * multiple for microbatch in microbatches]
    options: dict[str, Any] = {}
    if groups.pipeline.size > 1:
        own = [count // (groups.context.size * split) for count in rows]
        options["p2p_communicator"] = KnownShapes(groups.pipeline.group, config, own, len(chunks))
        # Megatron's default, which it requires together with a communicator
        options["pg_collection"] = ProcessGroupCollection.use_mpu_process_groups()
    return get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=[enumerate(microbatches) for _ in chunks],  # each chunk runs all microbatches
        model=chunks,
        num_microbatches=len(microbatches),
        seq_length=max(rows),  # unused with variable_seq_lengths
        micro_batch_size=1,
        forward_only=forward_only,
        **options,
    )
