"""docs/algorithms.md against the catalogue, the config and its own example."""

import dataclasses
import re
import sys
from pathlib import Path

import pytest
import torch
import yaml
from tensordict import TensorDict

from megatron_rl import cli
from megatron_rl.algo.actor import PolicyActor
from megatron_rl.algo.catalogue import rows
from megatron_rl.algo.loss import PolicyLoss
from megatron_rl.config import SECTIONS, AlgorithmConfig, RewardShapingConfig
from tests.unit.ragged import parts_of, ragged_batch

PAGE = (Path(__file__).parents[2] / "docs" / "algorithms.md").read_text()


@pytest.mark.parametrize("row", rows(), ids=lambda row: f"{row.key}: {row.name}")
def test_every_entry_has_its_line(row):
    options = ", ".join(f"`{option}`" for option in row.options) or "-"
    formula = row.formula.replace("`", "")
    line = f"| {row.name} | `{formula}` | {row.source} | {options} | `{row.key}: {row.name}`; {row.runs} |"
    assert line in PAGE.splitlines()


def test_every_line_of_the_two_tables_is_an_entry():
    named = re.findall(r"^\|.*\| `(algo\.(?:advantage|loss)): (\S+)`; .*\|$", PAGE, re.MULTILINE)
    assert named == [(row.key, row.name) for row in rows()]


def test_every_key_on_the_page_is_one_of_the_config_and_every_key_is_on_the_page():
    found = {pair for pair in re.findall(r"`(\w+)\.(\w+)(?:: [^`]*)?`", PAGE) if pair[0] in SECTIONS}
    for section, key in found:
        assert key in {field.name for field in dataclasses.fields(SECTIONS[section])}, f"{section}.{key}"
    for section, config in (("algo", AlgorithmConfig), ("reward_shaping", RewardShapingConfig)):
        missing = {field.name for field in dataclasses.fields(config)} - {key for name, key in found if name == section}
        assert missing <= {"clip_low", "overlong_penalty"}, missing


def test_the_pages_own_algorithms_run(tmp_path, monkeypatch):
    (code,), (config,) = (re.findall(rf"```{kind}\n(.*?)```", PAGE, re.DOTALL) for kind in ("python", "yaml"))
    (tmp_path / "mine.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "mine", raising=False)
    options, batch = AlgorithmConfig(**yaml.safe_load(config)["algo"]), ragged_batch()
    PolicyActor(None, options, temperature=1.0).compute_advantages(batch)
    rewards, group = batch["rewards"], batch["group"]
    best = torch.stack([(r >= rewards[group == g].max() - 0.1).float() for r, g in zip(rewards, group, strict=True)])
    centered = best - torch.stack([best[group == g].mean() for g in group])
    for part, wanted in zip(parts_of(batch), centered, strict=True):
        assert batch["advantages"][part].tolist() == pytest.approx(
            [float(wanted) * bool(m) for m in batch["loss_mask"][part]]
        )
    columns = {"labels": torch.ones(2).long(), "advantages": torch.tensor([1.0, -2.0]), "logprobs": torch.zeros(2)}
    data = TensorDict(columns | {"proximal_logprobs": torch.zeros(2)})
    loss, _ = PolicyLoss(options)(torch.tensor([0.2, -0.4]), torch.zeros(2), data)
    torch.testing.assert_close(loss, -torch.tensor(0.1).exp() + 2 * torch.tensor(-0.2).exp())


def test_the_command_lists_every_entry(capsys):
    cli.main(["algorithms"])
    text = capsys.readouterr().out
    assert all(f"  {row.name} " in text and row.formula in text and row.source in text for row in rows())
