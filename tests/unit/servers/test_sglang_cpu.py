"""What lets SGLang start without CUDA is applied to the versions that need it."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).resolve().parents[3] / "megatron_rl" / "tools" / "sglang_cpu"
PROGRAM = """
import sys, sitecustomize
hooks = {name: (lambda name=name: print(name), unneeded) for name, (_, unneeded) in sitecustomize.HOOKS.items()}
finder = sitecustomize.BeforeImport(hooks)
for name in sitecustomize.HOOKS:
    finder.find_spec(name), finder.find_spec(name)
"""
LATER = {"sglang.srt.configs", "sglang.srt.utils.weight_checker"}
"""Mended in 0.5.23."""


@pytest.mark.parametrize("version, unneeded", [("0.5.22", set()), ("0.5.23", LATER), ("0.6.0", LATER)])
def test_a_hook_runs_once_and_only_before_the_version_that_does_without_it(version, unneeded, tmp_path):
    (package := tmp_path / f"sglang-{version}.dist-info").mkdir()
    (package / "METADATA").write_text(f"Metadata-Version: 2.1\nName: sglang\nVersion: {version}\n")
    variables = os.environ | {"PYTHONPATH": f"{FOLDER}:{tmp_path}"}
    done = subprocess.run([sys.executable, "-c", PROGRAM], env=variables, stdout=subprocess.PIPE, text=True, check=True)
    ran = done.stdout.split()
    assert "torchvision" in ran and len(ran) == 8 - len(unneeded) and not set(ran) & unneeded
