"""Every family's largest published model, rehearsed: that a plan fits it on H100s, and what the rehearsal itself takes.

    python benchmarks/rehearse_largest.py

`GPU GiB` is the most memory of an update on the first or the last rank, and `planned` what the plan says of the longest
replies. `kernels` is the number that both ranks launch in the whole step. `cpu s` and `host GiB` are the rehearsal's
own: the CPU time of all its processes, and the most resident memory of one of them. Each is one command with
`--ranks first`.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from tempfile import TemporaryDirectory

import frame

from megatron_rl.config import TrainConfig, load_config
from megatron_rl.tools.plan.devices import DEVICES, GIB
from megatron_rl.tools.plan.fit import plans_of
from megatron_rl.tools.plan.plan import Cluster, Plan
from megatron_rl.tools.plan.plan_command import prompt_tokens, with_models

MODELS = frame.ROOT / "tests" / "model_configs"
CONFIG = frame.ROOT / "configs" / "math_llama3_70b_8nodes.yaml"
"""The config that all of them share but for the model and the layout."""
GPUS_PER_NODE = 8
DELTA = "model.delta_kernel=fla"
CUT = "megatron.pipeline_model_parallel_layout"
COLUMNS = {
    "parameters": "12",
    "nodes": "7,",
    "ranks": "7,",
    "GPU GiB": "9.1f",
    "planned": "9.1f",
    "kernels": "11,",
    "cpu s": "7.0f",
    "host GiB": "10.1f",
}
"""The columns of the table, and the format of the figure in each."""
NAMES = ("model", "parameters", "unit", *list(COLUMNS)[1:])
"""The words of a line, behind the family's name."""


@dataclass(frozen=True)
class Case:
    """A model on H100s.

    servers: their number, and the GPUs of each. settings: the layout, and what else differs from CONFIG.
    """

    model: str
    nodes: int
    servers: tuple[int, int]
    settings: str

    @property
    def overrides(self) -> list[str]:
        count, gpus = self.servers
        where = [f"model.path={MODELS / self.model}", f"rollout.server_count={count}"]
        return [*where, f"rollout.server_args=[--tp,{gpus}]", *self.settings.split()]

    @property
    def config(self) -> TrainConfig:
        return with_models(load_config(CONFIG, self.overrides), None)

    @property
    def plan(self) -> Plan:
        """The plan with these servers, and all other GPUs for the trainer."""
        cluster = Cluster(
            nodes=self.nodes, gpus_per_node=GPUS_PER_NODE, device=DEVICES["h100"], servers=self.servers[0]
        )
        count, gpus = self.servers
        return plans_of(self.config, prompt_tokens(self.config), cluster, cluster.gpus - count * gpus)[0]


def axes(tensor: int, pipeline: int, expert: int = 1) -> str:
    return f"parallel.tensor={tensor} parallel.pipeline={pipeline} parallel.expert={expert}"


CASES = {
    "deepseek_v3": Case("kimi-k2-instruct", 80, (2, 64), f"{axes(4, 8, 64)} {CUT}=Et*8|(t*8|)*5t*7|t*6L"),
    "gemma3": Case("gemma-3-27b-it", 3, (4, 2), axes(4, 2)),
    "glm4_moe": Case("glm-4.6", 24, (4, 16), axes(4, 4, 32)),
    "gpt_oss": Case("gpt-oss-120b", 10, (4, 4), axes(2, 4, 16)),
    "llama": Case("llama-3.1-405b-instruct", 36, (4, 16), axes(8, 14)),
    "minimax_m2": Case("minimax-m2", 20, (4, 8), axes(4, 2, 64)),
    "mistral": Case("mistral-large-instruct-2411", 12, (4, 8), axes(8, 4)),
    "mixtral": Case("mixtral-8x22b-instruct-v0.1", 12, (4, 8), axes(4, 4, 8)),
    # Its context is short.
    "olmo": Case("olmo-2-0325-32b-instruct", 3, (4, 2), f"{axes(4, 2)} generation.max_new_tokens=3072"),
    "phi3": Case("phi-4", 3, (8, 1), axes(2, 2)),
    "qwen2": Case("qwen1.5-110b-chat", 12, (4, 8), axes(8, 4)),
    "qwen3": Case("qwen3-32b", 3, (4, 2), axes(8, 1)),
    "qwen3_5": Case("qwen3.8-2.4t-a95b", 216, (2, 128), f"{axes(4, 23, 64)} {DELTA}"),
    "qwen3_moe": Case("qwen3-coder-480b-a35b-instruct", 40, (2, 32), f"{axes(4, 8, 32)} {CUT}=Et*7|(t*8|)*6t*7L"),
    "qwen3_next": Case("qwen3-next-80b-a3b-instruct", 5, (2, 4), f"{axes(2, 2, 16)} {DELTA}"),
    "seed_oss": Case("seed-oss-36b-instruct", 5, (4, 2), axes(4, 4)),
}
"""Family -> its largest published model."""
SHORT = "generation.max_new_tokens=32 data.max_prompt_tokens=16 reward_shaping.overlong_buffer=0"
QUICK = {"llama": Case(str(frame.TINY), 1, (1, 1), f"{axes(1, 1)} {SHORT}")}


def rehearsed(case: Case, folder: Path) -> dict[str, float | str]:
    """Rehearse a case by the command that a user types, and return its row. Raises RuntimeError with its last words."""
    words = [str(CONFIG), *case.overrides, "--nodes", str(case.nodes), "--gpus-per-node", str(GPUS_PER_NODE)]
    command = [sys.executable, "-m", "megatron_rl.cli", "rehearse", *words, "--ranks", "first", "--folder", str(folder)]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        said = process.stderr.read()
        # The usage that wait4 tells includes the command's own children, of which each rank is one.
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise RuntimeError(" ".join(said.split())[-400:])
    found = json.loads((folder / "rehearsal.json").read_text())["ranks"].values()
    plan = case.plan
    moments = plan.trainer.moments
    assert plan.fits, case.model
    return {
        "parameters": f"{plan.models[0].parameters / 1e9:,.1f} B",
        "nodes": case.nodes,
        "ranks": plan.trainer_gpus,
        "GPU GiB": max(rank["phases"]["update"]["peak_bytes"] for rank in found) / GIB,
        "planned": max(sum(parts.values()) for moment, parts in moments.items() if moment != "start") / GIB,
        "kernels": sum(phase["kernels"] for rank in found for phase in rank["phases"].values()),
        "cpu s": usage.ru_utime + usage.ru_stime,
        "host GiB": usage.ru_maxrss * 1024 / GIB,
    }


def row(case: Case) -> str:
    with TemporaryDirectory() as folder:
        try:
            found = rehearsed(case, Path(folder) / "ranks")
        except RuntimeError as error:
            return f"  {error}"
    return "".join(
        format(found[name], form if "." in form or "," in form else f">{form}") for name, form in COLUMNS.items()
    )


def main(argv: list[str] | None = None) -> None:
    parser = frame.parser(__doc__)
    parser.add_argument("--only", default="", help="families whose names match this regular expression")
    args = frame.arguments(parser, argv)
    print(f"{frame.Machine()}; H100 SXM 80 GB; megatron-core {metadata.version('megatron-core')}")
    heads = "".join(f"{name:>{form.partition('.')[0].strip(',')}}" for name, form in COLUMNS.items())
    print(f"{'':<43}{heads}")
    for family, case in (QUICK if args.quick else CASES).items():
        if re.search(args.only, family):
            print(f"{family:<13}{case.model:<30}{row(case)}", flush=True)


if __name__ == "__main__":
    frame.run(main)
