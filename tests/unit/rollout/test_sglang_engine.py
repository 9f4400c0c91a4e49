"""The engine of a loop of one's own: the prompts that it takes, and how many of them."""

import asyncio
import itertools

import pytest

from megatron_rl import RemoteSGLangEngine
from megatron_rl.config import AlgorithmConfig, BatchConfig, RolloutConfig, TrainConfig

ROWS = [{"n": number} for number in range(5)]
OF_THREE = TrainConfig(algo=AlgorithmConfig(advantage="reinforce"), batch=BatchConfig(prompts_per_step=3))


class Loader:
    """What a DataLoader with collate_fn=list is to its user."""

    batch_size = 2

    def __iter__(self):
        return itertools.chain([ROWS[:2], ROWS[2:4], ROWS[4:]])


def engine(config, monkeypatch):
    """An engine whose executor takes the rows and returns their numbers."""

    async def prepare_batch(prompts, workflow, count):
        return [row["n"] for row in itertools.islice(prompts, count)]

    made = RemoteSGLangEngine(config)
    monkeypatch.setattr(made, "_run", asyncio.run)
    monkeypatch.setattr(made.service.executor, "prepare_batch", prepare_batch)
    return made


@pytest.mark.parametrize(
    ("config", "prompts", "count", "taken"),
    [
        (RolloutConfig(), iter(ROWS), 2, [[0, 1], [2, 3], [4]]),
        (RolloutConfig(), ROWS, 2, [[0, 1], [2, 3], [4, 0]]),
        (RolloutConfig(), Loader(), None, [[0, 1], [2, 3], [4, 0]]),
        (RolloutConfig(), iter(Loader()), 3, [[0, 1, 2], [3, 4], []]),
        (OF_THREE, ROWS, None, [[0, 1, 2], [3, 4, 0], [1, 2, 3]]),
        (OF_THREE, Loader(), 1, [[0], [1], [2]]),
    ],
    ids=["an iterator", "a list", "a loader", "a loader's iterator", "a config", "a count counts most"],
)
def test_a_step_takes_as_many_rows_as_config_or_loader_say_and_goes_on(config, prompts, count, taken, monkeypatch):
    made = engine(config, monkeypatch)
    assert [made.prepare_batch(prompts, None, count) for _ in range(3)] == taken


@pytest.mark.parametrize(
    ("prompts", "count", "words"),
    [
        (ROWS, None, "prepare_batch: count = None: must be at least 1, because neither the config nor the prompts say"),
        (ROWS, 0, "prepare_batch: count = 0: must be at least 1"),
        ([], 1, "prepare_batch: prompts has no rows; give at least one"),
        (["2 + 2"], 1, "prepare_batch: prompts gave str; must give rows, each a dict, or lists of them"),
    ],
)
def test_prompts_without_a_number_or_without_rows_are_refused(prompts, count, words, monkeypatch):
    with pytest.raises(ValueError) as told:
        engine(RolloutConfig(), monkeypatch).prepare_batch(prompts, None, count)
    assert str(told.value).startswith(words)
