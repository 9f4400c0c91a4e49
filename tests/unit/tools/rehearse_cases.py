"""A program that rehearses ranks of a tiny job, each case with faults planted in the engine's code.

python rehearse_cases.py FOLDER    # reads FOLDER/cases.json: {case: {"faults": [...], "orders": [...]}}

The first case is done first: others hear what its last rank said. A case's ranks are done one after the other.

The shim comes before torch, so that this needs an interpreter of its own; ranks and cases are forked from it.
"""

import ctypes
import json
import os
import shutil
import sys
from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[3] / "megatron_rl"


def main(folder: Path) -> None:
    ctypes.CDLL(str(PACKAGE / "_C_rehearsal.so"))
    from megatron_rl.tools.rehearsal.rehearsed_rank import leave, prepare, rehearse_rank

    cases = json.loads((folder / "cases.json").read_text())
    ledger = prepare(80 << 30)
    from tests.unit.tools.planted_faults import FAULTS

    said = folder / next(iter(cases)) / "7" / "said.pickle"

    def rehearse_case(case: str) -> None:
        if case != said.parts[-3]:
            (folder / case / "7").mkdir(parents=True)
            shutil.copy(said, folder / case / "7")
        for order in cases[case]["orders"]:
            if os.fork() == 0:
                for name in cases[case]["faults"]:
                    FAULTS[name](order["rank"])
                leave(lambda order=order: rehearse_rank(folder / case / str(order["rank"]), order, ledger))
            os.wait()

    under_way = 0
    for number, case in enumerate(cases):
        if os.fork() == 0:
            leave(lambda case=case: rehearse_case(case))
        under_way += 1
        if number == 0 or under_way == (os.cpu_count() or 1):
            os.wait()
            under_way -= 1
    while under_way:
        os.wait()
        under_way -= 1


if __name__ == "__main__":
    main(Path(sys.argv[1]))
