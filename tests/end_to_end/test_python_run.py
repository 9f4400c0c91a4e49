"""Runs of a Python program and of a notebook: rows, a model and a reward, and all that a run by the launcher has."""

from __future__ import annotations

import json
import os
import re

import pytest

import megatron_rl as rl
from megatron_rl.algo.registry import torch_loss
from megatron_rl.train import main
from tests.kit import programs
from tests.kit.ranks import run_ranks
from tests.kit.runs import ROOT, steps_of
from tests.kit.served_models import make_tiny_model
from tests.kit.waiting import LATE_S

pytestmark = pytest.mark.slow

NEEDS = "is not installed: pip install 'megatron-rl[dev]'"
ROWS = [{"prompt": f"{n}+1=", "answer": str(n + 1)} for n in range(8)]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_tiny_model(tmp_path_factory.mktemp("model"))


def smaller(text: str, model, folder) -> str:
    """Return a notebook's code with the tiny model and three steps."""
    text = text.replace("models/smollm2-135m-instruct", str(model)).replace('"n_samples": 8', '"n_samples": 2')
    text = text.replace('"steps": 8, "checkpoint_every_steps": 4', '"steps": 3')
    return text.replace("batch={", 'rollout={"backend": "embedded", "reward_workers": 1},\n    batch={')


@pytest.fixture
def kernel(request, tmp_path_factory, monkeypatch):
    """The name of a kernel: `forked` has this process's imports, `python3` is an interpreter of its own."""
    kernelapp = pytest.importorskip("ipykernel.kernelapp", reason=f"ipykernel {NEEDS}")
    folder = tmp_path_factory.mktemp("kernel")
    (folder / "kernels/forked").mkdir(parents=True)
    spec = {"argv": [f"{folder}/kernel", "-f", "{connection_file}"], "display_name": "forked", "language": "python"}
    (folder / "kernels/forked/kernel.json").write_text(json.dumps(spec))
    monkeypatch.setenv("JUPYTER_PATH", str(folder))
    monkeypatch.setitem(programs.PROGRAMS, "ipykernel", kernelapp.launch_new_instance)
    with programs.forked_commands(folder, {"kernel": "ipykernel"}):
        yield request.param


@pytest.mark.parametrize("kernel", ["forked", pytest.param("python3", marks=pytest.mark.thorough)], indirect=True)
def test_a_notebook_trains_step_by_step_and_shows_progress_and_report(kernel, model, tmp_path, monkeypatch):
    nbformat, nbclient = (pytest.importorskip(name, reason=f"{name} {NEEDS}") for name in ("nbformat", "nbclient"))
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    book = nbformat.read(ROOT / "examples/notebook/train.ipynb", as_version=4)
    for cell in book.cells:
        if cell.cell_type == "code":
            cell.source = smaller(cell.source, model, tmp_path)
    where = {"metadata": {"path": str(tmp_path)}}
    nbclient.NotebookClient(book, timeout=LATE_S, kernel_name=kernel, resources=where).execute()
    _, built, stepped, sampled, trained, report, scores = (cell for cell in book.cells if cell.cell_type == "code")
    assert not built.outputs
    assert re.fullmatch(r"\(\d\.\d+, \d+\.\d+\)", stepped.outputs[-1]["data"]["text/plain"])
    assert (
        "share" not in sampled.outputs[-1]["data"]["text/plain"]
        and "reply" in sampled.outputs[-1]["data"]["text/plain"]
    )
    said = "".join(out.text for out in trained.outputs if out.output_type == "stream" and out.name == "stdout")
    assert re.search(r"\rstep 3/3 .*reward", said) and "\rreport: " in said
    assert report.outputs[-1]["data"]["image/svg+xml"]
    assert re.findall(r"'step': (\d)", scores.outputs[-1]["data"]["text/plain"]) == ["0", "3"]
    folder = tmp_path / "runs/notebook"
    assert len(steps_of(folder)) == 3 and (folder / "final/model.safetensors").is_file()


def options(folder, steps: int, **sections):
    return {
        "generation": {"n_samples": 2, "max_new_tokens": 4},
        "batch": {"prompts_per_step": 2},
        "rollout": {"backend": "embedded", "reward_workers": 1},
        "run": {"folder": str(folder), "steps": steps, "checkpoint_every_steps": 1, "save_at_end": False},
        **sections,
    }


def stopped_and_resumed(model, folder):
    """Take one step of three in one run and the others in a second one, in one process; return what each had."""
    price = 0.25

    def costs(completions, answer, **_):
        rl.log_metric("characters", len(completions))
        return float(completions == answer) - price * len(completions)

    @torch_loss()
    def scaled(rows, options):
        rl.log_metric("ratio", rows.ratio[rows.trained])
        return -rows.advantages * rows.ratio * 0.5

    given = {"run": {"folder": str(folder), "steps": 3, "checkpoint_every_steps": 1}, "algo": {"loss": scaled}}
    with rl.Run(ROWS, model, costs, **options(folder, 3) | given) as run:
        first = run.step()
    assert run.step() is None
    again = rl.train_on(ROWS, model, costs, resume="auto", **options(folder, 3) | given)
    return first, again.metrics, again.samples, again.config.rollout.reward


def test_a_run_of_python_is_stepped_stopped_and_resumed_with_functions_of_its_own(model, tmp_path, monkeypatch):
    folder = tmp_path / "run"
    first, metrics, samples, reward = run_ranks(1, stopped_and_resumed, model, folder, timeout_s=LATE_S)[0]
    assert first["step"] == 0 and [line["step"] for line in metrics] == [0, 1, 2]
    assert metrics[0]["reward/mean"] == first["reward/mean"] < 0
    assert [line["user/ratio"] for line in metrics] == pytest.approx([1.0] * 3, abs=0.1)  # of the loss
    # Of the rewards' processes; the first step's replies and rewards come from the journal.
    assert "user/characters" not in metrics[0] and all(0 < line["user/characters"] <= 8 for line in metrics[1:])
    assert samples and all(row["reward"] <= 0 for row in samples if row["reply"])
    assert re.fullmatch(r"function_[0-9a-f]{12}:costs", reward)
    assert (folder / "report.html").is_file() and (folder / "final/model.safetensors").is_file()
    files = sorted(os.listdir(folder / "given"))
    assert [name.partition("_")[0] for name in files if name != "__pycache__"] == ["function", "function", "rows"]
    rows = [json.loads(line) for line in next((folder / "given").glob("rows_*")).read_text().splitlines()]
    assert rows == ROWS
    # A command that knows the folder alone runs no code of it, which may be anybody's.
    asked = [str(folder / "config.yaml"), "--dry-run"]
    with pytest.raises(AssertionError, match="SystemExit"):
        run_ranks(1, main, asked, timeout_s=LATE_S)
    monkeypatch.syspath_prepend(folder / "given")
    monkeypatch.setenv("PYTHONPATH", str(folder / "given"))
    run_ranks(1, main, asked, timeout_s=LATE_S)


def with_a_dead_server(model, folder):
    from megatron_rl.life.process_exit import is_alive

    with rl.Run(ROWS, model, "megatron_rl.rewards:exact_match", **options(folder, 3)) as run:
        run.step()
        process = run._run.processes.process.process
        process.kill()
        try:
            run.train()
        except RuntimeError as error:
            return str(error), is_alive(process.pid)


def test_a_program_outlives_the_rollout_process_of_its_run(model, tmp_path):
    words, is_alive = run_ranks(1, with_a_dead_server, model, tmp_path / "run", timeout_s=LATE_S)[0]
    assert "rollout process" in words and "SIGKILL" in words and not is_alive
