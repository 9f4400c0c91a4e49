"""Decoder-only models (Llama, Mistral, Qwen2, Qwen3, Qwen3-MoE) in plain torch, with a KV cache.

This module owns the weights and the cache memory, but knows nothing of requests. Every HF tensor name maps to a view of
the tensor that the forward pass uses. So a weight update is a `copy_` by HF name, and checksums cover the weights in
use. Tests assert that float32 logits equal those of transformers to 1e-5, and that decoding row by row equals the full
forward pass.
"""

import math
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors import SafetensorError, safe_open
from torch import Tensor

from megatron_rl import routes
from megatron_rl.ops import fixed_order
from megatron_rl.tools.embedded_server.decoder_config import DecoderConfig, Experts, inverse_frequencies
from megatron_rl.weights.hf_files import is_of_mtp_layer
from megatron_rl.weights.update_group import checksum


class KVCache:
    """Keys and values of `rows` sequences: per layer `[rows, kv_heads, capacity, head_dim]`, zero where never written.

    Values at masked positions are multiplied by 0, so they must be finite: unwritten memory is zeroed, and a row that
    received NaN must be cleared with `clear_row`. The cache also holds the expert routes
    `[rows, capacity, layers, slots]`, int32 as packed by megatron_rl/routes.py, so that a reused prefix has its routes.
    With a draft head, it has a further layer for the head's keys and values, and the model's hidden states
    `[rows, capacity, H]`, which the head reads.

        cache = KVCache(decoder.config, torch.float32, torch.device("cpu"))
        cache.resize(rows=4, capacity=64, kept=[])
        cache.resize(rows=8, capacity=128, kept=[(2, 0, 50)])  # 50 tokens of row 2 are now in row 0
    """

    def __init__(self, config: DecoderConfig, dtype: torch.dtype, device: torch.device, *, has_draft: bool = False):
        self.shape = (config.num_kv_heads, config.head_dim)
        self.dtype, self.device = dtype, device
        self.rows = self.capacity = 0
        self.slots = (config.num_layers, config.experts.per_token if config.experts else 0)
        self.routes = torch.zeros(0, 0, *self.slots, dtype=torch.int32, device=device)
        self.states = torch.zeros(0, 0, config.hidden_size if has_draft else 0, dtype=dtype, device=device)
        self.keys = [self._empty(0, 0) for _ in range(config.num_layers + has_draft)]
        self.values = [self._empty(0, 0) for _ in range(config.num_layers + has_draft)]

    def _empty(self, rows: int, capacity: int) -> Tensor:
        heads, head_dim = self.shape
        return torch.zeros(rows, heads, capacity, head_dim, dtype=self.dtype, device=self.device)

    def resize(self, rows: int, capacity: int, kept: Sequence[tuple[int, int, int]]) -> None:
        """Reallocate the cache, and copy the rows in `kept`: (old row, new row, number of tokens).

        This needs extra memory for only one layer at a time.
        """
        for layers in (self.keys, self.values):
            for i, old in enumerate(layers):
                layers[i] = new = self._empty(rows, capacity)
                for source, target, tokens in kept:
                    new[target, :, :tokens] = old[source, :, :tokens]
        for name in ("routes", "states"):
            old = getattr(self, name)
            setattr(self, name, new := old.new_zeros(rows, capacity, *old.shape[2:]))
            for source, target, tokens in kept:
                new[target, :tokens] = old[source, :tokens]
        self.rows, self.capacity = rows, capacity

    def copy_prefix(self, source: int, targets: list[int], tokens: int) -> None:
        for layer in (*self.keys, *self.values):
            layer[targets, :, :tokens] = layer[source, :, :tokens]
        for table in (self.routes, self.states):
            table[targets, :tokens] = table[source, :tokens]

    def clear_row(self, row: int) -> None:
        for layer in (*self.keys, *self.values, self.states):
            layer[row].zero_()


PADDED_SHARE = 0.75
"""Prompts at least this fraction as long as their group's longest are padded to its length, for one attention call."""


@dataclass(frozen=True)
class Span:
    """`count` tokens of one row, starting at position `start`, in a packed prefill."""

    row: int
    start: int
    count: int


@dataclass
class Layer:
    input_norm: Tensor  # [H]
    qkv: Tensor  # [(heads + 2 kv_heads) * head_dim, H]
    qkv_bias: Tensor | None
    qk_norm: Tensor | None  # [2, head_dim]: the norm of queries, the norm of keys
    o: Tensor  # [H, heads * head_dim]
    o_bias: Tensor | None
    post_norm: Tensor  # [H]
    gate_up: Tensor  # [2 * intermediate, H], in a mixture [experts, 2 * size, H]
    gate_up_bias: Tensor | None
    down: Tensor  # [H, intermediate], in a mixture [experts, H, size]
    down_bias: Tensor | None
    router: Tensor | None = None  # [experts, H]


Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]


class Decoder:
    """A decoder-only model and its weights. Not thread-safe: one thread runs it and writes its weights.

    For example:

        decoder = Decoder(DecoderConfig.read(folder), dtype=torch.float32, device=cpu, context_length=512)
        decoder.load(folder)
        hidden = decoder.prefill(torch.tensor([5, 6, 7]), [Span(row=0, start=0, count=3)], cache)
        hidden = decoder.decode([8], positions=[3], rows=[0], cache=cache)  # [1, H]
        decoder.logits(hidden).argmax(-1)
    """

    def __init__(
        self,
        config: DecoderConfig,
        *,
        dtype: torch.dtype,
        device: torch.device,
        context_length: int,
        is_exact: bool = False,
    ) -> None:
        """is_exact: sum in the order of ops/fixed_order.py. Needs float32 on a CPU, and a model without experts."""
        self.config, self.dtype, self.device, self.is_exact = config, dtype, device, is_exact
        self._linear: Callable[..., Tensor] = fixed_order.linear if is_exact else linear
        self._silu: Callable[[Tensor], Tensor] = fixed_order.silu if is_exact else F.silu
        self.parameters: dict[str, Tensor] = {}
        """HF name -> view of the weight in use."""
        self.watch: Callable[[int, str, Tensor], object] = lambda layer, place, states: None
        """Function called with each intermediate result, in order: (layer number, name of the result, values)."""
        self.changes = 0
        """Number of changes to weights so far. A call of `memory_of` that returns memory counts as a change."""
        self._checksums: dict[str, str] = {}
        self._freed: list[tuple[torch.UntypedStorage, int]] = []
        self.embedding = self._new("model.embed_tokens.weight", config.vocab_size, config.hidden_size)
        self.layers = [self._new_layer(i) for i in range(config.num_layers)]
        self.norm = self._new("model.norm.weight", config.hidden_size)
        self.head = (
            self.embedding if config.tied else self._new("lm_head.weight", config.vocab_size, config.hidden_size)
        )
        angles = torch.outer(torch.arange(context_length).float(), inverse_frequencies(config.rope, config.head_dim))
        cos, sin = fixed_order.cos_and_sin(angles) if is_exact else (angles.cos(), angles.sin())
        self.cos, self.sin = (table.to(device=device, dtype=dtype)[:, None] for table in (cos, sin))
        # Row of `qk_norm` for each query and key head; all of them are normalized in one operation.
        self._norm_of_head = torch.tensor([0] * config.num_heads + [1] * config.num_kv_heads, device=device)

    def _new(self, name: str, *shape: int) -> Tensor:
        return self._new_fused([(name, shape[0])], *shape[1:])

    def _new_fused(self, parts: list[tuple[str, int]], *rest: int) -> Tensor:
        """Allocate one tensor for one fused matrix product, and register its parts under their HF names.

        parts: (HF name, number of rows) of each part. rest: the sizes of the tensor's other dimensions.
        """
        whole = torch.empty(sum(rows for _, rows in parts), *rest, dtype=self.dtype, device=self.device)
        views = whole.split([rows for _, rows in parts])
        self.parameters.update((name, view) for (name, _), view in zip(parts, views, strict=True))
        return whole

    def _new_layer(self, number: int) -> Layer:
        prefix = f"model.layers.{number}."
        c, hidden = self.config, self.config.hidden_size
        q_size, kv_size = c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim
        qkv = [(f"{prefix}self_attn.{n}_proj", size) for n, size in (("q", q_size), ("k", kv_size), ("v", kv_size))]
        gate_up = [(f"{prefix}mlp.{n}_proj", c.intermediate_size) for n in ("gate", "up")]

        def weight(parts: list[tuple[str, int]], columns: int) -> Tensor:
            return self._new_fused([(f"{name}.weight", rows) for name, rows in parts], columns)

        def bias(wanted: bool, parts: list[tuple[str, int]]) -> Tensor | None:
            return self._new_fused([(f"{name}.bias", rows) for name, rows in parts]) if wanted else None

        qk_norm = None
        if c.qk_norm:
            qk_norm = torch.empty(2, c.head_dim, dtype=self.dtype, device=self.device)
            for i, name in enumerate("qk"):
                self.parameters[f"{prefix}self_attn.{name}_norm.weight"] = qk_norm[i]
        o, down = [(f"{prefix}self_attn.o_proj", hidden)], [(f"{prefix}mlp.down_proj", hidden)]
        if c.experts is not None and number in c.experts.layers:
            feed_forward = self._new_mixture(f"{prefix}mlp.", c.experts)
        else:
            feed_forward = dict(
                gate_up=weight(gate_up, hidden),
                gate_up_bias=bias(c.mlp_bias, gate_up),
                down=weight(down, c.intermediate_size),
                down_bias=bias(c.mlp_bias, down),
            )
        return Layer(
            input_norm=self._new(f"{prefix}input_layernorm.weight", hidden),
            qkv=weight(qkv, hidden),
            qkv_bias=bias(c.qkv_bias, qkv),
            qk_norm=qk_norm,
            o=weight(o, q_size),
            o_bias=bias(c.o_bias, o),
            post_norm=self._new(f"{prefix}post_attention_layernorm.weight", hidden),
            **feed_forward,
        )

    def _new_mixture(self, prefix: str, experts: Experts) -> dict[str, Any]:
        hidden, size = self.config.hidden_size, experts.size
        gate_up = torch.empty(experts.count, 2 * size, hidden, dtype=self.dtype, device=self.device)
        down = torch.empty(experts.count, hidden, size, dtype=self.dtype, device=self.device)
        for expert in range(experts.count):
            parts = {"gate_proj": gate_up[expert, :size], "up_proj": gate_up[expert, size:], "down_proj": down[expert]}
            self.parameters |= {f"{prefix}experts.{expert}.{name}.weight": part for name, part in parts.items()}
        router = self._new(f"{prefix}gate.weight", experts.count, hidden)
        return dict(gate_up=gate_up, gate_up_bias=None, down=down, down_bias=None, router=router)

    # Weights

    def weight(self, name: str) -> Tensor | None:
        """Return a weight by its HF name, or None.

        The output layer of a tied model is its embedding. It can be read but not written: as in SGLang, `write` ignores
        it.
        """
        return self.embedding if self.config.tied and name == "lm_head.weight" else self.parameters.get(name)

    def check_tensor(self, name: str, shape: Sequence[int]) -> None:
        """Raise ValueError unless `name` is a tensor of this model with that shape."""
        own = self.weight(name)
        if own is None:
            raise ValueError(f"{name}: the {self.config.model_type} model has no such tensor; send Hugging Face names")
        if list(own.shape) != list(shape):
            raise ValueError(f"{name}: shape {list(shape)} must be {list(own.shape)}; send the whole tensor")

    def memory_of(self, name: str, dtype: torch.dtype) -> Tensor | None:
        """Return a weight's memory, so that a whole tensor of this dtype can be received into it directly.

        None if the weight has another dtype or is not contiguous; `write` must then convert. Drops the cached checksum.
        """
        own = self.parameters.get(name)
        if own is None or own.dtype != dtype or not own.is_contiguous():
            return None
        self.mark_changed(name)
        return own

    def write(self, name: str, tensor: Tensor) -> None:
        """Copy a tensor into the weight of this name, and compute the weight's checksum.

        A tensor that is the weight itself (see `memory_of`) is not copied. The checksum is cheapest now, while the data
        is in the CPU cache. A tied head is ignored.
        """
        own = self.parameters.get(name)
        if own is not None:
            self.mark_changed(name)
            if own is not tensor:
                own.copy_(tensor)
            self._checksums[name] = checksum(own)

    def part(self, name: str, start: int, count: int) -> Tensor:
        """Return elements [start, start + count) of a weight, flattened, as a view that can be changed in place.

        ValueError if the weight does not exist or is smaller.
        """
        own = self.weight(name)
        if own is None or start + count > own.numel():
            size = "no such tensor" if own is None else f"{own.numel()} numbers"
            raise ValueError(f"{name}: numbers {start} to {start + count} were sent; the model has {size}")
        return own.view(-1)[start : start + count]

    def mark_changed(self, name: str) -> None:
        """Count a change of a weight, and drop its cached checksum."""
        self.changes += 1
        self._checksums.pop(name, None)

    def load(self, folder: Path) -> None:
        """Read all weights of an HF folder. ValueError, before the first write, if names or shapes differ.

        A multi-token-prediction layer is skipped, as in transformers.
        """
        owner = {}
        for own, prefix in self._folders(folder):
            for path in sorted(own.glob("*.safetensors")):
                try:
                    handle = safe_open(path, framework="pt")
                except SafetensorError as error:
                    raise ValueError(f"{path}: not a whole safetensors file ({error}); write it again") from None
                layers = {"num_hidden_layers": self.config.num_layers}
                names = (name for name in handle.keys() if not name.endswith("rotary_emb.inv_freq"))
                names = (name for name in names if not is_of_mtp_layer(name, layers))
                owner |= {prefix + name: (handle, name) for name in names}
        if not owner:
            raise ValueError(f"model {folder}: no *.safetensors there")
        for name, (handle, there) in owner.items():
            self.check_tensor(name, handle.get_slice(there).get_shape())
        missing = sorted(self.parameters.keys() - owner.keys())
        if missing:
            raise ValueError(f"model {folder}: {len(missing)} tensors are missing, the first is {missing[0]}")
        for name, (handle, there) in owner.items():
            self.write(name, handle.get_tensor(there))

    def _folders(self, folder: Path) -> list[tuple[Path, str]]:
        """Return (folder, prefix) for each folder with weight files. The prefix is put before its tensor names."""
        return [(folder, "")]

    def draw(self) -> None:
        """Fill all weights with small random values (norms with 1), until the trainer sends the real ones."""
        self._checksums.clear()
        for name, weight in self.parameters.items():
            weight.fill_(1.0) if name.endswith("norm.weight") else weight.normal_(std=0.02)

    def free(self) -> None:
        """Free the memory of the weights. Nothing may read or write weights until `allocate` is called."""
        # Free storages, not tensors: all names and fused matrices are views, which `allocate` makes valid again.
        storages = {storage.data_ptr(): storage for storage in (p.untyped_storage() for p in self.parameters.values())}
        self._freed = [(storage, storage.nbytes()) for storage in storages.values()]
        self._checksums.clear()
        for storage, _ in self._freed:
            storage.resize_(0)

    def allocate(self) -> None:
        """Allocate the memory of the weights again after `free`. Their values are undefined."""
        for storage, size in self._freed:
            storage.resize_(size)
        self._freed = []

    def checksums(self) -> dict[str, str]:
        """Return, by HF name, checksums of the bytes that the forward pass reads. Cached until a tensor changes."""
        missing = self.parameters.keys() - self._checksums.keys()
        # Threads help, because torch releases the GIL while it sums.
        with ThreadPoolExecutor(max_workers=4) as pool:
            fresh = pool.map(lambda name: checksum(self.parameters[name]), missing)
            self._checksums |= zip(missing, fresh, strict=True)
        return {name: self._checksums[name] for name in self.parameters}

    # Forward

    def logits(self, hidden: Tensor) -> Tensor:
        """Return float32 logits `[T, V]` of hidden states `[T, H]`."""
        return self._linear(hidden, self.head).float()

    def prefill(self, tokens: Tensor, spans: Sequence[Span], cache: KVCache) -> Tensor:
        """Run the packed tokens `[T]` of several rows and write their keys and values. Return hidden states `[T, H]`.

        Each row must already hold positions [0, span.start).
        """
        positions, rows, attend = self._span_attention(spans, cache)
        return self._forward(tokens, positions, attend, cache, rows)

    def _span_attention(self, spans: Sequence[Span], cache: KVCache) -> tuple[Tensor, Tensor, Attend]:
        """Return the packed tokens' positions and rows, both `[T]`, and the function that computes their attention."""
        positions = torch.cat([torch.arange(s.start, s.start + s.count, device=self.device) for s in spans])
        rows = torch.repeat_interleave(
            torch.tensor([s.row for s in spans], device=self.device),
            torch.tensor([s.count for s in spans], device=self.device),
        )
        fresh, continued = ([], []) if self.is_exact else _plan_prefill(spans, self.device)
        scale = self.config.head_dim**-0.5

        def attend(i: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            # With a slice between two index tensors torch puts the indexed dim first: this is [T, kv_heads, head_dim].
            cache.keys[i][rows, :, positions] = k
            cache.values[i][rows, :, positions] = v
            if self.is_exact:
                return self._attend_exactly(i, q, spans, cache)
            out = torch.empty_like(q)
            for index, valid in fresh:
                # Padding is on the right, where causal attention never looks.
                padded = (x[index].transpose(1, 2) for x in (q, k, v))
                result = F.scaled_dot_product_attention(*padded, is_causal=True, scale=scale, enable_gqa=True)
                out[index[valid]] = result.transpose(1, 2)[valid]
            for row, part, mask in continued:
                keys, values = (layers[i][row][None, :, : mask.shape[1]] for layers in (cache.keys, cache.values))
                queries = q[part].transpose(0, 1)[None]
                result = F.scaled_dot_product_attention(queries, keys, values, mask, scale=scale, enable_gqa=True)
                out[part] = result[0].transpose(0, 1)
            return out

        return positions, rows, attend

    def decode(
        self, tokens: list[int], positions: list[int], rows: list[int], cache: KVCache, *, width: int = 1
    ) -> Tensor:
        """Run `width` tokens of each row and write their keys and values. Return hidden states `[B * width, H]`.

        tokens: `B * width` ids, row by row. positions: the position of each row's first token here. rows: numbers of
        the cache's rows, in ascending order.
        """
        at, row, attend = self._row_attention(positions, rows, cache, width)
        return self._forward(torch.tensor(tokens, device=self.device), at, attend, cache, row)

    def _row_attention(
        self, positions: list[int], rows: list[int], cache: KVCache, width: int
    ) -> tuple[Tensor, Tensor, Attend]:
        """Return the tokens' positions and rows, both `[B * width]`, and the function that computes their attention."""
        low, high, longest = rows[0], rows[-1] + 1, max(positions) + width
        gapless = high - low == len(rows)
        steps = torch.arange(width, device=self.device)
        first, own = torch.tensor(positions, device=self.device), torch.tensor(rows, device=self.device) - low
        at = (first[:, None] + steps).flatten()
        row = (own + low).repeat_interleave(width)
        # Idle rows between `low` and `high` are computed and discarded, which is cheaper than gathering the cache. They
        # attend to one position, because a softmax over none is NaN.
        lengths = torch.ones(high - low, width, dtype=torch.int64, device=self.device)
        lengths[own] = at.view(-1, width) + 1
        allowed = torch.arange(longest, device=self.device) < lengths[..., None]
        mask = torch.zeros(allowed.shape, dtype=self.dtype, device=self.device).masked_fill_(~allowed, -math.inf)
        kv_heads, head_dim = cache.shape
        sharing = self.config.num_heads // kv_heads
        mask = (mask if width == 1 else mask.repeat_interleave(sharing, 1))[:, None]
        scale = head_dim**-0.5

        def attend(i: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            cache.keys[i][row, :, at] = k
            cache.values[i][row, :, at] = v
            if self.is_exact:
                spans = [Span(number, position, 1) for number, position in zip(rows, positions, strict=True)]
                return self._attend_exactly(i, q, spans, cache)
            keys, values = cache.keys[i][low:high, :, :longest], cache.values[i][low:high, :, :longest]
            q = q.reshape(len(rows), width, kv_heads, sharing, head_dim)
            if not gapless:
                q = torch.zeros(high - low, *q.shape[1:], dtype=q.dtype, device=q.device).index_copy_(0, own, q)
            # The query heads that share a key head take the sequence dim, so keys and values need not be repeated.
            q = q.transpose(1, 2).reshape(high - low, kv_heads, -1, head_dim)
            if self.dtype == torch.float32:
                scores = torch.matmul(q * scale, keys.transpose(2, 3)).add_(mask)
                out = torch.matmul(torch.softmax(scores, -1), values)
            else:
                out = F.scaled_dot_product_attention(q, keys, values, attn_mask=mask, scale=scale)
            out = out.view(high - low, kv_heads, width, sharing, head_dim).transpose(1, 2)
            return (out if gapless else out[own]).reshape(len(rows) * width, -1, head_dim)

        return at, row, attend

    def _attend_exactly(self, layer: int, queries: Tensor, spans: Sequence[Span], cache: KVCache) -> Tensor:
        """Return the attention result `[T, heads, D]` of packed queries over the keys in the cache."""
        parts = []
        for span, own in zip(spans, queries.split([span.count for span in spans]), strict=True):
            stop = span.start + span.count
            keys, values = (kept[layer][span.row].transpose(0, 1)[:stop] for kept in (cache.keys, cache.values))
            bounds = (torch.tensor([0, count]) for count in (span.count, stop))
            parts.append(fixed_order.attention(own, keys, values, *bounds, self.config.head_dim**-0.5))
        return torch.cat(parts)

    def _norm(self, x: Tensor, weight: Tensor) -> Tensor:
        shape, eps = (self.config.hidden_size,), self.config.rms_norm_eps
        if self.is_exact:  # two operations, as in the trainer
            return F.rms_norm(x, shape, None, eps) * weight
        return F.rms_norm(x, shape, weight, eps)

    def _forward(self, tokens: Tensor, positions: Tensor, attend: Attend, cache: KVCache, rows: Tensor) -> Tensor:
        """Run all layers and return the hidden states `[T, H]`. Write the routes to the cache at [rows, positions]."""
        hidden = self.embedding[tokens]
        self.watch(0, "embedding", hidden)
        rotation = self.cos[positions], self.sin[positions]
        for i, layer in enumerate(self.layers):
            hidden, slots = self._layer(i, layer, hidden, rotation, attend)
            if slots is not None:
                cache.routes[rows, positions, i] = slots
        return self._norm(hidden, self.norm)

    def _layer(
        self, i: int, layer: Layer, hidden: Tensor, rotation: tuple[Tensor, Tensor], attend: Attend
    ) -> tuple[Tensor, Tensor | None]:
        """Run layer `i`. Return the hidden states `[T, H]` after it, and the routes `[T, slots]` of a mixture."""
        c, see, slots = self.config, self.watch, None
        cos, sin = rotation
        rotated = c.num_heads + c.num_kv_heads
        x = self._norm(hidden, layer.input_norm)
        see(i, "first norm", x)
        qkv = self._linear(x, layer.qkv, layer.qkv_bias).view(len(hidden), -1, c.head_dim)
        qk, v = qkv[:, :rotated], qkv[:, rotated:]
        if layer.qk_norm is not None:
            qk = F.rms_norm(qk, (c.head_dim,), None, c.rms_norm_eps) * layer.qk_norm[self._norm_of_head]
        # Hugging Face's rotary layout pairs an element with the one half a head further, not with its neighbour.
        first, second = qk.chunk(2, -1)
        qk = torch.cat((first * cos - second * sin, second * cos + first * sin), -1)
        out = attend(i, qk[:, : c.num_heads], qk[:, c.num_heads :], v)
        out = self._linear(out.reshape(len(hidden), -1), layer.o, layer.o_bias)
        see(i, "attention", out)
        hidden = hidden + out
        x = self._norm(hidden, layer.post_norm)
        see(i, "second norm", x)
        if layer.router is not None:
            out, slots = _mixture(x, layer, c.experts)
        else:
            gate, up = self._linear(x, layer.gate_up, layer.gate_up_bias).chunk(2, -1)
            out = self._linear(self._silu(gate) * up, layer.down, layer.down_bias)
        see(i, "feed-forward", out)
        return hidden + out, slots


def _mixture(x: Tensor, layer: Layer, experts: Experts) -> tuple[Tensor, Tensor]:
    """Return the weighted sum `[T, H]` of the chosen experts' outputs for `x` `[T, H]`, and the routes `[T, slots]`."""
    weights, chosen = linear(x, layer.router).float().softmax(-1).topk(experts.per_token)
    if experts.renormalised:
        weights /= weights.sum(-1, keepdim=True)
    out = torch.zeros_like(x)
    for expert in chosen.unique().tolist():
        rows, slots = (chosen == expert).nonzero(as_tuple=True)
        gate, up = linear(x[rows], layer.gate_up[expert]).chunk(2, -1)
        made = linear(F.silu(gate) * up, layer.down[expert])
        out.index_add_(0, rows, made * weights[rows, slots, None].to(x.dtype))
    return out, routes.pack(chosen, weights)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    # For float32, F.linear calls MKL's sgemm. oneDNN's is 2 to 3 times faster on AMD and for few rows.
    if weight.device.type == "cpu" and weight.dtype == torch.float32 and torch.backends.mkldnn.is_available():
        return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
    return F.linear(x, weight, bias)


def _plan_prefill(
    spans: Sequence[Span], device: torch.device
) -> tuple[list[tuple[Tensor, Tensor]], list[tuple[int, slice, Tensor]]]:
    """Plan the attention of packed tokens. Return one list for spans that begin a row, and one for the others.

    1. The spans that start at position 0 are grouped by similar length. Each group of n spans has one entry: the packed
       index of each token, `[n, longest]`, and a bool mask `[n, longest]` that is False for padding.
    2. Each span that continues a row has one entry: its row, its slice of the packed tokens, and its attention mask
       `[count, start + count]` bool.
    """
    # Longest first: each group's first span is its longest, and padding wastes at most 1 - PADDED_SHARE of it.
    begins = [0]
    for span in spans:
        begins.append(begins[-1] + span.count)
    groups: list[list[tuple[int, int]]] = []
    continued = []
    for begin, span in sorted(zip(begins, spans, strict=False), key=lambda item: -item[1].count):
        if span.start == 0:
            if not groups or span.count < PADDED_SHARE * groups[-1][0][1]:
                groups.append([])
            groups[-1].append((begin, span.count))
        else:
            keys = torch.arange(span.start + span.count, device=device)
            continued.append((span.row, slice(begin, begin + span.count), keys <= keys[span.start :, None]))
    fresh = []
    for group in groups:
        steps = torch.arange(group[0][1], device=device)
        begin, count = torch.tensor(group, device=device).T[:, :, None]
        # Padding repeats a span's last token; the result is not read.
        fresh.append((begin + torch.minimum(steps, count - 1), steps < count))
    return fresh, continued
