from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import TensorDict
from transformers import BatchEncoding

from megatron_rl.types import LLMRequest, LLMResponse, Runs, StepStats, Trajectory, TrajectoryBatch


def trajectory(prompt: list[int], output: list[int], reward: float, version: int = 3, **sequence: float) -> Trajectory:
    reply = LLMResponse(
        input_tokens=prompt,
        output_tokens=output,
        output_logprobs=[-0.5 * (i + 1) for i in range(len(output))],
        output_versions=[version] * len(output),
        stop_reason="stop",
    )
    return Trajectory.from_reply(reply, reward, **sequence)


@pytest.fixture
def batch() -> TrajectoryBatch:
    """Two groups: one of two trajectories (lengths 3 and 2), one of one (length 4)."""
    return TrajectoryBatch.from_trajectories(
        [
            [trajectory([1, 2], [3], 1.0), trajectory([1], [4], 0.0)],
            [trajectory([5], [6, 7, 8], 0.5, version=4)],
        ]
    )


def test_reply_becomes_a_trajectory_whose_entry_t_describes_token_t():
    one = trajectory([1, 2], [3, 4], reward=1, greedy_reward=0.25)
    assert one.input_ids.tolist() == [1, 2, 3, 4]
    assert one.loss_mask.tolist() == [False, False, True, True]
    assert one.logprobs.tolist() == [0.0, 0.0, -0.5, -1.0]
    assert one.versions.tolist() == [-1, -1, 3, 3]
    assert one.reward == 1.0 and isinstance(one.reward, float)
    assert one.sequence == {"greedy_reward": 0.25}
    assert [t.dtype for t in (one.input_ids, one.loss_mask, one.logprobs, one.versions)] == [
        torch.int32,
        torch.bool,
        torch.float32,
        torch.int32,
    ]


def test_a_column_is_set_for_tokens_or_for_trajectories_by_its_length(batch):
    batch["advantages"], batch["scores"] = torch.arange(9.0), torch.arange(3.0)
    assert "advantages" in batch.tokens and "scores" in batch.sequences
    with pytest.raises(ValueError, match=r"batch\['rewards'\] has shape \(9,\)"):
        batch["rewards"] = torch.arange(9.0)  # there is one for each trajectory
    with pytest.raises(ValueError, match=r"takes \(9,\) for tokens or \(3,\) for sequences"):
        batch["weights"] = torch.arange(4.0)


def test_a_column_is_not_guessed_where_every_trajectory_has_one_token():
    batch = TrajectoryBatch({"input_ids": torch.ones(2).long()}, {"rewards": torch.zeros(2)}, torch.arange(3))
    batch["rewards"] = torch.ones(2)
    assert batch.sequences["rewards"].tolist() == [1.0, 1.0] and "rewards" not in batch.tokens
    with pytest.raises(ValueError, match=r"set batch.tokens\['advantages'\] or batch.sequences"):
        batch["advantages"] = torch.ones(2)


def test_groups_are_joined_without_padding_and_numbered(batch):
    assert len(batch) == 3
    assert batch["input_ids"].tolist() == [1, 2, 3, 1, 4, 5, 6, 7, 8]
    assert batch["loss_mask"].tolist() == [False, False, True, False, True, False, True, True, True]
    assert batch["logprobs"].tolist() == [0.0, 0.0, -0.5, 0.0, -0.5, 0.0, -0.5, -1.0, -1.5]
    assert batch["versions"].tolist() == [-1, -1, 3, -1, 3, -1, 4, 4, 4]
    assert batch["rewards"].tolist() == [1.0, 0.0, 0.5]
    assert batch["group"].tolist() == [0, 0, 1]
    assert batch.cu_seqlens.tolist() == [0, 3, 5, 9]
    assert batch.lengths.tolist() == [3, 2, 4]
    assert batch.sequence_ids.tolist() == [0, 0, 0, 1, 1, 2, 2, 2, 2]
    assert "rewards" in batch and "advantages" not in batch


def test_further_columns_of_trajectories_are_kept():
    first, second = trajectory([1], [2], 1.0, greedy_reward=0.5), trajectory([3], [4, 5], 0.0, greedy_reward=1.0)
    first.tokens["turn"], second.tokens["turn"] = torch.tensor([0, 1]), torch.tensor([0, 2, 2])
    batch = TrajectoryBatch.from_trajectories([[first], [second]])
    assert batch["greedy_reward"].tolist() == [0.5, 1.0]
    assert batch["turn"].tolist() == [0, 1, 0, 2, 2]


def test_batch_without_trajectories_is_refused():
    with pytest.raises(ValueError, match="no trajectories: every episode of the batch was rejected or failed"):
        TrajectoryBatch.from_trajectories([[], []])


def test_select_takes_trajectories_in_the_order_asked_for(batch):
    chosen = batch.select([2, 0])
    assert chosen["input_ids"].tolist() == [5, 6, 7, 8, 1, 2, 3]
    assert chosen["rewards"].tolist() == [0.5, 1.0]
    assert chosen["group"].tolist() == [1, 0]
    assert chosen.cu_seqlens.tolist() == [0, 4, 7]


def test_select_may_repeat_and_may_be_empty(batch):
    assert batch.select([1, 1])["input_ids"].tolist() == [1, 4, 1, 4]
    empty = batch.select([])
    assert len(empty) == 0 and empty.cu_seqlens.tolist() == [0] and empty["rewards"].shape == (0,)


def test_cat_undoes_select(batch):
    joined = TrajectoryBatch.cat([batch.select([0]), batch.select([]), batch.select([1, 2])])
    for key in (*batch.tokens, *batch.sequences):
        assert joined[key].tolist() == batch[key].tolist(), key
    assert joined.cu_seqlens.tolist() == batch.cu_seqlens.tolist()


def padded(**changes) -> TensorDict:
    data = {
        "input_ids": torch.tensor([[0, 1, 2], [3, 4, 0]]),  # left padded, right padded
        "attention_mask": torch.tensor([[0, 1, 1], [1, 1, 0]]),
        "loss_mask": torch.tensor([[0, 0, 1], [0, 1, 0]]),
        "rewards": torch.tensor([1.0, 0.0]),
    }
    return TensorDict({k: v for k, v in (data | changes).items() if v is not None}, batch_size=[2])


def test_padding_on_either_side_is_removed():
    batch = TrajectoryBatch.from_padded(padded(logprobs=torch.tensor([[9.0, 0.0, -1.0], [0.0, -2.0, 9.0]])))
    assert batch["input_ids"].tolist() == [1, 2, 3, 4]
    assert batch["loss_mask"].tolist() == [False, True, False, True] and batch["loss_mask"].dtype == torch.bool
    assert batch["logprobs"].tolist() == [0.0, -1.0, 0.0, -2.0]
    assert batch["rewards"].tolist() == [1.0, 0.0]
    assert batch.cu_seqlens.tolist() == [0, 2, 4]
    assert "attention_mask" not in batch


def test_what_a_padded_batch_lacks_is_filled_in():
    batch = TrajectoryBatch.from_padded(padded())
    assert batch["logprobs"].tolist() == [0.0] * 4
    assert batch["versions"].tolist() == [-1] * 4
    assert batch["group"].tolist() == [0, 1]


@pytest.mark.parametrize("key", ["input_ids", "attention_mask", "loss_mask"])
def test_padded_batch_without_a_required_key_is_refused(key):
    with pytest.raises(ValueError, match=f"'{key}' is missing from .*return it from arun_episode"):
        TrajectoryBatch.from_padded(padded(**{key: None}))


def test_padded_tensor_of_another_shape_is_refused():
    with pytest.raises(ValueError, match=r"'values' has shape \(2, 4\): with attention_mask \(2, 3\)"):
        TrajectoryBatch.from_padded(padded(values=torch.zeros(2, 4)))


@pytest.mark.parametrize(
    ("where", "key", "size", "needed"), [("tokens", "advantages", 4, 5), ("sequences", "rewards", 3, 2)]
)
def test_column_of_the_wrong_length_is_refused(where, key, size, needed):
    columns = {"tokens": {"input_ids": torch.arange(5)}, "sequences": {"rewards": torch.zeros(2)}}
    columns[where][key] = torch.zeros(size)
    with pytest.raises(ValueError, match=rf"{where}\['{key}'\] has shape \({size},\): .* needs \({needed},\)"):
        TrajectoryBatch(columns["tokens"], columns["sequences"], torch.tensor([0, 2, 5]))


@settings(max_examples=100, deadline=None)
@given(st.lists(st.lists(st.integers(-1, 3), max_size=6), max_size=6), st.randoms(use_true_random=False))
def test_versions_in_runs_are_those_of_the_tokens(parts, random):
    each = [version for part in parts for version in part]
    runs = Runs.cat([Runs.of(torch.tensor(part, dtype=torch.int64)) for part in [[], *parts]])
    assert len(runs) == len(each) and runs.each().tolist() == each
    places = random.choices(range(len(each)), k=5) if each else []
    assert runs.at(torch.tensor(places, dtype=torch.int64)).tolist() == [each[place] for place in places]
    assert len(Runs.of(runs.each()).values) == sum(a != b for a, b in zip(each, [None, *each], strict=False))


def test_ids_mask_logprobs_and_versions_take_nine_bytes_a_token_whatever_is_done_with_a_batch():
    batch = TrajectoryBatch.from_trajectories([[trajectory([1] * 100, [2] * 9_900, 1.0, version=v)] for v in range(8)])
    joined = TrajectoryBatch.cat([batch.select([3, 0, 7]), batch.select([1])])
    again = TrajectoryBatch.from_columns(joined.columns())
    assert again["versions"].tolist() == [v for version in (3, 0, 7, 1) for v in [-1] * 100 + [version] * 9_900]
    assert "versions" in again and again.tokens.keys() == {"input_ids", "loss_mask", "logprobs"}
    assert sum(column.nbytes for column in again.columns().values()) / 40_000 < 9.01
    with pytest.raises(ValueError, match=r"versions hold 0.5: must be whole numbers"):
        again["versions"] = torch.full((40_000,), 0.5)


def test_mean_of_a_statistic_survives_an_update_without_weight():
    stats = StepStats(loss=0.0, weight=0.0, grad_norm=0.0, applied=True, lr=1e-6, sums={"clipped_tokens": 0.0})
    assert stats.mean("clipped_tokens") == 0.0
    stats = StepStats(loss=0.0, weight=4.0, grad_norm=0.0, applied=True, lr=1e-6, sums={"clipped_tokens": 1.0})
    assert stats.mean("clipped_tokens") == 0.25


PROMPTS = {
    "list": [1, 2],
    "tuple": (1, 2),
    "numpy's numbers": [np.int64(1), np.int64(2)],
    "tensor": torch.tensor([1, 2]),
    "array": np.array([[1, 2]]),
    "batch of one": [[1, 2]],
    "batch encoding": BatchEncoding({"input_ids": [1, 2], "attention_mask": [1, 1]}),
    "of tensors": BatchEncoding({"input_ids": torch.tensor([[1, 2]])}),
    "of arrays": {"input_ids": [np.array([1, 2])]},
}


@pytest.mark.parametrize("form", PROMPTS)
def test_a_request_takes_the_prompt_as_a_tokenizer_gives_it(form):
    taken = LLMRequest(rid="a", input_ids=PROMPTS[form]).input_ids
    assert taken == [1, 2] and set(map(type, taken)) == {int}


@pytest.mark.parametrize(
    ("ids", "found"),
    [
        ("1 2", "a str"),
        (None, "a NoneType"),
        ({"ids": [1]}, "a dict"),
        ([[1], [2]], "a list of list"),
        ([1.0, 2.0], "a list of float"),
        (["1"], "a list of str"),
        ([True], "a list of bool"),
        (torch.tensor([0.5]), "a Tensor of float"),
        (torch.tensor(3), "a Tensor"),
    ],
)
def test_a_prompt_that_is_no_list_of_ids_is_named(ids, found):
    with pytest.raises(ValueError, match=f"LLMRequest.input_ids is {found}: must be the token ids of one prompt"):
        LLMRequest(rid="a", input_ids=ids)
