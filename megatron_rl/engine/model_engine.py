"""Base class of both engines: initial weights, scores, statistics, publication, and updates that are skipped."""

from __future__ import annotations

import logging
import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, Self

import torch
from tensordict import TensorDict
from torch import Tensor

from megatron_rl import platform, support
from megatron_rl.api import LogprobLoss, TrainEngine, ValueLoss, WeightReceiver
from megatron_rl.batch.exchange import pack_alike
from megatron_rl.config import EngineConfig, OptimizerConfig
from megatron_rl.engine import soundness
from megatron_rl.engine.manifest import CheckpointError
from megatron_rl.parallel import ParallelGroups
from megatron_rl.types import MicroBatch, StepStats, TrajectoryBatch
from megatron_rl.weights.architecture import read_architecture
from megatron_rl.weights.decoder import Architecture
from megatron_rl.weights.delta import DeltaPublisher
from megatron_rl.weights.hf_files import write_hf_folder
from megatron_rl.weights.ipc import IPCPublisher
from megatron_rl.weights.mapping import carried_tensors, kinds_without_rule, weight_source, without_rule_text
from megatron_rl.weights.publish import AdapterPublisher, DiskPublisher, GroupPublisher, WeightPublisher
from megatron_rl.weights.tensor_rules import WeightSource
from megatron_rl.weights.update_group import TensorSpec

logger = logging.getLogger(__name__)


class ModelEngine(TrainEngine):
    """Training engine of one model. `head` is "policy" for log-probs or "value" for one value per token."""

    version = 0
    was_skipped = False
    """True if the last update was skipped. The learning-rate schedule does not count skipped updates."""
    optimizer: Any  # None for a frozen model
    scheduler: Any  # Megatron's learning-rate schedule, which counts in updates
    dtype: torch.dtype  # dtype of published and saved weights

    def __init__(self, config: EngineConfig, *, groups: ParallelGroups | None, trainable: bool, head: str) -> None:
        self.config, self.groups, self.trainable = config, groups, trainable
        self.arch = read_architecture(config.model.path).with_head(head)
        self.publisher: WeightPublisher | None = None
        self._said_what_servers_keep = False

    def first_weights(self) -> WeightSource:
        """Return the source of the initial weights: the model's folder, or random numbers from the config's seed."""
        config = self.config
        seed = config.seed if config.model.init == "random" else None
        return weight_source(config.model.path, self.arch, random_seed=seed)

    def say_what_is_not_loaded(self, folder: str | Path) -> None:
        """Log which tensors of a HF folder this model has no parameters for. Only the main rank logs."""
        if self.groups.is_main and (text := without_rule_text(folder)):
            logger.warning("%s", text)

    @property
    def saved_model(self) -> dict[str, str]:
        """Arguments for functions that write weights: the folder with the config and the tokenizer, and the head."""
        return {"model_folder": self.config.model.path, "head": self.arch.head}

    def optimizer_options(self, lr: float | None) -> OptimizerConfig:
        """Return the optimizer's config. If `lr` is given, the learning rate is constant at that value."""
        options = self.config.optimizer
        return options if lr is None else replace(options, lr=lr, min_lr=0.0, schedule="constant", warmup_updates=0)

    def in_microbatches(self, batch: TrajectoryBatch, **options: Any) -> list[MicroBatch]:
        """Pack the batch into microbatches, equally many on every rank. options: further arguments of `pack_alike`."""
        self.check_tokens(batch)
        config = self.config
        limits = {"tokens_per_microbatch": config.tokens_per_microbatch, "allow_longer": config.allow_longer_sequences}
        return pack_alike(batch, self.groups, **limits, **options)

    def check_tokens(self, batch: TrajectoryBatch) -> None:
        """Raise ValueError if a token id is outside the vocabulary. Ids of padded embedding rows are outside, too."""
        ids = batch["input_ids"]
        if not len(ids):
            return
        for place in (int(ids.argmin()), int(ids.argmax())):
            if not 0 <= ids[place] < self.arch.vocab:
                raise ValueError(
                    f"input_ids: token {place} of the batch is {int(ids[place])}, and the vocabulary of "
                    f"{self.config.model.path!r} has {self.arch.vocab} ids; take the tokenizer that belongs to the "
                    f"model."
                )

    def check_trainable(self) -> None:
        if self.optimizer is None:
            raise RuntimeError(
                "train_batch on an engine with trainable=False: a reference model is frozen; use forward."
            )

    def publish(
        self,
        receiver: WeightReceiver | None,
        specs: list[TensorSpec],
        tensors: Iterator[tuple[str, Tensor]],
        version: int,
    ) -> None:
        """Send weights to the rollout servers. Collective: every rank calls it.

        receiver: the servers' side of the publication. specs: names, dtypes and shapes of the tensors. tensors: the
        tensors and their names. version: the policy version that the servers then have.
        """
        if self.publisher is None:  # created lazily: the servers are unknown before the first call
            self.publisher = make_publisher(receiver, self.config, self.arch, backend=platform.backend())
        if not self._said_what_servers_keep:
            self._said_what_servers_keep = True
            self._say_what_servers_keep()
        self.publisher.publish(specs, tensors, version)

    def _say_what_servers_keep(self) -> None:
        """Log which tensors of the model's folder no publication sends. Only the main rank logs."""
        model, how = self.config.model, self.config.publication
        if not self.groups.is_main or model.init != "hf" or how in ("disk", "adapters"):
            return
        if names := kinds_without_rule(model.path):
            logger.warning(
                "rollout.publication = %s does not send these tensors of model.path, which are not trained as part of "
                "the model: %s. Servers keep the values that they loaded at their start. rollout.publication=disk "
                "writes them to each version's folder.",
                *(how, names),
            )

    def close_publisher(self) -> None:
        if self.publisher is not None:
            self.publisher.close()

    def saved_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the HF tensors that a saved model is made of.

        Tensors of the model's folder for which the model has no parameter are not among them.
        """
        return iter(self.hf_tensors())

    def write_weights(self, path: str | Path) -> None:
        """Write the `saved_tensors` to a HF folder. Collective: every rank calls it.

        Raises CheckpointError on all ranks if writing fails.
        """
        tensors = iter(self.saved_tensors())

        def write() -> None:
            try:
                carried = carried_by_model(self.config)
                write_hf_folder(path, tensors, dtype=self.dtype, carried=carried, **self.saved_model)
            finally:
                deque(tensors, maxlen=0)  # drain the stream after a failed write: every tensor is a collective

        if not self.groups.is_main:
            deque(tensors, maxlen=0)  # drain the stream: every tensor of it is a collective
        self.write_on_main("weights", write)

    def write_on_main(self, what: str, write: Callable[[], None]) -> None:
        """Call `write` on the main rank. Raises CheckpointError on all ranks if it could not write its files.

        what: what is written, for the error's text.
        """
        if fault := self.groups.on_main(write):
            raise CheckpointError(f"{what} {fault}; see that the disk has space, and save again.")

    def eval(self) -> Self:
        return self.train(False)

    def get_version(self) -> int:
        return self.version

    def set_version(self, version: int) -> None:
        self.version = version

    def score(self, data: TrajectoryBatch | TensorDict) -> Tensor:
        """Return a reward model's score of each sequence, `[B]` float32: the value at the sequence's last token.

        The score of an empty sequence is 0. Collective: every rank calls it with its share of the data.
        """
        self.check_head("score", "value")
        # The value at a token is of the state before it. The state after the last token needs one more token.
        longer, last = TrajectoryBatch.of(data).with_one_more_token()
        return self.forward(longer)[last]

    def step_lr_scheduler(self) -> None:
        if not self.was_skipped:
            self.scheduler.step(increment=1)

    def is_sound(self, loss: float, grad_norm: float) -> bool:
        """Return True if loss and gradient norm are finite on every rank. Collective: every rank calls it."""
        return not self.groups.any(not (math.isfinite(loss) and math.isfinite(grad_norm)))

    def note_update(
        self, applied: bool, data: Any, loss_fn: Any, *, loss: float, grad_norm: float, results: Tensor | None = None
    ) -> str:
        """Count an applied update, or log why an update was skipped. Collective: every rank calls it.

        Returns the reason why the update was skipped, or '' if it was applied. results: the log-probs or values from
        which the loss was computed. If it is None and the update was skipped, they are computed again.
        """
        self.version += applied
        self.was_skipped = not applied
        if applied:
            return ""
        batch, name = TrajectoryBatch.of(data), "own value" if self.arch.head == "value" else "own log p"
        if results is None:  # an extra forward pass; the update is lost anyway
            temperature = loss_fn.temperature if isinstance(loss_fn, LogprobLoss) else 1.0
            results = self.forward(batch, temperature=temperature)
        fault = soundness.explain(loss, grad_norm, batch, results, name, self.groups)
        if self.groups.is_main:
            logger.warning("an update is skipped: %s", fault)
        return fault

    def check_loss(self, loss_fn: Any, batch: TrajectoryBatch) -> None:
        """Raise ValueError if the loss needs another kind of head than this engine has, or would ignore supports."""
        self.check_head("loss_fn", "value" if isinstance(loss_fn, ValueLoss) else "policy")
        if support.COLUMN in batch and not isinstance(loss_fn, LogprobLoss | ValueLoss):
            raise ValueError(
                f"loss_fn: a loss on whole logits normalises over the vocabulary, and the data has a column "
                f"{support.COLUMN!r}, the tokens that each token was sampled from; pass a LogprobLoss, whose "
                f"log-probabilities are over these, or sample with generation.top_k=-1."
            )

    def check_head(self, asked: str, head: str) -> None:
        """Raise ValueError unless this engine's head is `head`. asked: what needs this head, for the error's text."""
        if self.arch.head != head:
            raise ValueError(
                f"{asked}: needs an engine with head={head!r}, and this one has {self.arch.head!r}: log-probs and "
                f"logits are a policy's, values and scores those of a critic or reward model; ask the other engine."
            )


def trained_tokens(rows: TensorDict) -> Tensor:
    """Return the number of trained rows of a microbatch, which is the default loss weight."""
    return (rows["labels"] >= 0).sum()


def loss_weight(found: Any) -> Tensor:
    """Convert the result of a loss_weight_fn to an int tensor on the host. Raises ValueError if it is a fraction."""
    weight = torch.as_tensor(found)
    if weight.is_floating_point() and float(weight) != int(weight):
        raise ValueError(
            f"loss_weight_fn returned {float(weight)}: weights are integer counts (trained tokens, sequences), because "
            f"the gradient is divided by their global sum; return the count and put fractions into the loss."
        )
    return weight.to("cpu", torch.int)


def step_stats(totals: dict[str, float], **rest: Any) -> StepStats:
    """Build a step's statistics. totals: the global sums by name, from which "loss" and "weight" are removed.

    rest: further fields of StepStats.
    """
    loss, weight = totals.pop("loss"), totals.pop("weight")
    return StepStats(loss=loss / max(weight, 1.0), weight=weight, sums=totals, **rest)


def carried_by_model(config: EngineConfig) -> Iterable[tuple[str, Tensor]]:
    """Yield the tensors of the model's folder that no parameter of the model is made of. They are unchanged."""
    return carried_tensors(config.model.path) if config.model.init == "hf" else ()


def make_publisher(
    receiver: WeightReceiver | None, config: EngineConfig, arch: Architecture, *, backend: str
) -> WeightPublisher:
    """Return the publisher that `config.publication` selects. backend: the trainer's torch.distributed backend."""
    folder: dict[str, Any] = {"folder": Path(config.publication_folder), "model_folder": config.model.path}
    if config.publication == "disk":
        return DiskPublisher(receiver, carried=lambda: carried_by_model(config), **folder)
    if config.publication == "adapters":
        return AdapterPublisher(receiver, arch=arch, lora=config.lora, **folder)
    if config.publication == "ipc":
        return IPCPublisher(receiver, bucket_bytes=config.bucket_bytes)
    if config.publication == "delta":
        return DeltaPublisher(receiver)
    return GroupPublisher(receiver, bucket_bytes=config.bucket_bytes, backend=backend)
