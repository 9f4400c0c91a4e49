"""The code recipe trains as its config says: programs that the policy writes run in locked workers, against tests."""

import ctypes
import json
import re

import psutil
import pytest
import torch
from transformers import AutoTokenizer

from megatron_rl.config import load_config
from megatron_rl.run.rl_run import RLRun
from megatron_rl.train import train
from tests.kit.forks import check_end, start_ranks
from tests.kit.runs import ROOT, evaluations_of, steps_of
from tests.kit.talkative_model import make_talkative_model
from tests.kit.waiting import LIMIT_S

pytestmark = pytest.mark.slow

CONFIG = ROOT / "configs" / "code_smollm2.yaml"
FACTORS = range(1, 7)
PROGRAMS = {f"```python\nprint({factor} * int(input()))\n```": factor for factor in FACTORS}
"""One token each of the model's. Any of them passes the first of a problem's tests, and the right one both."""
HOSTILE = [
    f"```python\n{text}\n```" for text in ("import os\nif os.fork(): print(0)", "open('it', 'w')\nprint(0)", "1/0")
]
"""Would pass the first test if they could do what they try."""
PR_SET_CHILD_SUBREAPER = 36


def rows():
    for factor in FACTORS:
        tests = [{"input": str(number), "output": str(factor * number)} for number in (0, 2)]
        yield {"problem": f"Multiply by {factor}.", "tests": tests}


def earned(reply, factor):
    """What a reply to the problem of a factor earns, by its last block that reads input: a half for each test."""
    programs = [block for block in re.findall(r"```.*?```", reply, re.DOTALL) if block in PROGRAMS]
    if not programs:
        return 0.0
    return 1.0 if PROGRAMS[programs[-1]] == factor else 0.5


def train_and_count_processes(overrides):
    """Train as a run does; keep the steps' batches with their advantages, and count who is left after it."""
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)  # whose parent ends is this process's child
    compute, kept = RLRun.compute_advantages, []

    def compute_and_keep(self, batch):
        compute(self, batch)
        kept.append(batch.own())

    RLRun.compute_advantages = compute_and_keep  # in this forked process alone
    config = load_config(CONFIG, list(overrides))
    train(config)
    _, left = psutil.wait_procs(psutil.Process().children(recursive=True), timeout=LIMIT_S)
    torch.save((kept, [process.cmdline() for process in left]), f"{config.run.folder}/kept.pt")


def test_code_recipe_trains_programs_that_run_locked(tmp_path):
    model = make_talkative_model(tmp_path / "model", words=[*PROGRAMS, *HOSTILE])
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows())))
    settings = [f"data.{part}.source={tmp_path}/rows.jsonl" for part in ("train_args", "evaluation_args")]
    settings += ["data.evaluation_args.count=2", "batch.prompts_per_step=4", "generation.max_new_tokens=6"]
    settings += ["run.steps=2", "run.save_at_end=false", f"run.folder={tmp_path}/run", f"model.path={model}"]
    output = tmp_path / "output.txt"
    check_end(start_ranks(1, train_and_count_processes, tuple(settings), output), output)

    batches, left = torch.load(tmp_path / "run" / "kept.pt", weights_only=False)
    assert left == [], "servers, rollout process, reward workers and programs have ended"
    tokenizer = AutoTokenizer.from_pretrained(model)
    for batch, step in zip(batches, steps_of(tmp_path / "run"), strict=True):
        rewards = batch["rewards"]
        assert rewards.tolist() == [earned(*reply) for reply in replies_of(batch, tokenizer)]
        assert step["reward/mean"] == pytest.approx(step["rollout/reward/passes"]) == pytest.approx(rewards.mean())
        assert step["rollout/reward_failed/passes"] == 0 < step["rollout/reward_s/passes"]
        assert step["policy/skipped_updates"] == 0 < step["policy/grad_norm"]
    assert set(torch.cat([batch["rewards"] for batch in batches]).tolist()) == {0.0, 0.5, 1.0}
    said = "".join(reply for batch in batches for reply, _ in replies_of(batch, tokenizer))
    assert all(program in said for program in HOSTILE), "each was tried"
    assert [evaluation["step"] for evaluation in evaluations_of(tmp_path / "run")] == [0, 2]


def replies_of(batch, tokenizer):
    """Each reply with its problem's factor."""
    bounds = batch.cu_seqlens.tolist()
    for a, b in zip(bounds, bounds[1:], strict=False):
        ids, mask = batch["input_ids"][a:b], batch["loss_mask"][a:b]
        factor = tokenizer.decode(ids[~mask]).partition("Multiply by ")[2][0]
        yield tokenizer.decode(ids[mask], skip_special_tokens=True), int(factor)
