"""Every config of a cluster fits its nodes, as planned with its model's published config.json, and a table says so.

    python tests/unit/tools/test_cluster_configs.py --write

writes the table of docs/cluster.md.
"""

from __future__ import annotations

import functools
import re
import sys
from pathlib import Path

import pytest

from megatron_rl.cli import main
from megatron_rl.config import load_config
from megatron_rl.tools.plan.devices import DEVICES, GIB
from megatron_rl.tools.plan.fit import plans_of, refusal
from megatron_rl.tools.plan.plan import Cluster, Plan
from megatron_rl.tools.plan.plan_command import prompt_tokens, with_models
from megatron_rl.weights.architecture import read_architecture
from megatron_rl.weights.layout import parameters

ROOT = Path(__file__).resolve().parents[3]
MODELS = ROOT / "tests" / "model_configs"
PAGE = ROOT / "docs" / "cluster.md"
TABLE = re.compile(r"(?<=<!-- configs -->\n).*?(?=<!-- end -->)", re.DOTALL)
LARGE = [
    path for path in sorted((ROOT / "configs").glob("*.yaml")) if re.search(r"qwen3|llama3|deepseek|glm", path.name)
]
PARAMETERS = {
    "qwen3-4b": 4_022_468_096,
    "qwen3-30b-a3b": 30_532_122_624,
    "llama-3.3-70b-instruct": 70_553_706_496,
    "qwen3-235b-a22b": 235_093_634_560,
    "glm-4.5-air": 106_852_245_504,
    "deepseek-v3": 671_026_404_352,
}
"""As their model cards have them; of DeepSeek-V3 and GLM-4.5-Air without their modules for multi-token prediction."""


def nodes_of(path: Path) -> int:
    found = re.search(r"_(\d+)nodes?$", path.stem)
    return int(found.group(1)) if found else 1


@functools.cache
def planned(path: Path) -> Plan:
    """The plan with the config's servers, and all other GPUs of its nodes for the trainer."""
    config = with_models(load_config(path), MODELS)
    servers = config.rollout.server_count
    cluster = Cluster(nodes=nodes_of(path), gpus_per_node=8, device=DEVICES["h100"], servers=servers)
    plans = plans_of(config, prompt_tokens(config), cluster)
    return next(plan for plan in plans if plan.trainer_gpus == cluster.gpus - servers * plan.server.gpus)


@pytest.mark.parametrize("path", LARGE, ids=lambda path: path.stem)
def test_every_config_of_a_cluster_fits_all_of_its_nodes(path):
    plan = planned(path)
    assert plan.fits, refusal(plan, None)
    assert plan.config.batch.tokens_per_microbatch >= plan.batch.longest_sequence
    assert plan.servers * plan.server.replies >= plan.config.generation.n_samples


def test_the_command_needs_no_more_than_the_config_and_a_folder_of_models(capsys):
    main(["plan", str(LARGE[0]), "--models", str(MODELS), "--nodes", str(nodes_of(LARGE[0]))])
    assert "at the fullest" in capsys.readouterr().out


@pytest.mark.parametrize("name", PARAMETERS)
def test_published_models_have_as_many_parameters_as_their_cards_say(name):
    assert parameters(read_architecture(MODELS / name)) == PARAMETERS[name]


def test_the_table_is_what_the_plans_say():
    found = TABLE.search(PAGE.read_text(encoding="utf-8"))
    assert found and found.group() == table(), "python tests/unit/tools/test_cluster_configs.py --write"


def table() -> str:
    head = ("config", "80 GB GPUs", "train", "serve", "trainer GPU", "full replies")
    rows = [" | ".join(head), " | ".join(["---"] * len(head))]
    for path in LARGE:
        plan = planned(path)
        layout, server = plan.config.parallel, plan.server
        axes = {"tensor": layout.tensor, "pipeline": layout.pipeline, "data": plan.batch.replicas}
        train = " x ".join(f"{name} {size}" for name, size in axes.items() if size > 1)
        train += f", expert {layout.expert}" * (layout.expert > 1)
        rows.append(
            f"[{path.stem}](../configs/{path.name}) | {nodes_of(path)} x 8 | {plan.trainer_gpus}: {train} | "
            f"{plan.servers} of {server.gpus} | {plan.trainer.peak / GIB:.0f} GiB | {plan.servers * server.replies:,}"
        )
    return "".join(f"| {row} |\n" for row in rows)


if __name__ == "__main__" and sys.argv[1:] == ["--write"]:
    PAGE.write_text(TABLE.sub(lambda _: table(), PAGE.read_text(encoding="utf-8")), encoding="utf-8")
