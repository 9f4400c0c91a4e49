"""A decoder with a draft head, which guesses tokens from the decoder's hidden states.

The head is one layer in the form of EAGLE (arXiv 2401.15077). The trainer trains it (engine/draft_head.py) and
publishes its tensors under names that begin with `draft.`. Embedding and output layer are the decoder's.
"""

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from megatron_rl.tools.embedded_server.decoder_config import DecoderConfig
from megatron_rl.tools.embedded_server.transformer import Attend, Decoder, KVCache, Layer, Span, linear
from megatron_rl.weights.draft_files import FOLDER, LAYER, PREFIX


class DraftingDecoder(Decoder):
    """A Decoder with a draft head. Its cache must have been made with `has_draft`.

    For example:

        hidden = decoder.prefill(torch.tensor([5, 6]), [Span(row=0, start=0, count=2)], cache, torch.tensor([6, 7]))
        states = decoder.draft([7], hidden[-1:], positions=[1], rows=[0], cache=cache)  # position 1 is followed by 7
        decoder.logits(states).argmax(-1)  # a guess of the token after 7
    """

    def __init__(self, config: DecoderConfig, *, dtype: torch.dtype, device: torch.device, context_length: int):
        super().__init__(config, dtype=dtype, device=device, context_length=context_length)
        hidden, layer = config.hidden_size, f"{PREFIX}{LAYER}"
        q_size, kv_size = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        ffn = config.intermediate_size

        def fused(columns: int, **rows: int) -> Tensor:
            kind = "self_attn" if "q" in rows or "o" in rows else "mlp"
            return self._new_fused([(f"{layer}{kind}.{n}_proj.weight", count) for n, count in rows.items()], columns)

        self.fc = self._new(f"{PREFIX}fc.weight", hidden, 2 * hidden)
        self.fc_bias = self._new(f"{PREFIX}fc.bias", hidden)
        self.draft_layer = Layer(
            input_norm=None,
            qkv=fused(hidden, q=q_size, k=kv_size, v=kv_size),
            qkv_bias=None,
            qk_norm=None,
            o=fused(q_size, o=hidden),
            o_bias=None,
            post_norm=self._new(f"{layer}post_attention_layernorm.weight", hidden),
            gate_up=fused(hidden, gate=ffn, up=ffn),
            gate_up_bias=None,
            down=fused(ffn, down=hidden),
            down_bias=None,
        )

    def _folders(self, folder: Path) -> list[tuple[Path, str]]:
        # A published folder has the head's tensors in the model's own files.
        return [(folder, ""), (folder / FOLDER, PREFIX)]

    def prefill(self, tokens: Tensor, spans: Sequence[Span], cache: KVCache, following: Tensor | None = None) -> Tensor:
        """Do what Decoder.prefill does, and write the head's keys and values. following: the token after each token."""
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
        """Run the draft head on `width` positions of each row. Return its states `[B * width, H]`, for `logits`.

        following: the tokens after these positions. states: `[B * width, H]`, the model's at these positions, or the
        head's own guess of them. Other arguments as in `decode`.
        """
        at, _, attend = self._row_attention(positions, rows, cache, width)
        return self._draft(torch.tensor(following, device=self.device), states, at, attend)

    def draft_spans(self, following: Tensor, spans: Sequence[Span], cache: KVCache) -> None:
        """Write the draft head's keys and values of positions that only the model has read, from the cache's states.

        following: the tokens after these positions, packed.
        """
        positions, rows, attend = self._span_attention(spans, cache)
        self._draft(following, cache.states[rows, positions], positions, attend)

    def _draft(self, following: Tensor, states: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        x = linear(torch.cat([self.embedding[following], states], -1), self.fc, self.fc_bias)
        return self._layer(len(self.layers), self.draft_layer, x, (self.cos[positions], self.sin[positions]), attend)[0]
