"""The seconds of a publication on a cluster with 400 Gb/s links, by arithmetic: predicted, and measured nowhere.

    python benchmarks/publication_times.py

Bytes are those of the rehearsed layouts: of each pipeline stage as its head has it, of what comes to that head within
its node and from others, as `megatron-rl plan` has them (tests/unit/tools/test_plan_rehearsed.py holds these to what a
rehearsed rank sends), and the buckets. A head sends over its GPU's one link. While a bucket is on its way the next is
gathered, so the slower of the two counts, and the first bucket's gather. To these come a request for each round, and
the reading of all weights for their checksums at either end. `one sender` has the other stages' weights come to rank 0,
over the same link's other direction. The servers' nodes are taken to have a free link for each sender; where all
broadcasts enter a node by one link, all bytes over one link are the time, which is the last column.
"""

from __future__ import annotations

import frame

from megatron_rl.config import TrainConfig, load_config
from megatron_rl.tools.plan.devices import CLUSTER_LINK, DEVICES
from megatron_rl.tools.plan.memory import models_of
from megatron_rl.tools.plan.plan_command import with_models
from megatron_rl.tools.plan.traffic import RankTraffic
from megatron_rl.tools.rehearsal.rehearsal import world_of
from megatron_rl.weights.layout import parameters_of_stage

MODELS = frame.ROOT / "tests" / "model_configs"
BARS_S = {"math_qwen3_235b_a22b_16nodes": 6.0, "math_deepseek_v3_64nodes": 20.0}
"""The longest that these publications are to take."""
REQUEST_S = 0.01
"""Of a round: an HTTP request to every server and its answer. Real SGLang on a CPU takes 2 ms for a bucket of one small
tensor, and 3.4 ms for a round of two senders."""
LOAD_S = 60e-6
"""Of a tensor, in a server's Python: SGLang looks each name up and copies a view. Real SGLang on a CPU takes 61
microseconds for each of 789 small tensors of a mixture of 128 experts."""
READ = 0.8
"""Of a GPU's memory bandwidth, that the kernels of checksums are predicted to reach at least (csrc/README.md)."""


def parts_of(config: TrainConfig, nodes: int) -> dict[str, float]:
    """Return what the seconds of a publication are made of, and bytes in GB."""
    model = models_of(config)[0]
    layout, world = config.parallel, world_of(config, nodes=nodes, gpus_per_node=8)
    ranks_of_stage = world.ranks // layout.pipeline
    sent, gathered = [], []
    for stage in range(layout.pipeline):
        shares = parameters_of_stage(model.arch, layout, stage, model.megatron)
        split, experts = layout.tensor, layout.expert * layout.expert_tensor
        sent.append(model.itemsize * (split * shares.dense + experts * shares.expert))
        traffic = RankTraffic(model, stage * ranks_of_stage, world.ranks, 8).of_publication()
        gathered.append(sum(part.nbytes / DEVICES["h100"].links[part.link] for part in traffic))
    rounds = -(-max(sent) // config.rollout.bucket_bytes)
    tensors = model.arch.layers * (10 + 3 * (model.arch.mixture.experts if model.arch.mixture else 1))
    bandwidth = READ * DEVICES["h100"].bandwidth
    return {
        "GB": sum(sent) / 1e9,
        "senders": layout.pipeline,
        "largest stage GB": max(sent) / 1e9,
        "gather s": max(gathered),
        "send s": max(sent) / CLUSTER_LINK,
        "rounds": rounds,
        "requests s": rounds * REQUEST_S,
        "load s": tensors * LOAD_S,
        "checksums s": max(sent) / bandwidth + sum(sent) / config.rollout.gpus_per_server / bandwidth,
        "first gather s": max(gathered) / rounds,
        "one link s": sum(sent) / CLUSTER_LINK,
    }


def seconds_of(parts: dict[str, float]) -> float:
    wire = max(parts["gather s"], parts["send s"])
    return wire + sum(parts[name] for name in ("first gather s", "requests s", "load s", "checksums s"))


def main(argv: list[str] | None = None) -> None:
    frame.arguments(frame.parser(__doc__), argv)
    print("predicted, not measured: bf16, one 400 Gb/s link a GPU (50 GB/s), NVLink 450 GB/s, H100 SXM\n")
    for name, bar in BARS_S.items():
        path = frame.ROOT / "configs" / f"{name}.yaml"
        config = with_models(load_config(path), MODELS)
        parts = parts_of(config, int(name.rpartition("_")[2].removesuffix("nodes")))
        print(name)
        print("  " + ", ".join(f"{key} {value:,.2f}" for key, value in parts.items()))
        total, alone = seconds_of(parts), seconds_of(parts | {"send s": parts["one link s"]})
        print(
            f"  by stage: max({parts['gather s']:.2f} gathering, {parts['send s']:.2f} sending) + "
            f"{parts['first gather s']:.2f} + {parts['requests s']:.2f} + {parts['load s']:.2f} + "
            f"{parts['checksums s']:.2f} = {total:.1f} s; the bar is {bar:g} s; one sender: {alone:.1f} s\n"
        )


if __name__ == "__main__":
    frame.run(main)
