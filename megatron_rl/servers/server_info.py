"""Properties of a server, read from the endpoints /server_info and /model_info and from its model's config.json."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson

from megatron_rl.api import ChecksumForm
from megatron_rl.config.rollout_section import shape_refusal
from megatron_rl.servers.reply_check import member, shown
from megatron_rl.servers.server_http import ServerError

SESSIONS_SINCE = (0, 5, 21)
CHECKSUMS_SINCE = (0, 5, 17)
GPU_CHECKSUMS_UNTIL = (0, 5, 23)
"""Newest SGLang version whose hash kernel was verified to match the trainer's checksums."""
WITH_HEAD = ("EAGLE", "NEXTN")
"""SGLang's names of speculative decoding with a draft head of the form that the trainer trains."""
QUANTIZING = ("quantization", "modelopt_quant", "torchao_config")
"""SGLang options in /server_info that make the server quantize its weights."""


@dataclass(frozen=True, kw_only=True)
class ServerInfo:
    """Properties that a server reports. A property that it does not report is None."""

    version: tuple[int, ...]
    ranks: int
    """Number of ranks that the server adds to a weight-update group: its tensor-parallel size.

    Data-parallel attention divides these ranks and adds none.
    """
    replicas: int
    """Number of copies of the weights: the data-parallel size, or 1 with data-parallel attention."""
    stages: int
    """Pipeline-parallel size."""
    nodes: int
    vocab_size: int | None
    context_length: int | None
    checksum_form: ChecksumForm | None
    """How the server computes checksums of its weights. None if the trainer does not know how."""
    weight_version: str | None
    is_embedded: bool
    """True for this package's own server, False for SGLang."""
    start: str | None
    """Instance ID, which changes with each restart of the server."""
    room: int | None
    """Maximum number of tokens of a prompt and its reply together. Context and cache limit it."""
    gives_text: bool
    quantization: str | None
    gives_routes: bool
    streams_whole: bool
    """True if each event of a stream repeats the whole reply so far."""
    counts_late: bool
    """True if penalties may count the last tokens of a reply too late."""
    has_draft: bool
    """True for an SGLang server that guesses tokens with a draft head of its own."""
    weight_loaders: tuple[str, ...]
    """Functions that the server may use to load weights, because it was started with --custom-weight-loader."""

    @property
    def has_sessions(self) -> bool:
        return self.version >= SESSIONS_SINCE

    def refusal(self, publication: str) -> str:
        """Return why this server cannot receive weights, and the remedy; '' if it can.

        publication: value of rollout.publication, the way in which weights are sent.
        """
        if self.quantization is not None:
            return (
                f"quantization = {self.quantization!r}: what is published would be copied into quantized weights under "
                f"the scales of others; start it without quantization, on the model in the trainer's dtype."
            )
        if self.has_draft and not self.has_sessions:
            return (
                f"SGLang {'.'.join(map(str, self.version))} decodes with a draft head, and takes weights for the head "
                f"alone only from {'.'.join(map(str, SESSIONS_SINCE))} on; update it, or start it without "
                f"--speculative-algorithm."
            )
        return shape_refusal(publication, replicas=self.replicas, stages=self.stages, nodes=self.nodes)


def parse_version(text: str, url: str) -> tuple[int, ...]:
    match = re.match(r"(\d+)\.(\d+)\.(\d+)", text)
    if match is None:
        raise ServerError(
            f"{url}/server_info: version = {text!r}: must be SGLang's, such as 0.5.21; is this an SGLang server?"
        )
    return tuple(int(number) for number in match.groups())


def server_info(url: str, server: dict[str, Any], model: dict[str, Any]) -> ServerInfo:
    """Parse a server's description of itself. Raises ValueError if a field is invalid.

    server, model: the answers of /server_info and /model_info.
    """
    config = model_config(model.get("model_path"))

    def size(name: str, *places: dict[str, Any]) -> int | None:
        found = next((place[name] for place in places if place.get(name) is not None), None)
        if found is not None and (type(found) is not int or found < 1):
            raise ValueError(f"{name} = {shown(found)}: must be a number from 1")
        return found

    # SGLang reports the value of --context-length, or None without it: then the model's own limit holds.
    context_length = size("context_length", server) or size("max_position_embeddings", config)
    rooms = [room for room in (context_length, size("max_total_num_tokens", server)) if room is not None]
    return ServerInfo(
        version=parse_version(str(server.get("version", "")), url),
        ranks=size("tp_size", server) or 1,
        replicas=1 if has_dp_attention(server) else size("dp_size", server) or 1,
        stages=size("pp_size", server) or 1,
        nodes=size("nnodes", server) or 1,
        vocab_size=size("vocab_size", server, model, config),
        context_length=context_length,
        checksum_form=checksum_form(server, config),
        # Not from /server_info, which keeps the version at start-up.
        weight_version=member(model, "weight_version", str, optional=True),
        is_embedded=bool(server.get("embedded", False)),
        start=start_of(server),
        room=min(rooms, default=None),
        gives_text=not server.get("skip_tokenizer_init"),
        quantization=quantization_of(server, config),
        gives_routes=bool(server.get("enable_return_routed_experts")),
        streams_whole=not (server.get("incremental_streaming_output") or server.get("stream_output")),
        counts_late=not server.get("embedded")
        and (not server.get("disable_overlap_schedule") or server.get("speculative_algorithm") is not None),
        has_draft=not server.get("embedded") and server.get("speculative_algorithm") in WITH_HEAD,
        weight_loaders=tuple(map(str, server.get("custom_weight_loader") or ())),
    )


def has_dp_attention(server: dict[str, Any]) -> bool:
    """Return True if a server has data-parallel attention: its tensor-parallel ranks share requests for attention.

    server: the answer of /server_info. Older and newer versions of SGLang report it in different fields.
    """
    return bool(server.get("enable_dp_attention")) or (server.get("attn_dp_size") or 1) != 1


def quantization_of(server: dict[str, Any], config: dict[str, Any]) -> str | None:
    """Return the name of the quantization that a server applies to weights, or None.

    It is found in the server's start options (in `server`) or in its model's config.json (`config`).
    """
    given = next((str(server[key]) for key in QUANTIZING if server.get(key) not in (None, "", "unquant")), None)
    method = config.get("quantization_config")
    return given or (None if method is None else str(dict(method).get("quant_method", "by its config.json")))


def start_of(server: dict[str, Any]) -> str | None:
    """Return a server's instance ID, or None: its start time, or for SGLang the measurements of its start-up."""
    start = server.get("startup_time")
    return None if start is None else str(orjson.dumps(start))


def checksum_form(server_info: dict[str, Any], config: dict[str, Any]) -> ChecksumForm | None:
    """Return how a server computes checksums of its weights, or None if that is unknown.

    config: content of the model's config.json, or {}.
    """
    dtype = server_info.get("dtype")
    dtype = dtype if dtype in ("float32", "bfloat16", "float16") else None
    if server_info.get("embedded"):
        return ChecksumForm("embedded", dtype)
    version, device = parse_version(str(server_info.get("version", "")), ""), server_info.get("device")
    # Excluded: quantized weights differ from those sent, and pipeline stages or DP attention divide them further.
    is_plain = quantization_of(server_info, {}) is None and not has_dp_attention(server_info)
    is_plain = is_plain and all((server_info.get(key) or 1) == 1 for key in ("pp_size", "dp_size"))
    if not is_plain or version < CHECKSUMS_SINCE or device not in ("cpu", "cuda"):
        return None
    if device == "cuda" and version > GPU_CHECKSUMS_UNTIL:  # a wrong guess would drop every server
        return None
    ranks = int(server_info.get("tp_size") or 1)
    kind = "sglang_cpu" if device == "cpu" else "sglang_gpu"
    kv_heads, experts = config.get("num_key_value_heads"), experts_as_sent(server_info, config)
    expert_ranks = int(server_info.get("ep_size") or 1) if experts is not None else 1
    return ChecksumForm(kind, dtype, ranks, kv_heads if ranks > 1 else None, experts, expert_ranks)


def experts_as_sent(server_info: dict[str, Any], config: dict[str, Any]) -> int | None:
    """Return the number of experts per layer if an SGLang server stores experts as they are sent, else None.

    They are sent with each expert's gate above its up projection. The server may store them with a fused shared expert,
    with redundant copies, or in a kernel's own order; then the result is None.
    """
    counts = (config.get(key) for key in ("num_experts", "n_routed_experts", "num_local_experts"))
    count = next((count for count in counts if count), None)
    has_shared = config.get("n_shared_experts") and not server_info.get("disable_shared_experts_fusion")
    is_moved = server_info.get("ep_num_redundant_experts") or server_info.get("enable_eplb")
    is_moved = is_moved or (server_info.get("moe_a2a_backend") or "none") != "none"
    # On a GPU `auto` may select a kernel with the reverse order. On a CPU there is only one order.
    in_order = server_info.get("device") == "cpu" or server_info.get("moe_runner_backend") == "triton"
    return count if in_order and not has_shared and not is_moved else None


def model_config(model_path: Any) -> dict[str, Any]:
    """Return the content of a model folder's config.json, or {} if the folder is not on this host.

    It is not on this host if the server runs elsewhere.
    """
    config = Path(str(model_path)) / "config.json"
    return json.loads(config.read_text()) if config.is_file() else {}
