"""The program that runs a rehearsal's ranks. It loads the shim before torch, and then everything else."""

import ctypes
import sys
from pathlib import Path

if __name__ == "__main__":
    ctypes.CDLL(str(Path(__file__).resolve().parents[2] / "_C_rehearsal.so"))
    from megatron_rl.tools.rehearsal.rehearsed_rank import main

    main(sys.argv[1])
