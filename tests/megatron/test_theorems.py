"""Theorems: loss, every gradient and the weights after two updates are those of one process, to 1e-5 relative.

Whatever the layout, the number of microbatches, the loss, what its weight counts, and where the trained tokens are;
also where dialogues fork and each row they share is computed once, against every dialogue computed alone; and the
gradients of one process are those of float64 autograd over transformers' model.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import pytest
import torch
from gathered import as_hf_tensors, record_gradients, relative_error
from safetensors.torch import load_file
from tensordict import TensorDict
from test_fsdp_referee import make_fsdp
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from megatron_rl.algo.loss import PolicyLoss, supervised, value_clip
from megatron_rl.api import LogprobLoss, ValueLoss
from megatron_rl.batch import packing
from megatron_rl.config import AlgorithmConfig
from megatron_rl.engine.packed_rows import own_rows
from megatron_rl.ops import gather_logprobs
from megatron_rl.parallel import Axis
from megatron_rl.types import TrajectoryBatch
from tests.kit.examples import IS_THOROUGH
from tests.kit.models import LAYOUTS, VOCAB, make_batch, make_engine, make_model, make_value_model, share_of
from tests.kit.ranks import run_ranks

TOLERANCE = 1e-5


def make_megatron(folder, layout, **options):
    return make_engine(folder, LAYOUTS[layout][1], **options)


def make_referee(folder, layout, **options):
    return make_fsdp(folder, weight_decay=0.0, **options)


@dataclass(frozen=True)
class Row:
    """A line of the grid: a layout of tiny.LAYOUTS, options of the optimizer, a family, and what trains it."""

    layout: str
    options: tuple[tuple[str, Any], ...] = ()
    family: str = "qwen3_tied_one_kv_head"
    make: Callable = make_megatron

    @property
    def layers(self) -> int:
        """Number of layers of the model: one for each chunk of each stage, two if no stage has chunks."""
        return 4 if LAYOUTS[self.layout][1].virtual_pipeline > 1 else 2


MIXTURE = "qwen3_moe"
EPS = (("eps", 1e-4),)
"""Near gradients as small as make_engine's eps Adam makes 1e-6 of rounding in the first gradient into 1e-5 of the
weights' change and of the second gradient. Those of few tokens are the smallest."""
DISTRIBUTED = (("distributed", True),)
OVERLAP = (*DISTRIBUTED, ("overlap", True))
GRID = {
    "1": Row("1"),
    "tp2": Row("tp2"),
    "tp2_sp": Row("tp2_sp"),
    "pp2": Row("pp2"),
    "pp2_vpp2": Row("pp2_vpp2"),
    "dp2": Row("dp2"),
    "dp2_distributed": Row("dp2", DISTRIBUTED),
    "dp2_overlap": Row("dp2", OVERLAP),
    "cp2": Row("cp2"),
    "cp4": Row("cp4"),
    "tp2_pp2": Row("tp2_pp2"),
    "cp2_tp2_pp2": Row("cp2_tp2_pp2"),
    "tp2_pp2_dp2_sp": Row("tp2_pp2_dp2", DISTRIBUTED),
    # Experts over data, context and tensor ranks; cut in two over data and tensor ranks; both.
    "ep2": Row("ep2", family=MIXTURE),
    "etp2": Row("etp2", DISTRIBUTED, MIXTURE),
    "cp2_ep2": Row("cp2_ep2", family=MIXTURE),
    "tp2_ep2": Row("tp2_ep2", DISTRIBUTED, MIXTURE),
    "tp2_etp2": Row("tp2_etp2", family=MIXTURE),
    "tp2_ep2_etp2": Row("tp2_ep2_etp2", family=MIXTURE),
    "tp2_pp2_ep2": Row("tp2_pp2_ep2", family=MIXTURE),
    "tp2_pp2_dp2_ep2": Row("tp2_pp2_dp2_ep2", DISTRIBUTED, MIXTURE),
    "fsdp2": Row("dp2", make=make_referee),
}


FAST = ("tp2_sp", "cp2")
"""A matrix and a sequence that are divided: enough for `make test-fast`."""
QUICK = (*FAST, "pp2_vpp2", "dp2_distributed", "tp2_pp2", "tp2_ep2")
"""Each axis of a dense model, experts, and two pairs of axes: enough for `make test`. Experts over context ranks are in
test_mixtures.py, the other backend is in test_fsdp_referee.py."""


def marks_of(line):
    return () if line in FAST else pytest.mark.slow if line in QUICK else pytest.mark.thorough


def trained_tokens(rows):
    return (rows["labels"] >= 0).sum()


def trained_sequences(rows):
    """The number of sequences that have a trained token."""
    lengths = rows["cu_seqlens"].diff()
    sequence = torch.repeat_interleave(torch.arange(len(lengths)), lengths)
    return len(sequence[rows["labels"] >= 0].unique())


def mean_over_sequences(logits, rows):
    """The mean over sequences with trained tokens of the sum over those, from logits."""
    logprobs = gather_logprobs(logits, rows["labels"])
    return torch.where(rows["labels"] >= 0, -logprobs * rows["advantages"], 0.0).sum() / trained_sequences(rows)


LOSSES: dict[str, tuple[LogprobLoss | ValueLoss | Callable, Callable]] = {
    "policy": (
        LogprobLoss(
            PolicyLoss(AlgorithmConfig(entropy_coefficient=0.01, kl_coefficient=0.1)), temperature=0.7, by_row=True
        ),
        trained_tokens,
    ),
    "policy_per_sequence": (mean_over_sequences, trained_sequences),
    "sft": (LogprobLoss(supervised), trained_tokens),
    "critic": (ValueLoss(partial(value_clip, clip=0.2)), trained_tokens),
}
COUNTS = (1, 2, 5) if IS_THOROUGH else (1, 2, 3)
"""Numbers of microbatches. The last is odd: a pipeline of two stages then ends with a round that is not full."""
SEEDS = (0, 1, 2)
"""Of the random trees."""


def cases_of(line):
    """(loss, batch, microbatches) of a line: each loss and each count, two losses with the sparse batch and with trees.

    Any three lines in a row have all pairs of loss and count; one process runs all but what it is compared with. A line
    of `make test` has each loss once: two with the full batch, one with the sparse batch and one with trees.
    """
    losses = list(LOSSES)
    if line in QUICK and not IS_THOROUGH:
        number = QUICK.index(line)
        first, second, third, fourth = (losses[(number + i) % len(losses)] for i in range(4))
        full = [(first, "full", COUNTS[number % 3]), (second, "full", COUNTS[(number + 1) % 3])]
        return [*full, (third, "sparse", 2), (fourth, f"trees {number % 3}", None)]
    number = list(GRID).index(line)
    if line == "1":
        some = [(loss, *rest) for loss in losses for rest in (("sparse", 2), ("full", 2), ("full", 5))]
        return some + [(loss, f"trees {seed}", None) for loss in losses for seed in SEEDS]
    full = [(loss, "full", COUNTS[(number + i) % 3]) for i, loss in enumerate(losses)]
    sparse = [(losses[(number + i) % len(losses)], "sparse", 2) for i in (0, 1)]
    trees = [(losses[(number + i) % len(losses)], f"trees {(number + i) % 3}", None) for i in (0, 2)]
    return [*full, *sparse, *trees]


def batch_of(kind):
    """Twelve trajectories; of the "sparse" ones only the last trains, three tokens at its end.

    So every replica but one, every context rank but one and every microbatch but one has no trained token. Of "trees"
    and a seed they are dialogues that fork, of "alone" and the seed the same ones without the groups that tell so.
    """
    batch = make_batch(lengths=(16, 12, 7, 12, 8, 9, 24, 8, 13, 4, 16, 11))
    if kind.startswith(("trees", "alone")):
        batch = make_trees(int(kind[-1]))
        if kind.startswith("alone"):
            del batch.sequences["group"]
    if kind == "sparse":
        batch.tokens["loss_mask"] = torch.arange(len(batch["input_ids"])) >= len(batch["input_ids"]) - 3
    generator = torch.Generator().manual_seed(5)
    for key in ("values", "returns"):
        batch.tokens[key] = torch.randn(len(batch["input_ids"]), generator=generator)
    # Near what a random policy gives one of 97 tokens: about a quarter of the ratios is clipped.
    batch.tokens |= {"proximal_logprobs": batch["logprobs"] - 4.0, "ref_logprobs": batch["logprobs"] - 5.0}
    return batch


def make_trees(seed):
    """Three groups of four dialogues, each of which goes on from a random token of one of those before it."""
    generator = torch.Generator().manual_seed(seed)
    drawn = lambda low, high: int(torch.randint(low, high, (1,), generator=generator))  # noqa: E731
    ids, masks = [], []
    for number in range(12):
        begin = ids[-1 - drawn(0, number % 4)] if number % 4 else torch.empty(0, dtype=torch.int64)
        own = torch.randint(0, VOCAB, (drawn(2, 12),), generator=generator)
        ids.append(torch.cat([begin[: drawn(1, 2 + len(begin))], own]))
        masks.append((torch.rand(len(ids[-1]), generator=generator) < 0.6) & (torch.arange(len(ids[-1])) > 0))
    mask, lengths = torch.cat(masks), list(map(len, ids))
    tokens = {
        "input_ids": torch.cat(ids),
        "loss_mask": mask,
        "logprobs": -torch.rand(sum(lengths), generator=generator) * mask,
        "versions": torch.where(mask, 0, -1),
        "advantages": torch.randn(sum(lengths), generator=generator),
    }
    sequences = {"rewards": torch.rand(12, generator=generator), "group": torch.arange(12) // 4}
    return TrajectoryBatch(tokens, sequences, torch.tensor([0, *lengths]).cumsum(0))


def budget_for(count, batch, replicas):
    """A token budget at which the replica that needs most needs `count` microbatches, final rows computed or not.

    None: one at which every replica needs several, and families are cut.
    """
    if count is None:
        return int(batch.lengths.max()) + 2
    shares = [batch.lengths[rank::replicas] for rank in range(replicas)]

    def counts(budget):
        return {max(packing.least_microbatches((s - cut).tolist(), budget) for s in shares) for cut in (0, 1)}

    return next(budget for budget in range(200, 0, -1) if counts(budget) == {count})


def head_of(loss):
    return "value" if isinstance(LOSSES[loss][0], ValueLoss) else "policy"


def run_cases(folders, row, cases):
    """Return the weights as loaded, by head; and of each case (stats, gradients of both updates, weights after)."""
    loaded, results, groups = {}, {}, None
    for head, folder in folders.items():
        options = dict(row.options + EPS)
        engine = row.make(folder, row.layout, groups=groups, head=head, **options).train()
        groups, gradients = engine.groups, record_gradients(engine)
        loaded[head] = {key: tensor.clone() for key, tensor in engine.hf_tensors()}
        for case in cases:
            if head_of(case[0]) == head:
                engine.load(folder)
                engine.reset_optimizer(10)
                results[case] = run_case(engine, gradients, *case)
    return loaded, results


def run_case(engine, gradients, name, kind, count):
    gradients.clear()
    batch, (loss, weigh), pipeline = batch_of(kind), LOSSES[name], engine.groups.pipeline
    engine.config.tokens_per_microbatch = budget_for(count, batch, engine.groups.data.size)
    weighed = []

    def weigh_and_count(rows):
        weighed.append(int(weigh(rows)))
        return torch.tensor(weighed[-1])

    stats = [engine.train_batch(share_of(batch, engine), loss, weigh_and_count) for _ in range(2)]
    if engine.groups.is_last_stage and count is not None:
        is_interleaved = engine.config.parallel.virtual_pipeline > 1  # such a schedule runs whole rounds
        passes = -(-count // pipeline.size) * pipeline.size if is_interleaved else count
        assert len(weighed) == 2 * passes
    whole = [as_hf_tensors(engine, values) for values in gradients]
    return stats, whole, {key: tensor.clone() for key, tensor in engine.hf_tensors()}, weighed


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory):
    """A function: family, layers -> {head: folder}."""

    @cache
    def make(family, layers):
        folders = {head: tmp_path_factory.mktemp(f"{family}_{head}") for head in ("policy", "value")}
        make_model(family, folders["policy"], layers)
        make_value_model(family, folders["value"], layers)
        return folders

    return make


def alone(case):
    """(loss, batch) of what one process does for a case: it computes each dialogue alone."""
    return case[0], case[1].replace("trees", "alone")


@pytest.fixture(scope="module")
def one_process(folder_of):
    """A function: family, layers, (loss, batch) of cases -> their results in one process with one microbatch."""
    found = {}

    def run(family, layers, asked):
        known = found.setdefault((family, layers), {})
        wanted = {*asked}
        if layers == 2:
            wanted |= {(loss, kind) for loss in LOSSES for kind in ("full", "sparse")}
        for line in QUICK:  # all that a session asks for, in one process
            if (GRID[line].family, GRID[line].layers) == (family, layers):
                wanted |= {alone(case) for case in cases_of(line)}
        if missing := [(loss, kind, 1) for loss, kind in sorted(wanted) if (loss, kind) not in known]:
            (_, results), *_ = run_ranks(1, run_cases, folder_of(family, layers), Row("1", family=family), missing)
            known |= {(loss, kind): result for (loss, kind, _), result in results.items()}
        return known

    return run


def assert_close(ours, expected, what):
    assert ours.keys() == expected.keys()
    errors = {name: relative_error(ours[name], expected[name]) for name in expected}
    worst = max(errors, key=errors.get)
    assert errors[worst] <= TOLERANCE, f"{what}: {worst} differs by {errors[worst]:.1e}"


@pytest.mark.proves("layouts", "{line}", "policy")
@pytest.mark.proves("layouts", "{line}", "SFT")
@pytest.mark.proves("layouts", "{line}", "critic")
@pytest.mark.proves("layouts", "{line}", "trees")
@pytest.mark.proves("layouts", "{line}", "HF round trip")
@pytest.mark.parametrize("line", [pytest.param(line, marks=marks_of(line)) for line in GRID])
def test_update_is_that_of_one_process(line, folder_of, one_process):
    row = GRID[line]
    folders, cases = folder_of(row.family, row.layers), cases_of(line)
    ranks = run_ranks(LAYOUTS[row.layout][0], run_cases, folders, row, cases)
    loaded, (first, *others) = ranks[0][0], [results for _, results in ranks]
    for head, folder in folders.items():
        theirs, ours = load_file(folder / "model.safetensors"), loaded[head]
        assert ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in theirs)
    expected = one_process(row.family, row.layers, map(alone, cases))
    for case, (stats, gradients, weights, _) in first.items():
        one_stats, one_gradients, one_weights, _ = expected[alone(case)]
        for update, (ours, one) in enumerate(zip(stats, one_stats, strict=True)):
            assert ours.weight == one.weight and ours.loss == pytest.approx(one.loss, rel=TOLERANCE), case
            assert_close(gradients[update], one_gradients[update], f"{case}, gradient of update {update + 1}")
            assert ours.grad_norm == pytest.approx(one.grad_norm, rel=TOLERANCE), case
            assert ours.sums == pytest.approx(one.sums, rel=1e-4, abs=1e-3) and ours.applied, case
        assert_close(weights, one_weights, f"{case}, weight")
        for rank in others:
            assert rank[case][0] == stats, "every rank reports the same step"
        if case[1] == "sparse" and "dp2" in line:
            replicas = [sorted(rank[case][3]) for rank in (first, *others)]
            assert [0] * 4 in replicas and [0, 0, one_stats[0].weight, one_stats[0].weight] in replicas


def test_sparse_batch_leaves_a_context_rank_without_a_trained_token():
    batch, trained = batch_of("sparse"), []
    for rank in range(2):
        for microbatch in packing.pack(batch, tokens_per_microbatch=budget_for(2, batch, 1), count=2):
            axis, labels = Axis(None, 2, rank), microbatch.rows["labels"]
            _, packed = own_rows(microbatch, axis, multiple_of=4, device=torch.device("cpu"))
            trained.append(int((packed.reads[labels >= 0] >= 0).sum()))
    assert sorted(trained) == [0, 0, 0, 3]


def float64_gradients(folder, batch, name, scratch):
    """Return (loss, weight, {HF name: gradient}) of transformers' model in float64, a sequence at a time."""
    is_critic, (loss_fn, weigh) = head_of(name) == "value", LOSSES[name]
    # Of its experts' implementations only the plain loop takes float64.
    model_class = AutoModelForSequenceClassification if is_critic else AutoModelForCausalLM
    model = model_class.from_pretrained(folder, experts_implementation="eager").double()
    bounds, total, weight = batch.cu_seqlens.tolist(), 0.0, 0
    for a, b in zip(bounds, bounds[1:], strict=False):
        # Row t predicts token t + 1; the last predicts nothing.
        rows = {key: values[a + 1 : b].double() for key, values in batch.tokens.items()}
        mask = batch["loss_mask"][a + 1 : b]
        labels = batch["input_ids"][a + 1 : b].masked_fill(~mask, -100)
        rows |= {"labels": labels, "loss_mask": mask, "cu_seqlens": torch.tensor([0, b - a - 1])}
        rows = TensorDict(rows)
        if not mask.any():
            continue
        weight += int(weigh(rows))
        if is_critic:
            values = model.score(model.model(batch["input_ids"][a:b][None]).last_hidden_state)[0, :-1, 0]
            total = total + loss_fn.fn(values * mask, rows)[0]
            continue
        logits = model(batch["input_ids"][a:b][None]).logits[0, :-1]
        if isinstance(loss_fn, LogprobLoss):
            logprobs = (logits / loss_fn.temperature).log_softmax(-1)
            entropy = -(logprobs.exp() * logprobs).sum(-1) * mask
            total = total + loss_fn.fn(logprobs.gather(-1, labels.clamp(min=0)[:, None])[:, 0] * mask, entropy, rows)[0]
        else:
            total = total + loss_fn(logits, rows) * weigh(rows)
    loss = total / weight
    loss.backward()
    for parameter in model.parameters():
        parameter.data = parameter.grad
    model.save_pretrained(scratch)  # under the names of a folder, which are not always those of transformers' modules
    return loss.item(), weight, load_file(scratch / "model.safetensors")


@pytest.mark.parametrize("family", sorted({row.family for row in GRID.values()}))
@pytest.mark.parametrize("loss", LOSSES)
def test_gradient_is_that_of_float64_autograd(loss, family, folder_of, one_process, tmp_path):
    for kind in ("full", "sparse"):
        stats, gradients, _, _ = one_process(family, 2, ())[loss, kind]
        folder = folder_of(family, 2)[head_of(loss)]
        expected, weight, whole = float64_gradients(folder, batch_of(kind), loss, tmp_path)
        assert stats[0].weight == weight and stats[0].loss == pytest.approx(expected, rel=TOLERANCE)
        assert_close(gradients[0], whole, f"{kind}, gradient")
