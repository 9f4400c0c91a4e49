"""Faults that are planted for the doctor, each as a user may meet it, and the words that name it rightly."""

from __future__ import annotations

import dataclasses
import json
import re
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from transformers import PreTrainedModel

from megatron_rl.config import GenerationConfig, ParallelConfig
from megatron_rl.engine.megatron_engine import MegatronEngine
from megatron_rl.engine.output_head import Head
from megatron_rl.tools.doctor import doctor, states, surroundings
from megatron_rl.tools.doctor.finding import Finding
from megatron_rl.tools.embedded_server import sampling, transformer
from megatron_rl.tools.embedded_server.decoder_config import DecoderConfig
from megatron_rl.tools.embedded_server.transformer import Decoder
from tests.kit.models import make_engine, make_model
from tests.kit.ranks import run_ranks
from tests.kit.runs import ROOT

IDS = [(7 * place * place + 3) % 90 for place in range(24)]
LAYERS = 2


@dataclass(frozen=True)
class Fault:
    """A planted fault. `find` returns what the doctor says of it; `words` must all be in that."""

    find: Callable[[Path], list[Finding]]
    words: tuple[str, ...]


FAULTS: dict[str, Fault] = {}


def in_server(name: str, family: str, *words: str, **changes: Any) -> Callable[..., Any]:
    """Plant a fault into the embedded server's model. changes: fields of its config that are wrong."""

    def register(plant: Callable[..., None]) -> Callable[..., None]:
        def find(folder: Path) -> list[Finding]:
            made(family, folder)
            reference = doctor.load_reference(folder)
            right = DecoderConfig.read(folder)
            decoder = Decoder(
                dataclasses.replace(right, **changes),
                dtype=torch.float32,
                device=torch.device("cpu"),
                context_length=64,
            )
            decoder.load(folder)
            held = {name: weight.clone() for name, weight in decoder.parameters.items()}
            expected = states.of_transformers(reference, IDS)
            with pytest.MonkeyPatch.context() as patch:
                plant(decoder, patch)
                found = list(doctor.compare_decoder(decoder, held, expected, IDS, config=right))
            return found

        FAULTS[name] = Fault(find, ("server", *words))
        return plant

    return register


def nothing(*_: Any) -> None:
    """The config alone is wrong."""


def made(family: str, folder: Path) -> PreTrainedModel:
    return make_model(family, folder, LAYERS)


in_server("rope with another base", "qwen3", "layer 0: attention", "base is 500000", rope={"rope_theta": 5e5})(nothing)
in_server(
    "rope without its scaling", "llama3_rope", "layer 0: attention", "scaling (llama3)", rope={"rope_theta": 1e4}
)(nothing)
in_server("eps of the norms", "llama", "layer 0: first norm", "eps is 0.01", rms_norm_eps=1e-2)(nothing)


def other_functions(patch: Any, **changed: Callable[..., Any]) -> None:
    """Change functions of torch for the server's model alone: the doctor uses the same module."""
    names = ("rms_norm", "silu", "linear", "scaled_dot_product_attention")
    patch.setattr(transformer, "F", SimpleNamespace(**{name: getattr(F, name) for name in names} | changed))


@in_server("gate and up in the wrong order", "llama", "layers.1.mlp.gate_proj.weight", "gate and up are swapped")
def _(decoder: Decoder, patch: Any) -> None:
    gate, up = (decoder.parameters[f"model.layers.1.mlp.{name}_proj.weight"] for name in ("gate", "up"))
    kept = gate.clone()
    gate.copy_(up)
    up.copy_(kept)


@in_server("tie of embedding and head lost", "llama_tied", "logits", "tie of head and embedding is lost")
def _(decoder: Decoder, patch: Any) -> None:
    decoder.head = decoder.embedding * 0.9


@in_server("one layer stale", "qwen3", "layer 1", "stale")
def _(decoder: Decoder, patch: Any) -> None:
    for name, weight in decoder.parameters.items():
        if name.startswith("model.layers.1."):
            weight.mul_(0.99)


@in_server("norms in bfloat16", "llama", "layer 0: first norm", "computed in bfloat16")
def _(decoder: Decoder, patch: Any) -> None:
    def norm(x: Any, size: Any, weight: Any, eps: float) -> Any:
        low = None if weight is None else weight.bfloat16()
        return F.rms_norm(x.bfloat16(), size, low, eps).float()

    other_functions(patch, rms_norm=norm)


@in_server("experts swapped", "qwen3_moe", "experts.1.", "experts 1 and 2 are swapped")
def _(decoder: Decoder, patch: Any) -> None:
    for name in ("gate_proj", "up_proj", "down_proj"):
        one, two = (decoder.parameters[f"model.layers.0.mlp.experts.{number}.{name}.weight"] for number in (1, 2))
        kept = one.clone()
        one.copy_(two)
        two.copy_(kept)


@in_server("weights of the chosen experts not rescaled", "qwen3_moe", "layer 0: feed-forward", "rescaled to sum to 1")
def _(decoder: Decoder, patch: Any) -> None:
    experts = dataclasses.replace(decoder.config.experts, renormalised=False)
    decoder.config = dataclasses.replace(decoder.config, experts=experts)


@in_server("one bad shard", "qwen3", "layers.1.self_attn.o_proj.weight", "rows 32 to 63 of 64: a bad shard")
def _(decoder: Decoder, patch: Any) -> None:
    decoder.parameters["model.layers.1.self_attn.o_proj.weight"][32:] = 0.0


@in_server("NaN in a weight", "qwen2", "layers.0.mlp.down_proj.weight", "NaN or infinite")
def _(decoder: Decoder, patch: Any) -> None:
    decoder.parameters["model.layers.0.mlp.down_proj.weight"][5, 5] = float("nan")


@in_server("norms of queries and keys left out", "qwen3", "layer 0: attention", "norms of queries and keys")
def _(decoder: Decoder, patch: Any) -> None:
    for layer in decoder.layers:
        layer.qk_norm = None


@in_server("biases of queries, keys and values left out", "qwen2", "layer 0: attention", "biases of queries")
def _(decoder: Decoder, patch: Any) -> None:
    for layer in decoder.layers:
        layer.qkv_bias = None


def other_attention(patch: Any, **changes: Any) -> None:
    attend = F.scaled_dot_product_attention
    other_functions(patch, scaled_dot_product_attention=lambda *args, **options: attend(*args, **options | changes))


@in_server("attention scores not scaled", "llama", "layer 0: attention", "not divided by the root")
def _(decoder: Decoder, patch: Any) -> None:
    other_attention(patch, scale=1.0)


@in_server("attention that is not causal", "llama", "layer 0: attention", "not causal")
def _(decoder: Decoder, patch: Any) -> None:
    other_attention(patch, is_causal=False)


@in_server("key heads in another order", "llama", "layer 0: attention", "key heads in another order")
def _(decoder: Decoder, patch: Any) -> None:
    attend = F.scaled_dot_product_attention

    def other(q: Any, k: Any, v: Any, *args: Any, enable_gqa: bool, **options: Any) -> Any:
        times = q.shape[1] // k.shape[1]
        return attend(q, k.repeat(1, times, 1, 1), v.repeat(1, times, 1, 1), *args, **options)

    other_functions(patch, scaled_dot_product_attention=other)


# -- in the trainer ----------------------------------------------------------------------------------------------------


def in_trainer(name: str, *words: str, family: str = "qwen3") -> Callable[..., Any]:
    """Plant a fault into the trainer's engine."""

    def register(plant: Callable[..., None]) -> Callable[..., None]:
        def find(folder: Path) -> list[Finding]:
            made(family, folder)
            own = shutil.copytree(folder, folder.with_name(f"{folder.name}-trainer"))
            with pytest.MonkeyPatch.context() as patch:
                plant(own, None, patch)
                engine = make_engine(own, ParallelConfig())
                plant(None, engine, patch)
                return list(doctor.compare(engine, folder, IDS))

        FAULTS[name] = Fault(find, ("trainer", *words))
        return plant

    return register


@in_trainer("rope of the trainer with another base", "layer 0: attention", "base is 500000")
def _(folder: Path | None, engine: MegatronEngine | None, patch: Any) -> None:
    if folder is not None:
        config = json.loads((folder / "config.json").read_text())
        config["rope_parameters"] = {"rope_theta": 5e5, "rope_type": "default"}
        (folder / "config.json").write_text(json.dumps(config))


@in_trainer("labels shifted twice", "log-probs", "labels are shifted by one more")
def _(folder: Path | None, engine: MegatronEngine | None, patch: Any) -> None:
    logprobs = Head.logprobs

    def shifted(self: Head, hidden: Any, rows: Any, *rest: Any) -> Any:
        return logprobs(self, hidden, dict(rows) | {"labels": rows["labels"].roll(-1)}, *rest)

    if engine is not None:
        patch.setattr(Head, "logprobs", shifted)


@in_trainer("a temperature that only the trainer applies", "log-probs", "divided by a temperature of 0.8")
def _(folder: Path | None, engine: MegatronEngine | None, patch: Any) -> None:
    logprobs = Head.logprobs
    if engine is not None:
        patch.setattr(Head, "logprobs", lambda self, h, r, p, temperature, *rest: logprobs(self, h, r, p, 0.8, *rest))


@in_trainer("another activation in the trainer", "layer 0: feed-forward", "activation is gelu")
def _(folder: Path | None, engine: MegatronEngine | None, patch: Any) -> None:
    if engine is not None:
        for layer in engine.chunks[0].decoder.layers:
            layer.mlp.config.activation_func = F.gelu


@in_trainer("a tensor of the trainer not loaded", "layers.1.input_layernorm.weight", "differs")
def _(folder: Path | None, engine: MegatronEngine | None, patch: Any) -> None:
    if engine is not None:
        engine.chunks[0].decoder.layers[1].input_layernorm.weight.data.fill_(1.0)


# -- in what is sampled ------------------------------------------------------------------------------------------------


def in_sampling(name: str, *words: str, eos: tuple[int, ...] = (), **wrong: Any) -> None:
    """Sample with other parameters than the config's. `told_at`: temperature at which log-probs are told."""

    def find(folder: Path) -> list[Finding]:
        model = made("llama", folder)
        generation, told_at = GenerationConfig(temperature=0.8, n_samples=8), wrong.get("told_at")
        options = {key: value for key, value in wrong.items() if key != "told_at"}
        params = sampling.SamplingParams(**{"temperature": 0.8} | options)
        replies, logits = [], []
        for number in range(8):
            ids, told = [5, 17, 30 + number], [0.0] * 3
            for place in range(24):
                with torch.no_grad():
                    row = 8.0 * model(torch.tensor([ids])).logits[0, -1:].float()
                (token,), (logprob,), _ = sampling.sample(row, [params], [sampling.key_of(number, place)], [])
                if told_at is not None:
                    logprob = float((row[0] / told_at).log_softmax(-1)[token])
                ids, told = [*ids, token], [*told, logprob]
            with torch.no_grad():
                logits.append(8.0 * model(torch.tensor([ids])).logits[0].float())
            replies.append((ids, torch.arange(len(ids)) >= 3, torch.tensor(told)))
        return list(surroundings.check_replies(replies, logits, generation, eos, 1e-3))

    FAULTS[name] = Fault(find, ("server", *words))


in_sampling("another top_p", "sampling", "as with top_p = 0.", top_p=0.5)
in_sampling("log-probs told without the temperature", "log-probs", "those of temperature 1", told_at=1.0)
in_sampling("drawn at another temperature", "sampling", "another temperature than 0.8", temperature=0.3, told_at=0.8)
in_sampling("a stop token that does not stop", "reply", "does not end it", eos=tuple(range(90)))


# -- in the data -------------------------------------------------------------------------------------------------------


def in_data(name: str, *words: str) -> Callable[..., Any]:
    def register(find: Callable[[Path], list[Finding]]) -> Callable[[Path], list[Finding]]:
        FAULTS[name] = Fault(find, words)
        return find

    return register


class Words:
    """A tokenizer of whole words with Llama's habits, and a chat template."""

    bos_token, bos_token_id, eos_token_id = "<s>", 1, 2
    all_special_tokens, all_special_ids = ["<s>", "<|im_start|>", "<|im_end|>"], [1, 3, 4]
    chat_template = "x"

    def apply_chat_template(self, turns: list[dict[str, str]], tokenize: bool = False) -> str:
        return "".join(f"<|im_start|> {it['role']} {it['content']} <|im_end|> " for it in turns)

    def __call__(self, text: str, **_: Any) -> dict[str, list[int]]:
        known = {"<s>": 1, "<|im_start|>": 3, "<|im_end|>": 4}
        return {"input_ids": [known.get(word, 5) for word in text.split()]}

    def convert_ids_to_tokens(self, token: int) -> str:
        return {1: "<s>", 2: "</s>", 3: "<|im_start|>", 4: "<|im_end|>"}[token]


def prompts_found(*rows: dict[str, Any], vocab: int = 90, context: int = 64) -> list[Finding]:
    sizes = {"vocab": vocab, "context": context, "longest_reply": 8}
    return list(surroundings.check_prompts(rows, Words(), **sizes))


@in_data("BOS twice", "prompt 2", "BOS ('<s>') twice")
def _(folder: Path) -> list[Finding]:
    return prompts_found({"input_ids": [1, 5]}, {"input_ids": [1, 1, 5]})


@in_data("chat template applied twice", "prompt 1", "applied twice")
def _(folder: Path) -> list[Finding]:
    said = "<|im_start|> user hello <|im_end|>"
    return prompts_found({"messages": [{"role": "user", "content": said}], "input_ids": [3, 3, 5, 4, 4]})


@in_data("tokenizer of another model", "token 151643", "another model's")
def _(folder: Path) -> list[Finding]:
    return prompts_found({"input_ids": [5, 151643]})


@in_data("context too short for the replies", "has 60 tokens and may get 8 more", "context is 64")
def _(folder: Path) -> list[Finding]:
    return prompts_found({"input_ids": [5] * 60})


@in_data("end of turn that stops no reply", "stop tokens", "'<|im_end|>' (4)", "does not end a reply")
def _(folder: Path) -> list[Finding]:
    return list(surroundings.check_stop_tokens(Words(), GenerationConfig(), [2]))


def all_found(folder: Path) -> dict[str, list[str]]:
    """Plant each fault and return what the doctor says of it."""
    found = {}
    for number, (name, fault) in enumerate(FAULTS.items()):
        found[name] = [str(finding) for finding in fault.find(folder / str(number))]
    return found


HEALTHY = ("llama", "llama_tied", "llama3_rope", "linear_rope", "mistral", "qwen2", "qwen2_tied", "qwen3", "qwen3_moe")


def all_healthy(folder: Path) -> dict[str, list[str]]:
    """Return what the doctor says of sound models of each family."""
    found = {}
    for family in HEALTHY:
        made(family, folder / family)
        engine = make_engine(folder / family, ParallelConfig())
        found[family] = [str(finding) for finding in doctor.compare(engine, folder / family, IDS)]
    return found


PAGE = ROOT / "docs" / "troubleshooting.md"
TABLE = re.compile(r"(<!-- doctor: faults -->\n)(.*?)(<!-- end -->)", re.DOTALL)


def table(found: dict[str, list[str]]) -> str:
    """Return the page's table of what the doctor says of each fault."""
    lines = ["| planted fault | what the doctor says |", "|---|---|"]
    return "\n".join([*lines, *(f"| {name} | {'; '.join(said) or 'nothing'} |" for name, said in found.items())]) + "\n"


def write(folder: Path) -> None:
    """Write the table into the page."""
    text = table(run_ranks(1, all_found, folder)[0])
    page = PAGE.read_text(encoding="utf-8")
    PAGE.write_text(TABLE.sub(lambda match: match[1] + text + match[3], page), encoding="utf-8")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as name:
        write(Path(name))
