"""Read Hugging Face safetensors folders in slices, write them atomically from a stream, and draw random weights."""

from __future__ import annotations

import json
import math
import os
import re
import shutil
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path, PurePath
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from megatron_rl.weights.architecture import with_value_head
from megatron_rl.weights.json_files import read_object
from megatron_rl.weights.tensor_rules import Shape, WeightSource

MODEL_FILE, ADAPTER_FILE = "model.safetensors", "adapter_model.safetensors"
WEIGHTS = (
    *(".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".h5", ".msgpack", ".gguf", ".onnx", ".onnx_data", ".ot", ".npz"),
    *(".distcp", ".index.json"),
)
"""Endings of the names of weight files and weight indexes. A model's other files are copied when it is saved."""
NOT_THE_MODELS = ("adapter_config.json", "checksums.json")
"""Files that an adapter may have in the folder of its model. They are not copied when the model is saved."""
MTP_COUNTS = ("num_nextn_predict_layers", "mtp_num_hidden_layers", "num_mtp_modules", "num_mtp_layers", "use_mtp")
"""Keys of config.json that count or enable multi-token-prediction layers."""
SHARD_BYTES = 2 * 1024**3
_LAYER = re.compile(r"model\.layers\.(\d+)\.")
_DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}

MXFP4_BLOCK = 32
"""Number of four-bit values that share a scale (OCP Microscaling Formats). MXFP4 is read as bfloat16, never written."""
# E2M1: one sign bit, two exponent bits, one mantissa bit.
_MAGNITUDES = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
MXFP4_VALUES = torch.cat([_MAGNITUDES, -_MAGNITUDES])


class HFFolder:
    """The safetensors files of a folder. The constructor checks the presence and shape of every expected tensor.

    folder = HFFolder("models/qwen3-4b", hf_shapes(arch))
    rows = folder.read("model.embed_tokens.weight", 0, 1000, 2000)  # of dimension 0
    """

    def __init__(self, folder: str | Path, expected: dict[str, Shape], *, file: str = MODEL_FILE) -> None:
        """Find out which file has which tensor, and check the expected ones.

        If the folder has an index, the files are those in the index. Otherwise it is `file` alone, or if the folder has
        no such file, all safetensors files. Raises ValueError if a tensor is missing or has another shape.
        """
        self.folder = Path(folder)
        self.index = self.folder / "model.safetensors.index.json"
        self.file_of = _file_of_each_tensor(self.folder, self.index, file)
        self._open = {}
        for name, shape in expected.items():
            for part, wanted in (packed_shapes(name, shape) if self._is_packed(name) else {name: shape}).items():
                self._check(part, wanted)
            self.dtype(name)  # refuses quantised weights, whose shapes match but which need their scales

    def _check(self, name: str, shape: Shape) -> None:
        if name not in self.file_of:
            raise ValueError(
                f"{name}: missing from the safetensors of {self.folder} ({len(self.file_of)} tensors); config.json "
                f"promises a tensor of shape {shape}; copy the model folder again or correct config.json."
            )
        found = self.shape(name)
        if found != shape:
            raise ValueError(
                f"{name} in {self.folder / self.file_of[name]} has shape {found}, but config.json makes it {shape}; "
                f"copy the model folder again or correct config.json."
            )

    def _is_packed(self, name: str) -> bool:
        return name not in self.file_of and f"{name}_blocks" in self.file_of

    def read(self, name: str, dim: int, start: int, stop: int | None) -> Tensor:
        """Return the slice `[start, stop)` of a tensor along `dim`, which is 0 or 1. stop: None for the end."""
        if self._is_packed(name):
            assert dim == 0, f"{name}: experts are read one by one"
            return dequantized(*(self.read(part, 0, start, stop) for part in packed_shapes(name, ())))
        part = self._slice(name)  # lazy: only the bytes of the slice are read
        return part[start:stop] if dim == 0 else part[:, start:stop]

    def shape(self, name: str) -> Shape:
        return tuple(self._slice(name).get_shape())

    def dtype(self, name: str) -> torch.dtype:
        if self._is_packed(name):
            return torch.bfloat16
        found = self._slice(name).get_dtype()
        if found not in _DTYPES:
            raise ValueError(
                f"{name} in {self.folder / self.file_of[name]} has dtype {found}: supported are {', '.join(_DTYPES)}; "
                f"take the model in one of these, or convert quantised weights by the scripts of their model."
            )
        return _DTYPES[found]

    def nbytes(self, name: str) -> int:
        """Return the number of bytes of a tensor in its file. Works for dtypes that torch lacks, too."""
        part = self._slice(name)
        bits = re.search(r"\d+", part.get_dtype())  # such as BF16, F8_E4M3 or BOOL
        return math.prod(part.get_shape()) * int(bits[0] if bits else 8) // 8

    def whole(self, name: str) -> Tensor:
        """Return a whole tensor unchanged. Raises ValueError for a dtype that torch lacks."""
        dtype = self._slice(name).get_dtype()
        try:
            return self._handle(name).get_tensor(name)
        except (SafetensorError, AttributeError, KeyError) as error:
            raise ValueError(
                f"{name} in {self.folder / self.file_of[name]} has dtype {dtype}, which torch {torch.__version__} does "
                f"not have, so it cannot be written again; remove it from the folder, or convert it."
            ) from error

    def _slice(self, name: str):
        try:
            return self._handle(name).get_slice(name)
        except SafetensorError as error:
            by = f"{self.index} says so" if self.index.is_file() else "its header says so"
            raise ValueError(
                f"{name}: not in {self.folder / self.file_of[name]}, though {by}; copy the model folder again."
            ) from error

    def _handle(self, name: str):
        path = self.folder / self.file_of[name]
        # Opening parses the whole header, so each file is opened once and stays open.
        if path not in self._open:
            self._open[path] = _opened(path, f", in which {self.index} has {name}" if self.index.is_file() else "")
        return self._open[path]


def _opened(path: Path, why: str = "") -> safe_open:
    try:
        return safe_open(path, framework="pt")
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{path}: unreadable safetensors file ({error}){why}; copy the model folder again.") from error


def packed_shapes(name: str, shape: Shape) -> dict[str, Shape]:
    """Return {name: shape} of the two MXFP4 tensors, blocks and scales, that store a stack of experts' matrices.

    name, shape: those of the stack, whose shape is `[experts, inputs, outputs]`. In the MXFP4 tensors, outputs come
    before inputs. If `shape` is empty, only the returned names are meaningful.
    """
    blocks = (shape[0], shape[2], shape[1] // MXFP4_BLOCK) if shape else ()
    return {f"{name}_blocks": (*blocks, MXFP4_BLOCK // 2), f"{name}_scales": blocks}


def dequantized(blocks: Tensor, scales: Tensor) -> Tensor:
    """Convert MXFP4 to bfloat16 `[experts, G * 32, outputs]` without rounding.

    blocks: `[experts, outputs, G, 16]` uint8, two numbers per byte, the first in the low four bits.
    scales: `[experts, outputs, G]` uint8, powers of two as exponent + 127.
    """
    halves = torch.stack([blocks & 15, blocks >> 4], dim=-1).flatten(-2)  # [experts, outputs, G, 32]
    values = torch.ldexp(MXFP4_VALUES[halves.int()], (scales.int() - 127)[..., None])
    return values.to(torch.bfloat16).flatten(-2).transpose(1, 2)


def _file_of_each_tensor(folder: Path, index: Path, file: str) -> dict[str, str]:
    if index.is_file():
        return _read_index(index)
    files = [folder / file] if (folder / file).is_file() else sorted(folder.glob("*.safetensors"))
    if not files:
        raise ValueError(
            f"model.path = {str(folder)!r}: no *.safetensors there; give a folder with weights, or set "
            f"model.init=random to train from scratch."
        )
    return {name: path.name for path in files for name in _opened(path).keys()}  # noqa: SIM118 (a handle is no dict)


def _read_index(path: Path) -> dict[str, str]:
    """Return {tensor name: file name} from an index.

    Raises ValueError if the index is invalid or names a file outside of its folder.
    """
    files = read_object(path, "copy the model folder again").get("weight_map")
    if not (isinstance(files, dict) and all(isinstance(name, str) for name in files.values())):
        raise ValueError(
            f"{path}: unreadable index (weight_map must give each tensor the name of its file); copy the model folder "
            f"again."
        )
    # An untrusted index could otherwise name any file on this host, which would be read and sent to the servers.
    for tensor, name in files.items():
        if PurePath(name).name != name or name == ".." or not name.endswith(".safetensors"):
            raise ValueError(
                f"{path}: has {tensor!r} in {name!r}, which must be a .safetensors file of this folder; copy the model "
                f"folder again, from a place that you trust."
            )
    return files


class RandomWeights:
    """Random initial weights: normally distributed with standard deviation 0.02. Norm weights are `norm`, biases 0.

    A tensor depends only on its name and the seed, so every parallel layout starts from the same model.
    """

    def __init__(self, expected: dict[str, Shape], seed: int, *, norm: float = 1.0) -> None:
        self.expected, self.seed, self.norm = expected, seed, norm

    def read(self, name: str, dim: int, start: int, stop: int) -> Tensor:
        shape = self.expected[name]
        if name.endswith("linear_attn.norm.weight"):  # never adds 1 to its weight
            full = torch.ones(shape)
        elif name.endswith("norm.weight"):
            full = torch.full(shape, self.norm)
        elif name.endswith("bias"):
            full = torch.zeros(shape)
        else:  # draw the whole tensor, so that a slice's values do not depend on the layout
            full = torch.empty(shape).normal_(std=0.02, generator=generator_for(name, self.seed))
        return full.narrow(dim, start, stop - start)


def generator_for(name: str, seed: int) -> torch.Generator:
    """Return the generator for the random values of the tensor `name`.

    Its seed is computed with crc32, because hash() of a string differs between processes.
    """
    return torch.Generator().manual_seed(zlib.crc32(name.encode()) + (seed << 32))


class ValueHeadFromZero:
    """Source of the weights of a critic that starts from a policy: `trunk`'s tensors, and zeros for the value head."""

    def __init__(self, trunk: WeightSource, head: str, shape: Shape) -> None:
        self.trunk, self.head, self.shape = trunk, head, shape

    def read(self, name: str, dim: int, start: int, stop: int) -> Tensor:
        if name == self.head:
            return torch.zeros(self.shape).narrow(dim, start, stop - start)
        return self.trunk.read(name, dim, start, stop)


def write_hf_folder(
    folder: str | Path,
    tensors: Iterable[tuple[str, Tensor]],
    *,
    model_folder: str | Path,
    dtype: torch.dtype | None,
    head: str = "policy",
    carried: Iterable[tuple[str, Tensor]] = (),
    shard_bytes: int = SHARD_BYTES,
) -> None:
    """Write streamed tensors as a HF folder, together with all other files of `model_folder`.

    The folder appears only when complete: it is written to a temporary sibling, fsynced and renamed. An earlier folder
    is deleted last. Raises OSError if a file cannot be written; the earlier folder then remains untouched.

    dtype: dtype in which `tensors` are written, except routers' biases, and which config.json names. None leaves the
    dtypes of the tensors, and the one in config.json, as they are.
    head: if `value`, config.json is changed to that of a sequence classification model with one label.
    carried: further tensors, which are written unchanged, except for those whose names `tensors` also had. If no
    tensor of a multi-token-prediction layer was written, the counts of these layers in config.json are set to zero.
    shard_bytes: maximum bytes of tensors held in memory, and of each file, unless a single tensor is larger.
    """
    folder = Path(folder)
    # A sibling, because renames are atomic only within a file system. The dot hides it from globs for `version-*`.
    aside = folder.with_name(f".{folder.name}.{os.getpid()}.partial")
    shutil.rmtree(aside, ignore_errors=True)
    try:
        aside.mkdir(parents=True)
        written: set[str] = set()
        write_tensors(aside, _with_dtype(tensors, carried, dtype, written), shard_bytes)
        copy_model_files(model_folder, aside, head=head)
        # transformers 5 reads `dtype`; earlier versions and other readers read `torch_dtype`.
        keys = () if dtype is None else ("dtype", "torch_dtype")
        changes: dict[str, Any] = dict.fromkeys(keys, str(dtype).removeprefix("torch."))
        config = json.loads((aside / "config.json").read_text(encoding="utf-8"))
        if not any(is_of_mtp_layer(name, config) for name in written):
            changes |= {key: type(config[key])(0) for key in MTP_COUNTS if config.get(key)}
        if changes:
            (aside / "config.json").write_text(json.dumps(config | changes, indent=2), encoding="utf-8")
        replace_folder(aside, folder)
    except (OSError, SafetensorError) as error:
        recover_folder(folder)
        shutil.rmtree(aside, ignore_errors=True)
        raise OSError(f"{folder}: {error}") from error


def _with_dtype(
    tensors: Iterable[tuple[str, Tensor]],
    carried: Iterable[tuple[str, Tensor]],
    dtype: torch.dtype | None,
    written: set[str],
) -> Iterator[tuple[str, Tensor]]:
    """Yield `tensors` in `dtype`, except routers' biases, and then those of `carried` with other names, unchanged.

    dtype: None leaves the dtypes of `tensors`, too. written: set to which the yielded names are added.
    """
    for name, tensor in tensors:
        written.add(name)
        # Routers rank experts by score plus this bias; rounding it to bfloat16 would create ties.
        kept = tensor.dtype if name.endswith("e_score_correction_bias") else dtype
        yield name, tensor.detach().to("cpu", kept).contiguous()
    for name, tensor in carried:
        if name not in written:
            written.add(name)
            yield name, tensor


def is_of_mtp_layer(name: str, config: dict[str, Any]) -> bool:
    """Return True if a tensor belongs to a multi-token-prediction layer of the model that config.json describes.

    Some families store these layers after the last layer, and others under names that start with `mtp.`.
    """
    layer = _LAYER.match(name)
    return name.startswith("mtp.") or (layer is not None and int(layer[1]) >= config.get("num_hidden_layers", 0))


def write_tensors(folder: Path, tensors: Iterable[tuple[str, Tensor]], shard_bytes: int = SHARD_BYTES) -> None:
    """Write tensors to safetensors files of at most `shard_bytes`, and an index if there are several files."""
    weight_map, shard, shard_size, count, total = {}, {}, 0, 0, 0

    def flush() -> None:
        nonlocal shard, shard_size, count
        if shard:
            count += 1
            save_file(shard, folder / f"part-{count}", metadata={"format": "pt"})
            (folder / f"part-{count}").chmod(0o644)  # safetensors makes private files
            weight_map.update(dict.fromkeys(shard, count))
        shard, shard_size = {}, 0

    for name, tensor in tensors:
        if shard_size + tensor.nbytes > shard_bytes:
            flush()
        shard[name] = tensor
        shard_size += tensor.nbytes
        total += tensor.nbytes
    flush()
    # File names contain the number of files, which is known only at the end of the stream.
    names = {
        n: f"model-{n:05}-of-{count:05}.safetensors" if count > 1 else "model.safetensors" for n in range(1, count + 1)
    }
    for number, name in names.items():
        (folder / f"part-{number}").rename(folder / name)
    if count > 1:
        index = {"metadata": {"total_size": total}, "weight_map": {k: names[n] for k, n in weight_map.items()}}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2, sort_keys=True))


def copy_model_files(source: str | Path, target: str | Path, *, head: str = "policy") -> None:
    """Copy all files of a model except its weights: the tokenizer, config.json and the rest.

    In the copy, config.json is adapted to `head` and no longer has quantization_config.
    """
    for file in model_files(source, outside=Path(target)):
        (Path(target) / file).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(Path(source) / file, Path(target) / file)  # not its mode, which may be read-only
    path = Path(target) / "config.json"
    config = json.loads(path.read_text(encoding="utf-8"))
    is_quantised = config.pop("quantization_config", None) is not None  # written weights are not quantised
    if head == "value":
        config = with_value_head(config)
    if head == "value" or is_quantised:
        path.write_text(json.dumps(config, indent=2), encoding="utf-8")


def model_files(folder: str | Path, *, outside: Path) -> list[Path]:
    """Return the files of a model folder that hold no weights, as paths relative to it. Links are followed.

    Hidden files are left out. Subfolders that contain weights at any depth are left out, because they belong to other
    models or to runs. So is the subfolder that contains `outside`.
    """
    folder, found = Path(folder), []
    for path in sorted(folder.iterdir()):
        if path.name.startswith(".") or path.name in NOT_THE_MODELS:
            continue
        if path.is_file() and not path.name.endswith(WEIGHTS):
            found.append(path.relative_to(folder))
        elif path.is_dir() and not outside.resolve().is_relative_to(path.resolve()):
            files = [file.relative_to(folder) for file in sorted(path.rglob("*")) if file.is_file()]
            files = [file for file in files if not any(part.startswith(".") for part in file.parts)]
            if not any(file.name.endswith(WEIGHTS) for file in files):
                found += files
    return found


def replace_folder(aside: Path, folder: Path) -> None:
    """Rename the finished folder `aside` to `folder`, and sync it to disk. An earlier `folder` is deleted last.

    If the process is killed between the two renames, `recover_folder` restores the earlier folder.
    """
    # Synced before the rename, so that a power failure leaves either the earlier folder or the complete new one.
    for path in [*aside.rglob("*"), aside]:
        _sync(path)
    old = _old_name(folder)
    if folder.exists():
        shutil.rmtree(old, ignore_errors=True)
        folder.rename(old)
    aside.rename(folder)
    _sync(folder.parent)
    shutil.rmtree(old, ignore_errors=True)


def recover_folder(folder: Path) -> None:
    """Restore the earlier folder if `replace_folder` was killed between its two renames."""
    if not folder.exists() and _old_name(folder).exists():
        _old_name(folder).rename(folder)


def _old_name(folder: Path) -> Path:
    return folder.with_name(f".{folder.name}.old")


def _sync(path: Path) -> None:
    """Flush a file's content, or a folder's entries, to disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
