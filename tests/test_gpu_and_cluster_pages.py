"""The commands and settings of docs/gpu.md and docs/cluster.md exist. None of them is run here."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
import yaml

from megatron_rl.config import load_config
from megatron_rl.tools.embedded_server import serve_command

ROOT = Path(__file__).parents[1]
PAGES = {name: (ROOT / "docs" / f"{name}.md").read_text(encoding="utf-8") for name in ("gpu", "cluster")}


def blocks(language: str) -> list[str]:
    return [body for page in PAGES.values() for body in re.findall(rf"```{language}\n(.*?)```", page, re.DOTALL)]


def commands() -> list[list[str]]:
    """Return the words of each command of the shell blocks and of the containers of the Kubernetes blocks."""
    shell = [line for body in blocks("bash") for line in body.replace("\\\n", " ").splitlines()]
    pods = [arg for body in blocks("yaml") for document in yaml.safe_load_all(body) for arg in arguments_of(document)]
    return [shlex.split(line, comments=True) for line in (*shell, *pods) if line.strip() and line[0] != "#"]


def arguments_of(document: dict) -> list[str]:
    pod = document["spec"].get("template", {}).get("spec", {})
    return [text for container in pod.get("containers", []) for text in container["args"]]


CONFIGURED = [words for words in commands() if any(word.startswith("configs/") for word in words)]


@pytest.mark.parametrize("words", CONFIGURED, ids=" ".join)
def test_a_command_with_a_config_names_options_that_are_allowed(words):
    config = next(place for place, word in enumerate(words) if word.startswith("configs/"))
    load_config(ROOT / words[config], [word for word in words[config + 1 :] if re.match(r"\w+\.\w+=", word)])


def test_both_pages_have_such_commands_and_the_pods_start_what_there_is():
    assert len(CONFIGURED) >= 8
    served = [words for words in commands() if "serve" in words]
    assert len(served) == 2
    for words in served:
        arguments, rest = serve_command.parser().parse_known_args(words[words.index("serve") + 1 :])
        assert not rest and arguments.backend == "sglang" and arguments.run == "qwen"
    (pod,) = [words for words in commands() if "$JOB_COMPLETION_INDEX" in words]
    given = [word for word in pod if re.match(r"\w+\.\w+=", word)]
    assert load_config(ROOT / "configs" / "gsm8k_qwen3_4b.yaml", given).rollout.server_count == 4


def test_the_extras_are_those_of_setup():
    setup = (ROOT / "setup.py").read_text(encoding="utf-8")
    declared = set(re.findall(r'^    "(\w+)": \[', setup, re.MULTILINE))
    (table,) = re.findall(r"^\| extra \|.*?\n\n", PAGES["gpu"], re.MULTILINE | re.DOTALL)
    assert set(re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE)) == declared
    named = re.findall(r"'\.\[([\w,]+)\]'", PAGES["gpu"] + (ROOT / "docker" / "Dockerfile").read_text())
    assert {extra for some in named for extra in some.split(",")} <= declared


def test_the_scripts_know_what_the_page_says_of_them():
    script = (ROOT / "scripts" / "train_grpo.sh").read_text()
    launcher = (ROOT / "megatron_rl" / "launch" / "slurm.py").read_text()
    for name in ("CONTAINER", "CONTAINER_RUNTIME", "CONTAINER_MOUNTS", "PYTHON"):
        assert f"{name}:=" in script and name in PAGES["cluster"]
    for option in ("--servers", "--ranks", "--sweep"):
        assert f'"{option}"' in launcher and option in PAGES["cluster"]


def test_recomputation_is_what_the_planner_proposes():
    from megatron_rl.tools.plan.fit import RECOMPUTE

    line = " ".join(f"megatron.{key}={value}" for key, value in RECOMPUTE.items())
    assert f"`{line}`" in PAGES["cluster"]


def test_what_the_table_shows_stands_in_the_code():
    table = PAGES["cluster"].split("## Common problems")[1]
    shown = re.findall(r"`([^`]+)`", " ".join(row.split("|")[2] for row in table.splitlines() if row.startswith("| ")))
    code = "\n".join(path.read_text(encoding="utf-8") for path in (ROOT / "megatron_rl").rglob("*.py"))
    code = re.sub(r'"\s*\n\s*f?"', "", code)
    wanted = [text for text in shown if text not in ("Too many open files", "belongs to a run in this folder")]
    for text in wanted:
        pieces = [piece.strip() for piece in text.split("...")]
        assert all(piece.replace("run.folder/", "") in code for piece in pieces), text
