"""Reads facts about torch operators from their schemas, and caches them because every call needs them."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload

NO_LAUNCH = ("aten::empty", "aten::new_empty", "aten::lift", "aten::_has_", "aten::set_", "aten::resize_")


@dataclass(frozen=True)
class Operation:
    """Facts about one overload of an operator."""

    name: str
    """Name with namespace, without the overload's name, such as `aten::copy_`."""
    arguments: tuple[str, ...]
    written: tuple[tuple[int, str], ...]
    """(position, name) of each argument that the operator writes to."""
    returns_argument: bool
    """True if the operator's first result is an argument or a view of one."""
    is_view: bool
    """True if the operator only returns views of its first argument: it allocates and writes nothing."""
    changes_form: bool
    """True if the operator may change its arguments' shapes or storages."""
    launches: bool
    """True if the operator launches a kernel. Only calls that allocate or write a tensor count."""

    def writes(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
        """Return the tensors that a call writes to."""
        if not self.written:
            return []
        return tensors_in(*(args[n] if n < len(args) else kwargs.get(name) for n, name in self.written))


@functools.cache
def operation(func: OpOverload) -> Operation:
    schema = func._schema
    written = tuple(
        (place, argument.name)
        for place, argument in enumerate(schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    )
    returns_argument = bool(schema.returns) and schema.returns[0].alias_info is not None
    return Operation(
        name=schema.name,
        arguments=tuple(argument.name for argument in schema.arguments),
        written=written,
        returns_argument=returns_argument,
        is_view=(returns_argument and not written and not schema.name.startswith("aten::lift"))
        or schema.name == "aten::_unsafe_view",  # its schema does not declare the alias
        changes_form=torch.Tag.inplace_view in func.tags or schema.name.startswith(("aten::set_", "aten::resize_")),
        launches=not schema.name.startswith(NO_LAUNCH),
    )


def tensors_in(*values: Any) -> list[Tensor]:
    """Return all tensors in arguments or results.

    This runs several times per operation, and is faster than tree_leaves.
    """
    found: list[Tensor] = []
    for value in values:
        if isinstance(value, Tensor):
            found.append(value)
        elif isinstance(value, list | tuple):
            found += tensors_in(*value)
        elif isinstance(value, dict) and value:
            found += tensors_in(*value.values())
    return found
