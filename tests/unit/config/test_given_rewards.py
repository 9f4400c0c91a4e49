"""Rewards that Python code gives as functions: found by other processes, or refused at once with the way out."""

import functools
import runpy
import sys

import pytest

from megatron_rl.config import GenerationConfig, RolloutConfig, RunConfig, TrainConfig
from megatron_rl.config.import_path import resolve
from megatron_rl.rewards import exact_match
from tests.unit import trying_rewards

PROGRAM = """
from megatron_rl.config import GenerationConfig, RolloutConfig, RunConfig, TrainConfig

def mine(completions, **data):
    return len(completions) / 4

def start():
    from megatron_rl.rollout.factory import check_reward  # which takes seconds, and workers need it not

    for reward, allowed in ((mine, []), ("__main__:mine", ["__main__"])):
        options = dict(rollout=RolloutConfig(reward=reward), run=RunConfig(import_from=allowed))
        config = TrainConfig(generation=GenerationConfig(n_samples=2), **options)
        value = check_reward(config, dict(input_ids=[1], answer="42"), None).value
        print(config.rollout.reward, config.run.import_from, value)

"""
GUARD, NO_GUARD = 'if __name__ == "__main__":\n    start()\n', "start()\n"


def run(folder, end, name="my_program.py"):
    """Run the program in a process that need not import anything; return its exit code and the lines that it wrote."""
    from tests.kit.forks import exit_codes
    from tests.kit.ranks import fork

    def as_main(file):
        sys.argv, sys.path[:0] = [str(file)], [str(folder)]
        runpy.run_path(str(file), run_name="__main__")

    file, output = folder / name, folder / "output.txt"
    file.write_text(PROGRAM + end)
    (code,) = exit_codes([fork(as_main, file, output)])
    return code, output.read_text().splitlines()


@pytest.mark.slow
def test_a_function_of_the_program_itself_is_a_reward(tmp_path):
    assert run(tmp_path, GUARD) == (0, ["my_program:mine ['my_program'] 0.5"] * 2)


@pytest.mark.slow
def test_a_program_without_a_guard_ends_at_once_with_the_remedy(tmp_path):
    code, (*_, last) = run(tmp_path, NO_GUARD)
    assert code == 1 and last.startswith(f"ValueError: {tmp_path}/my_program.py, line ")
    assert last.endswith('put what starts the run under `if __name__ == "__main__":`.')


def test_a_run_does_not_start_while_its_reward_is_looked_for(tmp_path, monkeypatch):
    (tmp_path / "unguarded.py").write_text(
        "from megatron_rl.config.import_path import refuse_while_importing\nrefuse_while_importing('a run')\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ValueError, match="unguarded.py, line 2: starts a run while it is imported, .*'unguarded:f'"):
        resolve("unguarded:f", key="rollout.reward", kind="reward", import_from=["unguarded"])


@pytest.mark.slow
def test_a_program_that_no_other_process_can_import_is_told_what_to_do(tmp_path):
    _, (*_, last) = run(tmp_path, GUARD, "my-program.py")
    assert last.startswith("ValueError: rollout.reward = '__main__:mine'") and "cannot be imported by a name" in last
    assert "move the function into a module next to it" in last


def given(reward, **sections):
    return TrainConfig(generation=GenerationConfig(n_samples=2), rollout=RolloutConfig(reward=reward), **sections)


def test_a_modules_function_is_named_and_trusted():
    config = given(trying_rewards.half, run=RunConfig(import_from=["other"]))
    assert config.rollout.reward == "tests.unit.trying_rewards:half"
    assert config.run.import_from == ["other", "tests.unit.trying_rewards"]
    assert given(exact_match).run.import_from == []
    assert given("tests.unit.trying_rewards:half").run.import_from == [], "a path is somebody's config"
    recipe = RolloutConfig(recipe=[{"reward": trying_rewards.half, "weight": 2.0}])
    config = TrainConfig(generation=GenerationConfig(n_samples=2), rollout=recipe)
    assert config.rollout.recipe == [{"reward": "tests.unit.trying_rewards:half", "weight": 2.0}]
    assert config.run.import_from == ["tests.unit.trying_rewards"]
    assert "reward: tests.unit.trying_rewards:half" in config.to_yaml()


def test_what_has_no_name_that_another_process_finds_is_refused():
    def inner(**_):
        return 1.0

    for reward, words in [
        (lambda **_: 1.0, "has no such name at its top; write it as a function of a module, with def"),
        (inner, "has no such name at its top"),
        (
            functools.partial(trying_rewards.half, scale=2),
            "is a partial, no function; .*arguments go into rollout.recipe",
        ),
        (trying_rewards.NoVerdict().with_traceback, "has no such name|no function"),
        (3, "is a int, no function"),
    ]:
        with pytest.raises(ValueError, match=f"rollout.reward = .*{words}"):
            given(reward)
