"""The stand-ins serve megatron.core and leave other libraries alone."""

import os
import resource
import subprocess
import sys

import pytest
import torch
from transformers import AutoModelForCausalLM

from megatron_rl import platform
from megatron_rl.platform import cpu
from tests.kit.models import make_model
from tests.kit.ranks import run_ranks


def test_transformers_loads_the_same_model_beside_the_stand_ins(tmp_path):
    model = make_model("qwen3", tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    ids = torch.arange(9)[None]
    assert torch.equal(model(ids).logits, loaded(ids).logits)


def test_prepare_is_idempotent():
    before = torch.cuda.current_device
    platform.prepare()
    assert torch.cuda.current_device is before


FRESH = """
import importlib.machinery as machinery, sys, torch

class Loader(machinery.SourceFileLoader): ...  # of every file from now on, as beartype has it

loaders = (machinery.ExtensionFileLoader, machinery.EXTENSION_SUFFIXES), (Loader, machinery.SOURCE_SUFFIXES)
sys.path_hooks.insert(0, machinery.FileFinder.path_hook(*loaders))
sys.path_importer_cache.clear()
from megatron_rl import platform
platform.prepare()
compiler = torch.compile
import megatron_rl.engine.megatron_engine
from megatron.core.dist_checkpointing.strategies import filesystem_async
import fractions
print(type(fractions.__spec__.loader).__name__, filesystem_async.get_write_results_queue.__module__)
print("torch._inductor.compile_fx" in sys.modules, torch.compile is compiler)
"""


@pytest.fixture(scope="module")
def fresh():
    """What a process says that imports all for itself, without CUDA, and beside another package's hook."""
    command, environment = [sys.executable, "-c", FRESH], os.environ | {"CUDA_VISIBLE_DEVICES": ""}
    ran = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    return [line.split() for line in ran.stdout.splitlines()[-2:]]


@pytest.mark.thorough
def test_fixes_are_applied_where_another_package_has_its_own_loader_for_every_file(fresh):
    """With beartype imported none was: each checkpoint left a process of 300 MB behind where a run was killed."""
    assert fresh[0] == ["Loader", "megatron_rl.platform.upstream"]


@pytest.mark.thorough
def test_a_rank_without_cuda_imports_no_compiler_and_leaves_torchs_own_as_it_is(fresh):
    assert fresh[1] == ["False", "True"]


def test_constants_are_swapped_in_nested_code_and_nowhere_else():
    source = "def f():\n    g = lambda: ('cuda', 'cuda:0', 'scuda')\n    return g(), 'torch.cuda.FloatTensor'\n"
    namespace = {}
    exec(cpu.rewrite_code(compile(source, "x", "exec")), namespace)
    assert namespace["f"]() == (("cpu", "cuda:0", "scuda"), "torch.FloatTensor")


def faults_of_a_repeated_allocation(_):
    """Fewest page faults of 64 MB that were allocated and freed before, and their pages."""
    counts = []
    for _ in range(6):  # the heap may grow a few times until it has a hole of that size
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        tensor = torch.ones(16 * 2**20)
        counts.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
        pages = tensor.nbytes // resource.getpagesize()
        del tensor
    return min(counts[1:]), pages


@pytest.mark.skipif(platform.has_cuda() or not sys.platform.startswith("linux"), reason="glibc on a CPU machine only")
def test_freed_memory_is_used_again_without_page_faults():
    faults, pages = run_ranks(1, faults_of_a_repeated_allocation, None)[0]
    assert faults < pages / 10


def late(_):
    sys.meta_path[:] = [f for f in sys.meta_path if type(f).__module__ != "megatron_rl.platform.imports"]
    try:
        platform.prepare()
    except RuntimeError as error:
        return str(error)


def test_preparing_after_megatron_was_imported_is_refused():
    assert "prepare() must run first" in run_ranks(1, late, None)[0]


# below the size at which oneDNN takes over, above it, strided operands, an empty one
@pytest.mark.slow
@pytest.mark.parametrize(
    "rows,inner,columns", [(8, 16, 8), (256, 300, 200), (1, 4096, 2048), (0, 16, 8), (300, 1, 20000)]
)
def test_matrix_products_and_their_gradients_are_right(rows, inner, columns):
    library = cpu.use_onednn_for_matrix_products()
    generator = torch.Generator().manual_seed(0)
    a = torch.randn(inner, rows, generator=generator).t().requires_grad_()
    b = torch.randn(columns, inner, generator=generator).t().requires_grad_()
    grad = torch.randn(rows, columns, generator=generator)
    product = a @ b
    product.backward(grad)
    exact = a.detach().double() @ b.detach().double(), grad.double() @ b.detach().double().t()
    for ours, truth in zip((product, a.grad), exact, strict=True):
        torch.testing.assert_close(ours.double(), truth, rtol=1e-5, atol=1e-6 * max(inner, columns))
    torch.testing.assert_close(b.grad.double(), a.detach().double().t() @ grad.double(), rtol=1e-5, atol=1e-3)
    del library
