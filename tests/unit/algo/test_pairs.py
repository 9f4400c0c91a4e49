"""Pairs of replies: read and checked, kept together, and what their losses are worth by hand."""

import json
import math

import pytest
import torch
from tensordict import TensorDict
from transformers import AutoTokenizer

from megatron_rl.algo import registry
from megatron_rl.algo.catalogue import find_pair_loss
from megatron_rl.algo.preference import pairs_of, preference_metrics
from megatron_rl.batch import packing
from megatron_rl.config import PAIR_LOSSES, load_config
from megatron_rl.data.sft_rows import join_pairs, load_replies
from megatron_rl.data.tasks import count_ones_pairs

TINY = "configs/models/count_tiny"
PAIRS = [([1, 2, 3], [4], [5, 6]), ([7], [8, 9], [8]), ([1, 2, 3, 4, 5, 6], [7], [9])]


@pytest.fixture
def load(tmp_path):
    """Read rows as the training pairs of a run: (ids of each sequence, their masks)."""

    def load(*rows, **settings):
        (tmp_path / "pairs.jsonl").write_text("\n".join(map(json.dumps, rows)))
        config = {"model.path": TINY, "data.train": tmp_path / "pairs.jsonl", "preference.loss": "dpo"} | settings
        (tmp_path / "empty.yaml").write_text("run: {steps: 1}")
        loaded = load_config(tmp_path / "empty.yaml", [f"{key}={value}" for key, value in config.items()])
        pairs, held_out = load_replies(loaded, AutoTokenizer.from_pretrained(TINY), context=16)
        assert held_out == {} and [row["chosen"] for row in pairs.rows] == [row["chosen"] for row in rows]
        return pairs.batch(range(len(rows)))

    return load


def test_replies_follow_their_prompt_and_end_as_a_model_ends_them(load):
    tokenizer = AutoTokenizer.from_pretrained(TINY)
    pairs = load(
        {"prompt": "0110?", "chosen": "2", "rejected": "14"}, {"input_ids": [3, 4], "chosen": "1", "rejected": "0"}
    )
    texts = [tokenizer.decode(ids) for ids in pairs["input_ids"].split(pairs.lengths.tolist())]
    eos = tokenizer.eos_token
    assert texts[:2] == [f"0110?2{eos}", f"0110?14{eos}"]
    trained = [tokenizer.decode(ids[mask]) for ids, mask in _parts(pairs)]
    assert trained == [f"2{eos}", f"14{eos}", f"1{eos}", f"0{eos}"]
    assert pairs["pair"].tolist() == pairs["group"].tolist() == [0, 0, 1, 1]


def _parts(pairs):
    lengths = pairs.lengths.tolist()
    return zip(pairs["input_ids"].split(lengths), pairs["loss_mask"].split(lengths), strict=True)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"prompt": "1?", "chosen": "1"}, "pair 2: rejected = None: must be the text of a reply"),
        ({"prompt": "1?", "chosen": " ", "rejected": "1"}, "pair 2: chosen = ' ': must be the text of a reply"),
        (
            {"prompt": "1?", "chosen": ["1"], "rejected": "0"},
            r"pair 2: chosen = \['1'\]: .* as the last message of the dialogue",
        ),
        ({"prompt": "1?", "chosen": "1", "rejected": "1"}, "pair 2: chosen and rejected are the same reply, '1'"),
        ({"prompt": "1?" * 7, "chosen": "1", "rejected": "10"}, "pair 2: has 17 tokens, more than .* context of 16"),
        ({"chosen": "1", "rejected": "0"}, "prompt 2: has only chosen, rejected; must have exactly one of"),
    ],
)
def test_row_that_is_no_pair_is_named(row, message, load):
    with pytest.raises(ValueError, match=message):
        load({"prompt": "1?", "chosen": "1", "rejected": "0"}, row)


def test_pairs_of_the_count_task_prefer_the_right_count():
    pairs = count_ones_pairs(count=50)
    assert all(int(pair["chosen"]) == pair["prompt"].count("1") != int(pair["rejected"]) for pair in pairs)
    assert {pair["rejected"] for pair in pairs} > set("0258") and pairs == count_ones_pairs(count=50)


# A budget of one row, of some and of all; prompts computed once, and twice.
@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("budget", [1, 9, 1000])
def test_pairs_stay_together_and_in_order_in_every_microbatch(budget, shared):
    batch = join_pairs([PAIRS[number] for number in (2, 0, 1, 0)])
    batch.sequences["is_rejected"] = torch.tensor([0, 1] * 4)
    options = {"share_prompts": shared, "final_rows": False}
    least = packing.least_microbatches([unit.rows for unit in packing.units(batch, budget, **options)], budget)
    found = []
    for microbatch in packing.pack(batch, tokens_per_microbatch=budget, count=least + 1, **options):
        rows, count = microbatch.rows, int(pairs_of(microbatch.rows))
        if count:
            assert rows["is_rejected"].tolist() == [0, 1] * count
            found += rows["pair"].view(-1, 2).tolist()
    assert sorted(found) == [[0, 0], [1, 1], [2, 2], [3, 3]], "a pair that is taken twice is two"


def loss_of_one_pair(name, chosen, rejected, **args):
    """The loss of one pair with these log-probs (or scores) in each trained row, and the gradient by row."""
    values = torch.tensor([0.0, *chosen, 0.0, *rejected]).double().requires_grad_()
    labels = torch.tensor([-100, *[1] * len(chosen), -100, *[1] * len(rejected)])
    bounds = torch.tensor([0, 1 + len(chosen), len(values)])
    reference = torch.where(labels >= 0, -1.0, 0.0)
    rows = TensorDict({"labels": labels, "cu_seqlens": bounds.int(), "ref_logprobs": reference})
    loss, sums = find_pair_loss(name, args)(values, rows)
    loss.backward()
    return loss.item(), sums, values.grad.tolist()


def test_losses_of_a_pair_worked_out_by_hand():
    chosen, rejected = [-0.5, -0.5], [-2.0]  # against the reference's -1 each: log ratios 1 and -1
    loss, sums, gradient = loss_of_one_pair("dpo", chosen, rejected, beta=0.5)
    slope = 0.5 / (1 + math.e)  # beta s(-d), d = 1
    assert loss == pytest.approx(math.log(1 + math.exp(-1)))
    assert [gradient[row] for row in (1, 2, 4)] == pytest.approx([-slope, -slope, slope])
    assert (float(sums["preferred"]), float(sums["chosen_reward"]), float(sums["rejected_reward"])) == (1, 0.5, -0.5)
    assert loss_of_one_pair("ipo", chosen, rejected, beta=0.1)[0] == pytest.approx((2 - 5) ** 2)
    # The same by token: 1 / 2 and -1.
    assert loss_of_one_pair("ipo", chosen, rejected, beta=0.1, per_token=True)[0] == pytest.approx((1.5 - 5) ** 2)
    # Means of -0.5 and -2 a token, twice: 3 - margin.
    assert loss_of_one_pair("simpo", chosen, rejected, margin=3)[0] == pytest.approx(math.log(2))
    smooth = loss_of_one_pair("dpo", chosen, rejected, beta=0.5, label_smoothing=0.25)[0]
    assert smooth == pytest.approx(0.75 * math.log(1 + math.exp(-1)) + 0.25 * math.log(1 + math.e))
    # By token r is 0.5 / 2 and -0.5; the chosen one's log p is -0.5 a token.
    by_token = loss_of_one_pair("dpo", chosen, rejected, beta=0.5, per_token=True, sft=2.0)[0]
    assert by_token == pytest.approx(math.log(1 + math.exp(-0.75)) + 2.0 * 0.5)
    # r - point and point - r are 0.5 - 0.25 and 0.25 + 0.5.
    loss, _, gradient = loss_of_one_pair("kto", chosen, rejected, beta=0.5, point=0.25, desirable=2.0)
    assert loss == pytest.approx(2 / (1 + math.exp(0.25)) + 1 / (1 + math.exp(0.75)))
    slope = 2 * 0.5 * math.exp(0.25) / (1 + math.exp(0.25)) ** 2  # of the chosen reply's tokens
    assert gradient[1] == gradient[2] == pytest.approx(-slope)
    loss, sums, _ = loss_of_one_pair("bradley_terry", [0.5], [2.5])
    assert loss == pytest.approx(math.log(1 + math.exp(2))) and float(sums["preferred"]) == 0
    assert preference_metrics(sums, 1.0) == {
        "accuracy": 0.0,
        "chosen_reward": 0.5,
        "rejected_reward": 2.5,
        "margin": -2.0,
    }


def test_microbatch_without_pairs_adds_nothing_and_has_a_graph():
    idle = packing.to_microbatch(join_pairs(PAIRS), []).rows
    idle["ref_logprobs"] = torch.zeros(1)
    values = torch.zeros(1, requires_grad=True)
    for name in PAIR_LOSSES:
        loss, sums = find_pair_loss(name, {})(values, idle)
        loss.backward()
        assert loss.item() == 0 and int(pairs_of(idle)) == 0 and not any(map(float, sums.values())), name
    assert float(values.grad) == 0


def test_losses_are_those_that_the_config_names():
    assert tuple(registry.PAIR_LOSSES) == PAIR_LOSSES


def of_one_number(pairs):
    return pairs.values[:, 0], pairs.values[:, 0]


@pytest.mark.parametrize(
    ("name", "args", "message"),
    [
        ("slic", {}, "preference.loss = 'slic': must be one of dpo, ipo, kto, simpo, bradley_terry, or an import"),
        ("kto", {"desirable": -1.0}, "preference.loss_args.desirable = -1.0: must be at least 0"),
        ("dpo", {"sft": -0.1}, "preference.loss_args.sft = -0.1: must be at least 0"),
        ("dpo", {"gamma": 1}, "preference.loss_args = .*gamma.* are beta=0.1, label_smoothing=0.0"),
        ("dpo", {"beta": 0}, "preference.loss_args.beta = 0: must be above 0"),
        ("dpo", {"label_smoothing": 0.5}, r"label_smoothing = 0.5: must be in \[0, 0.5\)"),
        (f"{__name__}:of_one_number", {}, r"returned \[\(1,\), \(1,\)\] for one pair; return two tensors"),
    ],
)
def test_wrong_loss_is_refused_before_anything_is_loaded(name, args, message):
    with pytest.raises(ValueError, match=message):
        find_pair_loss(name, args)
