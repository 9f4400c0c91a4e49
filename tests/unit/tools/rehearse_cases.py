"""A program that rehearses ranks of a tiny job, each case with faults planted in the engine's code.

python rehearse_cases.py FOLDER    # reads FOLDER/cases.json: {case: {"faults": [...], "orders": [...], "hears": case}}

A case's ranks are done one after the other, and hear what those before them said; so they do of another case that is
done first. The shim comes before torch, so this needs an interpreter of its own; ranks and cases are forked from it.
"""

import ctypes
import json
import os
import resource
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
PACKAGE = ROOT / "megatron_rl"
MOST_RESIDENT_KB = 2_500_000
SHIM = PACKAGE / "_C_rehearsal.so"


def order_of(config, ranks, overrides, **more):
    """Return the order of a rank on nodes of 8 GPUs of 80 GiB; more: its fields, `rank` among them."""
    order = {"world_size": ranks, "gpus_per_node": 8, "memory_bytes": 80 << 30, "config": str(ROOT / config)}
    return order | {"overrides": overrides} | more


def write_shape(folder, name, **changes):
    """Write a published config.json (tests/model_configs) with other sizes to a new folder; return its setting."""
    published = json.loads((ROOT / "tests" / "model_configs" / name / "config.json").read_text())
    published.pop("quantization_config", None)
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(published | changes))
    return f"model.path={folder}"


def rehearsed(folder, cases):
    """Run the program; return by case and rank what was found, or the text of the fault that ended it."""
    (folder / "cases.json").write_text(json.dumps(cases))
    environment = os.environ | {"PYTHONPATH": str(PACKAGE.parent)}
    done = subprocess.run([sys.executable, "-P", __file__, folder], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    assert int((folder / "most_resident").read_text()) < MOST_RESIDENT_KB, "large tensors have no memory"
    return {
        case: {order["rank"]: result(folder / case / str(order["rank"])) for order in said["orders"]}
        for case, said in cases.items()
    }


def result(folder):
    if (folder / "found.json").exists():
        return json.loads((folder / "found.json").read_text())
    return (folder / "fault.txt").read_text()


def main(folder: Path) -> None:
    ctypes.CDLL(str(SHIM))
    from megatron_rl.tools.rehearsal.rehearsed_rank import leave, prepare, rehearse_rank

    cases = json.loads((folder / "cases.json").read_text())
    ledger = prepare(80 << 30)
    from tests.unit.tools.planted_faults import FAULTS

    def rehearse_case(case: str) -> None:
        for said in (folder / cases[case].get("hears", "-")).glob("*/said.pickle"):
            (folder / case / f"heard-{said.parts[-2]}").mkdir(parents=True)
            shutil.copy(said, folder / case / f"heard-{said.parts[-2]}")
        for order in cases[case]["orders"]:
            if os.fork() == 0:
                for name in cases[case]["faults"]:
                    FAULTS[name](order["rank"])
                leave(lambda order=order: rehearse_rank(folder / case / str(order["rank"]), order, ledger))
            os.wait()

    under_way, heard = 0, {case["hears"] for case in cases.values() if "hears" in case}
    for case in sorted(cases, key=lambda case: case not in heard):
        if os.fork() == 0:
            leave(lambda case=case: rehearse_case(case))
        under_way += 1
        if case in heard or under_way == (os.cpu_count() or 1):
            os.wait()
            under_way -= 1
    while under_way:
        os.wait()
        under_way -= 1
    (folder / "most_resident").write_text(str(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
