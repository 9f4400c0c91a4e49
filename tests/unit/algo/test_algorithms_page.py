"""docs/algorithms.md against the catalogue, the config and its own example."""

import dataclasses
import inspect
import re
import sys
from pathlib import Path

import pytest
import torch
import yaml
from tensordict import TensorDict

import megatron_rl
from megatron_rl import cli, rewards, workflows
from megatron_rl.algo.actor import PolicyActor
from megatron_rl.algo.catalogue import rows
from megatron_rl.algo.loss import PolicyLoss
from megatron_rl.config import AlgorithmConfig, PreferenceConfig, RewardShapingConfig, SupervisedConfig, load_config
from megatron_rl.config.import_path import resolve
from megatron_rl.config.loading import SECTIONS
from megatron_rl.rollout.factory import configured_rewards
from megatron_rl.servers.request_rules import sampling_params
from megatron_rl.tools.embedded_server.sampling import SamplingParams
from megatron_rl.workflows.environments import SelfCorrection
from megatron_rl.workflows.trail import Trail
from tests.unit.ragged import parts_of, ragged_batch

PAGE = (Path(__file__).parents[3] / "docs" / "algorithms.md").read_text()


@pytest.mark.parametrize("row", rows(), ids=lambda row: f"{row.key}: {row.name}")
def test_every_formula_has_its_line(row):
    kind = {"algo.advantage": "estimator", "algo.loss": "loss", "preference.loss": "pairs"}[row.key]
    options = ", ".join(f"`{option}`" for option in row.options) or "-"
    formula = row.formula.replace("`", "")
    line = f"| {kind} | {row.name} | `{formula}` | {row.source} | {options} | `{row.key}: {row.name}`; {row.runs} |"
    assert line in PAGE.splitlines()


def test_every_line_of_a_formula_is_an_entry():
    keys = r"algo\.(?:advantage|loss)|preference\.loss"
    named = re.findall(rf"^\|.*\| `({keys}): (\S+)`; .*\|$", PAGE, re.MULTILINE)
    assert named == [(row.key, row.name) for row in rows()]


def test_the_catalogue_is_one_table_whose_lines_are_of_six_columns():
    lines = [line for line in PAGE.partition("## Sampling")[0].splitlines() if line.startswith("|")]
    assert "\n".join(lines) in PAGE and {line.count("|") for line in lines} == {7}


COUNT = Path(__file__).parents[3] / "configs" / "count_grpo.yaml"
PLACES = {
    "embedded server": [],
    "SGLang": [
        *("rollout.backend=sglang", "rollout.server_args=[--disable-overlap-schedule]", "rollout.interruption=abort"),
    ],
    "behind `rollout.router`": ["rollout.servers=[http://h:1]", "rollout.router=http://h:2"],
    "with a teacher": ["teacher.path=t"],
}
CHANGES = {
    **dict.fromkeys(("repetition_penalty", "frequency_penalty", "presence_penalty"), 1.1),
    "logit_bias": {5: -1.0},
}
COMPUTED = {"supports": "computed"}
SAMPLED = {
    "`temperature`": {"temperature": 0.7},
    "`top_k` from 2 to 256": {"top_k": 20},
    **{
        f"`top_k` and `{name}`": {"top_k": 20, name: value}
        for name, value in (("top_p", 0.9), ("min_p", 0.1), ("min_new_tokens", 2))
    },
    **{f"`top_k` and `{name}`": {"top_k": 20, name: value} for name, value in CHANGES.items()},
    "`top_k`, `repetition_penalty` and another penalty": {
        **{"top_k": 20, "repetition_penalty": 1.1, "frequency_penalty": 1.1},
    },
    "`top_k` and a reply's grammar": {"top_k": 20, "grammar": {"regex": "a+"}},
    "`top_p`": {"top_p": 0.9},
    "`min_p`": {"min_p": 0.1},
    "`min_new_tokens`": {"min_new_tokens": 2},
    "a reply's grammar": {"grammar": {"regex": "a+"}},
    "`greedy`": {"greedy": True},
    **{f"`{name}`": {name: value} for name, value in CHANGES.items()},
    "`repetition_penalty` and another penalty": {"repetition_penalty": 1.1, "frequency_penalty": 1.1},
    "`supports: computed` and `top_k`": {"top_k": 20, **COMPUTED},
    "`supports: computed` and `top_p`": {"top_p": 0.9, **COMPUTED},
    "`supports: computed` and `min_p`": {"min_p": 0.1, **COMPUTED},
    "`supports: computed` and all three": {"top_k": 20, "top_p": 0.9, "min_p": 0.1, **COMPUTED},
    "`supports: computed`, `top_p` and `min_new_tokens`": {"top_p": 0.9, "min_new_tokens": 2, **COMPUTED},
    "`supports: computed`, `top_p` and a penalty": {"top_p": 0.9, "presence_penalty": 1.1, **COMPUTED},
}


def what_becomes_of(options, place):
    """Return whether a run refuses sampling options, replays or computes what they leave, or is exact without."""
    options = dict(options)
    grammar = options.pop("grammar", None)
    try:
        config = load_config(COUNT, [*PLACES[place], *(f"generation.{key}={value}" for key, value in options.items())])
        if place == "embedded server":
            sent = sampling_params(config.generation, generated=0, seed=1) | (grammar or {})
            SamplingParams.parse(sent, vocab_size=100)
    except (ValueError, TypeError):
        return "refused"
    if config.generation.computed_size:
        return "computed"
    if config.generation.changed_size:
        return "replayed"
    if not config.generation.support_size:
        return "exact" if grammar is None else "not trained"
    return "replayed"


def test_the_table_of_sampling_says_what_the_config_and_the_servers_do():
    lines = [f"| option | {' | '.join(PLACES)} |", "|---|---|---|---|---|"]
    for name, options in SAMPLED.items():
        lines.append(f"| {name} | {' | '.join(what_becomes_of(options, place) for place in PLACES)} |")
    assert "\n".join(lines) in PAGE, "the table should be:\n" + "\n".join(lines)


def named(kind):
    return re.findall(rf"^\| {kind} \| `([^`]+)` \|", PAGE, re.MULTILINE)


def test_every_workflow_and_no_other_has_its_line_with_its_own_arguments():
    lines = dict(re.findall(r"^\| workflow \| `(\w+)` \| .* \| - \| (.*) \| `rollout.workflow`.*$", PAGE, re.MULTILINE))
    assert sorted(lines) == sorted([*workflows.__all__, "AgentWorkflow"])
    for name, options in lines.items():
        parameters = inspect.signature(getattr(megatron_rl, name)).parameters
        own = [key for key in parameters if key not in ("reward_fn", "gconfig", "tokenizer", "reward_timeout_s")]
        assert re.findall(r"`(\w+)`", options) == own, name


def test_every_reward_tool_and_recipe_is_where_its_line_says():
    paths = [f"{rewards.__name__}.{name}" if ":" in name else f"{rewards.__name__}:{name}" for name in named("reward")]
    assert len(paths) >= 14 and all(callable(resolve(path, key="reward", kind="reward")) for path in paths)
    listed = {path.partition(":")[2] for path in paths}
    assert {name for name, found in vars(rewards).items() if takes_a_reply(found)} <= listed
    assert len(named("tool")) == 3 and all(callable(resolve(path, key="tool", kind="tool")) for path in named("tool"))
    worlds = [resolve(path, key="environment", kind="environment") for path in named("environment")]
    assert worlds == [SelfCorrection, Trail]
    assert len(named("recipe")) == 5 and all(
        callable(resolve(path, key="recipe", kind="data")) for path in named("recipe")
    )


def takes_a_reply(found):
    return inspect.isfunction(found) and "completion_ids" in inspect.signature(found).parameters


def test_every_key_on_the_page_is_one_of_the_config_and_every_key_is_on_the_page():
    found = {pair for pair in re.findall(r"`(\w+)\.(\w+)(?:: [^`]*)?`", PAGE) if pair[0] in SECTIONS}
    for section, key in found:
        assert key in {field.name for field in dataclasses.fields(SECTIONS[section])}, f"{section}.{key}"
    whole = {"algo": AlgorithmConfig, "reward_shaping": RewardShapingConfig, "preference": PreferenceConfig}
    whole |= {"supervised": SupervisedConfig}
    for section, config in whole.items():
        missing = {field.name for field in dataclasses.fields(config)} - {key for name, key in found if name == section}
        assert missing <= {"clip_low", "overlong_penalty"}, missing


def test_the_pages_own_algorithms_run(tmp_path, monkeypatch):
    code, config = (
        next(block for block in re.findall(rf"```{kind}\n(.*?)```", PAGE, re.DOTALL) if word in block)
        for kind, word in (("python", "@estimator"), ("yaml", "mine:best_of_group"))
    )
    (tmp_path / "mine.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "mine", raising=False)
    options, batch = AlgorithmConfig(**yaml.safe_load(config)["algo"]), ragged_batch()
    PolicyActor(None, options, temperature=1.0).compute_advantages(batch)
    given, group = batch["rewards"], batch["group"]
    best = torch.stack([(r >= given[group == g].max() - 0.1).float() for r, g in zip(given, group, strict=True)])
    centered = best - torch.stack([best[group == g].mean() for g in group])
    for part, wanted in zip(parts_of(batch), centered, strict=True):
        assert batch["advantages"][part].tolist() == pytest.approx(
            [float(wanted) * bool(m) for m in batch["loss_mask"][part]]
        )
    columns = {"labels": torch.ones(2).long(), "advantages": torch.tensor([1.0, -2.0]), "logprobs": torch.zeros(2)}
    data = TensorDict(columns | {"proximal_logprobs": torch.zeros(2)})
    loss, _ = PolicyLoss(options)(torch.tensor([0.2, -0.4]), torch.zeros(2), data)
    torch.testing.assert_close(loss, -torch.tensor(0.1).exp() + 2 * torch.tensor(-0.2).exp())


def test_the_example_of_a_recipe_rewards_the_format_beside_the_answer(tmp_path):
    (text,) = [block for block in re.findall(r"```yaml\n(.*?)```", PAGE, re.DOTALL) if "rewards:matches" in block]
    (tmp_path / "config.yaml").write_text(f"model: {{path: some}}\ndata: {{train: a.jsonl}}\n{text}")
    config = load_config(tmp_path / "config.yaml", ["generation.n_samples=2"])
    right, form, length = configured_rewards(config)
    assert (form.name, form.weight) == ("matches", 0.1)

    def reward(reply):
        parts = (part.weight * part.function("", reply, [], [0] * 1024, answer="4") for part in (right, form, length))
        return pytest.approx(sum(parts))

    # Half of the 2048 tokens that cost 0.05.
    assert reward("<think>2 + 2</think><answer>4</answer>") == 1.1 - 0.025
    assert reward("<think>2 + 2</think><answer>5</answer>") == 0.1 - 0.025, "right or wrong"
    assert reward("<answer>4</answer>") == 1.0 - 0.025 and reward("4") == -0.025


def test_the_command_lists_every_entry(capsys):
    cli.main(["algorithms"])
    text = capsys.readouterr().out
    assert all(f"  {row.name} " in text and row.formula in text and row.source in text for row in rows())
