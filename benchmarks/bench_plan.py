"""Published runs beside what `megatron-rl plan` predicts for them: predicted, and none of them is a run of ours.

    python benchmarks/bench_plan.py --write

data/published_runs.csv has the runs: their layout, batch, mean lengths and seconds, with sources. The constants at the
end of plan/devices.py are fitted to the rows that say `fitted`; the rows that say `held out` are not, but they were
planned while the model's form was chosen. Both halves have different configurations, not different releases of one.
Rows of one run share its letter and number: its step, or parts of it. `--fit` fits the constants anew and prints them.

Rows that say `unseen` were collected later, and put down before any of them was planned. They are from tables that no
other row is from, train 16-bit weights on GPUs and families that a plan knows, and state their layout, batch, lengths
and recomputation. Derived: U3 and U4 from TFLOPS, with the FLOPs of arXiv 2204.02311; one layer a chunk from their
text; 8 replies a prompt in U21 from tokens per second. Assumed: LoRA's rank in U6 and U8; prompts in U20; no reference
model, full recomputation and microbatches of the longest reply in U21; tensor parallelism of 1 in U22. FSDP (U9 to
U12) is planned as a distributed optimizer. U9 to U12 are H100s of 500 W. U20 has the optimizer on the host. Their
first errors were 28 % in the median and 70 % at worst (parts: 66 % and 150 %). Since then the traffic between nodes is
counted apart from that in a node, because of U15: these rows are no longer unseen. No constant was fitted to them.

Left out of these, before any was planned: FP8; H20, GB200 and GB300; slower networks (several nodes in InternEvo's and
fms-fsdp's tables); overlapped experts and DeepEP or HybridEP over several nodes; GPT-OSS in Megatron-Bridge 25.11,
which contradicts its recipe; MoE Parallel Folding (arXiv 2504.14960), ms-swift and SkyRL, without microbatches or
virtual stages; AReaL and DAPO in SkyRL, without mean lengths; verl's broadcasts, without the trainer's layout; Llama 3
at 131,072 tokens, whose FLOPs are unclear; FSDP trainers other than TorchTitan; families without support.

Left out, because they contradict themselves, their recipe or a neighbour: NeMo-RL's rows of Qwen3-30B-A3B in v0.4, at
40k tokens and of agents, of Qwen3-235B 1-off in v0.6, and of Qwen3-235B on 128 GB200 in v0.6. Left out, because a plan
does not know what they use: FP8, speculative decoding, GB200, hybrid models, DeepEP over several nodes. Assumed:
prompts of 110 tokens, H100 for v0.3, and half of 16 GPUs for either side (A13).
"""

from __future__ import annotations

import csv
import itertools
import math
import statistics
from dataclasses import dataclass, replace
from pathlib import Path

import frame
import numpy as np

from megatron_rl.config import (
    AlgorithmConfig,
    BatchConfig,
    CorrectionConfig,
    DataConfig,
    GenerationConfig,
    LoraConfig,
    ModelConfig,
    OptimizerConfig,
    ParallelConfig,
    RolloutConfig,
    TrainConfig,
)
from megatron_rl.tools.plan import devices
from megatron_rl.tools.plan.devices import DEVICES
from megatron_rl.tools.plan.fit import ON_CPU, RECOMPUTE
from megatron_rl.tools.plan.memory import models_of, server_memory, trainer_memory
from megatron_rl.tools.plan.plan import Cluster, Plan
from megatron_rl.tools.plan.step_sizes import PromptTokens, ReplyTokens, plan_batch
from megatron_rl.weights.architecture import read_architecture
from megatron_rl.weights.layout import nearly_even

ROWS = Path(__file__).parent / "data" / "published_runs.csv"
MODELS = frame.ROOT / "tests" / "model_configs"
FITTED = (
    *("MATRIX_EFFICIENCY", "HALF_SIZE", "ATTENTION_EFFICIENCY", "LAYER_S", "MIXTURE_S"),
    *("ROUTING_IMBALANCE", "LINK_SHARE", "DECODE_BANDWIDTH", "DECODE_LAYER_S", "DECODE_REPLY_S", "ALL_REDUCE_S"),
    *("GROUP_S", "IPC_S", "IPC_TENSOR_S"),
)

STEP, DAMPING = 0.1, 0.3
"""Settings of `fit`, which works on the logarithms of the constants. STEP: how far a constant is moved to find a slope.
DAMPING: how strongly a round is held back from changing a constant."""


@dataclass(frozen=True)
class Row:
    """A published figure, and its prediction in the same seconds."""

    name: str
    half: str
    part: str
    is_whole: bool
    """False for a part of a step."""
    published: float
    planned: float

    @property
    def error(self) -> float:
        return self.planned / self.published - 1


def plan_of(row: dict[str, str]) -> Plan:
    """Return the plan of a published run, whose layout the config's own rules may refuse (servers over nodes)."""
    number = {name: int(row[name]) for name in row if row[name].isdigit()}
    model = MODELS / row["model"]
    parallel = ParallelConfig(
        **{axis: number[axis] for axis in ("tensor", "pipeline", "virtual_pipeline", "context", "expert")}
    )
    layers, chunks = read_architecture(model).layers, parallel.pipeline * parallel.virtual_pipeline
    cut = {"pipeline_model_parallel_layout": nearly_even(layers, chunks)} if layers % chunks else {}
    trainer = number["trainer_gpus"]
    shared = row["kind"] in ("rl", "shared GPUs") and trainer == number["gpus"]
    is_rl = row["kind"] == "rl"
    memory = ["--mem-fraction-static", row["memory_share"]] if row["memory_share"] else []
    config = TrainConfig(
        model=ModelConfig(path=str(model), dtype="bfloat16"),
        parallel=parallel,
        data=DataConfig(train="x:y"),
        lora=LoraConfig(rank=number["lora"]),
        generation=GenerationConfig(
            n_samples=number["samples"], max_new_tokens=number["max_tokens"] - number["prompt_tokens"]
        ),
        rollout=RolloutConfig(
            backend="sglang",
            publication="ipc" if shared else "group",
            max_staleness=number["staleness"],
            server_args=["--tp", row["server_gpus"], *memory],
        ),
        # A KL in the reward takes a pass of the policy before the updates; a reference takes another.
        algo=AlgorithmConfig(
            advantage="group_norm" if number["samples"] > 1 else "reinforce",
            kl_coefficient=0.01 * number["reference"],
            kl_in="reward" if number["proximal"] else "loss",
        ),
        correction=CorrectionConfig(proximal="recompute" if number["proximal"] else "behavior"),
        batch=BatchConfig(
            prompts_per_step=number["prompts"],
            updates_per_step=number["updates"],
            tokens_per_microbatch=number["microbatch"],
            share_prompts=False,
        ),
        optimizer=OptimizerConfig(
            distributed=True,
            overlap=True,
            megatron=({"grad_reduce_in_fp32": False} if is_rl else {}) | (ON_CPU if number["offload"] else {}),
        ),
        megatron=cut | (RECOMPUTE if number["recompute"] else {}),
    )
    cluster = Cluster(nodes=max(1, number["gpus"] // 8), gpus_per_node=8, device=DEVICES[row["device"]])
    longest = config.generation.max_new_tokens
    is_spread = is_rl and number["reply_tokens"] < longest
    replies = ReplyTokens.with_mean(number["reply_tokens"], longest) if is_spread else ReplyTokens((longest,))
    tokens = PromptTokens.of([number["prompt_tokens"]], replies)
    models = models_of(config)
    replicas = trainer // (parallel.tensor * parallel.pipeline * parallel.context)
    batch = plan_batch(config, tokens, replicas)
    return Plan(
        config=config,
        cluster=cluster,
        tokens=tokens,
        models=models,
        batch=batch,
        trainer=trainer_memory(models, config, batch, tokens, trainer, cluster.device),
        server=server_memory(models[0], config, batch, cluster.device),
        servers=number["servers"],
        trainer_gpus=trainer,
        shares_gpus=shared,
        is_balanced=bool(number["balanced"]),
    )


def planned(plan: Plan, part: str) -> float:
    """Return the seconds of a step or of one of its parts."""
    if part == "step":
        return plan.split.step_s
    if part == "generation":
        return plan.split.wait_s
    if part == "publication":
        return plan.publish_s
    if part == "log-probs":
        return plan.work["passes before"].seconds
    return plan.work["updates"].seconds + plan.work["optimizer"].seconds


def plans() -> list[tuple[dict[str, str], Plan]]:
    """Return each row with its run's plan, which rows of one run share."""
    with ROWS.open(newline="") as file:
        runs = itertools.groupby(csv.DictReader(file), key=lambda row: row["row"])
        return [(row, plan) for _, group in runs for row, plan in _with_plan(list(group))]


def _with_plan(run: list[dict[str, str]]) -> list[tuple[dict[str, str], Plan]]:
    plan = plan_of(run[0])
    return [(row, plan) for row in run]


def rows() -> list[Row]:
    return [
        Row(
            name=row["row"],
            half=row["half"],
            part=row["part"],
            is_whole=row["kind"] != "rl" or row["part"] == "step",
            published=float(row["seconds"]),
            planned=planned(plan, row["part"]),
        )
        for row, plan in plans()
    ]


def fit(rounds: int) -> None:
    """Set the constants to those with the least squares of logarithmic errors, by damped Gauss-Newton steps."""
    fitted = [(row, plan) for row, plan in plans() if row["half"] == "fitted"]

    def errors(logs: np.ndarray) -> np.ndarray:
        for name, value in zip(FITTED, logs, strict=True):
            setattr(devices, name, math.exp(value))
        known: dict[int, Plan] = {}  # a copy forgets what was cached with other constants
        copies = [(row, known.setdefault(id(plan), replace(plan))) for row, plan in fitted]
        return np.array([math.log(planned(plan, row["part"]) / float(row["seconds"])) for row, plan in copies])

    logs = np.log([getattr(devices, name) for name in FITTED])
    for _ in range(rounds):
        now = errors(logs)
        slopes = np.stack([(errors(logs + STEP * one) - now) / STEP for one in np.eye(len(logs))], axis=1)
        damped = np.vstack([slopes, DAMPING * np.eye(len(logs))])
        logs = logs + np.linalg.lstsq(damped, np.concatenate([-now, np.zeros(len(logs))]), rcond=None)[0]
    errors(logs)


def summary(found: list[Row]) -> str:
    errors = [abs(row.error) for row in found]
    return f"median error {statistics.median(errors):.0%}, worst {max(errors):.0%}"


def main(argv: list[str] | None = None) -> None:
    parser = frame.parser(__doc__)
    parser.add_argument("--fit", type=int, default=0, metavar="ROUNDS", help="fit the constants anew, and print them")
    args = frame.arguments(parser, argv)
    if args.fit:
        fit(args.fit)
        print(", ".join(f"{name} {getattr(devices, name):.3g}" for name in FITTED) + "\n")
    found = rows()
    for half in ("fitted", "held out", "unseen"):
        own = [row for row in found if row.half == half]
        print(f"{half + ': ' + str(len(own)) + ' figures':<40}{'published s':>12}{'planned s':>11}{'error':>8}")
        for row in own:
            print(f"{row.name:<15}{row.part:<25}{row.published:>12.1f}{row.planned:>11.1f}{row.error:>+8.0%}")
        print(f"whole steps, trainings and publications: {summary([row for row in own if row.is_whole])}")
        print(f"parts of steps: {summary([row for row in own if not row.is_whole])}\n")


if __name__ == "__main__":
    frame.run(main)
