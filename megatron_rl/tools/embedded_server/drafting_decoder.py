"""A decoder with a draft head, which guesses tokens from the decoder's hidden states.

The head is one layer, built like a multi-token prediction layer. The idea is EAGLE's (arXiv 2401.15077). The trainer
trains the head (engine/draft_head.py) and publishes its tensors under names that begin with `draft.`. The head uses the
decoder's embedding and output layer.
"""

from collections.abc import Sequence
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_rl.tools.embedded_server.decoder_config import DecoderConfig
from megatron_rl.tools.embedded_server.sampling import RACING
from megatron_rl.tools.embedded_server.transformer import Attend, Decoder, KVCache, Layer, Span, linear
from megatron_rl.weights.draft_files import FOLDER, LAYER, PREFIX


class DraftingDecoder(Decoder):
    """A Decoder with a draft head. Its cache must have been made with `has_draft`.

    For example:

        hidden = decoder.prefill(torch.tensor([5, 6]), [Span(row=0, start=0, count=2)], cache, torch.tensor([6, 7]))
        states = decoder.draft([7], hidden[-1:], positions=[1], rows=[0], cache=cache)  # position 1 is followed by 7
        decoder.guessed_logits(states).argmax(-1)  # a guess of the token after 7
    """

    def __init__(self, config: DecoderConfig, *, dtype: torch.dtype, device: torch.device, context_length: int):
        super().__init__(config, dtype=dtype, device=device, context_length=context_length)
        hidden, prefix = config.hidden_size, f"{PREFIX}{LAYER}"
        q_size, kv_size = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        qkv = [(f"{prefix}self_attn.{n}_proj", size) for n, size in (("q", q_size), ("k", kv_size), ("v", kv_size))]
        gate_up = [(f"{prefix}mlp.{n}_proj.weight", config.intermediate_size) for n in ("gate", "up")]
        self.hidden_norm, self.token_norm, self.final_norm = (
            self._new(f"{prefix}{name}_layernorm.weight", hidden) for name in ("hidden", "token", "final")
        )
        self.input_proj = self._new(f"{prefix}input_proj.weight", hidden, 2 * hidden)
        self.draft_layer = Layer(
            input_norm=self._new(f"{prefix}input_layernorm.weight", hidden),
            qkv=self._new_fused([(f"{name}.weight", size) for name, size in qkv], hidden),
            qkv_bias=self._new_fused([(f"{name}.bias", size) for name, size in qkv]),
            qk_norm=None,
            o=self._new(f"{prefix}self_attn.o_proj.weight", hidden, q_size),
            o_bias=None,
            post_norm=self._new(f"{prefix}post_attention_layernorm.weight", hidden),
            gate_up=self._new_fused(gate_up, hidden),
            gate_up_bias=None,
            down=self._new(f"{prefix}mlp.down_proj.weight", hidden, config.intermediate_size),
            down_bias=None,
        )

    def _folders(self, folder: Path) -> list[tuple[Path, str]]:
        # A published folder has the head's tensors in the model's own files. Otherwise they are in their own folder.
        return [(folder, ""), (folder / FOLDER, PREFIX)]

    def prefill(self, tokens: Tensor, spans: Sequence[Span], cache: KVCache, following: Tensor | None = None) -> Tensor:
        """Do what Decoder.prefill does, and write the head's keys and values.

        following: `[T]`, for each of `tokens` the token that comes after it.
        """
        assert following is not None, "the head reads the next token, too"
        positions, rows, attend = self._span_attention(spans, cache)
        hidden = self._forward(tokens, positions, attend, cache, rows)
        self._draft(following, hidden, positions, attend)
        return hidden

    def _forward(self, tokens, positions, attend, cache, rows) -> Tensor:
        hidden = super()._forward(tokens, positions, attend, cache, rows)
        cache.states[rows, positions] = hidden
        return hidden

    def draft(
        self,
        following: list[int],
        states: Tensor,
        positions: list[int],
        rows: list[int],
        cache: KVCache,
        *,
        width: int = 1,
    ) -> Tensor:
        """Run the draft head on `width` positions of each row. Return its states `[B * width, H]`.

        `guessed_logits` turns the returned states into logits. following: the token after each of these positions, row
        by row. states: `[B * width, H]` hidden states at these positions, computed by the model or guessed by the head.
        The other arguments are those of `decode`.
        """
        at, _, attend = self._row_attention(positions, rows, cache, width)
        return self._draft(torch.tensor(following, device=self.device), states, at, attend)

    def guessed_logits(self, states: Tensor) -> Tensor:
        """Return float32 logits `[T, min(RACING, V)]` of the lowest token ids, from the head's states `[T, H]`.

        Higher ids are never guessed: the whole output layer would cost several times as much as the rest of the head.
        """
        return linear(states, self.head[:RACING]).float()

    def draft_spans(self, following: Tensor, spans: Sequence[Span], cache: KVCache) -> None:
        """Write the head's keys and values of positions that it has skipped, from the hidden states in the cache.

        following: `[T]`, the token that follows each position of the spans, span by span.
        """
        positions, rows, attend = self._span_attention(spans, cache)
        self._draft(following, cache.states[rows, positions], positions, attend)

    def _draft(self, following: Tensor, states: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        embedded = self.embedding[following].masked_fill((positions == 0)[:, None], 0.0)  # as in engine/draft_head.py
        x = torch.cat([self._norm(states, self.hidden_norm), self._norm(embedded, self.token_norm)], -1)
        rotation = self.cos[positions], self.sin[positions]
        x, _ = self._layer(len(self.layers), self.draft_layer, linear(x, self.input_proj), rotation, attend)
        return self._norm(x, self.final_norm)

    def _norm(self, x: Tensor, weight: Tensor) -> Tensor:
        return F.rms_norm(x, (self.config.hidden_size,), weight, self.config.rms_norm_eps)
