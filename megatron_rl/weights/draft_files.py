"""A draft head's tensors: their names and shapes, and the folder in which they are saved.

The head has the form of MiMo's multi-token prediction layer, and SGLang loads it as one (`MiMoMTP`). It uses the
policy's embedding and output layer, which are not saved with it. The head is in the subfolder `draft` of the folder of
its model.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from torch import Tensor

from megatron_rl.api import DRAFT_FOLDER, DRAFT_PREFIX
from megatron_rl.weights.decoder import Architecture
from megatron_rl.weights.families import FAMILIES
from megatron_rl.weights.hf_files import HFFolder, write_tensors

FOLDER, PREFIX = DRAFT_FOLDER, DRAFT_PREFIX
LAYER = "model.mtp_layers.0."
SGLANG_CLASS = "MiMoMTP"
SGLANG_OWN = ("token_layernorm", "hidden_layernorm", "input_proj", "final_layernorm")
"""Modules of the head that SGLang keeps outside its transformer layer."""
SERVED = ("llama", "mistral", "qwen2", "qwen3", "qwen3_moe")
"""Model families for which servers are known to accept a draft head."""


def shapes_for(arch: Architecture) -> dict[str, tuple[int, ...]]:
    """Return {name: shape} of the tensors of a policy's draft head. Its layer is as wide as the policy's layers."""
    hidden, ffn = arch.hidden, arch.ffn
    queries, keys = arch.heads * arch.head_dim, arch.kv_heads * arch.head_dim
    shapes = {
        "hidden_layernorm.weight": (hidden,),
        "token_layernorm.weight": (hidden,),
        "input_proj.weight": (hidden, 2 * hidden),  # first columns: the state; last: the next token's embedding
        "input_layernorm.weight": (hidden,),
        "self_attn.q_proj.weight": (queries, hidden),
        "self_attn.q_proj.bias": (queries,),
        "self_attn.k_proj.weight": (keys, hidden),
        "self_attn.k_proj.bias": (keys,),
        "self_attn.v_proj.weight": (keys, hidden),
        "self_attn.v_proj.bias": (keys,),
        "self_attn.o_proj.weight": (hidden, queries),
        "post_attention_layernorm.weight": (hidden,),
        "mlp.gate_proj.weight": (ffn, hidden),
        "mlp.up_proj.weight": (ffn, hidden),
        "mlp.down_proj.weight": (hidden, ffn),
        "final_layernorm.weight": (hidden,),
    }
    return {f"{LAYER}{name}": shape for name, shape in shapes.items()}


def check_draft(arch: Architecture, kind: str) -> None:
    """Raise ValueError if a model cannot have a draft head of this kind. kind: `eagle` or `mtp`."""
    reason, has_layer = "", [name for name, family in FAMILIES.items() if family.mtp is not None]
    if arch.head != "policy":
        reason = "a reward model generates no tokens, so none can be guessed"
    elif kind == "eagle" and arch.family not in SERVED:
        reason = f"servers take a draft head next to models of {', '.join(SERVED)}, not {arch.family}"
    elif kind == "mtp" and arch.family not in has_layer:
        reason = f"{arch.family} has no multi-token-prediction layer, and {', '.join(has_layer)} have"
    if reason:
        raise ValueError(f"draft.kind = {kind!r}: {reason}; set draft.kind=none.")


def has_draft(folder: str | Path) -> bool:
    """Return True if a model's folder has a draft head."""
    return any((Path(folder) / FOLDER).glob("*.safetensors"))


def read_draft(folder: str | Path, arch: Architecture) -> dict[str, Tensor]:
    """Return {name: tensor} of the draft head in a model's folder.

    Raises ValueError if the head lacks a tensor that `arch` needs, or has it in another shape.
    """
    shapes = shapes_for(arch)
    source = HFFolder(Path(folder) / FOLDER, shapes)
    return {name: source.whole(name) for name in shapes}


def write_draft(folder: str | Path, tensors: Mapping[str, Tensor], arch: Architecture) -> None:
    """Write a draft head, tensors and config.json, into the folder of its model.

    Raises OSError if a file cannot be written.
    """
    write_draft_tensors(folder, tensors)
    write_draft_config(folder, arch, str(next(iter(tensors.values())).dtype).removeprefix("torch."))


def write_draft_tensors(folder: str | Path, tensors: Mapping[str, Tensor]) -> None:
    """Write the tensors of a draft head without its config.json, which servers already have."""
    target = Path(folder) / FOLDER
    target.mkdir(parents=True, exist_ok=True)
    write_tensors(target, ((name, tensor.detach().cpu().contiguous()) for name, tensor in tensors.items()))


def write_draft_config(folder: str | Path, arch: Architecture, dtype: str) -> Path:
    """Write a draft head's config.json without its tensors, which servers get from the trainer.

    Return the head's folder.
    """
    target = Path(folder) / FOLDER
    target.mkdir(parents=True, exist_ok=True)
    config = {
        "architectures": [SGLANG_CLASS],
        "model_type": "qwen2",
        "num_hidden_layers": 1,
        "hidden_size": arch.hidden,
        "intermediate_size": arch.ffn,
        "num_attention_heads": arch.heads,
        "num_key_value_heads": arch.kv_heads,
        "head_dim": arch.head_dim,
        "vocab_size": arch.vocab,
        "max_position_embeddings": arch.max_positions,
        "rms_norm_eps": arch.norm_eps,
        "rope_theta": arch.rope_theta,
        "rope_scaling": arch.rope_scaling,
        "tie_word_embeddings": arch.tied,
        "hidden_act": "silu",
        "torch_dtype": dtype,
    }
    (target / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    return target


def name_in_sglang(name: str) -> str:
    """Return the name that SGLang gives to a tensor of a draft head before it fuses q, k and v.

    name: the tensor's name here, with or without PREFIX. A name of another tensor is returned unchanged.
    """
    before, found, rest = name.partition(LAYER)
    if not found or before not in ("", PREFIX):
        return name
    return f"{before}model.{'' if rest.split('.')[0] in SGLANG_OWN else 'mtp_block.'}{rest}"
