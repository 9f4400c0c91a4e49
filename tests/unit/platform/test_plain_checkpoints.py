"""What a checkpoint of others may do to the process that reads it: nothing."""

import io
import json
import pathlib
import pickle
import pickletools

import pytest
import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from megatron_rl.platform.plain_checkpoints import _MetadataUnpickler, refusing_code
from megatron_rl.run.run_checkpoints import read_state


def metadata(file="__0_0.distcp"):
    chunks = [ChunkStorageMetadata(offsets=torch.Size([0, 0]), sizes=torch.Size([2, 3]))]
    tensor = TensorStorageMetadata(TensorProperties(dtype=torch.bfloat16), size=torch.Size([2, 3]), chunks=chunks)
    place = {MetadataIndex("weight", torch.Size([0, 0]), 0): _StorageInfo(file, 0, 100)}
    return Metadata({"weight": tensor}, planner_data={"weight": ("weight",)}, storage_data=place)


def read(content):
    with refusing_code("runs/x/checkpoints/step-1/model"):
        return _MetadataUnpickler(io.BytesIO(content)).load()


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_metadata_comes_back_as_torch_has_written_them(protocol):
    assert read(pickle.dumps(metadata(), protocol)) == metadata()


PATH, SIZE = b"cpathlib\nPosixPath\n", b"ctorch\nSize\n"
LAYOUT, DTYPE = b"ctorch.serialization\n_get_layout\n", b"ctorch\nfloat32\n"
RECORD = b"ctorch.distributed.checkpoint.metadata\nChunkStorageMetadata\n"
ENUM = b"ctorch.distributed.checkpoint.metadata\n_MEM_FORMAT_ENCODING\n"
SLOTS = b"(N}X\x06\x00\x00\x00stolenI1\nstb."
"""BUILD with the state (None, {"stolen": 1}), which sets an attribute whatever the object is."""


@pytest.mark.parametrize(
    ("content", "fault"),
    [
        *((b"\x80\x04" + it + SLOTS, "sets attributes of") for it in (PATH, SIZE, LAYOUT, DTYPE, RECORD, ENUM)),
        (b"\x80\x04" + PATH + b"}X\x06\x00\x00\x00stolenI1\nsb.", "sets attributes of"),
        (b"\x80\x04" + PATH + b"(X\x01\x00\x00\x00atR" + SLOTS, "sets attributes of"),
        (b"\x80\x04" + RECORD + b")\x81" + SLOTS, "sets attributes of"),
        (b"\x80\x04" + ENUM + b"(I0\ntR" + SLOTS, "sets attributes of"),
        (b"\x80\x04cos\nsystem\n(X\x02\x00\x00\x00idtR.", "names os.system, which is no data"),
        (b"\x80\x04" + PATH[:-1] + b".cwd\n.", "names pathlib.PosixPath.cwd, which is no data"),
        (b"\x80\x04X\x01\x00\x00\x00aQ.", "persistent"),
        (b"\x80\x04}" + b")" + b"\x85" * 200_000 + b"I1\ns.", "has a key of type tuple"),
        (b"\x80\x04(" + b")" + b"\x85" * 200_000 + b"I1\nd.", "no pickle of records"),
        (b"\x80\x04\x8f(" + b")" + b"\x85" * 200_000 + b"\x90.", "no pickle of records"),
        (b"\x80\x04Nr\xff\xff\xff\xff.", "holds a NoneType and no Metadata"),
        (b"\x80\x04\x8e" + b"\xff" * 7 + b"\x7fx", "no pickle of records|exceeds"),
        (b"\x80\x04].", "holds a list and no Metadata"),
        (b"", "no pickle of records"),
        (pickle.dumps(metadata())[:-9], "no pickle of records|truncated|exhausted"),
        *((pickle.dumps(metadata(it)), "outside of its folder") for it in ("../x", "/etc/passwd", "a/b", "..")),
    ],
)
def test_hostile_metadata_are_refused_in_one_line_and_change_nothing(content, fault):
    before = {it: dict(vars(it)) for it in (pathlib.PosixPath, torch.Size, ChunkStorageMetadata)}
    with pytest.raises(RuntimeError, match=fault) as refused:
        read(content)
    assert "checkpoint 'runs/x/checkpoints/step-1/model': " in str(refused.value) and len(str(refused.value)) < 500
    assert before == {it: dict(vars(it)) for it in before}


def test_every_state_of_our_own_metadata_is_a_records():
    names = {op.name for op, _, _ in pickletools.genops(pickle.dumps(metadata()))}
    assert names.isdisjoint({"DICT", "INST", "OBJ", "ADDITEMS", "FROZENSET", "PERSID", "BINPERSID"})


@pytest.mark.parametrize(
    ("state", "fault"),
    [
        ({"step": -5}, "has step = -5"),
        ({"step": 4}, "has step = 4, which must be that of the folder, 3"),
        ({"step": True}, "has step = True"),
        ({"step": 3.0}, "has step = 3.0"),
        ({"step": 3, "version": "3"}, "has version = '3'"),
        ({"step": 3, "prompts": {"number": -1, "count": 3}}, "has prompts = "),
        ({"step": 3, "prompts": [1]}, "has prompts = "),
        ({"step": 3, "ledgers": [{"open": [1, -1], "next": 0, "size": 1}]}, "has ledgers = "),
        ({"step": 3, "ledgers": [{"open": [], "next": 0, "size": 0}]}, "has ledgers = "),
        ({}, "has step = None"),
        ([], "is a list and no object"),
    ],
)
def test_run_is_not_resumed_from_a_place_that_is_none(state, fault, tmp_path):
    (tmp_path / "step-3").mkdir()
    (tmp_path / "step-3" / "run.json").write_text(json.dumps(state))
    with pytest.raises(RuntimeError, match=f"step-3': its run.json {fault}.*give an earlier checkpoint"):
        read_state(tmp_path / "step-3")
