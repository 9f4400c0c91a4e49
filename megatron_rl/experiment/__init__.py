"""One run: its parts, checked, built, and held together for the loop in train.py."""

from megatron_rl.experiment.checks import check, dry_run
from megatron_rl.experiment.experiment import Experiment

__all__ = ["Experiment", "check", "dry_run"]
