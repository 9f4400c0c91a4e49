"""Simulates a CUDA device whose tensors have shapes, dtypes and autograd, but no data. A Ledger records each call.

The shim (csrc/rehearsal) makes torch believe that the device exists. torch's FakeTensorMode computes shapes and rejects
operations on tensors of two devices. Host tensors are real, except large tensors copied from the device, and tensors
derived from those. These exceptions belong to a CPU optimizer, and have neither data nor known values.

Values on the device are not computed, except those of *known* tensors: tensors copied from the host, and tensors that
depend only on those. Examples are token counts, masks, positions and routes. Their values are kept on the host, where
each operation on them is also executed. So a mask selects the real number of rows, and only values that depend on
weights are unknown. Code that reads an unknown value gets 1, and a copy of unknown values to the host contains 0. The
ledger counts both. If a shape depends on an unknown value, UnknownShape is raised.

    mode = FakeCuda(ledger)
    with mode:
        engine.train_batch(...)
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._library.custom_ops import OPDEFS
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
)
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

from megatron_rl.tools.rehearsal.device_ledger import Ledger
from megatron_rl.tools.rehearsal.known_numbers import (
    MOST_KNOWN,
    MOST_ON_HOST,
    forget,
    is_large,
    known,
    on_device,
    values_in,
)
from megatron_rl.tools.rehearsal.operations import operation, tensors_in
from megatron_rl.tools.rehearsal.result_shapes import ResultShapes
from megatron_rl.tools.rehearsal.te_kernels import NAMESPACE

aten = torch.ops.aten

Answer = Callable[..., Any]


class UnknownShape(RuntimeError):
    """Raised if a shape depends on values that a rehearsal does not know."""


class FakeCuda(TorchDispatchMode):
    """A dispatch mode that runs device operations without computing values. Use only one per process."""

    def __init__(self, ledger: Ledger) -> None:
        super().__init__()
        self.ledger = ledger
        self.results = ResultShapes()
        self._answers: dict[Any, Answer] = {
            aten._local_scalar_dense.default: self._read_number,
            aten._to_copy.default: self._copy_to,
            aten.copy_.default: self._copy_into,
            aten.index.Tensor: self._index,
            aten.masked_select.default: self._masked_select,
            aten.index_put_.default: self._index,
            aten.index_put.default: self._index,
            aten._index_put_impl_.default: self._index,
            aten.is_pinned.default: lambda func, tensor, *_, **__: ledger.is_pinned(tensor),
            aten._pin_memory.default: self._pin,
        }

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # nothing is compiled, and the default check costs as much as an operation

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.prim.device.default:  # called far more often than all other operations together
            return args[0].fake_device
        kwargs = kwargs or {}
        if func.namespace == "c10d":
            return self.ledger.collective(func, args, kwargs)
        device = kwargs.get("device")
        is_fake = any(isinstance(tensor, FakeTensor) for tensor in tensors_in(args, kwargs))
        is_pinning = func is aten._pin_memory.default or func is aten.is_pinned.default
        if not (is_fake or is_pinning or (device is not None and torch.device(device).type == "cuda")):
            if self.ledger.order.has_host_uses:
                self.ledger.order.note(operation(func), args, kwargs, None)
            made = func(*args, **{name: value for name, value in kwargs.items() if name != "pin_memory"})
            if kwargs.get("pin_memory"):
                self.ledger.note_pinned(made)
            if isinstance(made, Tensor) and made.numel() > MOST_ON_HOST and made.device.type == "cpu":
                self.ledger.note_on_host(made)
            return made
        if func.namespace == "te_moe":  # Transformer Engine's own operators, made of Triton kernels
            with self:
                return OPDEFS[func._schema.name]._init_fn(*args, **kwargs)
        if answer := self._answers.get(func):
            return answer(func, *args, **kwargs)
        return self.run(func, args, kwargs)

    # Running without computing

    def run(self, func, args, kwargs) -> Any:
        """Run an operation, record the call, and return the result, with its values if they are known."""
        if operation(func).is_view and isinstance(args[0], FakeTensor):  # neither a kernel nor memory
            made = self.results.view(func, args, kwargs)
            values = None if known(args[0]) is None else self._known_result(func, args, kwargs)
            return _with_values(made, values)
        try:
            made = self.results.run(func, args, kwargs)
            values = self._known_result(func, args, kwargs)
        except (DataDependentOutputException, DynamicOutputShapeException) as error:
            values = self._known_result(func, args, kwargs)
            if values is None:
                raise UnknownShape(
                    f"{func} at {self.ledger.line()}: its result's shape depends on numbers that only the weights give."
                ) from error
            self.ledger.note_sync(str(func))
            made = tree_map(self._on_device, values)
        self.ledger.note_kernel(func, args, kwargs, made)
        if values is None:
            for tensor in operation(func).writes(args, kwargs):
                forget(tensor)
        return _with_values(made, values)

    def _on_device(self, value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        with self.results.fake:
            made = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="cuda")
        made.known = value
        return made

    # Known values

    def _known_result(self, func, args, kwargs) -> Any:
        """Execute an operation on the known values of its arguments; return None if one of them is unknown."""
        if func.namespace == NAMESPACE:  # no shape depends on these kernels' values
            return None
        if func in NEVER_KNOWN:
            return self._round_robin(func, args) if func is aten.topk.default else None
        if func in LIKE:  # only the first argument's shape matters
            if is_large(args[0]) or (isinstance(args[0], FakeTensor) and not on_device(args[0])):
                return None
            args = (torch.zeros((), dtype=args[0].dtype).expand(args[0].shape), *args[1:])
        if any(known(tensor) is None for tensor in tensors_in(args, kwargs)):
            return None
        args, kwargs = values_in(args), values_in(kwargs)
        if kwargs.get("device") is not None:
            kwargs = kwargs | {"device": torch.device("cpu")}
            shape = args[0] if args and isinstance(args[0], list | tuple) else ()
            if shape and all(isinstance(size, int) for size in shape) and math.prod(shape) > MOST_KNOWN:
                return None
        try:
            values = func(*args, **kwargs)
        except NotImplementedError:
            return None
        return None if any(is_large(value) for value in tensors_in(values)) else values

    def _round_robin(self, func, args) -> Any:
        """Return the result of a mixture router's topk, whose real routes depend on weights.

        Routes are spread evenly over the experts: token t goes to experts t * k to t * k + k - 1, modulo the number of
        experts.
        """
        scores, k = args[0], args[1]
        if scores.dim() != 2 or scores.shape[0] * k > MOST_KNOWN:
            return None
        rows, experts = scores.shape
        places = torch.arange(rows * k).view(rows, k) % experts
        values = torch.full((rows, k), 1.0 / k, dtype=scores.dtype)
        self.ledger.note_assumed("routes of experts: even")
        return values, places

    # Operations with special handling

    def _read_number(self, func, tensor: Tensor) -> Any:
        if on_device(tensor):
            self.ledger.order.launch("a number read", [tensor], [])
            self.ledger.note_sync("a number read")
        value = known(tensor)
        if value is not None:
            return func(value)
        self.ledger.note_assumed(f"a number of the device is 1, at {self.ledger.line()}")
        return 1.0 if tensor.dtype.is_floating_point else True if tensor.dtype is torch.bool else 1

    def _copy_to(self, func, source: Tensor, **kwargs) -> Any:
        device = kwargs.get("device")
        is_to_host = device is not None and torch.device(device).type == "cpu"
        is_blocking = not kwargs.get("non_blocking")
        if is_to_host and on_device(source):
            if source.is_floating_point() and source.numel() > MOST_ON_HOST and known(source) is None:
                target = self.run(func, (source,), kwargs)
            else:
                target = torch.empty(source.shape, dtype=kwargs.get("dtype") or source.dtype, pin_memory=False)
            if not is_blocking:
                self.ledger.note_pinned(target)  # torch allocates it pinned, because otherwise the copy would block
            self._to_host(source, target, is_blocking=is_blocking)
            return target
        made = self.run(func, (source,), kwargs)
        if on_device(made) and not on_device(source):
            self.ledger.note_copy("to device", source, is_blocking=is_blocking)
        return made

    def _copy_into(self, func, target: Tensor, source: Tensor, non_blocking: bool = False) -> Any:
        if not on_device(target) and (on_device(source) or not isinstance(target, FakeTensor)):
            self._to_host(source, target, is_blocking=not non_blocking)
            return target
        made = self.run(func, (target, source, non_blocking), {})
        if on_device(target) and not on_device(source):
            self.ledger.note_copy("to device", source, is_blocking=not non_blocking)
        # Weights are not tracked, although they come from the host: a model's would fill the host's memory.
        # Nor are the bytes of storages that come back from the host.
        is_tracked = not isinstance(target, torch.nn.Parameter) and target.dtype is not torch.uint8
        value = known(source) if is_tracked else None
        if value is not None and known(target) is None and _is_whole(target) and not is_large(value):
            target.known = value.to(target.dtype).expand(target.shape).clone()
        return made

    def _to_host(self, source: Tensor, target: Tensor, *, is_blocking: bool) -> None:
        if on_device(source):
            self.ledger.order.launch("a copy to the host", [source], [])
            self.ledger.note_copy("to host", target, is_blocking=is_blocking)
        value = known(source)
        if isinstance(target, FakeTensor):
            return
        if value is None:
            self.ledger.note_assumed(f"numbers copied to the host are 0, at {self.ledger.line()}")
            # Untouched pages take no memory. uint8 tensors are storages from the device; their pages are 0 already.
            if not is_large(target) and target.dtype is not torch.uint8:
                target.zero_()
        else:
            target.copy_(value)

    def _index(self, func, source: Tensor, indices: list, *rest, **kwargs) -> Any:
        """Index by a mask as CUDA does: the host first waits for the number of True positions."""
        places: list[Tensor | None] = []
        for index in indices:
            if index is not None and index.dtype in (torch.bool, torch.uint8):
                if known(index) is None:
                    raise UnknownShape(f"{func} at {self.ledger.line()}: by a mask that only the weights give.")
                self.ledger.note_sync("an index by a mask")
                places += [self._on_device(column) for column in known(index).nonzero().unbind(1)]
            else:
                places.append(index)
        return self.run(func, (source, places, *rest), kwargs)

    def _masked_select(self, func, source: Tensor, mask: Tensor) -> Any:
        shape = list(torch.broadcast_shapes(source.shape, mask.shape))
        source, mask = (self.run(aten.expand.default, (tensor, shape), {}) for tensor in (source, mask))
        return self._index(aten.index.Tensor, source, [mask])

    def _pin(self, func, tensor: Tensor, *_, **__) -> Tensor:
        made = self.run(aten.clone.default, (tensor,), {}) if isinstance(tensor, FakeTensor) else tensor.clone()
        self.ledger.note_pinned(made)
        return made


NEVER_KNOWN = {aten.topk.default, aten.empty.memory_format, aten.empty_strided.default, aten.empty_like.default}
LIKE = {aten.zeros_like.default, aten.ones_like.default, aten.full_like.default}
LIKE |= {aten.new_zeros.default, aten.new_ones.default, aten.new_full.default}
NEVER_KNOWN |= {aten.new_empty.default, aten.new_empty_strided.default}


def _with_values(made: Any, values: Any) -> Any:
    """Attach known values to an operation's result and return it. values: None if unknown."""
    if values is not None:
        for tensor, value in zip(tensors_in(made), tensors_in(values), strict=False):
            if isinstance(tensor, FakeTensor):
                tensor.known = value
    return made


def _is_whole(tensor: Tensor) -> bool:
    """Return True if a tensor covers its whole storage."""
    return tensor.numel() * tensor.element_size() == tensor.untyped_storage().nbytes()
