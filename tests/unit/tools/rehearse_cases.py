"""A program that rehearses ranks of a tiny job, each case with a fault planted in the engine's code.

python rehearse_cases.py FOLDER    # reads FOLDER/cases.json: {case: [order, ...]}; a case's ranks one after the other

The shim comes before torch, so that this needs an interpreter of its own; ranks and cases are forked from it.
"""

import ctypes
import json
import os
import sys
from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[3] / "megatron_rl"


def main(folder: Path) -> None:
    ctypes.CDLL(str(PACKAGE / "_C_rehearsal.so"))
    from megatron_rl.tools.rehearsal.rehearsed_rank import leave, prepare, rehearse_rank

    cases = json.loads((folder / "cases.json").read_text())
    ledger = prepare(80 << 30)
    from tests.unit.tools.planted_faults import FAULTS

    def rehearse_case(case: str) -> None:
        for order in cases[case]:
            if os.fork() == 0:
                if case in FAULTS:
                    FAULTS[case](order["rank"])
                leave(lambda order=order: rehearse_rank(folder / case / str(order["rank"]), order, ledger))
            os.wait()

    under_way = 0
    for case in cases:
        if under_way == (os.cpu_count() or 1):
            os.wait()
            under_way -= 1
        if os.fork() == 0:
            leave(lambda case=case: rehearse_case(case))
        under_way += 1
    while under_way:
        os.wait()
        under_way -= 1


if __name__ == "__main__":
    main(Path(sys.argv[1]))
