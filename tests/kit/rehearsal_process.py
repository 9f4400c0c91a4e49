"""The process of tests.kit.rehearsals: it imports what a rehearsed rank needs, once, and forks a process for each rank.

A line of its standard input asks for a rehearsal, and a line of its standard output says that it is done. The shim
comes before torch, so this is an interpreter of its own.
"""

import ctypes
import json
import os
import shutil
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SHIM = ROOT / "megatron_rl" / "_C_rehearsal.so"


def main() -> None:
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    ctypes.CDLL(str(SHIM))
    from megatron_rl.tools.rehearsal import device_ledger
    from megatron_rl.tools.rehearsal.fake_cuda import FakeCuda
    from megatron_rl.tools.rehearsal.rehearsed_rank import leave, prepare, rehearse_orders, rehearse_rank
    from megatron_rl.tools.rehearsal.stand_ins import stand_in_for_world

    ledger = prepare(80 << 30)
    from tests.kit.planted_faults import FAULTS

    def rehearse_case(folder: Path, orders: list[dict], faults: list[str], hears: str) -> int:
        """Rehearse ranks one after the other; return the most memory that one of them had, in KB."""
        for said in Path(hears).glob("*/said.pickle") if hears else ():
            (folder / f"heard-{said.parts[-2]}").mkdir(parents=True)
            shutil.copy(said, folder / f"heard-{said.parts[-2]}")

        def rehearse(order: dict) -> None:
            for name in faults:
                FAULTS[name](order["rank"])
            rehearse_rank(folder / str(order["rank"]), order, ledger)

        return max(in_a_fork(lambda order=order: rehearse(order)) for order in orders)

    def run_programs(folder: Path) -> None:
        """Run the programs of tests.kit.stream_programs, with their faults and without, and write what is found."""
        from tests.kit import stream_programs

        shown, own = device_ledger.shown, stream_programs.__file__
        device_ledger.shown = lambda name, line: f"{Path(own).name}:{line}" if name == own else shown(name, line)
        stand_in_for_world(ledger, rank=0, world_size=2, local_rank=0, local_world_size=2)
        found = {}
        with FakeCuda(ledger):
            for name, program in stream_programs.PROGRAMS.items():
                found[name] = []
                for is_mended in (False, True):
                    ledger.order.faults.clear()
                    program(is_mended)
                    found[name].append(dict(ledger.order.faults))
        (folder / "found.json").write_text(json.dumps(found))

    def in_a_fork(work) -> int:
        if (pid := os.fork()) == 0:
            leave(work)
        return os.wait4(pid, 0)[2].ru_maxrss

    for line in sys.stdin:
        asked = json.loads(line)
        folder = Path(asked.pop("folder"))
        if asked.pop("programs", False):
            answers.write(f"{in_a_fork(lambda folder=folder: run_programs(folder))}\n")
        elif asked:
            answers.write(f"{rehearse_case(folder, **asked)}\n")
        else:
            answers.write(f"{in_a_fork(lambda folder=folder: rehearse_orders(folder, ledger))}\n")
    os._exit(0)  # taking all down that was imported takes seconds


if __name__ == "__main__":
    main()
