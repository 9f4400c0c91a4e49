"""Options of the run itself: folder, length, checkpoints and telemetry."""

from __future__ import annotations

import re
from dataclasses import dataclass

from megatron_rl.config.rules import Section, above, at_least, ruled

MODULE = r"[^\W\d]\w*(\.[^\W\d]\w*)*"
LOGGERS = ("tensorboard", "wandb", "trackio")


@dataclass(kw_only=True)
class RunConfig(Section, name="run"):
    """Length of a run, its folder and its checkpoints."""

    folder: str = "runs/default"
    """Folder for metrics, report and weights."""
    import_from: list[str] = ruled(
        "each must be a module's name",
        lambda names: all(re.fullmatch(MODULE, name) for name in names),
        default=[],
        hint="e.g. my_project or my.rewards",
    )
    """Packages or modules, besides megatron_rl, from which a config may import its workflow, reward, data, advantage
    estimator and loss, such as [my_rewards] for your my_rewards.py in a folder on PYTHONPATH."""
    seed: int = 1
    steps: int = at_least(1, default=100)
    evaluate_every_steps: int = at_least(0, default=0)
    """Interval for evaluation. 0 evaluates only before the first step and after the last."""
    save_every_steps: int = at_least(0, default=0)
    """Interval for saving Hugging Face weights under folder/step-N. 0 saves weights only after the last step."""
    save_at_end: bool = True
    """Save Hugging Face weights after the last step."""
    checkpoint_every_steps: int = at_least(0, default=0)
    """Interval for writing checkpoints under folder/checkpoints, from which `--resume` continues. 0 writes none."""
    keep_checkpoints: int = at_least(1, default=2)
    """Number of newest checkpoints to keep."""
    grace_s: float = above(0, "seconds", default=60.0)
    """Time after SIGTERM or SIGUSR1 in which the run must finish or abandon its step and save a checkpoint. A run
    without checkpoints just ends. After Ctrl-C there is no time limit. A second Ctrl-C ends the run at once."""
    phase_timeout_s: float = above(0, "seconds", default=3600.0)
    """Maximum duration of one phase of a step (rollout, update, publish, ...). Then every rank reports where it stands,
    and the run ends. If it was only waiting for rollouts, it writes a checkpoint first."""
    most_skipped_updates: int = at_least(0, default=3)
    """Maximum number of consecutive updates of one model that may be skipped, because their loss or gradient is NaN or
    infinite. One more ends the run with an error that names the tokens with such numbers."""
    threads_per_rank: int = at_least(0, default=0)
    """CPU threads of each trainer rank, and of each server that the run starts. 0: the cores that are free at the
    start, within CPU set and container quota, divided among the host's trainer ranks. The thread count can change the
    order of summation, so set it if two runs must agree to the last bit."""
    offload: bool = False
    """Policy and reference model take turns in device memory. The one not in use is kept in host memory."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if any(name.partition(".")[0] == "megatron_rl" for name in self.import_from):
            rule = "what megatron_rl offers to configs needs no entry, and nothing else of it can be named"
            self.refuse("import_from", f"{rule}; leave it out")


@dataclass(kw_only=True)
class TelemetryConfig(Section, name="telemetry"):
    """Samples and timelines that a run records, and where it sends metrics in addition to its folder."""

    loggers: list[str] = ruled(
        f"each must be one of {', '.join(LOGGERS)}",
        lambda names: set(names) <= set(LOGGERS),
        default=[],
        hint="any other is refused",
    )
    """Where metrics are sent in addition to the run's folder."""
    project: str = "megatron_rl"
    """Name of the project, in services that have projects. The run has the name of its folder there."""
    prometheus: str = ruled(
        "must be host:port, e.g. 127.0.0.1:9464",
        lambda address: not address or re.fullmatch(r".+:\d{1,5}", address) is not None,
        default="",
    )
    """Address at which rank 0 serves the latest metrics. Port 0: any free port. Empty: they are not served."""
    samples_logged: int = at_least(0, default=8, hint="0 logs none")
    """Maximum number of random trajectories per training step that are written to samples.jsonl as text."""
    trace_steps: list[int] = ruled(
        "each must be at least 0, the first step", lambda steps: all(step >= 0 for step in steps), default=[]
    )
    """Steps, counted from 0, whose timelines of trainer ranks, rollouts and servers are written to
    trace/step-N.json.gz, to be opened at ui.perfetto.dev."""
    record_steps: list[str] = ruled(
        "each must be a step's number from 0, `every K` with K of at least 1, or on_alarm",
        lambda steps: all(re.fullmatch(r"\d+|every [1-9]\d*|on_alarm", step) for step in steps),
        default=["on_alarm"],
        hint="e.g. [3, 12], 'every 100', on_alarm, or [] for none",
    )
    """Steps that `megatron-rl replay` can repeat from run.folder/records, where a record has the step's trajectories
    and what it computed from them. on_alarm: if an error ends the run, the steps since the oldest of the newest
    run.keep_checkpoints checkpoints; up to 256 MB of them wait in each rank's memory. N from 0, or `every K` for every
    K-th step: written at once, with gradients and weights by tensor. The checkpoint before such a step is kept in
    addition to run.keep_checkpoints, and so are the trajectories of the steps between them."""

    def records(self, first: int, end: float) -> bool:
        """Return True if a step in [first, end) is to be recorded with its tensors."""
        periods = [int(entry.removeprefix("every ")) for entry in self.record_steps if entry.startswith("every ")]
        named = [int(entry) for entry in self.record_steps if entry.isdecimal()]
        return any(first <= step < end for step in named) or any(-(-first // k) * k < end for k in periods)
