"""Training on answers: each update is that of its definition in float64, whatever the layout and the split."""

import json
from pathlib import Path

import pytest
import torch
from gathered import as_hf_tensors, record_gradients, relative_error
from safetensors.torch import load_file
from test_fsdp_referee import OPTIONS, make_fsdp
from transformers import AutoModelForCausalLM

from megatron_rl.config import load_config
from megatron_rl.data.prompts import PromptIterator
from megatron_rl.data.sft_rows import join_replies
from megatron_rl.run.preference_run import asked_together
from megatron_rl.run.row_training import RowData, answer_training, check_supervised
from megatron_rl.telemetry.run_log import read_run
from megatron_rl.train import train
from tests.kit.models import LAYOUTS, VOCAB, make_engine, make_model
from tests.kit.ranks import run_ranks

pytestmark = pytest.mark.usefixtures("programs_are_forked")

TOLERANCE = 1e-5
# Every answer in a microbatch of its own, of which two replicas have three and two; some together; all in one.
SPLITS = {"1": (1, 30, 1000), "tp2_sp": (30,), "tp2_pp2": (30,), "pp2_vpp2": (30,), "dp2": (1, 1000), "cp2": (30,)}


def answers_of_batch():
    """Five answers of 1 to 8 tokens to prompts of 1 to 14."""
    generator = torch.Generator().manual_seed(3)

    def tokens(count):
        return torch.randint(0, VOCAB, (count,), generator=generator).tolist()

    return join_replies([(tokens(prompt), tokens(own)) for prompt, own in ((9, 3), (1, 4), (14, 8), (4, 6), (2, 1))])


def updates(backend, folder, layout, splits):
    """Return by split (loss before, statistics, whole gradient) of one update from the folder's weights."""
    engine = make_fsdp(folder) if backend == "fsdp" else make_engine(folder, LAYOUTS[layout][1], **OPTIONS)
    gradients, results = record_gradients(engine), {}
    for split in splits:
        engine.load(folder)
        engine.reset_optimizer(10)
        engine.config.tokens_per_microbatch = split
        training = answer_training(engine, engine.groups)
        before = training.evaluate(answers_of_batch()).loss
        results[split] = before, training.update(answers_of_batch()), as_hf_tensors(engine, gradients[-1])
    return results


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    found = tmp_path_factory.mktemp("policy")
    make_model("llama", found)
    return found


@pytest.fixture(scope="module")
def expected(folder, tmp_path_factory):
    """Loss and gradients by HF name: transformers' mean over all answer tokens, in float64."""
    batch, scratch = answers_of_batch(), tmp_path_factory.mktemp("gradients")
    model = AutoModelForCausalLM.from_pretrained(folder).double()
    bounds, losses = batch.cu_seqlens.tolist(), []
    for a, b in zip(bounds, bounds[1:], strict=False):
        ids, answer = batch["input_ids"][a:b], batch["loss_mask"][a:b]
        logprobs = model(ids[None]).logits[0, :-1].log_softmax(-1)
        losses.append(-logprobs.gather(-1, ids[1:, None])[:, 0][answer[1:]])
    loss = torch.cat(losses).mean()
    loss.backward()
    for parameter in model.parameters():
        parameter.data = parameter.grad
    model.save_pretrained(scratch)
    return loss.item(), load_file(scratch / "model.safetensors")


def assert_as_defined(ranks, expected):
    loss, whole = expected
    for split, (before, stats, gradients) in ranks[0].items():
        assert all(other[split][:2] == (before, stats) for other in ranks), "every rank reports the same step"
        assert stats.weight == 3 + 4 + 8 + 6 + 1
        assert (before, stats.loss) == pytest.approx((loss, loss), rel=TOLERANCE)
        for name, gradient in whole.items():
            error = relative_error(gradients[name], gradient)
            assert error <= TOLERANCE, f"microbatches of {split}: {name} differs by {error:.1e}"


@pytest.mark.parametrize(
    "layout",
    # test_theorems.py has this loss on each axis; here replicas have answers of different number.
    [pytest.param(layout, marks=() if layout in ("1", "dp2") else pytest.mark.thorough) for layout in SPLITS],
)
def test_update_is_that_of_the_definition_in_float64(layout, folder, expected):
    assert_as_defined(run_ranks(LAYOUTS[layout][0], updates, "megatron", folder, layout, SPLITS[layout]), expected)


@pytest.mark.slow
def test_the_same_on_fsdp(folder, expected):
    assert_as_defined(run_ranks(2, updates, "fsdp", folder, "dp2", (1, 30)), expected)


def rates_of_a_warm_start(backend, folder):
    options = OPTIONS | {"warmup_updates": 5, "schedule": "cosine"}
    engine = make_fsdp(folder, **options) if backend == "fsdp" else make_engine(folder, LAYOUTS["1"][1], **options)
    engine.reset_optimizer(3, lr=0.25)
    training = answer_training(engine, engine.groups)
    return [training.update(answers_of_batch()).lr for step in range(3)]


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["megatron", "fsdp"])
def test_warm_start_has_its_own_rate_whatever_the_schedule_of_what_comes_after(backend, folder):
    assert run_ranks(1, rates_of_a_warm_start, backend, folder) == [[0.25] * 3]


ROOT = Path(__file__).parents[2]
MODEL = (f"model.path={ROOT}/configs/models/count_tiny", "model.init=random")
SMALL = ("run.steps=3", "run.evaluate_every_steps=2", "batch.prompts_per_step=6", "batch.tokens_per_microbatch=40")


def run_of(*settings):
    """Run the shipped config on this rank; return what it logged."""
    return resumed_run_of(*settings, resume="")


def resumed_run_of(*settings, resume="auto"):
    config = load_config(ROOT / "configs" / "count_sft.yaml", [*MODEL, *SMALL, *settings])
    assert train(config, resume=resume)
    return read_run(config.run.folder)


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["dp2", pytest.param("tp2_sp", marks=pytest.mark.thorough)])
def test_run_is_the_same_on_two_ranks(layout, tmp_path):
    runs = {}
    for ranks, own in ((1, "1"), (2, layout)):
        settings = (f"parallel.tensor={LAYOUTS[own][1].tensor}", f"run.folder={tmp_path}/{own}")
        runs[own] = run_ranks(ranks, run_of, *settings)[0]
        assert (tmp_path / own / "report.html").is_file()
    one, two = runs["1"], runs[layout]
    assert [line["step"] for line in one.evaluations] == [0, 2, 3]
    for ours, alone in zip(two.evaluations, one.evaluations, strict=True):
        assert ours["tokens"] == 64 * 2 and ours["loss"] == pytest.approx(alone["loss"], rel=1e-4)
        assert ours["perplexity"] == pytest.approx(torch.tensor(ours["loss"]).exp().item(), rel=1e-4)
    for ours, alone in zip(two.steps, one.steps, strict=True):
        for name in ("loss", "perplexity", "grad_norm", "lr"):
            assert ours[f"supervised/{name}"] == pytest.approx(alone[f"supervised/{name}"], rel=1e-3)
    assert one.evaluations[-1]["loss"] < one.evaluations[0]["loss"]
    weights, found = (load_file(tmp_path / own / "final" / "model.safetensors") for own in ("1", layout))
    for name, tensor in weights.items():
        torch.testing.assert_close(found[name], tensor, rtol=0, atol=1e-4)


def rows_from(resumed, per_step):
    order = PromptIterator([{"prompt": str(number)} for number in range(37)], seed=3)
    data = RowData(order=order, rows=None, held_out={}, rows_per_step=per_step)
    if resumed is not None:
        data.resume(resumed)
    return data


@pytest.mark.parametrize("sizes", [(4, 10, 1), (9, 9, 9), (16, 3, 40), (1, 2, 3)], ids=str)
def test_a_resume_with_another_batch_size_repeats_no_row_and_leaves_none_out(sizes):
    state, trained = None, []
    for first_step, per_step in enumerate(sizes):
        rows = rows_from(state, per_step)
        for step in (2 * first_step, 2 * first_step + 1):
            trained += rows.numbers(step)
            rows.order.number = rows.end_of(step)
            assert trained[-per_step:] == rows.numbers(step)
        state = {"step": step + 1, "prompts": json.loads(json.dumps(rows.order.state_dict()))}
    order = PromptIterator([{"prompt": str(number)} for number in range(37)], seed=3)
    assert trained == [row["prompt_index"] for row in order.next_batch(2 * sum(sizes))]
    # The reference of what is still to be trained is complete, and the same after another resume.
    asked = list(asked_together(rows.numbers, 9, 5))
    assert {row for step in range(5, 9) for row in rows.numbers(step)} <= {row for batch in asked for row in batch}
    assert list(asked_together(rows_from(state, per_step).numbers, 9, 5)) == asked


def test_a_checkpoint_of_an_earlier_version_which_counted_no_rows_is_resumed_after_its_steps():
    state = {"step": 3, "prompts": rows_from(None, 6).order.state_dict()}
    assert state["prompts"]["number"] == 0
    assert rows_from(state, 6).numbers(3) == rows_from(None, 6).numbers(3)


@pytest.mark.thorough
def test_a_resumed_run_takes_changed_betas_and_says_so_and_refuses_another_dtype_by_name(tmp_path, capfd):
    settings = ("run.checkpoint_every_steps=2", "run.save_at_end=false", f"run.folder={tmp_path}/run")
    run_ranks(1, run_of, *settings, "run.steps=2")
    with pytest.raises(AssertionError, match="model.dtype = 'bfloat16': the checkpoint '.*step-2' has 'float32', and"):
        run_ranks(1, resumed_run_of, *settings, "model.dtype=bfloat16")
    capfd.readouterr()
    (run,) = run_ranks(1, resumed_run_of, *settings, "optimizer.beta1=0.5", "optimizer.eps=1e-3")
    assert "changed since the checkpoint: optimizer.beta1 = 0.5 (was 0.9), " in capfd.readouterr().out
    assert [line["step"] for line in run.steps] == [0, 1, 2]


def test_folder_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(AssertionError, match=r"run.folder = '.*/file/run': cannot be written \(.*\); name another one"):
        run_ranks(1, run_of, f"run.folder={tmp_path}/file/run")


@pytest.mark.slow
def test_run_says_how_many_rows_it_leaves_out(tmp_path, capfd):
    rows = [{"prompt": "1?", "answer": "1" * count} for count in (1, 2, 30, 4, 40)]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    data = (f"data.train={tmp_path}/rows.jsonl", "data.train_args={}", "data.evaluation=", "data.evaluation_args={}")
    settings = (*data, "data.max_tokens=7", "run.steps=1", "run.save_at_end=false", f"run.folder={tmp_path}/run")
    (run,) = run_ranks(1, run_of, *settings)
    assert "data.train: 2 rows are too long and left out, 3 are left" in capfd.readouterr().out
    assert len(run.steps) == 1 and run.evaluations == []


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["supervised.answer=''", "generation.n_samples=2"], "supervised.answer = '': names no column of the rows"),
        (["batch.updates_per_step=2"], "batch.updates_per_step = 2: must be 1 with supervised.answer; set"),
        (["warm_start.updates=5"], "warm_start.updates = 5: must be 0 with supervised.answer; run megatron-rl sft"),
        (["supervised.answer=solution"], "data.train, row 1: solution = None: must be the answer"),
        (["data.max_tokens=10"], "data.max_tokens = 10: all 192 prompts of data.train have more; raise it"),
        (["model.init=hf"], "no .*safetensors there"),
        (["parallel.tensor=3"], "parallel.tensor = 3"),
    ],
)
def test_what_cannot_be_trained_is_refused_before_anything_is_loaded(settings, message):
    with pytest.raises(ValueError, match=message):
        check_supervised(load_config(ROOT / "configs" / "count_sft.yaml", [*MODEL, *settings]))
