"""Rows and functions that a Python program gives a run, and the config that its arguments make."""

import functools
import importlib
import threading
from pathlib import Path

import numpy as np
import pytest

from megatron_rl.config.import_path import resolve
from megatron_rl.data.prompts import load_prompts
from megatron_rl.python_run import config_on
from megatron_rl.rewards import exact_match, length
from tests.unit import trying_rewards

ROWS = [{"prompt": "2+2=", "answer": "4"}]
SAMPLING = {"n_samples": 2}


class Scaled:
    def __init__(self, factor):
        self.factor = factor

    def __call__(self, completions, **_):
        return self.factor * len(completions)


def made(tmp_path, reward, rows=ROWS, **options):
    options = {"generation": SAMPLING, "run": {"folder": str(tmp_path / "run")}} | options
    config, given = config_on(rows, "models/some", reward, **options)
    given.write()
    importlib.invalidate_caches()
    return config


def rewards_of(config):
    paths = [part["reward"] for part in config.rollout.recipe] or [config.rollout.reward]
    return [resolve(path, key="rollout.reward", kind="reward", import_from=config.run.import_from) for path in paths]


FACTOR = 3


def nested(factor):
    def price(completions, **_):
        return -factor * FACTOR * len(completions)

    return price


@pytest.mark.parametrize(
    "reward, value",
    [
        (lambda completions, **_: len(completions) / 8, 0.5),
        (nested(2), -24.0),
        (functools.partial(nested(1)), -12.0),
        (Scaled(2), 8.0),
        (functools.partial(length, most=8), 0.25),
    ],
    ids=["lambda", "nested", "partial", "object", "partial_of_ours"],
)
def test_a_function_that_no_other_process_could_import_goes_by_value(reward, value, tmp_path):
    config = made(tmp_path, reward)
    assert config.rollout.reward.startswith("function_")
    (found,) = rewards_of(config)
    arguments = {"prompt": "", "completions": "abcd", "prompt_ids": [], "completion_ids": [1, 2]}
    assert found is not reward and found(**arguments) == value


def test_functions_of_modules_are_named_by_their_path(tmp_path):
    config = made(tmp_path, trying_rewards.half)
    assert config.rollout.reward == "tests.unit.trying_rewards:half"
    assert config.run.import_from == ["tests.unit.trying_rewards"]
    config = made(tmp_path, exact_match)
    assert config.rollout.reward == "megatron_rl.rewards:exact_match" and config.run.import_from == []
    config = made(tmp_path, "mine:f", run={"folder": str(tmp_path), "import_from": "mine"})
    assert config.rollout.reward == "mine:f" and config.run.import_from == ["mine"]


def test_a_list_of_functions_is_a_sum_of_rewards(tmp_path):
    parts = [exact_match, {"reward": lambda completions, **_: 1.0, "weight": 0.5, "name": "one"}]
    config = made(tmp_path, parts)
    first, second = config.rollout.recipe
    assert first == {"reward": "megatron_rl.rewards:exact_match"}
    assert second["weight"] == 0.5 and second["name"] == "one" and second["reward"].startswith("function_")
    assert [
        found(completions="4", answer="4", prompt="", prompt_ids=[], completion_ids=[]) for found in rewards_of(config)
    ] == [1, 1]


def test_what_cannot_be_sent_to_another_process_is_named(tmp_path):
    lock = threading.Lock()
    with pytest.raises(ValueError, match="rollout.reward: TypeError: .*lock.*; create that inside the function"):
        made(tmp_path, lambda completions, **_: lock.locked())


def test_rows_are_kept_by_what_they_hold_and_read_as_any_file(tmp_path):
    rows = ({"prompt": f"{n}?", "answer": str(n), "level": np.int64(n), "vector": np.ones(2)} for n in range(3))
    config = made(tmp_path, exact_match, rows)
    assert load_prompts(config.data.train)[2] == {"prompt": "2?", "answer": "2", "level": 2, "vector": [1.0, 1.0]}
    again = made(tmp_path, exact_match, ROWS, held_out=ROWS)
    assert again.data.train != config.data.train and again.data.evaluation == again.data.train
    assert Path(config.data.train).is_file(), "rows of a run are not replaced by those of a later one"
    assert made(tmp_path, exact_match, "hf:some/data").data.train == "hf:some/data"


@pytest.mark.parametrize(
    "rows, words",
    [
        ([], "rows: holds no rows; give at least one"),
        (["2+2="], "rows, row 1: is a str; must be a mapping"),
        ([*ROWS, {"prompt": "p", "score": float("nan")}], "rows, row 2: 'score' = nan: .*write it as text or a number"),
        ([{"prompt": "p", "at": object()}], "rows, row 1: 'at' = .*an? object cannot be written as JSON"),
    ],
)
def test_rows_that_no_file_can_hold_are_refused_by_row_and_column(rows, words, tmp_path):
    with pytest.raises(ValueError, match=words):
        made(tmp_path, exact_match, rows)


@pytest.mark.parametrize(
    "options, words",
    [
        ({"optimizer": {"lrr": 1}}, "optimizer.lrr = 1: unknown key; did you mean optimizer.lr?"),
        ({"optimizer": 1e-5}, "optimizer = 1e-05: must be a section with keys lr,"),
        ({"run": "here"}, "run = 'here': must be a dict of its keys."),
        ({"optimizer": {"lr": "fast"}}, "optimizer.lr = 'fast': .*correct it in the arguments."),
        ({"num_generations": 8}, "num_generations = 8: unknown key; here it is generation.n_samples "),
        ({"data": {"train": "other"}}, "data.train = 'other': is given twice; leave it out there."),
        (
            {"generation": {}},
            "generation.n_samples = 1: algo.advantage = group_norm compares the replies of one prompt",
        ),
        ({"parallel": {"tensor": 2}}, "parallel: tensor\\(2\\) .* = 2 ranks per replica, which"),
    ],
)
def test_wrong_options_have_the_errors_of_a_config(options, words, tmp_path):
    from megatron_rl.python_run import Run

    with pytest.raises(ValueError, match=words):
        Run(ROWS, "models/some", exact_match, **{"generation": SAMPLING} | options)


def test_options_may_have_dotted_names(tmp_path):
    options = {"optimizer.lr": 2e-5, "optimizer": {"clip_grad": 2.0}, "generation.n_samples": 4}
    config, _ = config_on(ROWS, {"path": "models/some", "dtype": "bfloat16"}, exact_match, **options)
    assert (config.model.path, config.model.dtype) == ("models/some", "bfloat16")
    assert (config.optimizer.lr, config.optimizer.clip_grad, config.generation.n_samples) == (2e-5, 2.0, 4)
