"""Computes the results of operations on FakeTensors, with a cache in front of torch's FakeTensorMode.

FakeTensorMode takes 0.1 ms or more per operation, and layers and microbatches repeat the same operations. So the
shapes, strides, dtypes and devices of results are cached. The key consists of the operation and the same properties of
its arguments. Views are made by the meta device's kernels.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._pytree import tree_map

from megatron_rl.tools.rehearsal.operations import Operation, operation, tensors_in

PLAIN = (int, float, bool, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format)
"""Types of non-tensor arguments that can be part of a cache key. Operations with other arguments are not cached."""


class Form(NamedTuple):
    """All properties of a new tensor except its values."""

    shape: torch.Size
    strides: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    @classmethod
    def of(cls, tensor: Tensor) -> Form:
        return cls(tensor.shape, tensor.stride(), tensor.dtype, tensor.device)


class ResultShapes:
    """Runs operations on FakeTensors. Host tensors among the arguments are treated as FakeTensors, too."""

    def __init__(self) -> None:
        self.fake = FakeTensorMode(allow_non_fake_inputs=True)
        self.fake.cache_enabled = False
        self._made: dict[Any, tuple[type, list[Form]]] = {}
        self._attributes: dict[torch.device, dict[str, Any]] = {}

    def run(self, func, args, kwargs) -> Any:
        """Return an operation's results. For an in-place operation, return the caller's own tensor.

        Raises FakeTensorMode's errors for arguments on different devices, and for shapes that depend on values.
        """
        op = operation(func)
        try:
            key = None if op.changes_form else (func, torch.get_default_dtype(), _key(args), _key(kwargs))
        except TypeError:
            key = None
        if key is not None and (found := self._made.get(key)):
            kind, forms = found
            if op.written:
                return op.writes(args, kwargs)[0] if kind is Tensor else None
            made = [self._tensor(form) for form in forms]
            return made[0] if kind is Tensor else kind(made)
        return self._run_anew(op, key, func, args, kwargs)

    def _run_anew(self, op: Operation, key: Any, func, args, kwargs) -> Any:
        entered_args, entered_kwargs = tree_map(self.entered, (args, kwargs))
        written = op.writes(args, kwargs)
        before = [Form.of(tensor) for tensor in written]
        with self.fake:
            made = func(*entered_args, **entered_kwargs)
        if len(written) == 1 and isinstance(made, Tensor) and op.returns_argument:
            made = written[0]
        if key is None:
            return made
        if written:
            if (made is None or made is written[0]) and before == [Form.of(tensor) for tensor in written]:
                self._made[key] = type(None) if made is None else Tensor, []
            return made
        tensors = [made] if isinstance(made, Tensor) else made
        if type(tensors) in (list, tuple) and _are_new(tensors, tensors_in(entered_args, entered_kwargs)):
            self._made[key] = Tensor if tensors is not made else type(made), [Form.of(tensor) for tensor in tensors]
        return made

    def view(self, func, args, kwargs) -> Any:
        """Return the result of an operation that only returns views of its first argument, a FakeTensor."""
        device = args[0].fake_device
        with torch._C._DisableTorchDispatch(), torch._C._PreserveDispatchKeyGuard():
            self.fake.in_kernel_invocation = True
            torch._C._set_meta_in_tls_dispatch_include(True)
            try:
                made = func(*args, **kwargs)
            finally:
                self.fake.in_kernel_invocation = False
        if isinstance(made, Tensor):
            return self._wrapped(made, device)
        return [self._wrapped(view, device) for view in made]

    def _tensor(self, form: Form) -> FakeTensor:
        made = torch.empty_strided(form.shape, form.strides, dtype=form.dtype, device="meta")
        return self._wrapped(made, form.device)

    def _wrapped(self, meta: Tensor, device: torch.device) -> FakeTensor:
        """Make a FakeTensor from a meta tensor, eight times as fast as FakeTensor(self.fake, meta, device)."""
        attributes = self._attributes.get(device)
        if attributes is None:
            made = FakeTensor(self.fake, meta, device)
            self._attributes[device] = dict(vars(made))
            return made
        made = Tensor._make_subclass(FakeTensor, meta, False, dispatch_device=True, device_for_backend_keys=device)
        torch._C._set_throw_on_mutable_data_ptr(made)
        vars(made).update(attributes)
        return made

    def entered(self, value: Any) -> Any:
        """Convert a host tensor to a FakeTensor; return other values unchanged."""
        if isinstance(value, Tensor) and not isinstance(value, FakeTensor):
            return self.fake.from_tensor(value, static_shapes=True)
        return value


def _are_new(tensors: Iterable[Any], given: list[Tensor]) -> bool:
    """Return True if each tensor covers a storage that no other result and no argument (`given`) uses."""
    seen = {tensor.untyped_storage()._cdata for tensor in given}
    for tensor in tensors:
        if not isinstance(tensor, FakeTensor) or tensor.storage_offset():
            return False
        storage = tensor.untyped_storage()
        alike = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
        if storage._cdata in seen or storage.nbytes() != alike.untyped_storage().nbytes():
            return False
        seen.add(storage._cdata)
    return True


def _key(value: Any) -> Any:
    """Return an argument's cache key. Raises TypeError for types outside of PLAIN."""
    if isinstance(value, Tensor):
        return value.shape, value.stride(), value.dtype, value.device
    if isinstance(value, list | tuple):
        return tuple([_key(part) for part in value])
    if isinstance(value, dict):
        return tuple([(name, _key(part)) for name, part in value.items()])
    if not isinstance(value, PLAIN):
        raise TypeError(f"{type(value)}: not remembered")
    return type(value), value  # 1, 1.0 and True are equal, but result in different dtypes
