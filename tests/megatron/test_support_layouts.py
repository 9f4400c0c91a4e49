"""Log-probabilities over supports in every layout: those of a masked dense softmax, with its updates.

The referee is FSDPEngine, which is transformers' model, plain autograd and no kernel of ours.
"""

from functools import cache

import pytest
import torch
from test_fsdp_referee import make_fsdp
from test_gradients import assert_same_updates

from megatron_rl.algo.loss import PolicyLoss
from megatron_rl.api import LogprobLoss
from megatron_rl.config import AlgorithmConfig, LoraConfig
from megatron_rl.support import ADJUSTMENT, COLUMN, whole
from tests.kit.models import LAYOUTS, VOCAB, make_engine, make_groups, make_model, share_of
from tests.kit.ranks import run_each

FAMILY = "qwen3_tied_one_kv_head"
WIDTH = 8
LOSSES = {
    "by token": AlgorithmConfig(kl_coefficient=0.1, entropy_coefficient=0.01),
    "by sequence": AlgorithmConfig(loss="gspo", kl_coefficient=0.0, entropy_coefficient=0.01),
}
# A split vocabulary; the others cut rows, layers and replicas.
OTHERS = ("tp2_sp", "pp2", "pp2_vpp2", "dp2", "cp2", "cp2_tp2_pp2", "tp2_dp2")
EVERY_LAYOUT = ["1", "tp2", *(pytest.param(layout, marks=pytest.mark.thorough) for layout in OTHERS)]


def with_supports(batch, *, is_adjusted):
    """The batch with a random support of 1 to WIDTH tokens for each trained token, and for every tenth none.

    is_adjusted: give the supports random shifts and penalties of their logits, too.
    """
    generator = torch.Generator().manual_seed(1)
    rows = whole(len(batch["input_ids"]), WIDTH)
    for row in batch["loss_mask"].nonzero()[:, 0].tolist():
        token = int(batch["input_ids"][row])
        others = [other for other in torch.randperm(VOCAB, generator=generator).tolist() if other != token]
        chosen = [token, *sorted(others[: row % WIDTH])]
        if row % 10:
            rows[row, : len(chosen)] = torch.tensor(chosen)
    batch.tokens[COLUMN] = rows
    if is_adjusted:
        found = 0.5 * torch.randn(*rows.shape, 3, generator=generator)
        share = torch.rand(*rows.shape, generator=generator)
        found[:, :, 1] = (0.7 + 0.6 * share).masked_fill(share < 0.3, 0.0)  # 0 is none
        is_whole = batch["loss_mask"] & (rows[:, 0] < 0)  # these change the logits of three tokens
        rows[is_whole, 1:4] = (batch["input_ids"][is_whole, None] + torch.tensor([0, 7, 50])).remainder(VOCAB).int()
        batch.tokens[ADJUSTMENT] = found.masked_fill((rows < 0)[:, :, None], 0.0)
    batch.tokens["ref_logprobs"] = batch["logprobs"] * 0.5
    return batch


def logprobs_and_updates(folder, layout, loss, options, by_referee=False):
    if by_referee:
        engine = make_fsdp(folder, weight_decay=0.0)
    else:
        engine = make_engine(
            folder, LAYOUTS[layout][1], weight_decay=0.0, eps=1e-5, tokens_per_microbatch=40, **options
        )
    batch = with_supports(make_groups(), is_adjusted=loss == "by token")
    own = share_of(batch, engine)
    before = torch.zeros(len(batch["input_ids"]))
    data = engine.groups.data
    before[torch.isin(batch.sequence_ids, torch.arange(data.rank, len(batch), data.size))] = engine.eval().forward(
        own, temperature=0.7
    )
    with pytest.raises(ValueError, match="loss on whole logits .* column 'support'.*pass a LogprobLoss"):
        engine.train_batch(own, lambda logits, rows: logits.sum())
    engine.train()
    fn = PolicyLoss(LOSSES[loss])
    stats = [engine.train_batch(own, LogprobLoss(fn, temperature=0.7, by_row=not fn.by_sequence)) for _ in range(2)]
    weights = {name: tensor.clone() for name, tensor in engine.hf_tensors()}
    return before, (stats, weights)


@pytest.fixture(scope="module")
def ran(tmp_path_factory):
    """A function: layout, layers -> by loss, what each rank found. The layout "referee" is FSDPEngine on one rank."""

    @cache
    def folder_of(layers):
        folder = tmp_path_factory.mktemp(f"{FAMILY}-{layers}")
        make_model(FAMILY, folder, layers=layers)
        return folder

    @cache
    def run(layout, layers):
        is_referee = layout == "referee"
        cases = {name: (folder_of(layers), layout, name, {}, is_referee) for name in LOSSES}
        return run_each(1 if is_referee else LAYOUTS[layout][0], logprobs_and_updates, cases)

    run.folder_of = folder_of
    return run


@pytest.mark.parametrize("layout", EVERY_LAYOUT)
def test_logprobs_and_updates_are_those_of_a_masked_softmax(layout, ran):
    layers = 4 if "vpp" in layout else 2
    expected, found = ran("referee", layers), ran(layout, layers)
    for loss in LOSSES:
        ((right, update),) = expected[loss]
        together = torch.stack([before for before, _ in found[loss]]).abs().amax(0)
        torch.testing.assert_close(together, right.abs(), rtol=0, atol=1e-5)
        assert together.max() > 1
        for _, ours in found[loss]:
            assert_same_updates(ours, update)


@pytest.mark.thorough
def test_adapters_learn_over_supports_what_one_process_learns(ran):
    cases = {
        layout: {"by token": (ran.folder_of(2), layout, "by token", {"lora": LoraConfig(rank=4, alpha=8.0)})}
        for layout in ("1", "tp2")
    }
    alone, split = (run_each(LAYOUTS[layout][0], logprobs_and_updates, case) for layout, case in cases.items())
    for ours in split["by token"]:
        torch.testing.assert_close(ours[0], alone["by token"][0][0], rtol=0, atol=1e-5)
        assert_same_updates(ours[1], alone["by token"][0][1])
