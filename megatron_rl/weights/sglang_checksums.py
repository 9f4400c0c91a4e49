"""Compute SGLang's weight checksums (`/weights_checker`) from the HF tensors that are sent to it.

SGLang hashes the tensors that each tensor-parallel rank keeps. It keeps q, k and v as one tensor, gate and up as one
tensor, and an embedding with padded rows. On a CPU the hash is SHA-256. On a GPU the kernel `gpu_tensor_hash` computes
it, which `ops.tile_hashes` reproduces. SGLang keeps all experts of a layer as two tensors. Here these are hashed slice
by slice, as their experts arrive.

Tensors are skipped if it is unknown how SGLang stores them. If the server has several ranks, only projections, experts,
embeddings and norms are hashed.
"""

from __future__ import annotations

import hashlib
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from megatron_rl.api import ChecksumForm
from megatron_rl.ops import HASH_TILE_BYTES, tile_hashes
from megatron_rl.weights.draft_files import name_in_sglang

FUSED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
"""{SGLang's name of a fused tensor: HF names of its parts, in order}."""
SPLIT_BY_ROWS = {part for parts in FUSED.values() for part in parts}
SPLIT_BY_COLUMNS = {"o_proj", "down_proj"}
EMBEDDINGS = {"embed_tokens", "lm_head"}
VOCAB_MULTIPLE = 64
"""SGLang pads the number of an embedding's rows to a multiple of this."""
EXPERT = re.compile(r"(.+\.experts)\.(\d+)\.(\w+)\.weight")
OF_EXPERTS = {"w13_weight": ("gate_proj", "up_proj"), "w2_weight": ("down_proj",)}
"""{SGLang's name of a tensor with all experts of a layer: HF names of each expert's parts}. The parts are stacked by
rows."""
MIXTRAL = {"w1": "gate_proj", "w3": "up_proj", "w2": "down_proj"}
"""{Mixtral's name of a part of an expert: the usual HF name}."""


class Piece(NamedTuple):
    """One rank's part of an expert's matrix.

    It is piece `number` of the tensor that holds all experts of the rank. That tensor, called `name` in SGLang, has
    `count` pieces of equal size, stacked by rows.
    """

    name: str
    number: int
    count: int
    part: Tensor


class SGLangChecksums:
    """The checksums that servers of one form must report after they have received the tensors passed to `add`.

    The tensors may be passed in any order.
    """

    def __init__(self, form: ChecksumForm) -> None:
        self.form = form
        # Parts of fused tensors, and of expert tensors that cannot be hashed in slices, kept until all are added.
        self._parts: dict[str, dict[str | int, Tensor]] = {}
        self._hashes: dict[str, str] = {}
        self._sums: list[tuple[list[str], Tensor]] = []  # per kernel launch: names, and sums of tensors or slices

    def add(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Take HF tensors, and hash each of SGLang's tensors that they complete. Does not wait for a GPU; `of` does."""
        kept: list[tuple[str, list[Tensor]]] = []
        slices: list[tuple[int, int]] = []
        for hf_name, tensor in tensors:
            name = name_in_sglang(hf_name)
            if expert := EXPERT.fullmatch(name):
                for piece in self._pieces_on_ranks(expert, tensor):
                    size = piece.part.nbytes
                    if self.form.kind == "sglang_gpu" and size % HASH_TILE_BYTES == 0:
                        kept.append((piece.name, [piece.part]))
                        slices.append((piece.number * size, piece.count * size))
                    elif parts := self._completed(piece.name, piece.number, piece.part, piece.count):
                        kept.append((piece.name, [torch.cat([parts[number] for number in range(piece.count)])]))
                        slices.append((0, piece.count * size))
                continue
            for whole_name, parts in self._whole(name, tensor):
                for rank, of_rank in enumerate(self._kept_by_ranks(whole_name, parts)):
                    kept.append((self.form.name_on(whole_name, rank), of_rank))
                    slices.append((0, sum(part.nbytes for part in of_rank)))
        if self.form.kind == "sglang_cpu":
            self._hashes |= {name: _cpu_hash(parts) for name, parts in kept}
        elif kept:
            self._sums.append(([name for name, _ in kept], tile_hashes([parts for _, parts in kept], slices)))

    def _pieces_on_ranks(self, expert: re.Match[str], tensor: Tensor) -> Iterator[Piece]:
        """Yield, for each rank that holds a part of an expert's matrix, this part as a Piece.

        Yield nothing if it is unknown how SGLang stores the matrix. expert: match of EXPERT with the matrix's name.
        """
        form, (layer, number, leaf) = self.form, expert.groups()
        leaf = MIXTRAL.get(leaf, leaf)
        kind = next((kind for kind, parts in OF_EXPERTS.items() if leaf in parts), None)
        split = form.ranks // form.expert_ranks
        dim = 1 if leaf == "down_proj" else 0
        if kind is None or form.experts is None or form.experts % form.expert_ranks or tensor.shape[dim] % split:
            return
        group, place = divmod(int(number), form.experts // form.expert_ranks)
        parts = OF_EXPERTS[kind]
        for of_group, part in enumerate(tensor.chunk(split, dim=dim)):
            name = form.name_on(f"{layer}.{kind}", group * split + of_group)
            count = form.experts // form.expert_ranks * len(parts)
            yield Piece(name, place * len(parts) + parts.index(leaf), count, part)

    def _completed(self, name: str, number: str | int, part: Tensor, count: int) -> dict[str | int, Tensor]:
        """Store a part of the tensor `name`. If all `count` parts are stored now, return {number: part}, else {}."""
        found = self._parts.setdefault(name, {})
        found[number] = part
        return self._parts.pop(name) if len(found) == count else {}

    def _whole(self, name: str, tensor: Tensor) -> Iterator[tuple[str, dict[str, Tensor]]]:
        """Yield SGLang's tensor that the HF tensor `name` completes: its name, and {last component of HF name: part}.

        Yield nothing if further parts are missing, or if the tensor cannot be compared.
        """
        module, _, leaf = name.rpartition(".")
        parent, _, last = module.rpartition(".")
        if leaf == "sinks":  # in float32 or bfloat16, as the attention kernel wants them, whatever the model's dtype
            return
        for whole, parts in FUSED.items():
            if last in parts:
                key = f"{parent}.{whole}.{leaf}"
                # No copy: the parts come from one Megatron parameter, so the others follow at once.
                if found := self._completed(key, last, tensor, len(parts)):
                    yield key, {part: found[part] for part in parts}
                return
        yield name, {last: tensor}

    def _kept_by_ranks(self, name: str, parts: dict[str, Tensor]) -> Iterator[list[Tensor]]:
        """Yield, for each rank, the tensors that SGLang concatenates by rows to the rank's part of the tensor `name`.

        Yield nothing if it is unknown how SGLang stores the tensor. parts: as from `_whole`.
        """
        ranks, kv_heads = self.form.ranks, self.form.kv_heads
        (last, first), is_weight = next(iter(parts.items())), name.endswith(".weight")
        if last in EMBEDDINGS and is_weight:  # padded even with a single rank
            yield from ([part] for part in _padded(first, ranks).chunk(ranks))
        elif ranks == 1:
            yield list(parts.values())
        elif last in SPLIT_BY_ROWS:
            if "k_proj" in parts and (kv_heads is None or kv_heads % ranks):
                return  # KV heads are replicated over ranks
            if all(len(part) % ranks == 0 for part in parts.values()):
                yield from (list(kept) for kept in zip(*(part.chunk(ranks) for part in parts.values()), strict=True))
        elif last in SPLIT_BY_COLUMNS:
            # Weights only: these projections' biases are not compared.
            if is_weight and first.shape[1] % ranks == 0:
                yield from ([part] for part in first.chunk(ranks, dim=1))
        elif last.endswith("norm") and is_weight:
            yield from ([first] for _ in range(ranks))

    def of(self) -> dict[str, str]:
        """Return {tensor name: checksum}, with the names and checksums that servers of this form report."""
        totals: Counter[str] = Counter()
        for names, sums in self._sums:
            for name, total in zip(names, sums.tolist(), strict=True):
                totals[name] += total  # the sums of slices add up to the tensor's
        return self._hashes | {name: gpu_hash(total) for name, total in totals.items()}


def _padded(embedding: Tensor, ranks: int) -> Tensor:
    rows = len(embedding)
    # To a multiple of 64 rows, or of 64 per rank if the ranks cannot share the former equally.
    multiple = VOCAB_MULTIPLE * (ranks if (rows + -rows % VOCAB_MULTIPLE) % ranks else 1)
    return torch.nn.functional.pad(embedding, (0, 0, 0, -rows % multiple)) if rows % multiple else embedding


def _cpu_hash(parts: list[Tensor]) -> str:
    """Return the first eight bytes, in hex, of the SHA-256 of the parts' concatenated bytes."""
    found = hashlib.sha256()
    for part in parts:
        found.update(part.detach().contiguous().view(-1).view(torch.uint8).cpu().numpy().data)
    return found.hexdigest()[:16]


def gpu_hash(total: int) -> str:
    """Return SGLang's checksum of a tensor, in hex. total: the tensor's result of `tile_hashes`."""
    mask = (1 << 64) - 1
    value = total & mask
    for turn, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        value = (value ^ value >> turn) * factor & mask
    return f"{value ^ value >> 31:016x}"
