"""Repeats recorded steps of a run, from the checkpoint before them, on one process or more.

The loop is `train.rl_steps` itself. Only its surroundings are replaced: batches come from the records, and instead of
logging metrics, the step's results are recorded again and compared.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import os
import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Self

import torch
import yaml
from omegaconf import OmegaConf
from transformers import PreTrainedTokenizerBase

from megatron_rl import platform
from megatron_rl.batch import exchange
from megatron_rl.batch.step_batch import StepBatch
from megatron_rl.config import ParallelConfig, TrainConfig, load_config
from megatron_rl.config.model_section import PIPELINE_CUTS
from megatron_rl.data.tokens import load_tokenizer, training_prompts
from megatron_rl.replay.differences import Compared, compare, compare_logprobs, compare_rewards
from megatron_rl.replay.records import StepRecord, read_record, recorded_steps
from megatron_rl.rollout.factory import serve_rewards
from megatron_rl.run.device_sharing import DeviceSharing
from megatron_rl.run.rl_run import RLRun
from megatron_rl.run.run_checkpoints import FOLDER as CHECKPOINTS
from megatron_rl.run.run_checkpoints import read_state
from megatron_rl.run.step_records import FOLDER as RECORDS
from megatron_rl.run.step_records import LOGPROBS, StepRecorder, arithmetic, machine
from megatron_rl.run.warm_start import WarmStart
from megatron_rl.train import rl_steps
from megatron_rl.types import LLMResponse, StepStats, TrajectoryBatch
from megatron_rl.workflows.scoring import RewardCall

TOLERANCES = {"float32": 1e-6, "bfloat16": 2e-2}
"""Relative differences, by model.dtype, that another layout, device or package version may cause."""
SINGLE_TURN = "megatron_rl.workflows:RLVRWorkflow"
LAYOUTS = ("parallel", "critic.parallel", "reward_model.parallel")


def path_to(run: Path, step: int, checkpoint: Path | None = None) -> tuple[int, Path | None]:
    """Return the first step that a replay of `step` must take, and the checkpoint before it.

    The result is (0, None) if the replay must begin at the run's start. checkpoint: a checkpoint of the run to use, for
    example one that was moved. Raises ValueError if a step on the way has no record.
    """
    recorded = recorded_steps(run)
    if step not in recorded:
        shown = ", ".join(map(str, recorded[-20:])) or "none"
        rule = f"{run} has no record of it, but of {shown}; record steps with telemetry.record_steps"
        raise ValueError(f"--step {step}: {rule}.")
    found = [checkpoint] if checkpoint is not None else list((run / CHECKPOINTS).glob("step-*"))
    starts = {int(match[1]): path for path in found if (match := re.fullmatch(r"step-(\d+)", path.name))}
    start = max((number for number in starts if number <= step), default=0)
    if missing := sorted(set(range(start, step)) - set(recorded)):
        raise ValueError(
            f"--step {step}: the last state before it is that of step {start}, and steps {missing[0]} to {missing[-1]} "
            f"have no record; keep the checkpoint before the step, with run.keep_checkpoints, or name it by "
            f"--checkpoint if it lies elsewhere."
        )
    return start, starts.get(start)


def config_for(
    record: StepRecord, overrides: list[str], *, steps: list[int], folder: Path, as_recorded: bool
) -> TrainConfig:
    """Return the config for a replay that writes into `folder`: the recorded one with changes.

    The replay runs on one rank unless `as_recorded` is True or `overrides` set a layout. steps: steps whose gradients
    and weights are recorded again.
    """
    given = OmegaConf.create(yaml.safe_load(record.facts["config"]))
    own: dict[str, Any] = {
        "run.folder": str(folder),
        "run.offload": False,
        "run.checkpoint_every_steps": 1,  # for on_alarm, which records every step; none is written
        "rollout.colocated": False,
        "telemetry.record_steps": ["on_alarm", *map(str, steps)],
        "telemetry.trace_steps": [],
    }
    if not as_recorded:
        one_rank = dataclasses.asdict(ParallelConfig())
        own |= {f"{layout}.{axis}": size for layout in LAYOUTS for axis, size in one_rank.items()}
        own |= {f"megatron.{name}": None for name in PIPELINE_CUTS if name in given.megatron}
    if not platform.has_cuda():
        own |= {"model.transformer_impl": "auto", "model.flash_attention": "torch", "model.shared_keys": "copied"}
    if record.facts["arithmetic"]["machine"] == machine():
        own["run.threads_per_rank"] = record.facts["arithmetic"]["threads"]
    for key, value in own.items():
        OmegaConf.update(given, key, value, merge=False, force_add=True)
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"config-{os.environ.get('RANK', '0')}.yaml"
    path.write_text(OmegaConf.to_yaml(given), encoding="utf-8")
    return load_config(path, overrides)


class ReplayedRun(RLRun):
    """A recorded run's models, with which a replay repeats its steps. Collective: every rank calls every method.

    steps = {"first": 10, "last": 12, "checkpoint": Path("runs/demo/checkpoints/step-10")}
    with ReplayedRun(config, Path("runs/demo"), **steps, tolerance=None, say=print) as run:
        for _ in rl_steps(run):
            pass
    run.difference  # of the first step that differs
    """

    def __init__(
        self,
        config: TrainConfig,
        run: Path,
        *,
        first: int,
        last: int,
        checkpoint: Path | None,
        tolerance: float | None,
        say: Callable[[str], None],
    ) -> None:
        """first, last: numbers of the first and the last step to take.

        tolerance: largest relative difference that counts as equal. None derives it from how the record was computed.
        """
        super().__init__(config)
        self.recorded_run, self.first_step, self.last, self.start = run, first, last, checkpoint
        self.tolerance, self._say_line = tolerance, say
        self.difference: Compared | None = None
        """First difference found in the last step taken, on the main rank; None if there is none."""
        self.is_different = False

    def say(self, text: str) -> None:
        if self.groups.is_main:
            self._say_line(text)

    def __enter__(self) -> Self:
        with contextlib.ExitStack() as at_end:
            self.at_end = at_end
            self._start()
            self.at_end = at_end.pop_all()
        return self

    def __exit__(self, *error: Any) -> None:
        self.at_end.__exit__(*error)

    def _start(self) -> None:
        config = self.config
        self._join()
        self.tokenizer = load_tokenizer(config.model.path, config.data.template_args)
        needs_prompts = config.teacher.is_there or (self.start is None and config.warm_start.updates > 0)
        prompts = training_prompts(config, self.tokenizer) if needs_prompts else []
        self.devices = DeviceSharing(config, self.groups, self.timers, None, None)
        self._build_models(prompts, self.tokenizer)
        self.records = StepRecorder(config, self.groups, self.trained, self.timers, say=self.say, defers=False)
        self.warm_start = WarmStart(
            config,
            self.groups,
            self.engine,
            prompts,
            self.tokenizer,
            measure=None,
            say=self.say,
            check=lambda stats: self.check_updates("policy", [stats]),
        )
        self.rollouts = SimpleNamespace(publish=lambda: None)  # type: ignore[assignment]

    # -- what surrounds the loop --------------------------------------------------------------------------------------

    def begin(self) -> None:
        """Load the state before the first step to take."""
        if self.start is None:
            options = self.config.warm_start
            if options.updates > 0 and not self.warm_start.is_kept():
                raise ValueError(
                    f"warm_start.folder = {options.folder!r}: the run began with a warm start that is not there, and "
                    f"no checkpoint leads to the step; set warm_start.folder, or record a step after a checkpoint."
                )
            self._begin_from_warm_start()
            return
        state = read_state(self.start)
        for name, engine in self.trained.items():
            engine.load(self.start / name, with_optimizer=True)
        self._continue_algorithm(state)

    def next_batch(self, step: int) -> StepBatch:
        self.record = read_record(self.recorded_run / RECORDS / f"step-{step}")
        self.trained_version = self.engine.get_version()
        batch = self.record.batch(self.groups)
        self.records.begin(step, batch)
        return batch

    def save(self, **of_step: int) -> None:
        """Do nothing, because a replay writes no weights, evaluates nothing and has no report."""

    evaluate = finish = save

    def log(
        self,
        step: int,
        batch: StepBatch,
        shares: list[TrajectoryBatch],
        stats: list[StepStats],
        critic_stats: list[StepStats],
    ) -> None:
        """Record the step again and compare the two records. Called in place of RLRun's logging."""
        self.records.end(batch, {"policy": stats, "critic": critic_stats})
        if self.groups.is_main:
            self._compare(step)
        self.is_different = self.groups.any(self.difference is not None)

    def _compare(self, step: int) -> None:
        if self.record.computed is None:
            self.say(f"step {step}: taken; the run ended within it, so there is nothing to compare")
            return
        replayed = read_record(self.records.folder / f"step-{step}")
        tolerance = self.tolerance_for(self.record)
        found = list(compare(self.record, replayed, tolerance=tolerance))
        self.difference = next((it for it in found if it.differing), None)
        if self.difference is None:
            how = "to the bit" if tolerance == 0 else f"within {tolerance:g}"
            self.say(f"step {step}: the same {how}")
        else:
            self.say(f"step {step}: DIFFERS. {self.difference}")
        if step == self.last or self.difference is not None:
            for compared in found:
                self.say(f"  {'*' if compared is self.difference else ' '} {compared}")

    def compare_rewards(self, record: StepRecord) -> Compared | None:
        """Compute the rewards of a step again. Return how they differ from the recorded ones; None if they do not.

        Only the main rank calls this. Raises ValueError for a workflow whose rewards depend on more than prompt and
        reply, and for a record without rows.
        """
        workflow = self.config.rollout.workflow
        if workflow != SINGLE_TURN:
            rule = f"only rewards of {SINGLE_TURN} follow from prompt and reply alone; leave --rewards out"
            raise ValueError(f"--rewards: rollout.workflow = {workflow!r}: {rule}.")
        if "prompt_index" not in record.consumed or not record.rows:
            raise ValueError("--rewards: the record has no rows of its prompts; leave it out.")
        rewards = asyncio.run(_rewards(record, self.config, self.tokenizer))
        found = compare_rewards(record, rewards, tolerance=self.tolerance_for(record))
        self.say(f"step {self.last}: {found}")
        return found if found.differing else None

    def compare_groups(self, groups: list[int]) -> Compared | None:
        """Compute the log-probs of some groups in the step's first update, and compare them with the recorded ones.

        groups: the groups' numbers in the step. Every rank returns the comparison if a log-prob differs by more than
        the tolerance, and None if none does. Only these groups' trajectories need memory.
        """
        record = self.record = read_record(self.recorded_run / RECORDS / f"step-{self.last}")
        trained, update = record.trained_batch(), record.update
        if update is None or record.trained is None or LOGPROBS not in record.trained:
            raise ValueError(f"--step {self.last}: the run ended within it, so its record has no log-probs to compare.")
        is_chosen = torch.isin(trained["group"], torch.tensor(groups))
        if missing := sorted(set(groups) - set(trained["group"].tolist())):
            has = f"the step has no group {missing[0]}; it has 0 to {int(trained['group'].max())}"
            raise ValueError(f"--groups: {has}.")
        is_first = is_chosen & (update == 0)
        chosen = is_first.nonzero()[:, 0].tolist()
        forward = functools.partial(self.engine.forward, temperature=self.config.generation.temperature)
        computed = exchange.by_token(trained.select(chosen), self.groups, forward)
        rows, column = trained.spread(is_first), record.trained[LOGPROBS].clone()
        column[rows] = computed.where(trained["loss_mask"][rows], 0.0)
        tolerance = TOLERANCES[self.config.model.dtype] if self.tolerance is None else self.tolerance
        found = compare_logprobs(record, column, count=int(rows.sum()), tolerance=tolerance)
        self.say(
            f"step {self.last}, in part: log-probs of {len(chosen)} of {len(trained)} trajectories. Left out are other "
            f"groups, {int(is_chosen.sum()) - len(chosen)} trajectories of these that a later update trains, and "
            f"advantages, losses, gradients and weights, which depend on the whole step."
        )
        self.say(f"  {found}")
        return found if found.differing else None

    def tolerance_for(self, record: StepRecord) -> float:
        """Return the tolerance for comparing with `record`.

        It is 0 if this replay computes just as the record was computed, and so must give the same bits.
        """
        if self.tolerance is not None:
            return self.tolerance
        is_same = record.facts["arithmetic"] == arithmetic(self.groups) and not platform.has_cuda()
        return 0.0 if is_same else TOLERANCES[self.config.model.dtype]

    def checkpoint(self, *, step: int) -> bool:
        return self.is_different or step > self.last


async def _rewards(record: StepRecord, config: TrainConfig, tokenizer: PreTrainedTokenizerBase) -> torch.Tensor:
    recipe = serve_rewards(config)
    try:
        timeout_s = float(config.rollout.workflow_args.get("reward_timeout_s", 60.0))
        call = RewardCall(recipe, tokenizer, timeout_s=timeout_s)
        found = [await call(reply, row) for reply, row in _replies(record)]
    finally:
        await recipe.close()
    return torch.tensor(found, dtype=torch.float32)


def _replies(record: StepRecord) -> list[tuple[LLMResponse, dict[str, Any]]]:
    batch, found = record.consumed, []
    bounds = batch.cu_seqlens.tolist()
    for number, place in enumerate(batch["prompt_index"].tolist()):
        first, end = bounds[number], bounds[number + 1]
        ids = batch["input_ids"][first:end].tolist()
        begin = int((batch["versions"][first:end] >= 0).int().argmax())  # the first sampled token
        reply = LLMResponse(
            input_tokens=ids[:begin],
            output_tokens=ids[begin:],
            output_logprobs=batch["logprobs"][first + begin : end].tolist(),
            output_versions=batch["versions"][first + begin : end].tolist(),
            stop_reason="stop",
        )
        found.append((reply, record.rows[str(place)]))
    return found


def replay(
    run: Path,
    step: int,
    *,
    folder: Path,
    overrides: list[str],
    as_recorded: bool = False,
    tolerance: float | None = None,
    checkpoint: Path | None = None,
    groups: list[int] | None = None,
    rewards: bool = False,
    say: Callable[[str], None] = print,
) -> Compared | None:
    """Repeat a recorded step, and all steps between it and the checkpoint before it.

    Return the first difference, if any. Collective: every rank calls it, and the main rank gets the result. folder:
    where this replay's own records are written. groups: if given, compute only these groups' log-probs, without any
    update. rewards: compute the step's rewards again as well, which calls the run's reward functions.
    """
    first, checkpoint = path_to(run, step, checkpoint)
    if groups is not None and first != step:
        raise ValueError(
            f"--groups {','.join(map(str, groups))}: computes nothing but log-probs, and the state before step {step} "
            f"is that after {first} steps, which the steps between would have to change; take step {first}."
        )
    way = [read_record(run / RECORDS / f"step-{number}") for number in range(first, step + 1)]
    with_tensors = [it.facts["step"] for it in way if it.computed is not None and it.computed["tensors"]]
    config = config_for(way[-1], overrides, steps=with_tensors, folder=folder, as_recorded=as_recorded)
    config.check_world_size(int(os.environ.get("WORLD_SIZE", 1)))
    place = {"first": first, "last": step, "checkpoint": checkpoint}
    with ReplayedRun(config, run, **place, tolerance=tolerance, say=say) as replayed:
        start = "the run's start" if checkpoint is None else f"the checkpoint of step {first}"
        replayed.say(f"from {start}, {replayed.groups.world_size} ranks; records of this replay are in {folder}")
        if groups is not None:
            replayed.begin()
            return replayed.compare_groups(groups)
        again = replayed.compare_rewards(way[-1]) if rewards and replayed.groups.is_main else None
        for _ in rl_steps(replayed):
            pass
        return replayed.difference or again
