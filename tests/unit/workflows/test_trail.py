"""The world of the trail configs: ten calls of a tool, each of which the note before it names."""

import asyncio
import re
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from megatron_rl.batch import packing
from megatron_rl.config import GenerationConfig
from megatron_rl.data.tasks import trail
from megatron_rl.rewards import exact_match
from megatron_rl.types import TrajectoryBatch
from megatron_rl.workflows import MultiTurnWorkflow
from megatron_rl.workflows.trail import Trail
from tests.kit.replies import RecordingEngine
from tests.kit.tokenizers import make_tokenizer

TINY = Path(__file__).parents[3] / "configs" / "models" / "count_tiny"


def steps(data, *replies):
    """The world's answers: the note, empty at the end, and what the reply has earned."""

    async def ask():
        world = Trail(data)
        turns = [await world.step(reply, None) for reply in replies]
        return [("".join(message["content"] for message in turn.messages), turn.reward) for turn in turns]

    return asyncio.run(ask())


ROUND = {"trail": [3, 0, 2, 1], "call": ""}
"""Box 3 says 0, box 0 says 2, box 2 says 1 and box 1 says 3."""


def test_a_round_trip_earns_one_and_ends():
    assert steps(ROUND, "0", "2\n", "1", "3") == [("2\n", 0.25), ("1\n", 0.25), ("3\n", 0.25), ("", 0.25)]


def test_behind_a_wrong_box_its_own_note_counts():
    # Box 1 for 0, whose note then is followed; the box that the right one would have named is wrong.
    assert steps(ROUND, "1", "3", "2", "1") == [("3\n", 0.0), ("0\n", 0.25), ("1\n", 0.0), ("", 0.25)]


@pytest.mark.parametrize("reply", ["", "4", "00", "0 2", "open 0", "٠"])
def test_what_opens_no_box_ends_the_dialogue_without_reward(reply):
    assert steps(ROUND, reply) == [("", 0.0)]


def test_calls_in_words_are_taken_as_they_are_shown():
    (problem,) = trail(count=1, boxes=4, held_out=1, words=True)
    first, second, third, _ = problem["trail"]
    assert problem["prompt"].endswith(f"\nopen {first}\n{second}\n") and problem["answer"] == f"open {second}"
    assert steps(problem, f"open {second}\n") == [(f"{third}\n", 0.25)]
    assert steps(problem, f"{second}\n") == [("", 0.0)]


def play(tokenizer, problem, script, **options):
    workflow = MultiTurnWorkflow(
        exact_match, GenerationConfig(**options), tokenizer, Trail, max_tokens=400, max_turns=10
    )
    engine = RecordingEngine(tokenizer, script=script)
    return asyncio.run(workflow.arun_episode(engine, problem)), engine


@pytest.mark.parametrize("words", [False, True])
def test_a_policy_that_follows_the_notes_takes_ten_turns_and_earns_one(words):
    tokenizer = make_tokenizer() if words else AutoTokenizer.from_pretrained(TINY)
    (problem,) = trail(count=1, words=words)

    def follow(request):
        note = re.findall(r"\d", tokenizer.decode(request.input_ids))[-1]
        return f"open {note}\n" if words else f"{note}<eos>"

    (trajectory,), engine = play(tokenizer, problem, follow, max_new_tokens=12)
    assert (trajectory.reward, trajectory.sequence["turns"]) == (pytest.approx(1.0), 10)
    assert len(engine.served) == 10
    if not words:
        # The prompt's 4 tokens, ten replies of 2, and nine notes of 2: it fits the tiny model's context of 64.
        assert len(trajectory.input_ids) == 4 + 10 * 2 + 9 * 2 and int(trajectory.loss_mask.sum()) == 20


def test_dialogues_of_a_group_are_one_tree_until_they_open_other_boxes():
    tokenizer = AutoTokenizer.from_pretrained(TINY)
    (problem,) = trail(count=1)

    def follow(request):
        """The first of four dialogues ends at its fifth call."""
        text = tokenizer.decode(request.input_ids)
        is_lost = request.rid.endswith("-0") and text.count("\n") == 2 + 4
        return "x<eos>" if is_lost else f"{re.findall(r'[0-9]', text)[-1]}<eos>"

    dialogues, _ = play(tokenizer, problem, follow, max_new_tokens=3, n_samples=4)
    lengths = [len(dialogue.input_ids) for dialogue in dialogues]
    assert lengths == [4 + 5 * 2 + 4 * 2, 42, 42, 42]
    batch = TrajectoryBatch.from_trajectories([dialogues])
    rows = {
        shared: sum(unit.rows for unit in packing.units(batch, 4096, share_prompts=shared, final_rows=False))
        for shared in (False, True)
    }
    # Without the last row of each, which predicts nothing. Of the lost one, its own are the wrong call's two tokens.
    assert rows == {False: 21 + 3 * 41, True: 41 + 1}
