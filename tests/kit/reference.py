"""What servers are compared with: transformers' own log-probabilities, and a trainer's side of a weight update."""

from __future__ import annotations

import asyncio
import functools
import json
import socket
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, PreTrainedModel

from megatron_rl.config import GenerationConfig
from megatron_rl.rollout.sglang_engine import RemoteSGLangEngine
from megatron_rl.types import LLMRequest, LLMResponse
from megatron_rl.weights.update_group import join_update_group, leave_update_group
from tests.kit.pace import held_at
from tests.kit.run_tokens import AUTHORIZED
from tests.kit.waiting import LATE_S, LIMIT_S, wait_until

BUCKET_BYTES = 40_000
"""Small enough that a tiny model is published in several buckets."""


@torch.no_grad()
def reference_logprobs(folder: Path, prompt: list[int], output: list[int], temperature: float = 1.0) -> list[float]:
    """log p of each output token after the prompt, in one float32 forward pass."""
    return logprobs_of(load_reference(folder), prompt, output, temperature)


@functools.lru_cache(maxsize=4)
def load_reference(folder: Path) -> PreTrainedModel:
    """The folder's model by transformers, float32. No test writes other weights to a folder that it has asked about."""
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


@torch.no_grad()
def logprobs_of(model: PreTrainedModel, prompt: list[int], output: list[int], temperature: float = 1.0) -> list[float]:
    """`reference_logprobs` of a model that is loaded, for many replies."""
    logits = model(torch.tensor([prompt + output])).logits[0].float() / temperature
    rows = logits.log_softmax(-1)[len(prompt) - 1 : -1]
    return rows.gather(1, torch.tensor(output)[:, None])[:, 0].tolist()


@torch.no_grad()
def reference_greedy(folder: Path, prompt: list[int], count: int) -> list[int]:
    """The `count` most likely tokens after the prompt, one after the other."""
    model = load_reference(folder)
    ids = list(prompt)
    for _ in range(count):
        ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
    return ids[len(prompt) :]


@torch.no_grad()
def reference_logprobs_on_old_keys(
    old: Path, new: Path, prompt: list[int], output: list[int], before: int
) -> list[float]:
    """log p of each output token where the weights changed after `before` of them and the keys of the old ones stayed.

    The last token before the change has no keys yet when it comes.
    """
    models = [load_reference(folder) for folder in (old, new)]
    ids = torch.tensor([prompt + output])
    computed = len(prompt) + before - 1
    first = models[0](ids[:, :computed], use_cache=True)
    second = models[1](ids[:, computed:], past_key_values=first.past_key_values)
    rows = torch.cat([first.logits[0], second.logits[0]]).float().log_softmax(-1)[len(prompt) - 1 : -1]
    return rows.gather(1, torch.tensor(output)[:, None])[:, 0].tolist()


@contextmanager
def weight_group(engine: RemoteSGLangEngine) -> Iterator[tuple[str, dist.ProcessGroup]]:
    """Join a gloo group with the engine's servers, as a trainer's rank 0 does."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    name = f"test-{port}"
    joined = engine.join_weight_group(address="127.0.0.1", port=port, name=name, backend="gloo")
    group = join_update_group(
        address="127.0.0.1",
        port=port,
        rank=0,
        world_size=1 + sum(engine.server_ranks.values()),
        name=name,
        timeout_s=LATE_S,
    )
    wait_for(joined)
    yield name, group
    wait_for(engine.leave_weight_group(name=name))
    leave_update_group(group)


def wait_for(answers: dict[str, Future]) -> None:
    for answer in answers.values():
        answer.result(LIMIT_S)


def pack_bucket(tensors: list[torch.Tensor]) -> torch.Tensor:
    """The tensors' bytes one after the other."""
    return torch.cat([tensor.contiguous().view(-1).view(torch.uint8) for tensor in tensors])


def publish(engine: RemoteSGLangEngine, group: tuple[str, dist.ProcessGroup], folder: Path, version: int) -> None:
    """Send the weights of a HF folder to the engine's servers in two buckets."""
    name, process_group = group
    tensors = list(load_file(folder / "model.safetensors").items())
    engine.pause()
    engine.begin_weight_update(version)
    for bucket in (tensors[:5], tensors[5:]):
        received = engine.load_bucket(
            names=[key for key, _ in bucket],
            dtypes=[str(tensor.dtype).removeprefix("torch.") for _, tensor in bucket],
            shapes=[list(tensor.shape) for _, tensor in bucket],
            group=name,
            version=version,
        )
        dist.broadcast(pack_bucket([tensor for _, tensor in bucket]), src=0, group=process_group)
        wait_for(received)
    engine.end_weight_update(version)
    engine.finish_update(version)
    engine.resume()


def interrupt(
    engine: RemoteSGLangEngine,
    url: str,
    prompt: list[int],
    count: int,
    act: Callable[[], None],
    timeout_s: float = LIMIT_S,
) -> LLMResponse:
    """Return a greedy reply of `count` tokens; `act` is called once the server is generating it."""
    gconfig = GenerationConfig(max_new_tokens=count, greedy=True, ignore_eos=True)
    # SGLang renews that number now and then.
    wait_until(lambda: not used_tokens(url), "the server is still generating for another test", poll_s=0.0)
    with ThreadPoolExecutor(1) as pool:
        with held_at(16):  # an embedded server; SGLang is slow enough
            reply = pool.submit(asyncio.run, engine.agenerate(LLMRequest(rid="r", input_ids=prompt, gconfig=gconfig)))
            wait_until(
                lambda: reply.done() or used_tokens(url) >= len(prompt) + 8, "the reply does not begin", poll_s=0.0
            )
            act()
        return reply.result(timeout_s)


def used_tokens(url: str) -> int:
    """Tokens of running requests, prompt and reply."""
    request = urllib.request.Request(f"{url}/v1/loads?include=core", headers=AUTHORIZED)
    with urllib.request.urlopen(request, timeout=LATE_S) as answer:
        load = json.load(answer)["loads"][0]
    return load["num_used_tokens"] if load["num_running_reqs"] else 0
