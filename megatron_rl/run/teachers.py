"""Teachers that run on the trainer's engines.

A teacher with a hint reads the hint, the prompt and the policy's reply.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from megatron_rl.algo.reward_shaping import written_tokens
from megatron_rl.config import TrainConfig
from megatron_rl.config.teacher_section import POLICY
from megatron_rl.data.tokens import load_tokenizer, prompt_lengths
from megatron_rl.engine.megatron_engine import MegatronEngine
from megatron_rl.engine.model import transformer_config
from megatron_rl.ops import TeacherTargets
from megatron_rl.ops.reverse_kl import PLACE
from megatron_rl.parallel import ParallelGroups
from megatron_rl.types import TrajectoryBatch
from megatron_rl.weights.architecture import read_architecture
from megatron_rl.weights.decoder import Architecture
from megatron_rl.weights.mapping import weight_source
from megatron_rl.workflows.rendering import prompt_ids
from megatron_rl.workflows.scoring import with_hint

Prompts = list[dict[str, Any]]


def check_teachers(
    config: TrainConfig, policy: Architecture, tokenizer: PreTrainedTokenizerBase, prompts: Prompts
) -> None:
    """Raise ValueError if a teacher's model, tokens or context do not fit, or if a prompt's source has no teacher."""
    options, own_tokens = config.teacher, tokenizer.get_vocab()
    teachers, contexts = options.teachers, {POLICY: policy.max_positions, "": policy.max_positions}
    for path in options.engine_paths:
        engine = config.teacher_engine(path)
        arch = read_architecture(path).with_head("policy")
        tokens = load_tokenizer(path).get_vocab()
        if tokens != own_tokens or arch.vocab < len(own_tokens):
            differing = len(tokens.items() ^ own_tokens.items())
            raise ValueError(
                f"teacher: the model in {path!r} has a vocabulary of {arch.vocab} and {len(tokens)} tokens, the policy "
                f"{policy.vocab} and {len(own_tokens)}, and {differing} entries differ; a teacher scores the policy's "
                f"own tokens, so give one with the same tokenizer."
            )
        weight_source(path, arch)
        transformer_config(arch, engine, config.megatron)  # raises if the layout does not fit the model
        contexts[path] = arch.max_positions
    for number, prompt in enumerate(prompts, start=1):
        if options.by_source and prompt.get("source") not in teachers:
            raise ValueError(
                f"teacher.by_source: has teachers for {', '.join(teachers)}, and prompt {number} of data.train is of "
                f"the source {prompt.get('source')!r}; name one for it too."
            )
    for source, teacher in teachers.items():
        read = [with_hint(it, teacher.hint) for it in prompts if not source or it["source"] == source]
        name = f"teacher.by_source.{source}" if source else "teacher"
        prompt_lengths(name, read, tokenizer, config.generation, context=contexts[teacher.path], vocab=policy.vocab)


class Teachers:
    """The teachers of a run, which share the policy's layout. Collective: every rank calls every method.

    With teacher.kl_in = advantage, a step needs `logprobs`; with teacher.kl_in = loss, it needs `targets`.
    """

    def __init__(
        self,
        config: TrainConfig,
        groups: ParallelGroups,
        policy: MegatronEngine,
        prompts: Prompts,
        tokenizer: PreTrainedTokenizerBase | None,
        **options: Any,
    ) -> None:
        """prompts: the rows to which `prompt_index` refers.

        Without any, the first teacher reads all trajectories unchanged. options: passed to MegatronEngine.
        """
        self.options, self.temperature = config.teacher, config.generation.temperature
        self.teachers = config.teacher.teachers
        self.prompts, self.tokenizer = prompts, tokenizer
        self.enable_thinking = bool(config.rollout.workflow_args.get("enable_thinking", False))
        self.own_engines = {
            path: MegatronEngine(config.teacher_engine(path), groups=groups, trainable=False, **options)
            for path in config.teacher.engine_paths
        }
        for engine in self.own_engines.values():
            engine.initialize()
        self.engines = self.own_engines | {POLICY: policy}

    def logprobs(self, batch: TrajectoryBatch) -> Tensor:
        """Return the teachers' log-probabilities of the trained tokens on this rank, `[N]` float32."""
        own = batch.own()
        has_scores = "teacher_logprobs" in own  # by teachers on servers, whose scores are kept
        found = own["teacher_logprobs"].clone() if has_scores else torch.zeros(len(own["input_ids"]))
        for engine, read, places in self._readings(own):
            values = engine.forward(read, temperature=self.temperature)
            is_scored = read["loss_mask"]
            found[places[is_scored]] = values[is_scored].to(found)
        return found

    def targets(self, share: TrajectoryBatch) -> TeacherTargets:
        """Return the teachers' next-token distributions for the trained tokens of this rank's share of an update.

        Also sets the share's column PLACE: each token's row in the distributions; -1 for tokens without one.
        """
        place, found, count = torch.full((len(share["input_ids"]),), -1, dtype=torch.int32), [], 0
        for engine, read, places in self._readings(share):
            found.append(engine.distributions(read, top=self.options.top_k, temperature=self.temperature))
            own = places[read["loss_mask"]]
            place[own] = torch.arange(count, count + len(own), dtype=torch.int32)
            count += len(own)
        share.tokens[PLACE] = place
        shard = self.engines[POLICY].shard
        return TeacherTargets(found, shard, self.temperature, self.options.coefficient)

    def _readings(self, own: TrajectoryBatch) -> Iterator[tuple[MegatronEngine, TrajectoryBatch, Tensor]]:
        """Yield each teacher's engine, the trajectories that it reads, and the index in `own` of each of their tokens.

        The index is -1 for tokens that are not in `own`, such as a hint's.
        """
        for number, (source, teacher) in enumerate(self.teachers.items()):
            if teacher.servers:
                continue
            if self.prompts:
                indices = [int(index) for index in own["prompt_index"]]
                chosen = [row for row, i in enumerate(indices) if not source or self.prompts[i]["source"] == source]
                prompts = [self._prompt(indices[row], teacher.hint) if teacher.hint else None for row in chosen]
            else:
                chosen = list(range(len(own))) if number == 0 else []
                prompts = [None] * len(chosen)
            yield self.engines[teacher.path], *behind_prompts(own, chosen, prompts)

    def _prompt(self, index: int, hint: str) -> list[int]:
        row = with_hint(self.prompts[index], hint)
        return prompt_ids(self.tokenizer, row, enable_thinking=self.enable_thinking)


def behind_prompts(
    batch: TrajectoryBatch, chosen: list[int], prompts: list[list[int] | None]
) -> tuple[TrajectoryBatch, Tensor]:
    """Return the chosen trajectories as a teacher reads them, and the index in `batch` of each of their tokens.

    The index is -1 for the tokens of new prompts. prompts: for each chosen trajectory, None to leave it unchanged, or
    token ids that replace everything before the first token that the policy wrote.
    """
    ids, mask, written = batch["input_ids"], batch["loss_mask"], written_tokens(batch)
    bounds, none = batch.cu_seqlens.tolist(), torch.empty(0, dtype=torch.int64)
    read, places, lengths = [ids[:0]], [none], [0]
    for number, prompt in zip(chosen, prompts, strict=True):
        first, end = bounds[number], bounds[number + 1]
        if prompt is not None:
            first += int((written[first:end].cumsum(0) == 0).sum())
        added = torch.tensor(prompt or [], dtype=ids.dtype)
        read += [added, ids[first:end]]
        places += [torch.full((len(added),), -1), torch.arange(first, end)]
        lengths.append(len(added) + end - first)
    place = torch.cat(places)
    tokens = {"input_ids": torch.cat(read), "loss_mask": mask[place.clamp_min(0)] & (place >= 0) if len(mask) else mask}
    sequences = {"group": batch["group"][chosen]}
    return TrajectoryBatch(tokens, sequences, torch.tensor(lengths).cumsum(0)), place
