"""What the README says must be there: its commands, its paths, and the names in its examples."""

from __future__ import annotations

import asyncio
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
CODE = re.findall(r"```(\w*)\n(.*?)```", README, re.DOTALL)
TRIED = {
    "make demo": "trains SmolLM2-135M for minutes: tests/end_to_end/test_training.py trains a tiny model as it does",
    "make demo-tiny": "trains for minutes: tests/end_to_end/test_training.py",
    "make test": "is what runs this",
    "make readme-tables": "tests/test_readme_tables.py",
    "make soak": "takes twenty minutes: tests/end_to_end/kills.py is imported by tests of single kills",
    "make bench-trl": "needs TRL, which is not installed: tests/end_to_end/test_benchmarks.py tries its arguments",
    ".venv/bin/torchrun ": "tests/end_to_end/test_training.py starts ranks with torchrun's variables",
    ".venv/bin/megatron-rl plan ": "tests/unit/tools/test_plan.py",
    ".venv/bin/megatron-rl launch ": "tests/unit/launch/test_local_launch.py",
    "sbatch ": "tests/slurm",
    ".venv/bin/python benchmarks/": "tests/end_to_end/test_benchmarks.py",
    ".venv/bin/python -m pytest ": "is a test",
}
"""How a command of the README begins, and which test tries it, or why none does."""
WRITTEN_BY_RUNS = ("runs/", "models/", ".venv/")


def commands() -> list[str]:
    """Return the lines of shell blocks and the inline code that starts like a command."""
    blocks = [line for language, body in CODE if language == "bash" for line in body.splitlines()]
    inline = [code for code in re.findall(r"`([^`\n]+)`", README) if code.startswith(("make ", "python ", ".venv/"))]
    return [line.split("#")[0].strip() for line in blocks + inline if line.strip()]


def example(word: str) -> str:
    """Return the Python block that mentions `word`."""
    (body,) = [body for language, body in CODE if language == "python" and word in body]
    return body


def test_first_command_is_near_the_top_and_the_whole_is_short():
    lines = README.splitlines()
    assert len(lines) <= 200
    first = next(i for i, line in enumerate(lines, start=1) if line.startswith("make "))
    assert first <= 40


def test_every_command_is_tried_or_says_why_not():
    for line in commands():
        assert any(line.startswith(beginning) for beginning in TRIED), f"{line}: no test tries it; add it to TRIED"
    for beginning, by in TRIED.items():
        assert any(line.startswith(beginning) for line in commands()), f"{beginning}: is in the README no more"
        for path in re.findall(r"tests/[\w/.]+\w", by):
            assert (ROOT / path).exists(), path


def test_opening_is_two_sentences():
    opening = README.split("\n\n")[1]
    assert len(re.findall(r"[.!?](?:\s|$)", opening)) == 2, opening


def test_every_make_target_exists():
    targets = {word for line in commands() if line.startswith("make ") for word in line.split()[1:] if "=" not in word}
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


def test_every_path_exists():
    links = re.findall(r"\]\(([^)#]+)\)", README)
    named = re.findall(r"[\w./-]+/[\w./-]+\.(?:py|yaml|md|html|json|jsonl|sh)", README)
    missing = [p for p in {*links, *named} if not p.startswith(WRITTEN_BY_RUNS) and not (ROOT / p).exists()]
    assert not missing, missing


def test_every_module_that_a_command_runs_exists():
    modules = [m for line in commands() for m in re.findall(r"-m (megatron_rl[\w.]*)", line)]
    assert "megatron_rl.train" in modules
    for module in modules:
        path = ROOT.joinpath(*module.split("."))
        assert path.with_suffix(".py").is_file() or (path / "__main__.py").is_file(), module


def test_overrides_in_commands_are_options():
    from megatron_rl.config import load_config

    for line in commands():
        words = line.split()
        config = [w for w in words if w.startswith("configs/")]
        if config:
            load_config(ROOT / config[0], [w for w in words if "=" in w and not w.startswith("-")])


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
    exec(compile(example("RolloutWorkflow"), "README.md", "exec"), names)
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
    # A process of its own: the engine must prepare megatron.core before anything else imports it.
    code = example("MegatronEngine") + check
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_own_estimator_and_reward_are_ten_lines_that_any_config_takes(tmp_path, monkeypatch):
    pytest.importorskip("megatron", reason="megatron-core is not installed")
    code, chosen = example("@estimator"), re.findall(r"`([\w.]+=\[?mine[^`\s]*)`", README)
    assert len(code.splitlines()) <= 10 and len(chosen) == 3
    (tmp_path / "mine.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "mine", raising=False)
    monkeypatch.chdir(ROOT)

    from megatron_rl import platform

    platform.prepare()
    from megatron_rl.algo.actor import PolicyActor
    from megatron_rl.config import load_config
    from megatron_rl.rollout.factory import serve_rewards
    from megatron_rl.run.checks import check
    from tests.unit.ragged import parts_of, ragged_batch

    config = load_config("configs/count_grpo.yaml", chosen)
    check(config)
    undeclared = load_config("configs/count_grpo.yaml", [it for it in chosen if "import_from" not in it])
    with pytest.raises(ValueError, match=r"algo.advantage = 'mine:squashed'.*set run.import_from=\[mine\]"):
        check(undeclared)

    recipe = serve_rewards(config)
    try:
        given = {"prompt": "6 * 7 =", "prompt_ids": [1], "completion_ids": [2, 3, 4], "answer": "42"}
        assert recipe(completions=" 42\n", **given) == pytest.approx(0.97)
        assert recipe(completions="43", **given) == pytest.approx(-0.03)
    finally:
        asyncio.run(recipe.close())

    batch = ragged_batch()
    PolicyActor(None, config.algo, temperature=1.0).compute_advantages(batch)
    squashed, group = batch["rewards"].tanh(), batch["group"]
    for number, part in enumerate(parts_of(batch)):
        wanted = squashed[number] - squashed[group == group[number]].mean()
        assert batch["advantages"][part].tolist() == pytest.approx(
            (wanted * batch["loss_mask"][part]).tolist(), abs=1e-6
        )


def test_all_configs_are_listed():
    for path in (ROOT / "configs").glob("*.yaml"):
        assert f"configs/{path.name}" in README


def test_demos_end_with_the_make_that_started_them():
    recipes = [line for line in (ROOT / "Makefile").read_text().splitlines() if "-m megatron_rl.launch" in line]
    assert len(recipes) == 2 and all("--exit-with $$PPID" in line for line in recipes)
