"""SGLang's checksums without SGLang on a GPU: its kernel's source in triton's interpreter, its layout by hand."""

import hashlib
import json
import os
import subprocess
import sys

import pytest
import torch

from megatron_rl.api import ChecksumForm
from megatron_rl.ops import reference, tile_hashes
from megatron_rl.servers.server_process import SGLANG_CPU_PACKAGES
from megatron_rl.weights.sglang_checksums import SGLangChecksums, gpu_hash
from tests.kit.waiting import LATE_S

KERNEL = SGLANG_CPU_PACKAGES / "sglang/kernels/ops/memory/gpu_tensor_hash.py"
# No whole word, and a second tile of 8192 words that is not full.
SIZES = [5, 4 * 8192 + 6]
RUN_THE_KERNEL = """
import importlib.util, json, sys, torch
spec = importlib.util.spec_from_file_location("kernel", sys.argv[1])
kernel = importlib.util.module_from_spec(spec)
spec.loader.exec_module(kernel)
torch.manual_seed(0)
tensors = [torch.randint(0, 256, (size,), dtype=torch.uint8) for size in SIZES]
print(json.dumps([f"{kernel.gpu_tensor_hash(tensor, reduce_chunk=2):016x}" for tensor in tensors]))
"""


@pytest.mark.thorough
def test_the_hash_is_that_of_sglangs_kernel():
    if not KERNEL.is_file():
        pytest.skip(f"{KERNEL} is not installed; run scripts/install_sglang_cpu.sh with this interpreter")
    code = RUN_THE_KERNEL.replace("SIZES", str(SIZES))
    environment = os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": str(SGLANG_CPU_PACKAGES)}
    # -O: the kernel's wrapper asserts that it is given a CUDA tensor.
    command = [sys.executable, "-O", "-c", code, str(KERNEL)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True, timeout=LATE_S)
    torch.manual_seed(0)
    tensors = [torch.randint(0, 256, (size,), dtype=torch.uint8) for size in SIZES]
    assert [gpu_hash(int(total)) for total in tile_hashes([[tensor] for tensor in tensors])] == json.loads(done.stdout)
    empty = torch.empty(0, dtype=torch.uint8)
    assert gpu_hash(int(tile_hashes([[empty]]))) == "0" * 16


def test_the_hash_does_not_depend_on_how_it_is_taken(monkeypatch):
    data = torch.randint(0, 256, (4 * 8192 * 3 + 20,), dtype=torch.uint8)
    whole = tile_hashes([[data]])
    parts_above_each_other, elsewhere_in_memory = [data[:400], data[400:]], [torch.cat([data[:1], data])[1:]]
    assert tile_hashes([parts_above_each_other, elsewhere_in_memory]).tolist() == 2 * whole.tolist()
    monkeypatch.setattr(reference, "TILES_AT_ONCE", 2)
    assert tile_hashes([[data]]) == whole
    data[-1] ^= 1
    assert tile_hashes([[data]]) != whole


def checksums(tensors, ranks=1, kv_heads=None, experts=None, expert_ranks=1):
    found = SGLangChecksums(ChecksumForm("sglang_cpu", None, ranks, kv_heads, experts, expert_ranks))
    found.add(tensors.items())
    return found.of()


def sha(*parts):
    return hashlib.sha256(b"".join(part.contiguous().numpy().tobytes() for part in parts)).hexdigest()[:16]


@pytest.fixture
def layer():
    """Four heads of queries and two of keys and values, of two numbers each."""
    shapes = {"q_proj": (8, 6), "k_proj": (4, 6), "v_proj": (4, 6), "o_proj": (6, 8), "q_norm": (2,)}
    return {f"model.layers.0.self_attn.{name}.weight": torch.randn(shape) for name, shape in shapes.items()}


def test_each_rank_keeps_its_heads_in_one_tensor(layer):
    q, k, v, o, norm = layer.values()
    attention = "model.layers.0.self_attn"
    assert checksums(layer) == {
        f"{attention}.qkv_proj.weight": sha(q, k, v),
        f"{attention}.o_proj.weight": sha(o),
        f"{attention}.q_norm.weight": sha(norm),
    }
    assert checksums(layer, ranks=2, kv_heads=2) == {
        f"{attention}.qkv_proj.weight (rank 0)": sha(q[:4], k[:2], v[:2]),
        f"{attention}.qkv_proj.weight (rank 1)": sha(q[4:], k[2:], v[2:]),
        f"{attention}.o_proj.weight (rank 0)": sha(o[:, :4]),
        f"{attention}.o_proj.weight (rank 1)": sha(o[:, 4:]),
        f"{attention}.q_norm.weight (rank 0)": sha(norm),
        f"{attention}.q_norm.weight (rank 1)": sha(norm),
    }
    # Two heads for four ranks are repeated, and what cannot be told is left out.
    assert not [name for name in checksums(layer, ranks=4, kv_heads=2) if "qkv" in name]
    assert checksums({"model.layers.0.mlp.experts.w13_weight": q}, ranks=2) == {}


def test_biases_are_compared_and_sinks_are_not_as_their_dtype_is_that_of_a_kernel():
    """SGLang keeps GPT-OSS's sinks in float32 for one attention kernel, and in bfloat16 for the others."""
    attention = "model.layers.0.self_attn"
    named = {f"{attention}.{name}_proj.bias": torch.randn(size) for name, size in {"q": 8, "k": 4, "v": 4}.items()}
    assert checksums(named | {f"{attention}.sinks": torch.randn(4)}) == {
        f"{attention}.qkv_proj.bias": sha(*named.values())
    }


def test_rows_of_an_embedding_are_padded():
    rows = torch.randn(100, 3)
    padded = torch.cat([rows, torch.zeros(28, 3)])
    assert checksums({"model.embed_tokens.weight": rows}) == {"model.embed_tokens.weight": sha(padded)}
    by_rank = checksums({"lm_head.weight": rows}, ranks=2)
    assert list(by_rank.values()) == [sha(padded[:64]), sha(padded[64:])]
    # 128 rows do not divide by three: SGLang on a CPU pads to a multiple of 3 x 64 then.
    more = torch.cat([padded, torch.zeros(64, 3)])
    assert list(checksums({"lm_head.weight": rows}, ranks=3).values()) == [sha(part) for part in more.chunk(3)]


def experts(count, ffn, hidden, names=("gate_proj", "up_proj", "down_proj"), layer="model.layers.3.mlp"):
    """A layer's experts by HF name, and by kind: `[E, F, H]`, `[E, F, H]` and `[E, H, F]`."""
    gate, up, down = torch.randn(count, ffn, hidden), torch.randn(count, ffn, hidden), torch.randn(count, hidden, ffn)
    kinds = list(zip(names, (gate, up, down), strict=True))
    named = {f"{layer}.experts.{n}.{name}.weight": kind[n] for n in range(count) for name, kind in kinds}
    return named, (gate, up, down)


# Every expert on each rank, cut; whole experts, shared out; and shared out among groups of ranks that cut them.
@pytest.mark.parametrize("ranks, expert_ranks", [(1, 1), (2, 1), (2, 2), (4, 2)])
def test_experts_are_two_tensors_of_a_layer_on_each_rank_whatever_the_order_they_come_in(ranks, expert_ranks):
    named, (gate, up, down) = experts(4, 8, 6)
    split, expected = ranks // expert_ranks, {}
    for rank in range(ranks):
        own = slice(rank // split * 4 // expert_ranks, (rank // split + 1) * 4 // expert_ranks)
        place = "" if ranks == 1 else f" (rank {rank})"
        rows = [kind[own].chunk(split, dim=1)[rank % split] for kind in (gate, up)]
        columns = down[own].chunk(split, dim=2)[rank % split]
        expected[f"model.layers.3.mlp.experts.w13_weight{place}"] = sha(torch.cat(rows, dim=1))
        expected[f"model.layers.3.mlp.experts.w2_weight{place}"] = sha(columns)
    mixed = dict(sorted(named.items(), key=lambda item: item[0][::-1]))
    assert checksums(mixed, ranks, experts=4, expert_ranks=expert_ranks) == expected
    assert checksums(named, ranks) == {}, "nothing is hashed that is kept in a way of its own"
    mixtral, _ = experts(2, 8, 6, names=("w1", "w3", "w2"), layer="model.layers.0.block_sparse_moe")
    kept = checksums(mixtral, experts=2)
    assert list(kept) == [f"model.layers.0.block_sparse_moe.experts.{name}_weight" for name in ("w13", "w2")]


# 128 x 64 numbers of four bytes are a tile, of which slices are hashed as they come; 64 x 64 are half of one.
@pytest.mark.parametrize("ffn", [128, 64])
def test_a_gpu_hashes_experts_as_they_come(ffn):
    named, (gate, up, down) = experts(4, ffn, 64)
    found = SGLangChecksums(ChecksumForm("sglang_gpu", None, experts=4))
    items = list(named.items())[::-1]
    for start in range(0, len(items), 5):  # buckets, which end anywhere
        found.add(items[start : start + 5])
        assert ffn == 64 or not found._parts, "nothing is kept"
    both = [torch.cat([gate, up], dim=1), down]
    assert list(found.of().values()) == [gpu_hash(int(tile_hashes([[whole]]))) for whole in both[::-1]]


def test_hashes_of_slices_add_up_to_those_of_the_tensor():
    tile = 4 * 8192
    whole = torch.randint(0, 256, (5 * tile + 1001,), dtype=torch.uint8)
    slices, places = whole.tensor_split([2 * tile, 3 * tile]), [(n * tile, len(whole)) for n in (0, 2, 3)]
    assert int(tile_hashes([[part] for part in slices], places).sum()) == int(tile_hashes([[whole]]))
