"""docs/from_other_trainers.md: its names of ours are options, messages know its names of others, and its code runs."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml

from megatron_rl.config import load_config
from megatron_rl.config.other_names import OTHERS, ours
from megatron_rl.tools.option_pages import described_options

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "from_other_trainers.md").read_text(encoding="utf-8")
KEYS = {option.dotted for option in described_options()}
ROWS = [line.strip("| ").split(" | ") for line in PAGE.splitlines() if line.startswith("| `")]
BLOCKS = {name: body for name, body in re.findall(r"```python\n# (\w+)\.py\n(.*?)```", PAGE, re.DOTALL)}


def in_code(cell: str) -> list[str]:
    return re.findall(r"`([^`]+)`", cell)


def test_every_key_of_ours_beside_a_name_of_others_is_an_option():
    found = {key for row in ROWS for key in in_code(row[1]) if re.fullmatch(r"[a-z_]+\.[a-z_]+", key)}
    found -= {"actor.save"}
    assert len(ROWS) > 150 and len(found) > 60 and found <= KEYS, found - KEYS


def test_names_in_messages_are_those_of_the_page():
    assert set(OTHERS) <= KEYS
    known = {}
    for theirs, here, *_ in ROWS:
        for name in in_code(theirs):
            if key := ours(name.removeprefix("--")):
                known[name] = key
                assert key in in_code(here), f"{name}: {key} in messages, and {here} on the page"
    assert {name for names in OTHERS.values() for name in names.split()} - {
        ending
        for name in known
        for parts in [name.removeprefix("--").replace("-", "_").split(".")]
        for ending in (".".join(parts[first:]) for first in range(len(parts)))
    } == {"model_name_or_path", "gae_lambda"}, "TRL's scripts and AReaL's critic, which the page leaves out"


@pytest.mark.parametrize(
    "theirs, words",
    [
        ("generation.num_generations", "generation.num_generations = 7: unknown key; here it is generation.n_samples "),
        ("num_generations", "num_generations = 7: unknown key; here it is generation.n_samples "),
        (
            "actor_rollout_ref.rollout.n",
            "actor_rollout_ref.rollout.n = 7: unknown key; here it is generation.n_samples",
        ),
        ("rollout_batch_size", "here it is batch.prompts_per_step "),
        ("actor.eps_clip_higher", "here it is algo.clip_high "),
        ("algorithm.kl_ctrl.kl_coef", "here it is algo.kl_coefficient "),
        ("data.train_batch_size", "here it is batch.prompts_per_step "),
        ("algo.beta", "here it is algo.kl_coefficient "),
        ("generation.n_sample", "did you mean generation.n_samples?"),
        ("optimizer.epsilon", "did you mean optimizer.eps?"),
    ],
)
def test_another_trainers_name_for_a_key_is_answered_with_ours(theirs, words, tmp_path):
    config = tmp_path / "config.yaml"
    config.write_text(yaml.safe_dump({"model": {"path": "some"}, "data": {"train": "a.jsonl"}}))
    with pytest.raises(ValueError, match=re.escape(words)):
        load_config(config, [f"{theirs}=7"])


def test_the_lines_of_the_readme_are_a_run_that_is_taken(monkeypatch):
    import megatron_rl
    from megatron_rl.python_run import config_on

    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    (block,) = [it for it in re.findall(r"```python\n(.*?)```", readme, re.DOTALL) if "rl.train_on" in it]
    monkeypatch.setattr(megatron_rl, "train_on", config_on, raising=False)
    names = {"__name__": "__main__"}
    exec(compile(block, "README.md", "exec"), names)
    config, given = names["run"]
    assert config.generation.n_samples == 8 and config.run.steps == 20 and config.rollout.reward.endswith(":right")
    assert config.run.import_from == given.modules and sum(bool(line.strip()) for line in block.splitlines()) <= 10


def quickstart(model, folder):
    import os

    os.chdir(folder)
    block = BLOCKS["quickstart"].replace("models/smollm2-135m-instruct", str(model))
    block = block.replace('"n_samples": 8', '"n_samples": 2').replace(
        'run={"steps": 20})', 'run={"steps": 1}, batch={"prompts_per_step": 2}, rollout={"backend": "embedded"})'
    )
    names = {"__name__": "__main__"}
    exec(compile(block, "quickstart.py", "exec"), names)
    return names["run"].metrics, str(names["run"].report().page)


@pytest.mark.slow
def test_the_quickstart_is_ten_lines_and_runs(tmp_path, monkeypatch):
    pytest.importorskip("megatron", reason="megatron-core is not installed")
    from tests.kit.programs import fork_programs
    from tests.kit.ranks import run_ranks
    from tests.kit.served_models import make_tiny_model
    from tests.kit.waiting import LATE_S

    assert sum(bool(line.strip()) for line in BLOCKS["quickstart"].splitlines()) <= 10
    model = make_tiny_model(tmp_path / "model")
    fork_programs(monkeypatch)
    metrics, page = run_ranks(1, quickstart, model, tmp_path, timeout_s=LATE_S)[0]
    assert len(metrics) == 1 and page == "runs/default/report.html" and (tmp_path / page).is_file()


def areal(model, folder):
    import torch
    from transformers import AutoTokenizer

    from megatron_rl.config import EngineConfig, GenerationConfig, ModelConfig, OptimizerConfig, RolloutConfig
    from megatron_rl.servers.supervisor import start_servers

    tokenizer = AutoTokenizer.from_pretrained(model)
    tokenizer.chat_template = "{{ messages[0]['content'] }}"
    rows = [{"messages": [{"role": "user", "content": f"{n}+1="}], "id": str(n)} for n in range(4)]
    engine = EngineConfig(model=ModelConfig(path=str(model)), optimizer=OptimizerConfig(lr=1e-3))
    with start_servers(model, folder, RolloutConfig(backend="embedded")) as served:
        names = {
            "config": SimpleNamespace(rollout=served, actor=engine, gconfig=GenerationConfig(max_new_tokens=3)),
            "rows": rows,
            "reward": lambda completion_ids, **_: sum(completion_ids) % 7 / 7,
            "tokenizer": tokenizer,
            "steps": 2,
        }
        for block in ("remax", "actor", "loop"):
            exec(compile(BLOCKS[block], f"{block}.py", "exec"), names)
        version = names["rollout"].get_version()
        names["rollout"].destroy()
    batch, stats = names["batch"], names["stats"]
    assert torch.isfinite(torch.tensor(stats.loss)) and len(set(batch["rewards"].tolist())) > 1
    return len(batch), stats.applied, version


@pytest.mark.slow
def test_remax_in_the_style_of_areal_runs_by_its_own_loop(tmp_path, monkeypatch):
    pytest.importorskip("megatron", reason="megatron-core is not installed")
    from tests.kit.programs import fork_programs
    from tests.kit.ranks import run_ranks
    from tests.kit.served_models import make_tiny_model
    from tests.kit.waiting import LATE_S

    model = make_tiny_model(tmp_path / "model")
    fork_programs(monkeypatch)
    found = run_ranks(1, areal, model, tmp_path / "servers", timeout_s=LATE_S)[0]
    assert found == (4, True, 2)
