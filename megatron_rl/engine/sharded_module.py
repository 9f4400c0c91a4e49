"""Checkpointing of this package's own modules that split parameters over tensor ranks."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint, sharded_state_dict_default
from torch import Tensor, nn


class ShardedModule(nn.Module):
    """Module that saves the parameters named in `cut` as shards along dimension 0, and its others as replicas.

    By default, Megatron saves all parameters of modules that are not its own as replicas.
    """

    cut: tuple[str, ...] = ()
    tp_group: torch.distributed.ProcessGroup

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple = (), metadata: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        own: dict[str, Tensor] = {}
        self._save_to_state_dict(own, "", keep_vars=True)
        groups = dict(tp_group=self.tp_group, dp_cp_group=(metadata or {})["dp_cp_group"])
        state = make_sharded_tensors_for_checkpoint(own, prefix, dict.fromkeys(self.cut, 0), sharded_offsets, **groups)
        for name, module in self.named_children():
            state |= sharded_state_dict_default(module, f"{prefix}{name}.", sharded_offsets, metadata, self.tp_group)
        return state
