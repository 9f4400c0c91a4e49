"""Delta nets by flash-linear-attention's kernels: how segments become their calls, and the kernels themselves."""

import importlib.util
import os
import pickle
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from megatron_rl import platform
from megatron_rl.engine.delta_kernels import Calls, Sequences

PROGRAM = Path(__file__).with_name("fla_cases.py")
ROOT = Path(__file__).parents[3]
PACKAGE = Path(sys.prefix) / "share" / "fla"  # where `make` puts it
HAS_PACKAGE = (PACKAGE / "fla").is_dir() and importlib.util.find_spec("triton") is not None


@pytest.mark.thorough  # the same calls with plain torch's kernels are in tests/megatron/test_delta_nets.py
@pytest.mark.skipif(not HAS_PACKAGE, reason=f"fla-core is not in {PACKAGE}, or there is no triton")
@pytest.mark.parametrize("tree", ["forked", "apart"])
def test_the_packages_kernels_give_results_and_gradients_of_plain_torch(tree, tmp_path):
    output = tmp_path / "found.pickle"
    environment = os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": f"{ROOT}{os.pathsep}{PACKAGE}"}
    done = subprocess.run([sys.executable, PROGRAM, tree, output], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    found = pickle.loads(output.read_bytes())
    for kernels, plain in zip(found["fla"], found["torch"], strict=True):
        assert plain.norm() > 0 and (kernels - plain).norm() <= 1e-5 * plain.norm()


def test_the_worked_example_of_a_prompt_and_two_replies():
    calls = Calls.of(torch.tensor([[0, 2, -1, 0], [2, 2, 0, 2], [4, 1, 0, 2]]), 4)
    assert calls.segments.bounds.tolist() == [0, 2, 4, 5]
    prompt, replies = calls.depths
    assert (prompt.sequences.bounds.tolist(), prompt.rows, prompt.parents) == ([0, 2], 2, None)
    assert (replies.sequences.bounds.tolist(), replies.rows) == ([0, 2, 3], 3)
    assert replies.parents.rows.tolist() == [0, 0]
    assert calls.by_depth.tolist() == calls.in_order.tolist() == [0, 1, 2, 3, 4]
    there = calls.inputs.are_there.view(3, 4)
    assert there.tolist() == [[False] * 4, [False, False, True, True], [False, False, True, True]]
    assert calls.inputs.taken.rows.view(3, 4)[there].tolist() == [0, 1, 0, 1]


def test_rows_stand_by_depth_where_a_fork_comes_before_a_sequence_of_its_own():
    # A prompt, a turn that forks into two, another reply to the prompt, another prompt.
    segments = [[0, 3, -1, 0], [3, 1, 0, 3], [4, 2, 1, 4], [6, 1, 1, 4], [7, 2, 0, 3], [9, 1, -1, 0]]
    calls = Calls.of(torch.tensor(segments), 2)
    assert calls.by_depth.tolist() == [0, 1, 2, 9, 3, 7, 8, 4, 5, 6]
    assert calls.by_depth[calls.in_order].tolist() == list(range(10))
    assert [depth.sequences.bounds.tolist() for depth in calls.depths] == [[0, 3, 4], [0, 1, 3], [0, 2, 3]]
    assert [depth.parents and depth.parents.rows.tolist() for depth in calls.depths] == [None, [0, 0], [0, 0]]


def test_sequences_without_forks_are_one_call_in_their_own_order():
    calls = Calls.of(torch.tensor([[0, 64, -1, 0], [64, 130, -1, 0]]), 4)
    assert calls.inputs is calls.by_depth is calls.in_order is None and len(calls.depths) == 1
    assert calls.segments.chunks.tolist() == [[0, 0], [1, 0], [1, 1], [1, 2]]
    assert Sequences.of(torch.tensor([65, 1])).chunks.tolist() == [[0, 0], [0, 1], [1, 0]]


@pytest.mark.skipif(platform.has_cuda(), reason="needs a machine without CUDA")
def test_kernels_that_cannot_be_had_are_refused_with_the_way_out(monkeypatch):
    platform.check_delta_kernel("torch", "float32")
    with pytest.raises(ValueError, match="model.delta_kernel = 'fla': there is no CUDA device.*; install fla-core"):
        platform.check_delta_kernel("fla", "bfloat16")
    monkeypatch.setattr(platform, "has_cuda", lambda: True)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match="No module named 'fla'; install fla-core.*or set model.delta_kernel=torch"):
        platform.check_delta_kernel("fla", "bfloat16")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name)
    platform.check_delta_kernel("fla", "bfloat16")
    with pytest.raises(ValueError, match="model.dtype = float32.*; set model.dtype=bfloat16, or"):
        platform.check_delta_kernel("fla", "float32")
