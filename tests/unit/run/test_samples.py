"""Which trajectories of a step are kept as text, and how a dialogue reads."""

import io
from collections import Counter
from concurrent.futures import Future

import pytest
import torch
from rich.console import Console

from megatron_rl.config import GenerationConfig, TrainConfig
from megatron_rl.run.evaluation import Evaluations, decode, decode_samples, draw
from megatron_rl.telemetry.run_log import RunLog, read_run
from megatron_rl.types import Trajectory, TrajectoryBatch

WORDS = ["sys", "ask", "one", "no", "again", "two", "yes", "three"]


class Words:
    """A tokenizer of few words."""

    def decode(self, ids):
        return " ".join(WORDS[token] for token in ids.tolist())


def trajectory(words, written, *, reward=1.0, trained=None, **sequence):
    """written: which words the policy wrote, all of them trained unless `trained` says otherwise."""
    mask = torch.tensor([word in written for word in words.split()])
    ids = torch.tensor([WORDS.index(word) for word in words.split()])
    return Trajectory(
        input_ids=ids,
        loss_mask=mask if trained is None else torch.tensor([word in trained for word in words.split()]),
        logprobs=torch.zeros(len(ids)),
        versions=torch.where(mask, 0, -1),
        reward=reward,
        sequence=sequence,
    )


def decoded(*args, **kwargs):
    batch = TrajectoryBatch.from_trajectories([[trajectory(*args, **kwargs)]])
    return decode(Words(), batch, 0)


@pytest.mark.parametrize("trained", [None, ["two"], []], ids=["all", "the last", "none"])
def test_a_dialogue_is_kept_turn_by_turn_whatever_of_it_is_trained(trained):
    sample = decoded("sys ask one no again two yes", ["one", "two"], trained=trained)
    turns = [(turn.by, turn.text) for turn in sample.turns]
    others = [("others", "sys ask"), ("others", "no again"), ("others", "yes")]
    assert turns == [others[0], ("policy", "one"), others[1], ("policy", "two"), others[2]]
    assert (sample.prompt, sample.reply, sample.said) == ("sys ask", "two", "onetwo")


def test_a_single_reply_has_no_turns():
    for words, written, prompt, reply in (
        ("ask one two", ["one", "two"], "ask", "one two"),
        ("one two", ["one", "two"], "", "one two"),
        ("ask again", [], "ask again", ""),
    ):
        sample = decoded(words, written)
        assert (sample.prompt, sample.reply, sample.said, sample.turns) == (prompt, reply, reply, [])


def groups(prompts=4, samples=4):
    rows = [[trajectory("ask one", ["one"], reward=float(10 * p + n)) for n in range(samples)] for p in range(prompts)]
    batch = TrajectoryBatch.from_trajectories(rows)
    batch.sequences["prompt_index"] = batch["group"] + 1
    return batch


def test_samples_are_drawn_at_random_of_as_many_prompts_as_there_are():
    batch = groups()
    drawn = [batch["rewards"][draw(batch, 6, seed=seed)].tolist() for seed in range(20)]
    assert drawn[0] == batch["rewards"][draw(batch, 6, seed=0)].tolist()
    for rewards in drawn:
        assert len(set(rewards)) == 6 and set(Counter(reward // 10 for reward in rewards).values()) <= {1, 2}
    assert {reward for rewards in drawn for reward in rewards} == set(batch["rewards"].tolist())
    assert sorted(draw(batch, 10**6)) == list(range(len(batch))) and draw(batch, 0) == []


def test_a_samples_answer_is_that_of_its_prompt():
    prompts = [{"answer": number} for number in range(4)] + [{"prompt": "without one"}]
    for sample in decode_samples(Words(), groups(), prompts=prompts):
        place = int(sample.reward // 10) + 1
        assert sample.answer == (str(place) if place < 4 else "")
    unnumbered = groups()
    del unnumbered.sequences["prompt_index"]
    assert {sample.answer for sample in decode_samples(Words(), unnumbered, prompts=prompts)} == {""}


@pytest.mark.parametrize(
    ("rewards", "says"), [([0.0, 1.0], "accuracy 0.00 -> 1.00"), ([0.0, 0.29], "reward 0.00 -> 0.29")]
)
def test_the_console_speaks_of_accuracy_only_where_replies_are_right_or_wrong(tmp_path, rewards, says):
    with RunLog(tmp_path, 1, console=Console(file=io.StringIO())) as log:
        evaluations = Evaluations(
            TrainConfig(generation=GenerationConfig(n_samples=2)), {"held_out": [{"answer": 1}]}, log, Words()
        )
        for step, reward in enumerate(rewards):
            one = trajectory("ask one no two", ["one", "two"], reward=reward, prompt=0)
            batch = TrajectoryBatch.from_trajectories([[one]])
            replies = Future()
            replies.set_result(batch)
            evaluations.begin(step, replies)
        evaluations.log_finished()
    assert evaluations.change == f"held-out {says}"
    (row,) = read_run(tmp_path).samples["held_out", 0]
    assert row["turns"][0] == {"by": "others", "text": "ask"} and row["reply"] == "two" and row["answer"] == "1"
