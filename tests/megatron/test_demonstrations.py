"""Demonstrations in an RL step: loss and gradient are those of their definition in float64, in every layout."""

import json

import pytest
import torch
from gathered import as_hf_tensors, record_gradients, relative_error
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from megatron_rl import parallel
from megatron_rl.algo.actor import PolicyActor
from megatron_rl.batch import exchange
from megatron_rl.config import (
    AlgorithmConfig,
    DataConfig,
    DemonstrationsConfig,
    ModelConfig,
    ParallelConfig,
    TrainConfig,
)
from megatron_rl.config.model_section import BatchConfig
from megatron_rl.run.demonstrated_rows import Demonstrations
from megatron_rl.run.step_metrics import mismatch_metrics, policy_metrics
from tests.kit.models import LAYOUTS, VOCAB, make_batch, make_engine, make_model, share_of
from tests.kit.ranks import run_ranks

TEMPERATURE, WEIGHT, STEP = 0.7, 0.3, 2
ROWS = [{"prompt": text, "answer": text[::-1] * 2} for text in ("ab", "hello", "t", "quick", "no", "world", "u")]
ALGORITHMS = {
    "token_mean": AlgorithmConfig(advantage="reinforce", loss="reinforce"),
    "sequence_mean": AlgorithmConfig(advantage="reinforce", loss="reinforce", aggregation="sequence_mean"),
}


class Letters:
    """A tokenizer whose tokens are letters."""

    eos_token_id, name_or_path = 1, "letters"

    def __call__(self, text, **_):
        return {"input_ids": [ord(letter) % VOCAB for letter in text]}


def batch_of(marks=True):
    """Seven trajectories; of two prompts' tokens some are to be imitated, one of which nothing predicts."""
    batch = make_batch(lengths=(9, 12, 7, 12, 6, 9, 8))
    demonstrated = torch.zeros(len(batch["input_ids"]))
    demonstrated[[0, 1, 2, 9, 10]] = torch.tensor([1.0, 0.5, 2.0, 1.0, 0.25])
    if marks:
        batch.tokens["demonstrated"] = demonstrated.masked_fill(batch["loss_mask"], 0.0)
    batch.sequences["number"] = torch.arange(len(batch))
    return batch


def config_of(folder, algo):
    return TrainConfig(
        model=ModelConfig(path=str(folder)),
        data=DataConfig(train="given"),
        algo=algo,
        batch=BatchConfig(updates_per_step=2),
        demonstrations=DemonstrationsConfig(weight=WEIGHT, source=str(folder / "rows.jsonl"), rows_per_step=5),
    )


def trained(folder, layout):
    """Return of each algorithm the trajectories of the first update, its statistics, metrics and gradient."""
    found = {}
    for name, algo in ALGORITHMS.items():
        engine = make_engine(folder, LAYOUTS[layout][1], tokens_per_microbatch=40, clip_grad=0.0)
        gradients, groups = record_gradients(engine), engine.groups
        own = share_of(batch_of(), engine) if groups.is_rollout_rank else None
        step = exchange.share_out(own, groups, updates=2, seed=5)
        demonstrations = Demonstrations(config_of(folder, algo), groups, Letters(), context=64)
        demonstrations.load_state_dict({"step": STEP})
        updates = demonstrations.add(step, step.shares())
        actor = PolicyActor(engine, algo, temperature=TEMPERATURE)
        stats = actor.update(updates)
        metrics = policy_metrics(stats) | mismatch_metrics(updates, stats, 0, groups)
        members = step["number"][step.plan.update == 0].tolist()
        rows = [demonstrations.order.at(STEP * 5 + place)["prompt_index"] for place in (0, 2, 4)]
        found[name] = members, rows, stats[0].loss, stats[0].weight, metrics, as_hf_tensors(engine, gradients[0])
    return found


def in_float64(folder, algo, members, rows, scratch):
    """Return (loss, divisor, mean -log p of what is imitated, gradient) of one update by autograd over transformers."""
    model, batch = AutoModelForCausalLM.from_pretrained(folder).double(), batch_of()
    policy, imitated, counts, divisor = 0.0, [], 0, 0
    for number in members:
        one = batch.select([number])
        mask, marks = one["loss_mask"][1:], one["demonstrated"][1:]
        logits = model(one["input_ids"][None].long()).logits[0, :-1] / TEMPERATURE
        own = logits.log_softmax(-1).gather(1, one["input_ids"][1:, None].long())[:, 0]
        loss = -(own * one["advantages"][1:])[mask]
        divisor += 1 if algo.aggregation == "sequence_mean" else len(loss)
        policy = policy + (loss.mean() if algo.aggregation == "sequence_mean" else loss.sum())
        imitated += [(-own[marks > 0] * marks[marks > 0]).sum()]
        counts += int((marks > 0).sum())
    plain = [float(sum(it.detach() for it in imitated))]
    for row in rows:
        prompt = Letters()(ROWS[row]["prompt"])["input_ids"]
        ids = torch.tensor([*prompt, *Letters()(ROWS[row]["answer"])["input_ids"], Letters.eos_token_id])
        own = (model(ids[None]).logits[0, :-1] / TEMPERATURE).log_softmax(-1).gather(1, ids[1:, None])[:, 0]
        imitated += [-own[len(prompt) - 1 :].sum()]
        counts += len(ids) - len(prompt)
    loss = policy / divisor + WEIGHT * sum(imitated) / counts
    loss.backward()
    for parameter in model.parameters():
        parameter.data = parameter.grad
    model.save_pretrained(scratch)
    return float(loss.detach()), divisor, counts, load_file(scratch / "model.safetensors"), plain


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("llama")
    make_model("llama", path, layers=2)
    (path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    return path


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["1", pytest.param("tp2_pp2", marks=pytest.mark.thorough), "dp2", "cp2"])
def test_demonstrations_weigh_what_they_are_said_to(layout, folder, tmp_path):
    ranks = run_ranks(LAYOUTS[layout][0], trained, folder, layout)
    for name, algo in ALGORITHMS.items():
        members, rows, loss, weight, metrics, gradients = ranks[0][name]
        right, divisor, count, expected, _ = in_float64(folder, algo, members, rows, tmp_path)
        assert weight == divisor and loss == pytest.approx(right, rel=1e-5), name
        errors = {key: relative_error(gradients[key], expected[key]) for key in expected}
        assert max(errors.values()) < 1e-5, (name, errors)
        assert metrics["policy/demonstrated_nll"] == pytest.approx(4.6, abs=0.5) and count > 20
        # About 97 tokens, of which servers said as much: of those that were imitated they had said nothing.
        assert metrics["mismatch/max"] < 8 and "mismatch/not_finite" not in metrics
        assert all(rank[name][2:5] == ranks[0][name][2:5] for rank in ranks[1:])


def test_a_mark_on_a_sampled_token_or_without_a_weight_is_refused(folder):
    run_ranks(1, refused, folder)


def refused(folder):
    engine = make_engine(folder, LAYOUTS["1"][1])
    config = config_of(folder, ALGORITHMS["token_mean"])
    batch = batch_of()
    batch.tokens["demonstrated"][batch["loss_mask"].nonzero()[0]] = 1.0
    step = exchange.share_out(batch, engine.groups, updates=2, seed=5)
    with pytest.raises(ValueError, match=r"tokens\['demonstrated'\] = 1.0 for 1 tokens: must be 0 or more, and 0"):
        Demonstrations(config, engine.groups, Letters(), context=64).add(step, step.shares())
    config.demonstrations = DemonstrationsConfig()
    with pytest.raises(ValueError, match=r"demonstrations.weight = 0.0: the workflow's trajectories mark tokens"):
        Demonstrations(config, engine.groups, Letters(), context=64).add(step, step.shares())
    step.tokens.pop("demonstrated")
    shares = step.shares()
    assert Demonstrations(config, engine.groups, Letters(), context=64).add(step, shares) is shares


def rows_taken(folder, sizes):
    """Return the rows' numbers of two steps with each number of rows per step, each resumed after the one before."""
    groups, state, taken = parallel.start(ParallelConfig(), seed=1), None, []
    for number, size in enumerate(sizes):
        config = config_of(folder, ALGORITHMS["token_mean"])
        config.demonstrations.rows_per_step = size
        demonstrations = Demonstrations(config, groups, Letters(), context=64)
        if state:
            demonstrations.load_state_dict({"step": 2 * number} | state)
        for _ in range(2):
            at, found = demonstrations.order.at, []
            demonstrations.order.at = lambda place, at=at, found=found: found.append(place) or at(place)
            step = exchange.share_out(batch_of(marks=False), groups, updates=2, seed=5)
            demonstrations.add(step, step.shares())
            demonstrations.order.at = at
            taken += sorted(found)
        state = json.loads(json.dumps(demonstrations.state_dict()))
    return taken


def test_a_resume_with_more_demonstrations_a_step_repeats_none_and_leaves_none_out(folder):
    assert run_ranks(1, rows_taken, folder, (5, 2, 4))[0] == list(range(22))
