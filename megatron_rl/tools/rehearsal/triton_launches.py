"""Counts launches of Triton kernels on the simulated device, for packages whose Python code allocates their results.

The package's own code runs, and its tensors have memory as on a GPU. A kernel's launch is counted, and what it may have
written is unknown from then on.
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
    """Make Triton's kernels launch nothing but be counted, if Triton is installed. Call it before packages use it."""
    if importlib.util.find_spec("triton") is None:
        return
    from triton.runtime import autotuner, driver, jit

    def run(self: Any, *args: Any, **kwargs: Any) -> None:
        ledger.note_launch(tensors_in(args, kwargs))

    driver.set_active(_Driver())
    for kind in (jit.JITFunction, autotuner.Autotuner, autotuner.Heuristics):
        kind.run = run
