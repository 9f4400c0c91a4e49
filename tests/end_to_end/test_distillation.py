"""A model learns from itself what it can do with the answer before its eyes: the demo's task, in three steps."""

from pathlib import Path

import pytest

from tests.kit.runs import ROOT, evaluations_of, steps_of, train_forked

SMOLLM2 = ROOT / "models" / "smollm2-135m-instruct"


@pytest.mark.slow
@pytest.mark.thorough
@pytest.mark.skipif(
    not (SMOLLM2 / "model.safetensors").exists(), reason=f"needs {SMOLLM2.name}, which `make demo` fetches"
)
def test_smollm2_teaches_itself_to_add_within_three_steps(tmp_path: Path):
    """Held-out greedy replies: from 12 of 32 right to 20 at least. benchmarks/bench_distillation.py has three seeds."""
    options = (f"run.folder={tmp_path}/run", f"model.path={SMOLLM2}", "run.steps=3", "run.save_at_end=false")
    train_forked("configs/demo_distillation.yaml", *options, "run.evaluate_every_steps=1")
    before, *after = (line["accuracy"] for line in evaluations_of(tmp_path / "run"))
    assert before == pytest.approx(12 / 32, abs=1 / 32) and after[-1] >= 20 / 32, (before, after)
    divergence = [step["policy/teacher_kl"] for step in steps_of(tmp_path / "run")]
    assert divergence[-1] < 0.6 * divergence[0], divergence
