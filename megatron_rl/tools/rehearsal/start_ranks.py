"""The program of a rehearsal's ranks: it loads the shim, which must come before torch, and then everything else."""

import ctypes
import sys
from pathlib import Path

if __name__ == "__main__":
    ctypes.CDLL(str(Path(__file__).resolve().parents[2] / "_C_rehearsal.so"))
    from megatron_rl.tools.rehearsal.rehearsed_rank import main

    main(sys.argv[1])
