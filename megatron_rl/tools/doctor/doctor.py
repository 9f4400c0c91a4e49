"""`megatron-rl doctor`: compares the trainer, Hugging Face's model and a rollout server on the same tokens.

Cheap checks come first, and checks that need a server last. The doctor reports the first weight, layer, operator or
option that is wrong. It runs in one process, because results do not depend on the parallel layout. With --layout, the
trainer is compared again in that layout (layout_doctor.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerBase

from megatron_rl import parallel
from megatron_rl.config import DraftConfig, EngineConfig, GenerationConfig, ParallelConfig, TrainConfig, load_config
from megatron_rl.data.tokens import load_tokenizer, training_prompts
from megatron_rl.engine.megatron_engine import MegatronEngine
from megatron_rl.parallel import ParallelGroups
from megatron_rl.rollout.sglang_engine import RemoteSGLangEngine
from megatron_rl.servers.supervisor import Supervisor
from megatron_rl.tools.doctor import elimination, states, surroundings
from megatron_rl.tools.doctor.diagnosis import diagnose, wrong_weights
from megatron_rl.tools.doctor.finding import Finding
from megatron_rl.tools.doctor.hosts import check_hosts
from megatron_rl.tools.doctor.machine_checks import check_machine
from megatron_rl.tools.embedded_server.decoder_config import DecoderConfig
from megatron_rl.tools.embedded_server.transformer import Decoder
from megatron_rl.tools.evaluate_command import where_it_is
from megatron_rl.types import FinetuneSpec
from megatron_rl.weights.hf_files import HFFolder
from megatron_rl.weights.mapping import hf_shapes
from megatron_rl.workflows import RLVRWorkflow
from megatron_rl.workflows.rendering import prompt_ids

TOKENS, PROMPTS = 64, 64
"""Number of tokens in the compared sequence, and number of prompts that are joined to make it."""
ASKED, REPLIES, REPLY_TOKENS = 4, 32, 16
"""Number of prompts sent to a server, total number of replies to them, and maximum number of tokens per reply."""
TOLERANCE = 1e-4
"""Largest accepted difference of float32 activations, relative to their root mean square over a token."""
SERVED = {"float32": 1e-3, "bfloat16": 0.25}
"""{the run's dtype: largest accepted difference of a token's log-probability in nats, between server and reference}."""
CPU = torch.device("cpu")


def doctor(path: Path, overrides: list[str], *, say: Callable[[str], None] = print) -> list[Finding]:
    """Check a config, or the newest weights in a run's folder. Pass each finding to `say`, and return all of them."""
    config = load_config(*where_it_is(path, overrides))
    tokenizer = load_tokenizer(config.model.path, config.data.template_args)
    prompts = training_prompts(config, tokenizer)
    found: list[Finding] = []
    for title, check in (
        ("machine", lambda: check_machine(Path(config.run.folder))),
        ("hosts", lambda: check_hosts(Path(config.run.folder))),
        ("data", lambda: of_data(config, prompts, tokenizer)),
        ("model", lambda: of_models(config, prompts, tokenizer)),
    ):
        before = len(found)
        for finding in check():
            found.append(finding)
            say(f"FAULT: {finding}")
        if len(found) == before:
            say(f"ok: {title}")
    if not config.starts_servers:
        say(
            "not checked: replies of servers that the run does not start, because the doctor would change their weights"
        )
    return found


def of_data(
    config: TrainConfig, prompts: list[dict[str, Any]], tokenizer: PreTrainedTokenizerBase
) -> Iterator[Finding]:
    model = DecoderConfig.read(Path(config.model.path))
    sizes = {"vocab": model.vocab_size, "context": model.max_positions}
    yield from surroundings.check_prompts(prompts, tokenizer, **sizes, longest_reply=config.generation.max_new_tokens)
    yield from surroundings.check_stop_tokens(tokenizer, config.generation, model.eos_token_ids)
    yield from surroundings.check_rewards(config, prompts[0], tokenizer)


def of_models(
    config: TrainConfig, prompts: list[dict[str, Any]], tokenizer: PreTrainedTokenizerBase
) -> Iterator[Finding]:
    """Compare the trainer, the embedded server's model and a server's replies with transformers."""
    groups = parallel.start(ParallelConfig(), seed=config.run.seed)
    try:
        alone = replace(config.actor, parallel=ParallelConfig(), publication="group", draft=DraftConfig())
        engine, folder = started(config, alone, groups)
        rows = [prompt_ids(tokenizer, row) for row in prompts[:PROMPTS]]
        context = engine.arch.max_positions
        yield from compare(engine, folder, sequence(rows, 0, min(TOKENS, context)))
        # Long enough that a server caches their keys for the next prompt with the same prefix.
        asked = [sequence(rows, start, min(TOKENS, context - REPLY_TOKENS)) for start in range(ASKED)]
        yield from of_server(config, engine, folder, asked)
    finally:
        parallel.stop()


def started(config: TrainConfig, options: EngineConfig, groups: ParallelGroups) -> tuple[MegatronEngine, Path]:
    """Return the trainer's engine and the folder of its weights. Random initial weights are first saved to a folder.

    The engine computes in float32, so that rounding hides no error. A server uses the run's dtype.
    """
    model = replace(config.model, dtype="float32", transformer_impl="local")
    engine = MegatronEngine(replace(options, model=model), groups=groups)
    engine.initialize(None, FinetuneSpec(total_updates=1))
    folder = Path(config.model.path)
    if config.model.init == "random":
        folder = Path(config.run.folder) / "doctor_model"
        engine.save(folder)
    return engine, folder


def sequence(rows: list[list[int]], start: int, most: int) -> list[int]:
    """Join the prompts from index `start` on, then those before it, and return the first `most` tokens."""
    return [token for ids in [*rows[start:], *rows[:start]] for token in ids][:most]


def of_layout(config: TrainConfig, prompts: list[dict[str, Any]], tokenizer: PreTrainedTokenizerBase) -> list[Finding]:
    """Compare the trainer in the config's parallel layout with transformers. Collective: every rank calls it.

    Returns the findings on the main rank, [] on the others. ValueError for context parallelism.
    """
    if config.parallel.context > 1:
        raise ValueError(
            f"--layout context={config.parallel.context}: the doctor compares whole sequences; leave context out."
        )
    groups = parallel.start(config.parallel, seed=config.run.seed)
    try:
        engine, folder = started(config, config.actor, groups)
        rows = [prompt_ids(tokenizer, row) for row in prompts[:PROMPTS]]
        return compare_layout(engine, folder, sequence(rows, 0, min(TOKENS, engine.arch.max_positions)))
    finally:
        parallel.stop()


def compare_layout(engine: MegatronEngine, folder: Path, ids: list[int]) -> list[Finding]:
    """Compare a trainer, in any layout without context parallelism, with transformers. Collective: every rank calls it.

    Returns the findings on the main rank, [] on the others.
    """
    held = {name: tensor.float().clone() for name, tensor in engine.hf_tensors()}
    found = states.of_layout(engine, ids)
    if not engine.groups.is_main:
        return []
    true = folder_weights(folder, engine)
    if finding := wrong_weights("trainer", held, true):
        return [finding]
    expected = states.of_transformers(load_reference(folder), ids)
    finding = diagnose("trainer", found, expected, true, DecoderConfig.read(folder), ids, TOLERANCE)
    return [] if finding is None else [finding]


def compare(engine: MegatronEngine, folder: Path, ids: list[int]) -> Iterator[Finding]:
    """Compare the trainer and the embedded server's model with transformers, which loads the folder's weights.

    Stops if the trainer's weights differ from the folder's.
    """
    config = DecoderConfig.read(folder)
    reference = load_reference(folder)
    true = folder_weights(folder, engine)
    expected = states.of_transformers(reference, ids)
    held = {name: tensor.float().clone() for name, tensor in engine.hf_tensors()}
    if finding := wrong_weights("trainer", held, true):
        yield finding
        return
    if finding := diagnose("trainer", states.of_trainer(engine, ids), expected, true, config, ids, TOLERANCE):
        yield finding
    decoder = Decoder(config, dtype=torch.float32, device=CPU, context_length=max(len(ids), 64))
    decoder.load(folder)
    yield from compare_decoder(decoder, held, expected, ids, config=config)


def compare_decoder(
    decoder: Decoder,
    held: dict[str, Tensor],
    expected: states.States,
    ids: list[int],
    *,
    config: DecoderConfig,
) -> Iterator[Finding]:
    """Compare the embedded server's weights with the trainer's, `held`, and its states with `expected`."""
    if finding := wrong_weights("server", decoder.parameters, held):
        yield finding
    elif finding := diagnose("server", states.of_embedded(decoder, ids), expected, held, config, ids, TOLERANCE):
        yield finding


def load_reference(folder: Path) -> PreTrainedModel:
    transformers.utils.logging.disable_progress_bar()
    options = {"dtype": torch.float32, "attn_implementation": "eager"}
    return AutoModelForCausalLM.from_pretrained(folder, **options).eval()


def folder_weights(folder: Path, engine: MegatronEngine) -> dict[str, Tensor]:
    names = hf_shapes(engine.arch)
    files = HFFolder(folder, names)
    return {name: files.read(name, 0, 0, None).float() for name in names}


def of_server(config: TrainConfig, engine: MegatronEngine, folder: Path, prompts: list[list[int]]) -> Iterator[Finding]:
    """Start a server, publish the trainer's weights to it as a run does, and compare its replies with transformers.

    The server first answers with other weights, which reveals a KV cache that is not flushed by a publication. Yields
    nothing if the run starts no servers.
    """
    if not config.starts_servers:
        return
    options = replace(config.rollout, server_count=1, publication="group")
    supervisor = Supervisor(options, folder, Path(config.run.folder) / "doctor_servers", dtype=config.model.dtype)
    with supervisor:
        rollout = RemoteSGLangEngine(replace(options, token_file=str(supervisor.token_file)), seed=config.run.seed)
        rollout.initialize(supervisor.urls)
        try:
            yield from of_rollouts(config, rollout, engine, folder, prompts)
        finally:
            engine.close_publisher()
            rollout.destroy()


def of_rollouts(
    config: TrainConfig, rollout: RemoteSGLangEngine, engine: MegatronEngine, folder: Path, prompts: list[list[int]]
) -> Iterator[Finding]:
    """Publish the trainer's weights to the server behind `rollout`, and compare its replies with transformers."""
    # The reference computes log-probs over the whole vocabulary and changes no logits, so the server must not either.
    generation = config.generation
    if generation.support_size or generation.changed_size:
        generation = generation.unrestricted()
    replies, tolerance = served(rollout, engine, generation, prompts), SERVED[config.model.dtype]
    reference = load_reference(folder)
    with torch.no_grad():
        logits = [reference(torch.tensor([ids])).logits[0].float() for ids, _, _ in replies]
    eos, temperature = DecoderConfig.read(folder).eos_token_ids, generation.temperature
    yield from surroundings.check_replies(
        *(replies, logits, generation, eos, tolerance),
        explain=lambda: elimination.explain(folder, replies, temperature, tolerance),
    )


def served(
    rollout: RemoteSGLangEngine, engine: MegatronEngine, generation: GenerationConfig, prompts: list[list[int]]
) -> list[surroundings.Reply]:
    """Publish scaled weights and sample, then publish the right weights and sample. Return the second replies."""
    asked = replace(generation, n_samples=max(2, REPLIES // len(prompts)), max_new_tokens=REPLY_TOKENS)
    workflow = RLVRWorkflow(lambda **_: 0.0, asked, tokenizer=None)
    rows = [{"input_ids": ids} for ids in prompts]
    weights = [parameter.detach().clone() for parameter in engine.parameters()]
    with torch.no_grad():
        for parameter in engine.parameters():
            parameter.mul_(elimination.EARLIER)
    engine.update_weights(rollout, 1)
    rollout.rollout_batch(rows, workflow)
    with torch.no_grad():
        for parameter, weight in zip(engine.parameters(), weights, strict=True):
            parameter.copy_(weight)
    engine.update_weights(rollout, 2)
    batch = rollout.rollout_batch(rows, workflow)
    bounds = batch.cu_seqlens.tolist()
    return [
        (batch["input_ids"][a:b].tolist(), batch["loss_mask"][a:b], batch["logprobs"][a:b])
        for a, b in zip(bounds, bounds[1:], strict=False)
    ]
