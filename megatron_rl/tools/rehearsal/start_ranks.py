"""Program that runs a rehearsal's ranks. Loads the shim, which makes torch see a CUDA device, before torch."""

import ctypes
import sys
from pathlib import Path

if __name__ == "__main__":
    ctypes.CDLL(str(Path(__file__).resolve().parents[2] / "_C_rehearsal.so"))
    from megatron_rl.tools.rehearsal.rehearsed_rank import main

    main(sys.argv[1])
