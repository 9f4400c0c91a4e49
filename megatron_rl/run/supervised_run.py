"""Supervised training on the rows' answers, with the same engine as RL: its config check and its run."""

from __future__ import annotations

from typing import Any

from megatron_rl.config import TrainConfig
from megatron_rl.engine.megatron_engine import MegatronEngine
from megatron_rl.run.row_training import RowData, RowSteps, answer_training, check_rows, start_engine
from megatron_rl.run.run import Run


def check_supervised(config: TrainConfig) -> RowData:
    """Check the config before a process group is started. Return the rows.

    Raises ValueError, which names key, value and remedy.
    """
    if not config.supervised.answer:
        raise ValueError(
            "supervised.answer = '': names no column of the rows; set the one with the answer's text, or messages. RL "
            "is started by megatron-rl launch."
        )
    return check_rows(config, head="policy")


class SupervisedRun(Run):
    """All parts of one supervised run on this rank.

    For example:

        with SupervisedRun(load_config("configs/count_sft.yaml", [])) as run:
            run.begin()
            run.update(0)  # logs supervised/loss
            run.finish()
    """

    def _start(self) -> None:
        self.data = check_supervised(self.config)  # before any process group or file: a mistake costs seconds
        self._join()
        self._open()
        self.engine = start_engine(self.config, self.groups, head="policy")
        self.steps = RowSteps(
            *(self.config, self.data, answer_training(self.engine, self.groups), self.log_file, self.timers),
            resumed=self.resumed,
            check=lambda stats, rows: self.check_updates("model", [stats], trained_on=rows),
        )

    @property
    def trained(self) -> dict[str, MegatronEngine]:
        return {"model": self.engine}

    def _state(self) -> dict[str, Any]:
        return self.steps.state_dict()

    def begin(self) -> bool:
        """Bring the model to the state of the first step. Always returns True: it is too short to be interrupted."""
        if self.resumed:
            self.load_checkpoint()
        else:
            self.evaluate(step=0)
        return True

    def update(self, step: int) -> None:
        self.steps.update(step, self.data.rows.batch)

    def evaluate(self, *, step: int) -> None:
        self.steps.evaluate(step=step)
