"""Runs one rank's part of one step with the code of a real run, on a simulated device (fake_cuda.py)."""

from __future__ import annotations

import importlib.util
import json
import os
import pickle
import sys
import traceback
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any, NoReturn

from megatron_rl import platform
from megatron_rl.config import TrainConfig, load_config
from megatron_rl.platform import upstream
from megatron_rl.tools.rehearsal.device_ledger import Ledger, shown
from megatron_rl.tools.rehearsal.fake_cuda import FakeCuda
from megatron_rl.tools.rehearsal.stand_ins import (
    Objects,
    stand_in_for_device,
    stand_in_for_world,
)
from megatron_rl.tools.rehearsal.te_package import install
from megatron_rl.tools.rehearsal.triton_launches import stand_in_for_triton


def main(folder: str) -> None:
    """Rehearse the ranks listed in `folder/orders.json`. The shim must have been loaded before torch."""
    orders = json.loads((Path(folder) / "orders.json").read_text())
    rehearse_orders(Path(folder), prepare(orders[0][0]["memory_bytes"]))


def rehearse_orders(folder: Path, ledger: Ledger) -> None:
    """Rehearse the ranks listed in `folder/orders.json`, each in a fork of this process.

    The file has a list of lists. Ranks of one inner list run in parallel, at most one per core. The next list starts
    when all of them are done.
    """
    for together in json.loads((folder / "orders.json").read_text()):
        under_way: set[int] = set()
        for order in together:
            if len(under_way) >= (os.cpu_count() or 1):
                under_way.discard(os.wait()[0])
            if pid := os.fork():
                under_way.add(pid)
            else:
                leave(lambda order=order: rehearse_rank(folder / str(order["rank"]), order, ledger))
        while under_way:
            under_way.discard(os.wait()[0])


def leave(work: Callable[[], None]) -> NoReturn:
    """Run `work` in a forked process, then end this process without running the parent's exit handlers."""
    code = 1
    try:
        work()
        code = 0
    finally:
        if code:
            traceback.print_exc()  # the current error does not propagate further
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def prepare(memory_bytes: int) -> Ledger:
    """Prepare the simulated device and a rank's imports, before forking.

    Returns an empty ledger, of which each fork fills its own copy.
    """
    ledger = Ledger()
    stand_in_for_device(ledger, memory_bytes=memory_bytes)
    install()
    stand_in_for_triton(ledger)
    # Before megatron.core's first import, because its modules import the name `jit_fuser`.
    upstream.FIXES["megatron.core.jit"] = lambda module: setattr(module, "jit_fuser", ledger.compiled)
    platform.prepare()  # checks whether CUDA is available
    import megatron_rl.tools.rehearsal.layer_kernels
    import megatron_rl.tools.rehearsal.step  # noqa: F401

    return ledger


def rehearse_rank(place: Path, order: dict[str, Any], ledger: Ledger) -> None:
    """Rehearse one rank in this process, which must not be used for anything else. Write the results to `place`.

    found.json: the ledger's content. said.pickle: Python objects that the rank sent to others. fault.txt: the error
    that ended the rank. output.txt: its stdout and stderr.
    """
    from megatron_rl.tools.rehearsal.layer_kernels import kernels_of_layers
    from megatron_rl.tools.rehearsal.step import rehearse_step

    place.mkdir(parents=True, exist_ok=True)
    output = (place / "output.txt").open("w")
    os.dup2(output.fileno(), 1)
    os.dup2(output.fileno(), 2)
    stand_in_for_world(
        ledger,
        rank=order["rank"],
        world_size=order["world_size"],
        local_rank=order["rank"] % order["gpus_per_node"],
        local_world_size=order["gpus_per_node"],
    )
    heard = [pickle.loads(path.read_bytes()) for path in sorted(place.parent.glob("*/said.pickle"))]
    objects = Objects(ledger, heard)
    try:
        with FakeCuda(ledger):
            config = config_of(order, ledger)
            with rehearse_step(config, ledger, order.get("lengths", ())) as run:
                found = as_dict(ledger)  # before single layers are run, which are not a part of the step
                found["kernels_of_layers"] = kernels_of_layers(run.engine, run.packed, ledger)
    except Exception as error:  # any error would end the rank on its cluster, too
        text = " ".join(str(error).split())[:600]
        (place / "fault.txt").write_text(f"{type(error).__name__} at {innermost(error)}: {text}")
        raise
    (place / "said.pickle").write_bytes(pickle.dumps(objects.said))
    (place / "found.json").write_text(json.dumps(found))


def config_of(order: dict[str, Any], ledger: Ledger) -> TrainConfig:
    """Return an order's config.

    If an option needs a package that is not installed, the option is changed, and the ledger records this.
    """
    from megatron_rl.engine.megatron_overrides import missing_for_flex

    config, changed = load_config(order["config"], order["overrides"]), []
    if config.model.delta_kernel == "fla" and importlib.util.find_spec("fla") is None:
        ledger.note_assumed("model.delta_kernel = 'fla' computes as torch does, which keeps more: fla is not installed")
        changed.append("model.delta_kernel=torch")
    elif config.model.delta_kernel == "fla":
        ledger.note_assumed("kernels of fla count as launches without FLOPs")
    if config.megatron.get("moe_token_dispatcher_type") == "flex" and (package := missing_for_flex(config.megatron)):
        ledger.note_assumed(f"moe_token_dispatcher_type = 'flex' sends by alltoall: {package} is not installed")
        changed.append("megatron.moe_token_dispatcher_type=alltoall")
    return load_config(order["config"], [*order["overrides"], *changed]) if changed else config


def innermost(error: Exception) -> str:
    """Return the innermost code line of this package or of megatron.core in the error's traceback."""
    places = [shown(frame.f_code.co_filename, line) for frame, line in traceback.walk_tb(error.__traceback__)]
    return next((place for place in reversed(places) if place), "elsewhere")


def as_dict(ledger: Ledger) -> dict[str, Any]:
    memory, host = ledger.memory.report(), ledger.host_memory.report()
    peaks = memory.pop("phase_peaks")
    return memory | {
        "host": {name: host[name] for name in ("peak_bytes", "peak_phase", "peak_by_line", "peak_by_part")},
        "phases": {name: vars(ledger.phases[name]) | {"peak_bytes": peak} for name, peak in peaks.items()},
        "collectives": [asdict(call) for call in ledger.collectives],
        "groups": ledger.groups,
        "buckets": ledger.buckets,
        "made_groups": ledger.made_groups,
        "peers": {backend: len(ranks) - 1 for backend, ranks in ledger.peers.items()},
        "assumed": ledger.assumed,
        "unordered": ledger.order.faults,
        "checkpoint_bytes": ledger.checkpoint_bytes,
        "layers": ledger.layers,
    }
