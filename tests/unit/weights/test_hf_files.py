"""A folder is replaced whole or not at all, wherever the process is killed."""

import json
import os
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from megatron_rl.weights.hf_files import HFFolder, recover_folder, replace_folder


def killed_at(call: int, aside: Path, folder: Path) -> bool:
    """Run replace_folder in a fork that dies just before its `call`-th change to the disk; False if it lives."""
    pid = os.fork()
    if pid == 0:
        calls = 0

        def counted(function):
            def run(*args, **kwargs):
                nonlocal calls
                calls += 1
                if calls > call:
                    os._exit(9)
                return function(*args, **kwargs)

            return run

        Path.rename, shutil.rmtree = counted(Path.rename), counted(shutil.rmtree)
        replace_folder(aside, folder)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 9


@pytest.mark.parametrize("call", range(6))
def test_a_folder_is_the_old_or_the_new_one_wherever_its_replacement_is_killed(call, tmp_path):
    folder, aside = tmp_path / "checkpoint", tmp_path / ".checkpoint.partial"
    for path, text in ((folder, "old"), (aside, "new")):
        path.mkdir()
        (path / "file").write_text(text)
    was_killed = killed_at(call, aside, folder)
    recover_folder(folder)
    # Its changes: remove an older leftover, move the old one away, move the new one in, remove the old one.
    assert was_killed == (call < 4)
    assert (folder / "file").read_text() == ("old" if call < 3 else "new")
    if aside.exists():
        replace_folder(aside, folder)
    assert (folder / "file").read_text() == "new"


@pytest.mark.parametrize(
    "file", ["../other.safetensors", "/etc/x.safetensors", "a/b.safetensors", "..", "", "model.bin", "/dev/zero"]
)
def test_index_does_not_lead_out_of_its_folder(file, tmp_path):
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a.weight": file}}))
    with pytest.raises(ValueError, match="index.json: has 'a.weight' in .*must be a .safetensors file of this folder"):
        HFFolder(tmp_path, {"a.weight": (1,)})


@pytest.mark.parametrize("text", ["{}", "[]", "{", '{"weight_map": {"a": 1}}', '{"weight_map": 3}', "[" * 100_000])
def test_index_that_is_none_is_named(text, tmp_path):
    (tmp_path / "model.safetensors.index.json").write_text(text)
    with pytest.raises(ValueError, match="model.safetensors.index.json: unreadable index .*copy the model folder"):
        HFFolder(tmp_path, {"a.weight": (1,)})


def test_quantised_weights_are_refused_when_the_folder_is_opened(tmp_path):
    """They have the shapes that config.json promises, and would pass for weights without their scales."""
    save_file({"a.weight": torch.ones(1).to(torch.float8_e4m3fn)}, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=r"a.weight in .* has dtype F8_E4M3: supported are .* convert quantised"):
        HFFolder(tmp_path, {"a.weight": (1,)})
