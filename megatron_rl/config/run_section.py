"""The run itself: its folder, length and checkpoints, and where its numbers go."""

from __future__ import annotations

import re
from dataclasses import dataclass

from megatron_rl.config.rules import Section, above, at_least, ruled

MODULE = r"[^\W\d]\w*(\.[^\W\d]\w*)*"
LOGGERS = ("tensorboard", "wandb", "trackio")


@dataclass(kw_only=True)
class RunConfig(Section, name="run"):
    """The length of a run, its folder and its checkpoints."""

    folder: str = "runs/default"
    """The folder in which metrics, report and weights are written."""
    import_from: list[str] = ruled(
        "each must be a module's name",
        lambda names: all(re.fullmatch(MODULE, name) for name in names),
        default=[],
        hint="e.g. my_project or my.rewards",
    )
    """Packages or modules beside megatron_rl from which a config may import: workflow, reward, data, advantage, loss.

    A module of your own, such as my_rewards.py in a folder on PYTHONPATH: [my_rewards].
    """
    seed: int = 1
    steps: int = at_least(1, default=100)
    evaluate_every_steps: int = at_least(0, default=0)
    """0 evaluates before the first and after the last step only."""
    save_every_steps: int = at_least(0, default=0)
    """HF weights under folder/step-N; 0 saves after the last step only."""
    save_at_end: bool = True
    checkpoint_every_steps: int = at_least(0, default=0)
    """Checkpoints that `--resume` continues from, under folder/checkpoints; 0 writes none."""
    keep_checkpoints: int = at_least(1, default=2)
    """Newest checkpoints that stay."""
    grace_s: float = above(0, "seconds", default=60.0)
    """Seconds after SIGTERM or SIGUSR1 to finish the step or leave it and save; a run without checkpoints just ends.

    Ctrl-C is such a notice for every run, without an end to its time: the second one ends the run at once.
    """
    phase_timeout_s: float = above(0, "seconds", default=3600.0)
    """Longest that one phase of a step (rollout, update, publish, ...) may take; then every rank says where it stands,
    and the run ends: with a checkpoint where only rollouts are waited for."""
    most_skipped_updates: int = at_least(0, default=3)
    """Updates of one model that may be skipped in a row, because their loss or gradient was no number, or infinite;
    behind one more the run ends and names the tokens. 0: the first one ends it."""
    threads_per_rank: int = at_least(0, default=0)
    """CPU threads of one trainer rank, and of an embedded server; 0 takes the cores that are free when the run starts
    (of those that the process may use, within its container's quota), shared evenly among the ranks of this host. Other
    numbers of threads may sum in another order: give one where two runs must agree to the last bit."""
    offload: bool = False
    """Policy and reference take turns in device memory; the one that is not used waits in host memory."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if any(name.partition(".")[0] == "megatron_rl" for name in self.import_from):
            rule = "what megatron_rl offers to configs needs no entry, and nothing else of it can be named"
            self.refuse("import_from", f"{rule}; leave it out")


@dataclass(kw_only=True)
class TelemetryConfig(Section, name="telemetry"):
    """The samples that a run keeps, and where its numbers go besides its own folder."""

    loggers: list[str] = ruled(
        f"each must be one of {', '.join(LOGGERS)}",
        lambda names: set(names) <= set(LOGGERS),
        default=[],
        hint="leave the others out",
    )
    """Any of tensorboard, wandb, trackio."""
    project: str = "megatron_rl"
    """The run's project in services that have them; the run is called as its folder."""
    prometheus: str = ruled(
        "must be host:port, e.g. 127.0.0.1:9464",
        lambda address: not address or re.fullmatch(r".+:\d{1,5}", address) is not None,
        default="",
    )
    """host:port on which rank 0 offers the newest numbers, e.g. 127.0.0.1:9464; port 0 takes a free one, '' none."""
    samples_logged: int = at_least(0, default=8, hint="0 logs none")
    """Trajectories of each training step, drawn at random, that go to samples.jsonl as text; 0 for none, more than a
    step has for all."""
    trace_steps: list[int] = ruled(
        "each must be at least 0, the first step", lambda steps: all(step >= 0 for step in steps), default=[]
    )
    """Steps, counted from 0, of which trace/step-N.json.gz shows what trainer ranks, rollouts and servers did when: for
    ui.perfetto.dev."""
