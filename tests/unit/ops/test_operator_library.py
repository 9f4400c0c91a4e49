"""Operators that were not built, or from other sources than those that are there, are refused by name."""

import inspect
import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import torch
from torch.nn.attention.varlen import varlen_attn

from megatron_rl.ops import library, packed_logprobs


def test_a_missing_library_says_how_to_build_it(tmp_path, monkeypatch):
    monkeypatch.setattr(library, "PACKAGE", tmp_path)
    with pytest.raises(RuntimeError, match=r"_C_cpu.so does not exist: .*run `python csrc/build.py`"):
        library.load()


def test_a_library_built_from_other_sources_is_refused(tmp_path):
    copy = tmp_path / "_C_cpu.so"
    shutil.copy(library.PACKAGE / "_C_cpu.so", copy)
    built = library.built_from(library.PACKAGE / "_C_cpu.so")
    copy.with_suffix(".json").write_text(json.dumps(built))
    library.check_current(copy)
    copy.with_suffix(".json").write_text(json.dumps(built | {"sources": "0123456789abcdef"}))
    with pytest.raises(RuntimeError, match=r"built from other sources \(0123456789abcdef\).*python csrc/build.py"):
        library.check_current(copy)


@pytest.mark.parametrize("name", ["_C_cpu.so", "_C_cuda.so"])
def test_a_library_takes_the_compilers_own_strings_and_streams(name):
    """Torch's libraries export some of another one's: a stream that is made by both cannot write numbers."""
    if name == "_C_cuda.so" and not (library.PACKAGE / name).exists():
        pytest.skip(f"{name} was not built")
    said = subprocess.run(["readelf", "-d", library.PACKAGE / name], capture_output=True, text=True, check=True).stdout
    assert re.findall(r"NEEDED.*\[(\w[\w+]*)", said)[0] == "libstdc++"


def test_there_is_no_fallback_on_a_device_without_an_implementation():
    logits, labels = torch.zeros(2, 8, device="meta"), torch.zeros(2, dtype=torch.int64, device="meta")
    assert packed_logprobs(logits, labels).device.type == "meta"  # shapes only
    with pytest.raises((RuntimeError, NotImplementedError), match="megatron_rl::logprob_partials"):
        torch.ops.megatron_rl.logprob_partials.default.redispatch(
            torch._C.DispatchKeySet(torch._C.DispatchKey.XPU), logits, labels, 1.0, None, 0, 8
        )


def test_a_torch_was_allowed_whose_attention_has_no_windows():
    """varlen_attn has `window_size` and `scale` since torch 2.11; addmm has added to a float32 total since 2.10."""
    setup = (Path(__file__).parents[3] / "setup.py").read_text()
    (floor,) = re.findall(r'"torch>=([\d.]+)"', setup)
    assert tuple(map(int, floor.split("."))) >= (2, 11)
    assert {"window_size", "scale"} <= inspect.signature(varlen_attn).parameters.keys()
