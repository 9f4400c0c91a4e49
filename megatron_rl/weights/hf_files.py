"""Hugging Face safetensors folders: read in slices and checked, written as a stream and at once; random weights."""

from __future__ import annotations

import json
import os
import shutil
import zlib
from collections import Counter
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
"""Ends of the names of files with weights, or with an index of them. All other files of a model go along with it."""
NOT_THE_MODELS = ("adapter_config.json", "checksums.json")
"""Files that belong to an adapter in the same folder."""
MTP_COUNTS = ("num_nextn_predict_layers", "mtp_num_hidden_layers", "num_mtp_modules", "num_mtp_layers", "use_mtp")
"""Keys of config.json that count layers which predict further tokens. They are never trained."""

_DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
"""By the names of safetensors."""

MXFP4_BLOCK = 32
"""Four-bit numbers that share a power of two (OCP Microscaling Formats); read as bfloat16, never written."""
# One bit of sign, two of exponent, one of mantissa.
_MAGNITUDES = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
MXFP4_VALUES = torch.cat([_MAGNITUDES, -_MAGNITUDES])


class HFFolder:
    """The safetensors of a folder. Opening checks every expected tensor's presence and shape against the headers.

    For example:

        folder = HFFolder("models/qwen3-4b", hf_shapes(arch))
        rows = folder.read("model.embed_tokens.weight", 0, 1000, 2000)  # of dimension 0
    """

    def __init__(self, folder: str | Path, expected: dict[str, Shape], *, file: str = MODEL_FILE) -> None:
        """file: the one with all tensors, if there is such a file and no index; else each safetensors file counts."""
        self.folder = Path(folder)
        self.index = self.folder / "model.safetensors.index.json"
        self.file_of = _file_of_each_tensor(self.folder, self.index, file)
        self._open = {}
        for name, shape in expected.items():
            for part, wanted in (packed_shapes(name, shape) if self._is_packed(name) else {name: shape}).items():
                self._check(part, wanted)
            self.dtype(name)  # quantised weights have the shape that config.json promises, but need their scales

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
        """Return a slice of a tensor; without `stop` up to its end."""
        if self._is_packed(name):
            assert dim == 0, f"{name}: experts are read one by one"
            return dequantized(*(self.read(part, 0, start, stop) for part in packed_shapes(name, ())))
        part = self._slice(name)  # no bytes yet: only those of the slice are read
        return part[start:stop] if dim == 0 else part[:, start:stop]

    def shape(self, name: str) -> Shape:
        """Return the shape that a tensor has in its file."""
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

    def whole(self, name: str) -> Tensor:
        """Return a tensor of any shape and dtype as it lies in its file."""
        self._slice(name)
        return self._handle(name).get_tensor(name)

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
        # Each file is opened once and stays open: opening parses its whole header.
        if path not in self._open:
            try:
                self._open[path] = safe_open(path, framework="pt")
            except (SafetensorError, OSError) as error:
                named = f", in which {self.index} has {name}" if self.index.is_file() else ""
                raise ValueError(
                    f"{path}: unreadable safetensors file ({error}){named}; copy the model folder again."
                ) from error
        return self._open[path]


def packed_shapes(name: str, shape: Shape) -> dict[str, Shape]:
    """Return the two tensors of a stack of matrices `[experts, inputs, outputs]`, which has outputs first in them."""
    blocks = (shape[0], shape[2], shape[1] // MXFP4_BLOCK) if shape else ()
    return {f"{name}_blocks": (*blocks, MXFP4_BLOCK // 2), f"{name}_scales": blocks}


def dequantized(blocks: Tensor, scales: Tensor) -> Tensor:
    """Return `[experts, G * 32, outputs]` bfloat16, exactly what the numbers are.

    blocks: `[experts, outputs, G, 16]` uint8, two numbers to a byte, the first in its lower half. scales: `[experts,
    outputs, G]` uint8, exponents of two plus 127.
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
    names = {}
    for path in files:
        try:
            with safe_open(path, framework="pt") as handle:
                names |= {name: path.name for name in handle.keys()}  # noqa: SIM118 (a handle is no dict)
        except SafetensorError as error:
            raise ValueError(f"{path}: unreadable safetensors file ({error}); copy the model folder again.") from error
    return names


def _read_index(path: Path) -> dict[str, str]:
    """Return the index's files by tensor. Each lies in its folder, which may be somebody else's."""
    files = read_object(path, "copy the model folder again").get("weight_map")
    if not (isinstance(files, dict) and all(isinstance(name, str) for name in files.values())):
        raise ValueError(
            f"{path}: unreadable index (weight_map must give each tensor the name of its file); copy the model folder "
            f"again."
        )
    # With folders in it a name would have a file from elsewhere on this host read, and sent to the servers.
    for tensor, name in files.items():
        if PurePath(name).name != name or name == ".." or not name.endswith(".safetensors"):
            raise ValueError(
                f"{path}: has {tensor!r} in {name!r}, which must be a .safetensors file of this folder; copy the model "
                f"folder again, from a place that you trust."
            )
    return files


class RandomWeights:
    """Initial weights of a model that has none: normal with standard deviation 0.02, norms `norm`, biases 0.

    A tensor depends on its name and the seed alone, so that every layout starts from the same model.
    """

    def __init__(self, expected: dict[str, Shape], seed: int, *, norm: float = 1.0) -> None:
        self.expected, self.seed, self.norm = expected, seed, norm

    def read(self, name: str, dim: int, start: int, stop: int) -> Tensor:
        shape = self.expected[name]
        if name.endswith("linear_attn.norm.weight"):  # which multiplies by its weight where the others add 1
            full = torch.ones(shape)
        elif name.endswith("norm.weight"):
            full = torch.full(shape, self.norm)
        elif name.endswith("bias"):
            full = torch.zeros(shape)
        else:
            # crc32, as hash() of a text is another in every process. All of it is drawn, whatever part is asked for.
            generator = torch.Generator().manual_seed(zlib.crc32(name.encode()) + (self.seed << 32))
            full = torch.empty(shape).normal_(std=0.02, generator=generator)
        return full.narrow(dim, start, stop - start)


class ValueHeadFromZero:
    """The tensors of another source and, under `head`, zeros: a critic that starts from a policy."""

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
    carried: Iterable[tuple[str, Tensor]] | None = (),
    shard_bytes: int = 2 * 1024**3,
) -> None:
    """Write streamed tensors as a HF folder with index, and all other files of `model_folder`.

    head: `value` makes config.json that of a sequence classification model with one label. carried: further tensors,
    which are written as they are. If there are none, config.json counts no layers that predict further tokens; None
    leaves it as it is.

    It appears under its name only when complete: written aside, fsynced, renamed; an earlier folder is replaced last.
    At most `shard_bytes` of tensors are held at a time. dtype None keeps each tensor's own and config.json as it is.
    OSError where a file cannot be written: the earlier folder is untouched then.
    """
    folder = Path(folder)
    # Beside the folder, as a rename is atomic on one file system only; with a dot, as others look for `version-*`.
    aside = folder.with_name(f".{folder.name}.{os.getpid()}.partial")
    shutil.rmtree(aside, ignore_errors=True)
    try:
        aside.mkdir(parents=True)
        unchanged: Counter[str] = Counter()
        _write_tensors(aside, _with_dtype(tensors, carried or (), dtype, unchanged), shard_bytes)
        copy_model_files(model_folder, aside, head=head)
        changes: dict[str, Any] = {}
        if dtype is not None:
            # transformers 5 reads the one, earlier versions and other readers the other.
            changes = dict.fromkeys(("dtype", "torch_dtype"), str(dtype).removeprefix("torch."))
        config = json.loads((aside / "config.json").read_text(encoding="utf-8"))
        if carried is not None and not unchanged:
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
    unchanged: Counter[str],
) -> Iterator[tuple[str, Tensor]]:
    """Yield tensors in `dtype` (None keeps theirs), then the carried ones as they are, whose names `unchanged` gets."""
    for name, tensor in tensors:
        # Routers choose experts by sums with this bias, which bfloat16 would make equal.
        kept = tensor.dtype if name.endswith("e_score_correction_bias") else dtype
        yield name, tensor.detach().to("cpu", kept).contiguous()
    for name, tensor in carried:
        unchanged[name] += 1
        yield name, tensor


def _write_tensors(aside: Path, tensors: Iterable[tuple[str, Tensor]], shard_bytes: int) -> None:
    """Write the safetensors of a folder, and the index of more than one."""
    weight_map, shard, shard_size, count, total = {}, {}, 0, 0, 0

    def flush() -> None:
        nonlocal shard, shard_size, count
        if shard:
            count += 1
            save_file(shard, aside / f"part-{count}", metadata={"format": "pt"})
            (aside / f"part-{count}").chmod(0o644)  # safetensors makes private files
            weight_map.update(dict.fromkeys(shard, count))
        shard, shard_size = {}, 0

    for name, tensor in tensors:
        if shard_size + tensor.nbytes > shard_bytes:
            flush()
        shard[name] = tensor
        shard_size += tensor.nbytes
        total += tensor.nbytes
    flush()
    # A file's name holds the count of files, which nobody knows before the end of the stream.
    names = {
        n: f"model-{n:05}-of-{count:05}.safetensors" if count > 1 else "model.safetensors" for n in range(1, count + 1)
    }
    for number, name in names.items():
        (aside / f"part-{number}").rename(aside / name)
    if count > 1:
        index = {"metadata": {"total_size": total}, "weight_map": {k: names[n] for k, n in weight_map.items()}}
        (aside / "model.safetensors.index.json").write_text(json.dumps(index, indent=2, sort_keys=True))


def copy_model_files(source: str | Path, target: str | Path, *, head: str = "policy") -> None:
    """Copy all files of a model but its weights: config.json, of a model with that head, the tokenizer and the rest."""
    for file in model_files(source, outside=Path(target)):
        (Path(target) / file).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(Path(source) / file, Path(target) / file)  # without its mode, which may forbid to write
    path = Path(target) / "config.json"
    config = json.loads(path.read_text(encoding="utf-8"))
    is_quantised = config.pop("quantization_config", None) is not None  # what is written is not
    if head == "value":
        config = with_value_head(config)
    if head == "value" or is_quantised:
        path.write_text(json.dumps(config, indent=2), encoding="utf-8")


def model_files(folder: str | Path, *, outside: Path) -> list[Path]:
    """Return the files of a model folder that hold no weights, as paths within it. Links count as what they point to.

    Hidden files are left out, and folders with weights somewhere in them, which belong to other models or to runs. So
    is the folder that `outside` lies in.
    """
    folder, found = Path(folder), []
    for path in sorted(folder.iterdir()):
        if path.name.startswith(".") or path.name in NOT_THE_MODELS:
            continue
        if path.is_file() and not path.name.endswith(WEIGHTS):
            found.append(path.relative_to(folder))
        elif path.is_dir() and not outside.resolve().is_relative_to(path.resolve()):
            below = [path / file for file in _files_below(path)]
            if not any(file.name.endswith(WEIGHTS) for file in below):
                found += [file.relative_to(folder) for file in below]
    return found


def _files_below(folder: Path) -> list[Path]:
    """Return all files below a folder that are not hidden, as paths within it. No linked folder is entered."""
    found = []
    for place, folders, files in os.walk(folder):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        paths = [Path(place, name) for name in sorted(files) if not name.startswith(".")]
        found += [path.relative_to(folder) for path in paths if path.is_file()]
    return found


def replace_folder(aside: Path, folder: Path) -> None:
    """Make the finished folder `aside` appear as `folder`, durably; what was there before goes last.

    Killed between its two renames it leaves the earlier folder under another name: `recover_folder` brings it back.
    """
    # What a file holds before its name, and every name before the rename that shows it: a host that loses power in
    # between keeps the earlier folder, or the whole new one.
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
    """Undo a `replace_folder` that was killed while nothing stood under the name."""
    if not folder.exists() and _old_name(folder).exists():
        _old_name(folder).rename(folder)


def _old_name(folder: Path) -> Path:
    return folder.with_name(f".{folder.name}.old")


def _sync(path: Path) -> None:
    """Bring a file's content, or a folder's names, to the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
