from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

gguf = pytest.importorskip("gguf", reason="gguf is not installed (the extra megatron-rl[tasks] brings it)")

from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM  # noqa: E402

from megatron_rl.tools.gguf_files import convert_gguf, find_smollm2, halves_from_pairs  # noqa: E402

TOKENS = ["<|end|>", "<|start|>", "a", "b", "c", "1", "2", "Ġ", "Ċ", "ab", "Ġc"]
MERGES = ["a b", "Ġ c"]
TEMPLATE = "{% for m in messages %}<|start|>{{ m['content'] }}<|end|>{% endfor %}"


def interleave(weight: np.ndarray, heads: int) -> np.ndarray:
    """What llama.cpp's converter does to q and k (`LlamaModel.permute` in convert_hf_to_gguf)."""
    out, width = weight.shape
    return weight.reshape(heads, 2, out // heads // 2, width).swapaxes(1, 2).reshape(out, width)


def tiny_llama(tied: bool = False) -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=len(TOKENS),
        max_position_embeddings=64,
        rms_norm_eps=1e-5,
        tie_word_embeddings=tied,
        initializer_range=0.3,  # large enough that a wrong row order changes the logits visibly
    )
    return LlamaForCausalLM(config).eval()


def write_gguf(path: Path, model: LlamaForCausalLM, *, architecture: str = "llama", split: str = "smollm") -> None:
    config, tensors = model.config, {k: v.detach().numpy() for k, v in model.state_dict().items()}
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(10_000.0)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(split)
    writer.add_token_list(TOKENS)
    writer.add_token_types([3, 3] + [1] * (len(TOKENS) - 2))
    writer.add_token_merges(MERGES)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(0)
    writer.add_chat_template(TEMPLATE)
    writer.add_tensor("token_embd.weight", tensors["model.embed_tokens.weight"])
    writer.add_tensor("output_norm.weight", tensors["model.norm.weight"])
    if not config.tie_word_embeddings:
        writer.add_tensor("output.weight", tensors["lm_head.weight"])
    for layer in range(config.num_hidden_layers):
        part = {k.removeprefix(f"model.layers.{layer}."): v for k, v in tensors.items() if f"layers.{layer}." in k}
        writer.add_tensor(f"blk.{layer}.attn_q.weight", interleave(part["self_attn.q_proj.weight"], 4))
        writer.add_tensor(f"blk.{layer}.attn_k.weight", interleave(part["self_attn.k_proj.weight"], 2))
        for ours, theirs in (
            ("attn_v", "self_attn.v_proj"),
            ("attn_output", "self_attn.o_proj"),
            ("attn_norm", "input_layernorm"),
            ("ffn_norm", "post_attention_layernorm"),
            ("ffn_gate", "mlp.gate_proj"),
            ("ffn_up", "mlp.up_proj"),
            ("ffn_down", "mlp.down_proj"),
        ):
            writer.add_tensor(f"blk.{layer}.{ours}.weight", part[f"{theirs}.weight"])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.mark.parametrize("tied", [False, True])
def test_converted_model_computes_the_same_logits(tmp_path, tied):
    model = tiny_llama(tied)
    write_gguf(tmp_path / "tiny.gguf", model)
    folder = convert_gguf(tmp_path / "tiny.gguf", tmp_path / "hf", dtype=torch.float32)
    converted = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    ids = torch.tensor([[1, 2, 9, 5, 6, 10, 3, 0]])
    with torch.no_grad():
        torch.testing.assert_close(converted(ids).logits, model(ids).logits, atol=1e-5, rtol=0)
    assert converted.config.tie_word_embeddings == tied
    assert converted.config.rms_norm_eps == 1e-5


def test_rows_of_one_head_are_put_back_in_halves():
    pairs = np.array([[0], [10], [1], [11], [2], [12]])  # one head of 6 rows: a0 b0 a1 b1 a2 b2
    assert halves_from_pairs(pairs, heads=1).ravel().tolist() == [0, 1, 2, 10, 11, 12]


def test_tokenizer_and_chat_template_survive(tmp_path):
    write_gguf(tmp_path / "tiny.gguf", tiny_llama())
    tokenizer = AutoTokenizer.from_pretrained(convert_gguf(tmp_path / "tiny.gguf", tmp_path / "hf"))
    assert tokenizer.encode("ab c12\n") == [9, 10, 5, 6, 8]  # merges applied, digits apart, byte-level newline
    assert tokenizer.decode([9, 10, 5, 6, 8]) == "ab c12\n"
    assert tokenizer.decode([1, 2, 0], skip_special_tokens=True) == "a"
    assert (tokenizer.eos_token_id, tokenizer.bos_token_id, tokenizer.pad_token_id) == (0, 1, 0)
    rendered = tokenizer.apply_chat_template([{"role": "user", "content": "ab"}], tokenize=False)
    assert rendered == "<|start|>ab<|end|>"


def test_finished_conversion_is_left_alone(tmp_path):
    write_gguf(tmp_path / "tiny.gguf", tiny_llama())
    folder = convert_gguf(tmp_path / "tiny.gguf", tmp_path / "hf")
    before = (folder / "model.safetensors").stat().st_mtime_ns
    assert convert_gguf(tmp_path / "tiny.gguf", tmp_path / "hf") == folder
    assert (folder / "model.safetensors").stat().st_mtime_ns == before


def test_target_that_is_something_else_is_refused(tmp_path):
    write_gguf(tmp_path / "tiny.gguf", tiny_llama())
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("precious")
    with pytest.raises(ValueError, match="not a finished conversion.*remove it or name another folder"):
        convert_gguf(tmp_path / "tiny.gguf", tmp_path / "mine")
    folder = convert_gguf(tmp_path / "tiny.gguf", tmp_path / "hf")
    config = json.loads((folder / "config.json").read_text())
    config["converted_from"]["file"] = "other.gguf"
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=r"converted from .*other\.gguf"):
        convert_gguf(tmp_path / "tiny.gguf", tmp_path / "hf")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"architecture": "gemma3"}, "general.architecture = 'gemma3'; supported: llama"),
        ({"split": "qwen2"}, "tokenizer.ggml.pre = 'qwen2': supported are"),
    ],
)
def test_what_cannot_be_converted_is_refused_and_leaves_nothing(tmp_path, options, message):
    write_gguf(tmp_path / "tiny.gguf", tiny_llama(), **options)
    with pytest.raises(ValueError, match=message):
        convert_gguf(tmp_path / "tiny.gguf", tmp_path / "hf")
    assert [p.name for p in tmp_path.iterdir()] == ["tiny.gguf"]


def test_file_that_is_not_gguf_is_refused(tmp_path):
    (tmp_path / "model.gguf").write_bytes(b"PK\x03\x04 something else")
    with pytest.raises(ValueError, match="does not begin with the bytes GGUF"):
        convert_gguf(tmp_path / "model.gguf", tmp_path / "hf")
    with pytest.raises(ValueError, match="no such file"):
        convert_gguf(tmp_path / "absent.gguf", tmp_path / "hf")


@pytest.mark.thorough
def test_smollm2_answers_in_a_sentence(tmp_path):
    try:
        source = find_smollm2()
    except RuntimeError as error:
        pytest.skip(str(error))
    folder = convert_gguf(source, tmp_path / "smollm2")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    question = [{"role": "user", "content": "What is the capital of France?"}]
    ids = tokenizer.apply_chat_template(question, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    reply = model.generate(**ids, max_new_tokens=12, do_sample=False)[0, ids["input_ids"].shape[1] :]
    assert tokenizer.decode(reply, skip_special_tokens=True) == "The capital of France is Paris."
