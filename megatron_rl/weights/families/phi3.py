"""Phi-3 and Phi-4: Llama, but HF files store Q, K and V as one tensor, and gate and up as one tensor."""

from __future__ import annotations

from megatron_rl.weights.decoder import Architecture
from megatron_rl.weights.family import Family, rotary_share, windows_everywhere
from megatron_rl.weights.tensor_rules import ATTENTION, NORMS, Columns, HeadGroups, OneGateUp, Part, Rule


def joined(arch: Architecture) -> tuple[int, list[Part]]:
    """Return the number of KV groups, and the parts of each group in one HF tensor [all queries; all keys; all values].

    For use as `HeadGroups.parts`.
    """
    groups, width = arch.kv_heads, arch.head_dim
    queries = arch.heads // groups * width
    starts = groups * queries, groups * (queries + width)
    return groups, [Part(0, 0, queries, queries), *(Part(0, start, width, width) for start in starts)]


JOINED_ATTENTION = (
    Rule(
        "self_attention.linear_qkv.weight", {"self_attn.qkv_proj.weight": "query_key_value hidden"}, HeadGroups(joined)
    ),
    ATTENTION[1],
)
JOINED_DENSE = (
    Rule("mlp.linear_fc1.weight", {"mlp.gate_up_proj.weight": "gate_up hidden"}, OneGateUp()),
    Rule("mlp.linear_fc2.weight", {"mlp.down_proj.weight": "hidden ffn"}, Columns()),
)
FAMILY = Family(
    name="phi3",
    classes=("Phi3ForCausalLM",),
    attention=(*NORMS, *JOINED_ATTENTION),
    dense=JOINED_DENSE,
    read=lambda config: {"windows": windows_everywhere(config), "rotary_share": rotary_share(config, 1.0)},
)
