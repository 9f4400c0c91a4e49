"""The worlds as a config names them: each is offered with its arguments, and prompts for those that have them."""

import pytest

from megatron_rl.agents.worlds.mcp_tools import McpTools
from megatron_rl.agents.worlds.openenv import OpenEnv
from megatron_rl.agents.worlds.task_folders import TaskFolder
from megatron_rl.agents.worlds.text_games import TextGames
from megatron_rl.config import GenerationConfig, load_config
from megatron_rl.data.prompts import load_prompts
from megatron_rl.rollout.factory import make_workflow
from tests.kit.tokenizers import make_tokenizer

WORLDS = "megatron_rl.agents.worlds"


def workflow_of(workflow, **args):
    config = load_config("configs/count_grpo.yaml", [f"rollout.workflow={workflow}", f"rollout.workflow_args={args}"])
    return make_workflow(config, make_tokenizer(), GenerationConfig())


@pytest.mark.parametrize(
    ("path", "args", "kind"),
    [
        ("mcp_tools:McpTools", {"servers": [{"url": "http://127.0.0.1:1/mcp"}]}, McpTools),
        ("openenv:OpenEnv", {"url": "http://127.0.0.1:1", "action": "message"}, OpenEnv),
        ("task_folders:TaskFolder", {"images": ["debian:*"]}, TaskFolder),
    ],
)
def test_a_config_names_an_environment_and_its_arguments(path, args, kind):
    options = {"environment": f"{WORLDS}.{path}", "environment_args": args, "max_tokens": 512}
    workflow = workflow_of("megatron_rl.workflows:MultiTurnWorkflow", **options)
    assert workflow.environment is kind and workflow.environment_args == args


def test_a_config_names_a_game_and_its_prompts():
    workflow = workflow_of(f"{WORLDS}.text_games:TextGames", game="TicTacToe-v0", seats=2, max_tokens=512)
    assert isinstance(workflow, TextGames) and workflow.seats == 2
    prompts = load_prompts(f"{WORLDS}.text_games:game_prompts", {"count": 2, "first": 5})
    assert [prompt["seed"] for prompt in prompts] == [5, 6]


@pytest.mark.thorough
@pytest.mark.slow
def test_an_environment_of_verifiers_comes_from_the_modules_that_a_config_may_import():
    options = {"environment": "wordle:load_environment", "max_tokens": 512}
    with pytest.raises(
        ValueError, match=r"environment = 'wordle:load_environment': module wordle is not in megatron_rl"
    ):
        workflow_of(f"{WORLDS}.verifiers:VerifiersWorkflow", **options)
