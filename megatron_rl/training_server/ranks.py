"""Work on the engine that all ranks do together. Rank 0 calls it, and the other ranks follow."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import Tensor

from megatron_rl.engine.manifest import CheckpointError
from megatron_rl.training_server.losses import make_loss
from megatron_rl.training_server.shared_engine import AdamStep, Adapted, ModelState, Pass, SharedEngine
from megatron_rl.training_server.wire import ForwardBackward

FAILURES = (ValueError, CheckpointError)
"""Errors that an operation raises on all ranks alike. Such an error ends only the request; any other ends the
server."""
IDLE = ("rest", "stop")


class Ranks:
    """The models in the engine, by id, on each rank.

    ranks = Ranks(engine)
    if engine.groups.is_main:
        ranks.call("create", "a:train:0", Adapted(rank=8, seed=0))
        ranks.call("stop")
    else:
        ranks.follow()
    """

    def __init__(self, engine: SharedEngine) -> None:
        self.engine = engine
        self.models: dict[str, ModelState] = {}

    def is_at_hand(self, model: str) -> bool:
        """Return True if the model's passes can run together with those of other models."""
        return self.engine.is_at_hand(self.models[model])

    def call(self, name: str, *arguments: Any) -> Any:
        """Run the method `name` of this class on all ranks and return rank 0's result. Only rank 0 calls this.

        Two names are no methods: `rest` does nothing, and `stop` ends `follow` on the other ranks.
        """
        dist.broadcast_object_list([(name, arguments)], src=0, group=self.engine.groups.control)
        return None if name in IDLE else getattr(self, name)(*arguments)

    def follow(self) -> None:
        """Run every method that rank 0 passes to `call`, until it passes `stop`. All ranks except rank 0 call this."""
        name = ""
        while name != "stop":
            told: list[Any] = [None]
            dist.broadcast_object_list(told, src=0, group=self.engine.groups.control)
            name, arguments = told[0]
            with contextlib.suppress(*FAILURES):  # rank 0 has the same error, and tells the client
                if name not in IDLE:
                    getattr(self, name)(*arguments)

    def create(self, model: str, adapted: Adapted) -> None:
        self.models[model] = self.engine.new_model(adapted)

    def drop(self, model: str) -> None:
        self.engine.drop(self.models.pop(model))

    def compute(self, asked: list[ForwardBackward], with_gradients: bool) -> list[tuple[float, list[Tensor]]]:
        passes = [Pass(self.models[one.model_id], one.data, make_loss(one.loss, one.options)) for one in asked]
        return self.engine.compute(passes, with_gradients=with_gradients)

    def optim_step(self, model: str, step: AdamStep) -> tuple[bool, float]:
        state = self.models[model]
        if state.gradients is None:
            raise ValueError("optim_step: no forward_backward since the last one has succeeded; call that first.")
        return self.engine.optimizer_step(state, step)

    def save(self, model: str, folder: Path) -> None:
        self.engine.save_model(self.models[model], folder)

    def load(self, model: str, folder: Path, with_optimizer: bool) -> None:
        self.engine.load_model(self.models[model], folder, with_optimizer=with_optimizer)

    def export(self, model: str, folder: Path) -> None:
        self.engine.export_model(self.models[model], folder)
