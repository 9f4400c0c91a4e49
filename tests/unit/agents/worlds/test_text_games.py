"""Games of the real package textarena: alone and against oneself, with the games' own rewards."""

import asyncio
import random
import re

import psutil
import pytest

from megatron_rl.agents.worlds.text_games import GameFailed, TextGames, game_prompts
from megatron_rl.config import GenerationConfig
from tests.kit.optional import later
from tests.kit.replies import RecordingEngine, check_trajectory
from tests.kit.tokenizers import make_tokenizer

later("textarena", reason="textarena is not installed: pip install 'megatron-rl[worlds]'")
TOKENIZER = make_tokenizer()


@pytest.fixture(scope="module")
def play():
    """Play games in which the policy moves as `moves` says of the text that a seat has before it."""
    pools = {}

    def played(game, moves, *, seed=0, samples=1, max_tokens=20_000, **options):
        engine = RecordingEngine(TOKENIZER, script=lambda req: f"{moves(TOKENIZER.decode(req.input_ids))}<eos>")
        gconfig = GenerationConfig(n_samples=samples, max_new_tokens=100)
        workflow = TextGames(lambda **_: 1 / 0, gconfig, TOKENIZER, game, max_tokens, **options)
        workflow._pool = pools.get((game, workflow.seats))  # to import the package takes seconds
        (data,) = game_prompts(1, seed, text="Play.")
        try:
            trajectories = asyncio.run(workflow.arun_episode(engine, data))
        finally:
            pools[game, workflow.seats] = workflow._pool
        for trajectory in trajectories:
            check_trajectory(trajectory, engine.served)
        return trajectories

    played.pools = pools
    yield played
    for pool in pools.values():
        pool.close()


def halving(text):
    """Guess between the bounds that the game's answers leave."""
    low, high = 1, 20
    for guess, hint in re.findall(r"<\|assistant\|>(\d+).*?The target number is (higher|lower)", text, re.DOTALL):
        low, high = (int(guess) + 1, high) if hint == "higher" else (low, int(guess) - 1)
    return (low + high) // 2


def test_a_group_plays_the_same_game_alone_and_has_its_rewards(play):
    before = random.getstate()
    trajectories = play("GuessTheNumber-v0", halving, seed=3, samples=2)
    assert [t.reward for t in trajectories] == [1.0, 1.0]
    first, second = (TOKENIZER.decode(t.input_ids) for t in trajectories)
    assert first == second, "the seed hides the same number"
    assert first.startswith("<|system|>Play.<|end|><|user|>You are Player 0. You are playing Guess The Number.")
    assert first.count("You are Player 0") == 1, "what was said is not said again"
    assert [t.sequence["sample"] for t in trajectories] == [0, 1] and trajectories[0].sequence["turns"] >= 2
    assert random.getstate() == before, "games draw from random numbers of their own"


def test_the_policy_plays_all_seats_and_each_has_its_own_dialogue_and_reward(play):
    def first_free(text):
        return re.findall(r"Available Moves: '\[(\d)\]'", text)[-1]

    first, second = play("TicTacToe-v0", first_free, seats=2)
    # 0 2 4 6 are the first player's and 1 3 5 the second's: 2 4 6 is a row.
    assert [t.reward for t in (first, second)] == [1.0, -1.0]
    assert [(t.sequence["agent"], t.sequence["turns"]) for t in (first, second)] == [(0, 4), (1, 3)]
    heard = TOKENIZER.decode(second.input_ids)
    assert "You are Player 1 in Tic Tac Toe" in heard and "You are Player 0" not in heard
    assert "[Player 0] [0]\nPlayer 0 placed their symbol (O) in cell 0." in heard


def test_a_dialogue_without_room_ends_without_reward(play):
    (one,) = play("GuessTheNumber-v0", lambda _: "1", seed=3, max_turns=1)
    assert one.reward == 0.0 and one.sequence["turns"] == 1
    (one,) = play("GuessTheNumber-v0", halving, seed=3, max_tokens=len(one.input_ids) + 5)
    assert one.reward == 0.0 and one.sequence["turns"] == 1


def test_a_game_that_cannot_be_made_is_named(play):
    with pytest.raises(GameFailed, match="game no-such-game: .*not found in registry"):
        play("no-such-game", lambda _: "1")


@pytest.mark.slow
def test_a_game_that_dies_hangs_or_raises_fails_its_sample_and_is_no_reward(play):
    def kill(_):
        (game,) = psutil.Process(play.pools["GuessTheNumber-v0", 1].process.pid).children()
        game.kill()
        return "1"

    def stop(_):
        (game,) = psutil.Process(play.pools["GuessTheNumber-v0", 1].process.pid).children()
        game.suspend()
        return "1"

    with pytest.raises(GameFailed, match="game GuessTheNumber-v0: a worker died"):
        play("GuessTheNumber-v0", kill)
    with pytest.raises(GameFailed, match="game GuessTheNumber-v0: a move took longer than 1 s"):
        play("GuessTheNumber-v0", stop, move_timeout_s=1.0)
    with pytest.raises(GameFailed, match="game GuessTheNumber-v0: AssertionError: The number of players has to be 1"):
        play("GuessTheNumber-v0", halving, seats=2)
