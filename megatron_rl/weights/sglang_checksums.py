"""The checksums that SGLang takes of its weights (`/weights_checker`), taken of the HF tensors that are sent to it.

SGLang hashes what each tensor-parallel rank keeps: q, k and v as one tensor, gate and up as one, an embedding with its
rows padded. On a CPU that is SHA-256; on a GPU a kernel of its own (`gpu_tensor_hash`, the same in 0.5.17 to 0.5.23),
whose arithmetic is repeated here in torch. Left out is what SGLang keeps in other ways, such as experts, and with
several ranks everything but the projections, embeddings and norms of a dense transformer.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator

import torch
from torch import Tensor

from megatron_rl.api import ChecksumForm

FUSED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
"""SGLang's name, and the HF parts in their order in it."""
SPLIT_BY_ROWS = {part for parts in FUSED.values() for part in parts}
SPLIT_BY_COLUMNS = {"o_proj", "down_proj"}
EMBEDDINGS = {"embed_tokens", "lm_head"}
VOCAB_MULTIPLE = 64
"""SGLang pads the rows of an embedding to a multiple of it."""


class SGLangChecksums:
    """The checksums that a server of one form must report once it holds the tensors that were added, in any order."""

    def __init__(self, form: ChecksumForm) -> None:
        self.form = form
        self._parts: dict[str, dict[str, Tensor]] = {}
        """Of tensors that SGLang fuses, until the last part is there."""
        self._hashes: dict[str, str | Tensor] = {}

    def add(self, name: str, tensor: Tensor) -> None:
        """On a GPU nothing is waited for: the hashes are read in `of`."""
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
                    self._hash(key, {part: found[part] for part in parts})
                return
        self._hash(name, {last: tensor})

    def _hash(self, name: str, parts: dict[str, Tensor]) -> None:
        for rank, kept in enumerate(self._kept_by_ranks(name, parts)):
            take = _cpu_hash if self.form.kind == "sglang_cpu" else gpu_hash_sum
            self._hashes[self.form.name_on(name, rank)] = take(kept)

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
        return {name: h if isinstance(h, str) else gpu_hash(int(h)) for name, h in self._hashes.items()}


def _padded(embedding: Tensor, ranks: int) -> Tensor:
    rows = len(embedding)
    # To 64 rows as on one rank; where the ranks cannot share these equally, to 64 for each.
    multiple = VOCAB_MULTIPLE * (ranks if (rows + -rows % VOCAB_MULTIPLE) % ranks else 1)
    return torch.nn.functional.pad(embedding, (0, 0, 0, -rows % multiple)) if rows % multiple else embedding


def _bytes_of(parts: list[Tensor]) -> list[Tensor]:
    return [part.detach().contiguous().view(-1).view(torch.uint8) for part in parts]


def _cpu_hash(parts: list[Tensor]) -> str:
    """The first eight bytes of SHA-256."""
    found = hashlib.sha256()
    for part in _bytes_of(parts):
        found.update(part.cpu().numpy().data)
    return found.hexdigest()[:16]


TILE_WORDS = 8192
TILES_AT_ONCE = 512
"""Of the temporary memory of a hash: 16 MB for each of a few operands."""
FIRST_SEED = 0x243F6A88
SEEDS = (FIRST_SEED, (FIRST_SEED * 0x9E3779B1 ^ 0xDEADBEEF) & 0xFFFFFFFF)
POSITION_FACTORS = (0x27D4EB2D, 0x165667B1)
POSITION_TURNS = (15, 13)


def gpu_hash_sum(parts: list[Tensor]) -> Tensor:
    """The sum mod 2^64 of the hashes of all tiles of 8192 words of four bytes: 0-dim int64 on the parts' device."""
    data = torch.cat(_bytes_of(parts)) if len(parts) > 1 else _bytes_of(parts)[0]
    if data.numel() % 4 or data.storage_offset() % 4:  # padding also copies what does not begin at a word
        data = torch.nn.functional.pad(data, (0, -data.numel() % 4))
    words = data.view(torch.int32)
    total = torch.zeros((), dtype=torch.int64, device=data.device)
    for start in range(0, words.numel(), TILE_WORDS * TILES_AT_ONCE):
        chunk = words[start : start + TILE_WORDS * TILES_AT_ONCE]
        # Torch has no unsigned arithmetic: int32 wraps around in the same bits, and so do the sums in int64.
        place = torch.arange(start, start + chunk.numel(), dtype=torch.int64, device=data.device).to(torch.int32)
        halves = []
        for seed, factor, turn in zip(SEEDS, POSITION_FACTORS, POSITION_TURNS, strict=True):
            turned = (place << turn) | _shift_right(place, 32 - turn)
            mixed = _mix(chunk ^ ((place * _signed(factor) + _signed(seed)) ^ turned))
            tiles = torch.nn.functional.pad(mixed, (0, -mixed.numel() % TILE_WORDS)).view(-1, TILE_WORDS)
            sums = tiles.sum(1, dtype=torch.int64).to(torch.int32)  # mod 2^32
            halves.append(_mix(sums ^ _signed(4 * words.numel() & 0xFFFFFFFF)).to(torch.int64))
        total += ((halves[0] << 32) | (halves[1] & 0xFFFFFFFF)).sum()
    return total


def gpu_hash(total: int) -> str:
    """The checksum (hex) of what has this `gpu_hash_sum`."""
    mask = (1 << 64) - 1
    value = total & mask
    for turn, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        value = (value ^ value >> turn) * factor & mask
    return f"{value ^ value >> 31:016x}"


def _mix(words: Tensor) -> Tensor:
    """The finalizer of MurmurHash3, of int32 taken as unsigned."""
    for turn, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
        words = (words ^ _shift_right(words, turn)) * _signed(factor)
    return words ^ _shift_right(words, 16)


def _shift_right(words: Tensor, count: int) -> Tensor:
    return (words >> count) & ((1 << (32 - count)) - 1)


def _signed(word: int) -> int:
    return word - (1 << 32) if word >> 31 else word
