"""The README's commands and examples, and those of docs that need more than to be run; test_docs.py has the rest."""

from __future__ import annotations

import asyncio
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from tensordict import TensorDict

from tests.kit.waiting import LATE_S
from tests.test_docs import commands_of

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
DOCS = ROOT / "docs"


def example(word: str, page: Path = ROOT / "README.md") -> str:
    """Return the Python block of a page that mentions `word`."""
    blocks = re.findall(r"```python\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL)
    (body,) = [body for body in blocks if word in body]
    return body


def test_every_make_target_exists():
    made = [line.split()[1:] for line in commands_of(ROOT / "README.md") if line.startswith("make ")]
    targets = {word for words in made for word in words if "=" not in word}
    assert {"demo", "test"} <= targets
    declared = set((ROOT / "Makefile").read_text().split(".PHONY:")[1].splitlines()[0].split())
    assert targets <= declared


@pytest.mark.parametrize(
    "target", ["demo", "demo SERVER=sglang", "demo-tiny", "test", "test-fast", "bench-trl", "lint", "format", "clean"]
)
def test_make_knows_how_to_build_each_target(target):
    if "SERVER=sglang" in target or target == "test":
        if not (ROOT / "scripts" / "install_sglang_cpu.sh").is_file():
            pytest.fail("scripts/install_sglang_cpu.sh is missing, which the Makefile calls")
    done = subprocess.run(["make", "--dry-run", *target.split()], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_every_module_that_a_command_runs_exists():
    modules = [m for line in commands_of(ROOT / "README.md") for m in re.findall(r"-m (megatron_rl[\w.]*)", line)]
    assert "megatron_rl.train" in modules
    for module in modules:
        path = ROOT.joinpath(*module.split("."))
        assert path.with_suffix(".py").is_file() or (path / "__main__.py").is_file(), module


def test_workflow_example_generates_the_trajectories_it_promises():
    from megatron_rl import GenerationConfig, LLMResponse, RolloutWorkflow

    class Tokenizer:
        def encode(self, text):
            return [ord(c) for c in text]

    class Engine:
        texts = iter(["4", "44"])

        async def agenerate(self, request):
            text = next(self.texts)
            size = len(text)
            return LLMResponse(
                input_tokens=request.input_ids,
                output_tokens=[7] * size,
                output_logprobs=[-1.0] * size,
                output_versions=[0] * size,
                stop_reason="stop",
                text=text,
            )

    names = {}
    exec(compile(example("RolloutWorkflow", DOCS / "workflows.md"), "workflows.md", "exec"), names)
    workflow = names["ShortAnswers"](None, GenerationConfig(n_samples=2), Tokenizer())
    assert isinstance(workflow, RolloutWorkflow)
    first, second = asyncio.run(workflow.arun_episode(Engine(), {"prompt": "ab", "answer": "4"}))
    assert first.input_ids.tolist() == [97, 98, 7]
    assert (first.reward, second.reward) == pytest.approx((0.99, -0.02))


def test_loss_example_is_the_mean_over_trained_tokens():
    pytest.importorskip("megatron", reason="megatron-core is not installed")
    check = """
import torch
logits = torch.tensor([[0.0, 0.0], [0.0, 0.0], [5.0, -3.0]])
rows = {"labels": torch.tensor([0, 1, -100]), "loss_mask": torch.tensor([True, True, False])}
rows["advantages"] = torch.tensor([1.0, 3.0, 9.0])
loss = reinforce_loss(logits, rows)
torch.testing.assert_close(loss, torch.tensor(2.0).mul(torch.tensor(2.0).log()))  # (1 + 3) log 2 over two tokens
assert issubclass(MyActor, MegatronEngine)
"""
    from tests.kit.ranks import run_ranks

    # A process of its own, as the engine prepares what it is imported in.
    run_ranks(1, exec, example("MegatronEngine", DOCS / "algorithms.md") + check, {}, timeout_s=LATE_S)


def test_own_reward_and_loss_are_ten_lines_that_any_config_takes(tmp_path, monkeypatch):
    code = example("def brief")
    (command,) = [line for line in commands_of(ROOT / "README.md") if "mine:brief" in line]
    config, *chosen = command.split()[2:]
    assert len(code.splitlines()) <= 10
    (tmp_path / "mine.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "mine", raising=False)
    monkeypatch.chdir(ROOT)

    from megatron_rl.algo.loss import PolicyLoss
    from megatron_rl.config import load_config
    from megatron_rl.rollout.factory import serve_rewards

    options = load_config(config, chosen)
    recipe = serve_rewards(options)
    try:
        given = {"prompt": "6 * 7 =", "prompt_ids": [1], "completion_ids": [2, 3, 4], "answer": "42"}
        assert recipe(completions=" 42\n", **given) == pytest.approx(0.97)
        assert recipe(completions="43", **given) == pytest.approx(-0.03)
    finally:
        asyncio.run(recipe.close())

    columns = {"labels": torch.ones(2).long(), "advantages": torch.tensor([1.0, -2.0]), "logprobs": torch.zeros(2)}
    data = TensorDict(columns | {"proximal_logprobs": torch.zeros(2)})
    loss, _ = PolicyLoss(options.algo)(torch.tensor([0.2, -0.4]), torch.zeros(2), data)
    torch.testing.assert_close(loss, -torch.tensor(0.2).exp() + 2 * torch.tensor(-0.4).exp())


def test_all_configs_are_listed():
    for path in (ROOT / "configs").glob("*.yaml"):
        assert f"configs/{path.name}" in README


def test_demos_end_with_the_make_that_started_them():
    recipes = [line for line in (ROOT / "Makefile").read_text().splitlines() if "-m megatron_rl.launch" in line]
    assert len(recipes) == 2 and all("--exit-with $$PPID" in line for line in recipes)
