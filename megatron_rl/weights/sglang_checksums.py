"""The checksums that SGLang takes of its weights (`/weights_checker`), taken of the HF tensors that are sent to it.

SGLang hashes what each tensor-parallel rank keeps: q, k and v as one tensor, gate and up as one, an embedding with its
rows padded. On a CPU that is SHA-256; on a GPU a kernel of its own (`gpu_tensor_hash`), which
`ops.tile_hashes` repeats. All experts of a layer are two tensors there, which are hashed as
their slices come. Left out is what SGLang keeps in other ways, and with several ranks everything but
projections, experts, embeddings and norms: nothing is hashed that is not compared.
"""

from __future__ import annotations

import hashlib
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_rl.api import ChecksumForm
from megatron_rl.ops import HASH_TILE_BYTES, tile_hashes

FUSED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
"""SGLang's name, and the HF parts in their order in it."""
SPLIT_BY_ROWS = {part for parts in FUSED.values() for part in parts}
SPLIT_BY_COLUMNS = {"o_proj", "down_proj"}
EMBEDDINGS = {"embed_tokens", "lm_head"}
VOCAB_MULTIPLE = 64
"""SGLang pads the rows of an embedding to a multiple of it."""
EXPERT = re.compile(r"(.+\.experts)\.(\d+)\.(\w+)\.weight")
OF_EXPERTS = {"w13_weight": ("gate_proj", "up_proj"), "w2_weight": ("down_proj",)}
"""SGLang's name for one kind of a layer's experts, and the parts of each, one above the other. Mixtral has other names
for them, in `MIXTRAL`."""
MIXTRAL = {"w1": "gate_proj", "w3": "up_proj", "w2": "down_proj"}


@dataclass(frozen=True)
class Piece:
    """A part of an expert where a rank keeps it."""

    name: str
    """SGLang's, of the tensor that it belongs to."""
    number: int
    count: int
    """Pieces of that tensor, all of a size, one above the other."""
    part: Tensor


class SGLangChecksums:
    """The checksums that a server of one form must report once it holds the tensors that were added, in any order."""

    def __init__(self, form: ChecksumForm) -> None:
        self.form = form
        self._parts: dict[str, dict[str, Tensor]] = {}
        """Of tensors that SGLang fuses, until the last part is there."""
        self._hashes: dict[str, str] = {}
        self._pieces: dict[str, dict[int, Tensor]] = {}
        """Of layers' experts that cannot be hashed before they are whole."""
        self._sums: list[tuple[list[str], Tensor]] = []
        """Of what was hashed together: the tensors' names, and what `tile_hashes` gave of each or of a slice."""

    def add(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Take the hashes of what is whole with these. On a GPU nothing is waited for: they are read in `of`."""
        kept: list[tuple[str, list[Tensor]]] = []
        slices: list[tuple[int, int]] = []
        for name, tensor in tensors:
            if expert := EXPERT.fullmatch(name):
                for piece in self._pieces_on_ranks(expert, tensor):
                    size = piece.part.nbytes
                    if self.form.kind == "sglang_gpu" and size % HASH_TILE_BYTES == 0:
                        kept.append((piece.name, [piece.part]))
                        slices.append((piece.number * size, piece.count * size))
                    elif whole := self._complete(piece):
                        kept.append((piece.name, whole))
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
        """Yield an expert's pieces on the ranks that have it; nothing where it is not known how they keep it."""
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

    def _complete(self, piece: Piece) -> list[Tensor]:
        """Keep a piece; return all of its tensor, as one, where it was the last."""
        found = self._pieces.setdefault(piece.name, {})
        found[piece.number] = piece.part
        if len(found) < piece.count:
            return []
        del self._pieces[piece.name]
        return [torch.cat([found[number] for number in range(piece.count)])]

    def _whole(self, name: str, tensor: Tensor) -> Iterator[tuple[str, dict[str, Tensor]]]:
        """Yield the tensor that is complete with this one, under SGLang's name, as its HF parts; or nothing yet."""
        module, _, leaf = name.rpartition(".")
        parent, _, last = module.rpartition(".")
        for whole, parts in FUSED.items():
            if last in parts:
                key = f"{parent}.{whole}.{leaf}"
                # Without a copy: the parts come from one Megatron parameter, so the others follow at once.
                found = self._parts.setdefault(key, {})
                found[last] = tensor
                if len(found) == len(parts):
                    del self._parts[key]
                    yield key, {part: found[part] for part in parts}
                return
        yield name, {last: tensor}

    def _kept_by_ranks(self, name: str, parts: dict[str, Tensor]) -> Iterator[list[Tensor]]:
        """Yield what each rank keeps, one above the other; nothing where that is not known."""
        ranks, kv_heads = self.form.ranks, self.form.kv_heads
        (last, first), is_weight = next(iter(parts.items())), name.endswith(".weight")
        if last in EMBEDDINGS and is_weight:  # the one kind that is padded, with a single rank, too
            yield from ([part] for part in _padded(first, ranks).chunk(ranks))
        elif ranks == 1:
            yield list(parts.values())
        elif last in SPLIT_BY_ROWS:
            if "k_proj" in parts and (kv_heads is None or kv_heads % ranks):
                return  # heads are repeated on several ranks
            if all(len(part) % ranks == 0 for part in parts.values()):
                yield from (list(kept) for kept in zip(*(part.chunk(ranks) for part in parts.values()), strict=True))
        elif last in SPLIT_BY_COLUMNS:
            # Weights only: no family here has a bias behind these.
            if is_weight and first.shape[1] % ranks == 0:
                yield from ([part] for part in first.chunk(ranks, dim=1))
        elif last.endswith("norm") and is_weight:
            yield from ([first] for _ in range(ranks))

    def of(self) -> dict[str, str]:
        """Tensor -> checksum, under the names of the servers."""
        totals: Counter[str] = Counter()
        for names, sums in self._sums:
            for name, total in zip(names, sums.tolist(), strict=True):
                totals[name] += total  # of slices: they add up
        return self._hashes | {name: gpu_hash(total) for name, total in totals.items()}


def _padded(embedding: Tensor, ranks: int) -> Tensor:
    rows = len(embedding)
    # To 64 rows as on one rank; where the ranks cannot share these equally, to 64 for each.
    multiple = VOCAB_MULTIPLE * (ranks if (rows + -rows % VOCAB_MULTIPLE) % ranks else 1)
    return torch.nn.functional.pad(embedding, (0, 0, 0, -rows % multiple)) if rows % multiple else embedding


def _cpu_hash(parts: list[Tensor]) -> str:
    """The first eight bytes of SHA-256."""
    found = hashlib.sha256()
    for part in parts:
        found.update(part.detach().contiguous().view(-1).view(torch.uint8).cpu().numpy().data)
    return found.hexdigest()[:16]


def gpu_hash(total: int) -> str:
    """The checksum (hex) of what has this sum of `tile_hashes`."""
    mask = (1 << 64) - 1
    value = total & mask
    for turn, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        value = (value ^ value >> turn) * factor & mask
    return f"{value ^ value >> 31:016x}"
