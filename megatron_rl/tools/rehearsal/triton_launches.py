"""Counts launches of Triton kernels on the simulated device.

The Python code that calls a kernel runs as on a GPU, and the tensors that it allocates are recorded. The kernel itself
does not run. Its launch is counted, and the values of all tensors that it may have written become unknown.
"""

from __future__ import annotations

import importlib.util
from types import SimpleNamespace
from typing import Any

from megatron_rl.tools.rehearsal.device_ledger import Ledger
from megatron_rl.tools.rehearsal.operations import tensors_in

HOPPER = SimpleNamespace(backend="cuda", arch=90, warp_size=32)
PROPERTIES = {"multiprocessor_count": 132, "max_shared_mem": 232_448, "warpSize": 32}
"""Properties of an H100, as Triton's driver returns them."""


class _Driver:
    """The part of Triton's driver that packages ask about the device."""

    utils = SimpleNamespace(get_device_properties=lambda _: PROPERTIES)

    def get_current_target(self) -> SimpleNamespace:
        return HOPPER

    def get_current_device(self) -> int:
        return 0


def stand_in_for_triton(ledger: Ledger) -> None:
    """Make Triton's kernels only count their launches, if Triton is installed. Call this before Triton is used."""
    if importlib.util.find_spec("triton") is None:
        return
    from triton.runtime import autotuner, driver, jit

    def run(self: Any, *args: Any, **kwargs: Any) -> None:
        ledger.note_launch(tensors_in(args, kwargs))

    driver.set_active(_Driver())
    for kind in (jit.JITFunction, autotuner.Autotuner, autotuner.Heuristics):
        kind.run = run
