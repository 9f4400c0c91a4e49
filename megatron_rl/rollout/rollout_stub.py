"""Base class of proxies for a RolloutService in another process or on another thread's event loop.

Each method has the signature of the RolloutService method that it calls; mypy and a test check this.
"""

from __future__ import annotations

import abc
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, TypeVar

from megatron_rl.api import ChecksumForm, HeldWeights
from megatron_rl.rollout.rollout_service import RolloutService
from megatron_rl.telemetry.rollout_metrics import Counts

P = ParamSpec("P")
T = TypeVar("T")
Buckets = dict[str, Any]


class RolloutStub(abc.ABC):
    """Proxy of a RolloutService; the methods are documented there. It is also a WeightReceiver."""

    @abc.abstractmethod
    def _call(self, method: Callable[Concatenate[Any, P], T], /, *args: P.args, **kwargs: P.kwargs) -> T:
        """Call a method of the service. Return its result, or raise its exception."""

    @abc.abstractmethod
    def _await(
        self, method: Callable[Concatenate[Any, P], Coroutine[Any, Any, T]], /, *args: P.args, **kwargs: P.kwargs
    ) -> T:
        """Call a coroutine method of the service and block until it has finished."""

    @abc.abstractmethod
    def _value(self, name: str) -> Any:
        """Return the value of one of the service's properties."""

    # -- servers

    @property
    def membership(self) -> int:
        value: int = self._value("membership")
        return value

    @property
    def server_ranks(self) -> dict[str, int]:
        value: dict[str, int] = self._value("server_ranks")
        return value

    @property
    def serving(self) -> list[str]:
        value: list[str] = self._value("serving")
        return value

    @property
    def needs_weights(self) -> bool:
        value: bool = self._value("needs_weights")
        return value

    def fail(self, message: str) -> None:
        self._call(RolloutService.fail, message)

    def trainer_address(self) -> str:
        return self._call(RolloutService.trainer_address)

    def drop(self, server: str, reason: str) -> None:
        self._await(RolloutService.drop, server, reason)

    def unreachable(self) -> dict[str, str]:
        return self._await(RolloutService.unreachable)

    def select_servers(self) -> None:
        self._await(RolloutService.select_servers)

    def set_memory(self, parts: frozenset[str], starts: dict[str, int]) -> list[str]:
        return self._await(RolloutService.set_memory, parts, starts)

    def pause(self) -> None:
        self._await(RolloutService.pause)

    def resume(self) -> None:
        self._await(RolloutService.resume)

    # -- weights

    def join_weight_group(self, *, address: str, port: int, name: str, backend: str) -> dict[str, Future[None]]:
        return self._call(RolloutService.join_weight_group, address=address, port=port, name=name, backend=backend)

    def leave_weight_group(self, *, name: str) -> dict[str, Future[None]]:
        return self._call(RolloutService.leave_weight_group, name=name)

    def begin_weight_update(self, version: int) -> None:
        self._await(RolloutService.begin_weight_update, version)

    def end_weight_update(self, version: int) -> None:
        self._await(RolloutService.end_weight_update, version)

    def load_bucket(
        self,
        *,
        names: list[str],
        dtypes: list[str],
        shapes: list[list[int]],
        group: str,
        version: int,
        flattened: bool = True,
    ) -> dict[str, Future[None]]:
        return self._call(
            RolloutService.load_bucket,
            names=names,
            dtypes=dtypes,
            shapes=shapes,
            group=group,
            version=version,
            flattened=flattened,
        )

    def load_round(self, buckets: list[Buckets], version: int, pickled: str) -> dict[str, Future[None]]:
        return self._call(RolloutService.load_round, buckets, version, pickled)

    def shared_memory_forms(self, at_hand: Sequence[str] = ()) -> dict[str, str | None]:
        return self._await(RolloutService.shared_memory_forms, at_hand)

    def load_shared(
        self, *, names: list[str], dtypes: list[str], shapes: list[list[int]], buckets: Buckets, version: int
    ) -> dict[str, Future[None]]:
        return self._call(
            RolloutService.load_shared, names=names, dtypes=dtypes, shapes=shapes, buckets=buckets, version=version
        )

    def change_forms(self) -> dict[str, str | None]:
        return self._call(RolloutService.change_forms)

    def load_changes(self, bodies: dict[str, bytes | list[str]], version: int) -> dict[str, Future[None]]:
        return self._call(RolloutService.load_changes, bodies, version)

    def load_folder(self, path: str | Path, version: int) -> dict[str, Future[None]]:
        return self._call(RolloutService.load_folder, path, version)

    def load_adapters(self, path: str | Path, version: int) -> dict[str, Future[None]]:
        return self._call(RolloutService.load_adapters, path, version)

    def checksum_forms(self) -> dict[str, ChecksumForm | None]:
        return self._call(RolloutService.checksum_forms)

    def held_weights(self) -> dict[str, Future[HeldWeights]]:
        return self._call(RolloutService.held_weights)

    def finish_update(self, version: int) -> None:
        self._call(RolloutService.finish_update, version)

    # -- policy version, counts

    def set_version(self, version: int) -> None:
        self._call(RolloutService.set_version, version)

    def mark_published(self, serving: list[str], version: int) -> None:
        self._await(RolloutService.mark_published, serving, version)

    def counts(self) -> Counts:
        return self._call(RolloutService.counts)
