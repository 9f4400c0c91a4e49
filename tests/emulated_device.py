"""A pytest plugin: torch gets a CUDA device whose kernels are nvcc's PTX, run on the CPU (csrc/emulation).

python -m pytest -p tests.emulated_device tests/gpu/test_operators_cuda.py
"""

import ctypes

from csrc.build import torch_folder, torch_versions
from csrc.emulation import emulated

# Before torch, whose autograd asks once, at import, which devices there are. And behind torch's own kernels, if it has
# some: they find CUDA's runtime, and what they register is replaced.
if torch_versions()[1]:
    ctypes.CDLL(str(torch_folder() / "lib" / "libtorch_cuda.so"))
ctypes.CDLL(str(emulated.build()), mode=ctypes.RTLD_GLOBAL)

import pytest  # noqa: E402
import torch  # noqa: E402

torch.version.cuda = None  # so that the operators compiled for a real device stay away: these are linked already
torch.cuda.is_available = lambda: True
torch.cuda._lazy_init = lambda: None
torch.cuda.is_initialized = lambda: True
torch.cuda.device_count = lambda: 1
torch.cuda.current_device = lambda: 0


LEFT_TO_A_GPU = {
    "test_another_process_reads_a_bucket_on_the_gpu": "another process needs a driver",
    "test_the_whole_step_replays_as_a_graph": "a CUDA graph needs a driver",
    "test_more_than_two_and_four_thousand_million_logits": "reads 13 GB on one core",
}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if reason := LEFT_TO_A_GPU.get(item.originalname):
            item.add_marker(pytest.mark.skip(reason=reason))
