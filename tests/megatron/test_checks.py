"""Bad input is refused before any process, group or server is started, with key, value, rule and way out."""

import importlib
import json
import os
import shutil
from functools import partial
from pathlib import Path

import pytest
import torch

from megatron_rl import platform
from megatron_rl.config import load_config
from megatron_rl.run.checks import check, check_greedy, check_publication, dry_run
from megatron_rl.run.row_training import check_rows
from megatron_rl.types import TrajectoryBatch
from megatron_rl.weights.architecture import read_architecture
from tests.kit.models import make_model
from tests.kit.ranks import fork

ROOT = Path(__file__).parents[2]
MODEL = ROOT / "configs" / "models" / "count_tiny"


def refused(*overrides):
    with pytest.raises(ValueError) as error:
        check(load_config(ROOT / "configs" / "count_grpo.yaml", [f"model.path={MODEL}", *overrides]))
    return str(error.value)


def test_good_config_passes():
    tokenizer, train, held_out = check(load_config(ROOT / "configs" / "count_grpo.yaml", [f"model.path={MODEL}"]))
    assert len(train) == 192 and list(map(len, held_out.values())) == [64] and tokenizer.eos_token_id is not None


def test_operators_without_their_cuda_part_were_found_after_the_first_rollout(monkeypatch):
    monkeypatch.setattr(platform, "has_cuda", lambda: True)
    # Where torch is a build for CUDA and nvcc is there, this process has loaded that part.
    monkeypatch.setattr(torch._C, "_dispatch_has_kernel_for_dispatch_key", lambda operator, key: key != "CUDA")
    answers = load_config(ROOT / "configs" / "count_sft.yaml", [f"model.path={MODEL}"])
    for find in (lambda: refused(), lambda: check_rows(answers, head="policy")):
        with pytest.raises(RuntimeError, match=r"_C_cuda.so: is not there.*nvcc.*python csrc/build.py"):
            find()


def test_quantised_model_is_refused_before_servers_load_it(tmp_path):
    folder = Path(shutil.copytree(MODEL, tmp_path / "model"))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": {"quant_method": "mxfp4"}}))
    assert f"model.path = '{folder}': config.json has quantization_config (mxfp4)" in refused(f"model.path={folder}")
    words = [f"model.path={folder}", "rollout.servers=[http://127.0.0.1:30000]"]  # which may hold others
    check(load_config(ROOT / "configs" / "count_grpo.yaml", words))


def test_prompt_longer_than_the_context_is_refused(tmp_path):
    path = tmp_path / "long.jsonl"
    path.write_text(json.dumps({"prompt": "01?"}) + "\n" + json.dumps({"prompt": "0" * 62 + "?"}) + "\n")
    message = refused(f"data.train={path}", "data.train_args={}")
    assert "data.train, prompt 2: has 63 tokens" in message and "context of 64" in message


@pytest.mark.parametrize(
    "override,parts",
    [
        ("rollout.reward=absent.module:thing", ["absent.module is not in megatron_rl", "set run.import_from=[absent]"]),
        ("rollout.workflow=absent.module:thing", ["rollout.workflow = 'absent.module:thing'", "run.import_from = []"]),
        ("data.evaluation=absent.module:thing", ["data.evaluation = 'absent.module:thing'", "run.import_from = []"]),
        (
            "rollout.reward=megatron_rl.rewards:nothing",
            ["did you mean megatron_rl.rewards:"],
        ),
        ("rollout.workflow=megatron_rl.workflows:Nothing", ["rollout.workflow", "is no workflow that"]),
        ("rollout.workflow_args={speed: 3}", ["rollout.workflow", "speed", "signature"]),
        ("data.train=megatron_rl.data.tasks:nothing", ["data.train", "nothing"]),
        ("data.train=/no/such/file.jsonl", ["data.train", "file.jsonl"]),
        ("algo.advantage=no.such:thing", ["algo.advantage = 'no.such:thing'", "set run.import_from=[no]"]),
        ("algo.advantage_args={k: 2}", ["algo.advantage_args = {'k': 2}", "the arguments of algo.advantage are none"]),
        ("algo.loss=megatron_rl.algo.loss:thing", ["algo.loss", "is no loss that"]),
        ("algo.loss_args={cap: 2}", ["algo.loss_args = {'cap': 2}", "the arguments of algo.loss are none"]),
        ("model.path=/no/such/folder", ["model.path", "no config.json", "convert"]),
        ("rollout.server_args=[--quantization,fp8]", ["rollout.server_args: --quantization fp8", "leave it out"]),
        ("model.init=hf", ["model.path", "no *.safetensors", "model.init=random"]),
    ],
)
def test_what_cannot_be_found_is_named(override, parts):
    message = refused(override)
    for part in parts:
        assert part in message, message


def test_warm_start_names_the_prompt_without_an_answer(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text('{"prompt": "01?", "answer": "1"}\n{"prompt": "11?", "solution": "2"}\n')
    rows = (f"data.train={path}", "data.train_args={}")
    message = refused(*rows, "warm_start.updates=3")
    assert "data.train, row 2: answer = None: must be the answer" in message
    assert "the answer that warm_start.updates = 3 trains on; give every row one" in message
    message = refused(f"data.train={long_answer(tmp_path)}", "data.train_args={}")
    assert "data.train, row 1: has 68 tokens, more than the model's context of 64" in message
    assert message.endswith("shorten it or leave it out."), "data.max_tokens is none of RL's"
    check(load_config(ROOT / "configs" / "count_grpo.yaml", [f"model.path={MODEL}", *rows, "warm_start.updates=0"]))


def long_answer(folder):
    path = folder / "long.jsonl"
    path.write_text(json.dumps({"prompt": "01?", "answer": "1" * 64}))
    return path


def test_declared_module_that_cannot_be_found_is_named():
    message = refused("rollout.reward=absent.module:thing", "run.import_from=[absent]")
    for part in ("rollout.reward = 'absent.module:thing'", "cannot be imported", "PYTHONPATH"):
        assert part in message, message


def test_a_dialogue_longer_than_the_context_is_refused():
    environment = "megatron_rl.workflows.environments:SelfCorrection"
    message = refused(
        "rollout.workflow=megatron_rl.workflows:MultiTurnWorkflow",
        f"rollout.workflow_args={{environment: '{environment}', max_tokens: 65}}",
    )
    assert "rollout.workflow_args.max_tokens = 65: the model's context is 64 tokens" in message


def test_file_of_the_users_own_is_taken_with_one_line(tmp_path, monkeypatch):
    (tmp_path / "my_task.py").write_text(
        "def short(completions, **data): return -float(len(completions))\n"
        "def numbers(count): return [{'prompt': f'{n:b}?'} for n in range(count)]\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    own = ("rollout.reward=my_task:short", "data.train=my_task:numbers", "data.train_args={count: 5}")
    own += ("warm_start.updates=0",)  # its prompts have no answers
    assert "set run.import_from=[my_task]" in refused(*own)
    config = load_config(
        ROOT / "configs" / "count_grpo.yaml", [f"model.path={MODEL}", *own, "run.import_from=[my_task]"]
    )
    _, train, _ = check(config)
    assert [prompt["prompt"] for prompt in train] == ["0?", "1?", "10?", "11?", "100?"]


def test_an_estimator_of_ones_own_that_compares_replies_needs_several():
    own = ("algo.advantage=tests.unit.algo.test_estimators:compares_best", "algo.advantage_args={margin: 0.1}")
    assert "set run.import_from=[tests]" in refused(*own)
    assert "set run.import_from=[tests]" in refused("algo.loss=tests.unit.algo.test_losses:anything")
    own += ("run.import_from=[tests]",)
    check(load_config(ROOT / "configs" / "count_grpo.yaml", [f"model.path={MODEL}", *own]))
    assert "generation.n_samples = 1: algo.advantage = tests.unit" in refused(*own, "generation.n_samples=1")


def test_empty_data_set_is_refused(tmp_path):
    (tmp_path / "empty.jsonl").write_text("\n")
    message = refused(f"data.train={tmp_path}/empty.jsonl")
    assert "data.train" in message and "train_args" in message or "no prompts" in message


# What a user sees: one line and exit status 1, no traceback.
@pytest.mark.parametrize(
    "module,arguments,words",
    [
        ("megatron_rl.train", ["configs/none.yaml"], "no such file"),
        ("megatron_rl.train", ["configs/count_grpo.yaml", "optimiser.lr=1"], "did you mean optimizer"),
        ("megatron_rl.train", ["configs/count_grpo.yaml", "parallel.tensor=2"], "does not divide the world size 1"),
        ("megatron_rl.train", ["configs/demo.yaml", "model.path=/none"], "no config.json"),
        ("megatron_rl.cli", ["sft", "configs/demo.yaml"], "supervised.answer = '': names no column"),
        ("megatron_rl.cli", ["preferences", "configs/none.yaml"], "no such file"),
        ("megatron_rl.cli", ["report", "/none"], "metrics.jsonl"),
        ("megatron_rl.cli", ["convert", "/none.gguf", "/tmp/never"], "none.gguf"),
        ("megatron_rl.cli", ["serve", "/none"], "no config.json"),
    ],
)
def test_command_line_errors_are_one_line(module, arguments, words, tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    # Forked, as a process of its own takes seconds to import what is here already.
    pid = fork(importlib.import_module(module).main, arguments, tmp_path / "said")
    code, said = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), (tmp_path / "said").read_text()
    assert code == 1 and words in said, said
    assert "Traceback" not in said and len(said.strip().splitlines()) == 1, said


def train_beside(arguments, errors):
    """Run the command with its errors in a file of their own."""
    os.dup2(os.open(errors, os.O_CREAT | os.O_WRONLY), 2)
    importlib.import_module("megatron_rl.train").main(arguments)


def test_dry_run_prints_what_is_set_and_ends_with_ok(tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    pid = fork(
        partial(train_beside, errors=tmp_path / "errors"), ["configs/count_grpo.yaml", "--dry-run"], tmp_path / "out"
    )
    assert os.waitpid(pid, 0)[1] == 0
    printed = (tmp_path / "out").read_text()
    assert "clip_high: 0.28" in printed and "server" not in (tmp_path / "errors").read_text()
    assert "dual_clip" not in printed and len(printed.splitlines()) < 60, "an ok below 250 lines is not seen"
    said = printed.strip().splitlines()[-1]
    assert said.startswith("ok: ") and "the reward of the first one's own answer is 1." in said
    assert said.endswith("the workflow's constructor and the rewards were run; not run: rollout servers.")


def test_dry_run_tries_the_reward_the_rows_and_the_backend(tmp_path, monkeypatch):
    (tmp_path / "dry_rewards.py").write_text("def wrong(completions, **data):\n    return [1.0]\n")
    monkeypatch.syspath_prepend(tmp_path)
    rows = [{"prompt": "1?", "answer": str(n)} for n in range(20)]
    rows[13] = {"prompt": "1?"}
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    for overrides, fault in (
        (["rollout.reward=dry_rewards:wrong", "run.import_from=dry_rewards"], "rollout.reward = 'dry_rewards:wrong': "),
        (
            [f"data.train={tmp_path}/rows.jsonl", "data.train_args={}", "warm_start.updates=0"],
            "data.train, prompt 14: has no 'answer'",
        ),
        (["rollout.backend=sglang"], "rollout.backend = 'sglang': the package sglang is not installed"),
        (
            [
                "rollout.recipe=[{reward: 'megatron_rl.rewards.remote:RemoteReward', args: {urls: ['http://[::1]:9/s']}}]"
            ],
            r"rollout.recipe: reward megatron_rl.rewards.remote:RemoteReward: http://\[::1\]:9/s: .*start the server",
        ),
    ):
        config = load_config(ROOT / "configs" / "count_grpo.yaml", [f"model.path={MODEL}", *overrides])
        with pytest.raises(ValueError, match=fault) as refused:
            dry_run(config)
        assert "\n" not in str(refused.value)


def test_remax_asks_for_the_greedy_reward_in_what_comes_back():
    """Not for a name in the workflow's path: what it returns is known at the first batch."""
    batch = TrajectoryBatch({"input_ids": torch.zeros(2)}, {"rewards": torch.zeros(2)}, torch.arange(3))
    options = ["algo.advantage=remax", "rollout.workflow=mine:Greedy", f"model.path={MODEL}"]
    config = load_config(ROOT / "configs" / "count_grpo.yaml", options)
    with pytest.raises(ValueError, match=r"rollout.workflow = 'mine:Greedy': .* \['rewards'\], .* or greedy_reward of"):
        check_greedy(config, batch)
    batch.sequences["greedy_reward"] = torch.zeros(2)
    check_greedy(config, batch)
    scored = load_config(ROOT / "configs" / "count_grpo.yaml", [*options, "reward_model.path=judge"])
    with pytest.raises(
        ValueError, match=r"reward_model.path = 'judge', which scores it, needs is_greedy of the greedy"
    ):
        check_greedy(scored, batch)
    batch.sequences["is_greedy"] = torch.zeros(2)
    check_greedy(scored, batch)


def test_a_teacher_of_other_tokens_is_refused_and_so_is_a_prompt_without_one(tmp_path):
    other = shutil.copytree(MODEL, tmp_path / "other")
    words = (other / "tokenizer.json").read_text()
    (other / "tokenizer.json").write_text(words.replace('"a": 13', '"b": 13').replace('"b": 14', '"a": 14'))
    told = refused(f"teacher.path={other}")
    assert f"{str(other)!r} has a vocabulary of 48 and 48 tokens" in told and "4 entries differ; a teacher" in told
    told = refused("teacher.by_source={sums: {path: policy, hint: so}}")
    assert "has teachers for sums, and prompt 1 of data.train is of the source None" in told
    assert "so short" in refused("teacher.path=policy", "teacher.hint='so short {question}'")
    told = refused("teacher.path=policy", f"teacher.hint={'1 ' * 40}+")
    assert "teacher, prompt 1: has" in told and "context of 64" in told


@pytest.mark.skipif(platform.has_cuda(), reason="needs a machine without CUDA")
def test_adapters_of_experts_that_sglang_computes_on_no_cpu_are_refused(tmp_path):
    make_model("qwen3_moe", tmp_path)
    arch = read_architecture(tmp_path)
    words = [f"model.path={MODEL}", "warm_start.updates=0", "lora.rank=4"]
    words += ["rollout.publication=adapters", "rollout.interruption=abort", "rollout.backend=sglang"]

    def tried(*more):
        check_publication(load_config(ROOT / "configs" / "count_grpo.yaml", [*words, *more]), arch)

    with pytest.raises(ValueError, match=r"lora.targets = \[\] adapt mlp.experts.gate_proj.*; leave experts out of"):
        tried()
    tried("lora.targets=[q_proj]")
    tried("rollout.backend=embedded")
    tried("rollout.publication=group")
    tried("rollout.servers=[http://127.0.0.1:1]")  # which may have a GPU
