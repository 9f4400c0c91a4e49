"""Runs a config in a Slurm job: one step per rollout server, and one step for all trainer ranks.

    sbatch --nodes 12 scripts/train_grpo.sh configs/count_grpo.yaml          # the batch script calls this module

This module runs on the job's first node. Servers register in a folder, where trainers also find servers of other jobs.
On a stop signal (`--signal`, preemption), the trainer saves. Then the job is requeued and resumes.
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from megatron_rl.config import TrainConfig, load_config
from megatron_rl.launch.placement import Nodes, Placement, ServerPlace, nodes_of_job, place
from megatron_rl.launch.rank import PROGRAM
from megatron_rl.life.stop_signal import EXIT_STOPPED

FIRST_PORT, PORTS = 20_000, 4_000
"""First port and number of ports for the rendezvous of ranks. Servers listen on higher ports (launch/ports.py)."""
FIRST_SERVER_PORT, SERVER_PORTS, PORTS_OF_SERVER = 12_000, 500, 16
"""Ports for the rendezvous of a server's nodes: the first port, the number of slots, and the ports per slot. SGLang
uses seven ports of its slot."""
POLL_S = 0.2
STOP_S = 25.0
"""Seconds that servers get to stop. They finish requests for up to 20 s of this time."""
LAST_RANK_S = 120
"""Seconds from the end of the first rank until the others are killed, in case they wait for it in a collective.

They are not killed at once, because ranks that save on a stop signal end one after another with a nonzero exit code.
"""
FIRST_RESTART_S = 2.0
TAIL_LINES = 5
RUNTIMES = ("pyxis", "apptainer")
"""Ways to start a container: pyxis (an srun plugin) or apptainer."""


@dataclass(frozen=True, kw_only=True)
class Container:
    """A container image and its runtime. The working folder and `mounts` have the same paths inside and outside."""

    image: str
    runtime: str
    mounts: Sequence[str] = ()

    @property
    def _folders(self) -> list[str]:
        return list(dict.fromkeys([str(Path.cwd()), *self.mounts]))

    def srun_options(self) -> list[str]:
        if self.runtime != "pyxis":
            return []
        mounts = ",".join(f"{folder}:{folder}" for folder in self._folders)
        return [f"--container-image={self.image}", f"--container-mounts={mounts}", f"--container-workdir={Path.cwd()}"]

    def command(self, arguments: Sequence[str], *, has_gpus: bool) -> list[str]:
        python = ["python3", *arguments]
        if self.runtime == "pyxis":
            return python
        binds = [word for folder in self._folders for word in ("--bind", folder)]
        return ["apptainer", "exec", *(["--nv"] * has_gpus), *binds, "--pwd", str(Path.cwd()), self.image, *python]


@dataclass(kw_only=True)
class Server:
    """A job step with one server and its supervisor, which restarts the server. The job restarts the step if it ends.

    A server over several nodes has one supervisor per node. If one of them ends, the whole step ends.
    """

    name: str
    number: int
    place: ServerPlace
    log: Path
    process: subprocess.Popen[bytes]
    starts: int = 1
    next_start: float | None = None
    """Monotonic time at which the job restarts the step; None while the step runs."""


@dataclass(kw_only=True)
class Job:
    """One Slurm job: starts its steps, watches them, and stops them."""

    config: TrainConfig
    number: str
    serving: Nodes
    training: Nodes
    placement: Placement
    train_arguments: list[str]
    container: Container | None = None
    srun_options: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.folder = Path(self.config.run.folder)
        self.registry = Path(self.config.rollout.registry or self.folder / "registry")
        self.rank_logs = self.folder / "ranks"
        self.trains = bool(self.placement.ranks)
        self.servers: list[Server] = []
        self.trainer: subprocess.Popen[bytes] | None = None
        self.stop_signal: signal.Signals | None = None
        self._shown = 0

    def run(self) -> int:
        """Start all steps, wait until the trainer ends, stop the servers, and return the trainer's exit code."""
        for number in (signal.SIGUSR1, signal.SIGTERM):
            signal.signal(number, self._hear)
        try:
            for number, where in enumerate(self.placement.servers):
                self._start_server(number, where)
            if self.trains:
                self.trainer = self._start_trainer()
            return self._wait()
        finally:
            self._stop()

    def _wait(self) -> int:
        while True:
            code = None if self.trainer is None else self.trainer.poll()
            self._show_first_rank()
            if code is not None:
                return code if code >= 0 else 128 - code
            if self.stop_signal is not None and not self.trains:
                return EXIT_STOPPED
            if self.stop_signal is None and not self._keep_servers():
                return 1
            time.sleep(POLL_S)

    # -- servers ------------------------------------------------------------------------------------------------------

    def _start_server(self, number: int, where: ServerPlace) -> None:
        name = f"{where.hosts[0]}-{number}"
        log = self.folder / "servers" / name / "supervisor.log"
        log.parent.mkdir(parents=True, exist_ok=True)
        step = self._server_step(number, where, log)
        self.servers.append(Server(name=name, number=number, place=where, log=log, process=step))

    def _server_step(self, number: int, where: ServerPlace, log: Path) -> subprocess.Popen[bytes]:
        config, backend = self.config, self.config.rollout.backend
        if backend == "auto":
            backend = "sglang" if self.serving.gpus else "embedded"
        serve = ["-m", "megatron_rl.cli", "serve", config.model.path, "--backend", backend]
        # The trainer sends the weights: --load-format dummy spares each server reading the files.
        head = address(where.hosts[0])
        serve += ["--host", head, "--dtype", config.model.dtype, "--load-format", "dummy"]
        serve += ["--restarts", str(config.rollout.server_restarts), "--log-folder", str(log.parent)]
        serve += ["--start-timeout-s", str(config.rollout.start_timeout_s)]
        serve += ["--health-timeout-s", str(config.rollout.health_timeout_s)]
        serve += ["--token-file", config.rollout.token_file] if config.rollout.token_file else []
        serve += ["--register", str(self.registry), "--run", self.folder.name, *config.rollout.server_args]
        # The step sees all GPUs of its node; restrict the server to its own.
        gpus = ["env", f"CUDA_VISIBLE_DEVICES={','.join(map(str, where.gpus))}"] if where.gpus else []
        here = sum(where.hosts[0] in other.hosts for other in self.placement.servers)
        step = srun(self.serving, dict.fromkeys(where.hosts, 1), cpus_per_task=self.serving.cpus // here)
        if (nodes := len(where.hosts)) > 1:
            serve += ["--nnodes", str(nodes), "--dist-init-addr", f"{head}:{server_port_of(self.number, number)}"]
            step += ["--kill-on-bad-exit=1", "--label"]
        return self._popen(step, [*gpus, *self._python(serve, self.serving)], log)

    def _keep_servers(self) -> bool:
        """Restart servers whose steps have ended; the wait before a restart doubles each time.

        Return False once all servers are given up.
        """
        limit = self.config.rollout.server_restarts
        for server in self.servers:
            if server.process.poll() is None:
                continue
            # Reported once, when first noticed; later rounds only wait for its restart time.
            if server.next_start is None:
                delay_s = FIRST_RESTART_S * 2 ** (server.starts - 1)
                server.next_start = time.monotonic() + delay_s
                then = f"starts again in {delay_s:g} s" if server.starts <= limit else "is given up"
                say(
                    f"server {server.name} ended with exit code {server.process.returncode} and {then}; its log, "
                    f"{server.log}, ends with: {tail(server.log)}"
                )
            elif server.starts <= limit and time.monotonic() > server.next_start:
                server.process = self._server_step(server.number, server.place, server.log)
                server.starts, server.next_start = server.starts + 1, None
        return not self.servers or any(s.next_start is None or s.starts <= limit for s in self.servers)

    # -- the trainer --------------------------------------------------------------------------------------------------

    def _start_trainer(self) -> subprocess.Popen[bytes]:
        ranks = self.placement.ranks
        train = ["-m", PROGRAM, *self.train_arguments]
        if self.config.run.checkpoint_every_steps:
            # Always resume: Slurm may have requeued this job after losing a node, without notice.
            train += ["--resume", "auto"]
        rollout = self.config.rollout
        if not (rollout.servers or rollout.colocated or self.config.learns_from_data):
            # A job without its own servers waits for those of others.
            count = len(self.servers) or rollout.server_count
            train += [f"rollout.registry={self.registry}", f"rollout.server_count={count}"]
        self.rank_logs.mkdir(parents=True, exist_ok=True)
        first = self.rank_logs / "rank-0.log"
        self._shown = first.stat().st_size if first.exists() else 0
        step = srun(self.training, ranks, cpus_per_task=self.training.cpus // max(ranks.values()))
        step += [f"--wait={LAST_RANK_S}"]
        step += ["--cpu-bind=none"] * rollout.colocated  # a node's first rank starts its servers, which need its cores
        meeting = {"MASTER_ADDR": address(next(iter(ranks))), "MASTER_PORT": str(port_of(self.number))}
        if len(set(ranks.values())) > 1:
            hosts = self.rank_logs / "hosts"
            # --distribution=arbitrary reads its hosts from a file, one line per task.
            hosts.write_text("".join(f"{host}\n" * count for host, count in ranks.items()))
            meeting["SLURM_HOSTFILE"] = str(hosts)
        return self._popen(step, self._python(train, self.training), self.rank_logs / "rank-%t.log", meeting)

    def _show_first_rank(self) -> None:
        """Copy what the first rank has newly printed to the job's log."""
        try:
            with (self.rank_logs / "rank-0.log").open("rb") as log:
                log.seek(self._shown)
                new = log.read()
        except FileNotFoundError:
            return
        self._shown += len(new)
        sys.stdout.buffer.write(new)
        sys.stdout.buffer.flush()

    def _hear(self, number: int, _: object) -> None:
        """Handle a stop signal. Only SIGUSR1 is forwarded to the trainer, because Slurm itself sends SIGTERM to it."""
        if number == signal.SIGUSR1 and self.trains and not self.config.run.checkpoint_every_steps:
            return  # a run without checkpoints cannot save, so it goes on until it is killed
        self.stop_signal = signal.Signals(number)
        if number == signal.SIGUSR1:
            tell(self.trainer)

    # -- steps --------------------------------------------------------------------------------------------------------

    def _python(self, arguments: Sequence[str], nodes: Nodes) -> list[str]:
        if self.container is None:
            return [sys.executable, *arguments]
        return self.container.command(arguments, has_gpus=nodes.gpus > 0)

    def _popen(
        self, step: list[str], command: list[str], log: Path, environment: Mapping[str, str] | None = None
    ) -> subprocess.Popen[bytes]:
        # Append, so that the second start of a server or job keeps the first one's log.
        options = [*self.srun_options, f"--output={log}", "--open-mode=append"]
        options += self.container.srun_options() if self.container is not None else []
        say(shlex.join([*step, *options, *command]))
        return subprocess.Popen([*step, *options, *command], env=os.environ | (environment or {}))

    def _stop(self) -> None:
        """Stop the trainer, which saves if it still runs, and then the servers."""
        servers = [server.process for server in self.servers]
        # The trainer first: it still needs its servers while it abandons its rollouts and saves.
        for steps, patience_s in (([self.trainer], self.config.run.grace_s), (servers, STOP_S)):
            for step in steps:
                tell(step)
            deadline = time.monotonic() + patience_s
            for step in (step for step in steps if step is not None):
                try:
                    step.wait(max(0.0, deadline - time.monotonic()))
                except subprocess.TimeoutExpired:
                    step.terminate()  # srun then kills its tasks
                    step.wait()


def tell(step: subprocess.Popen[bytes] | None) -> None:
    """Send SIGUSR1 to a step's srun, which forwards it to the tasks. On SIGTERM, srun would kill the tasks."""
    if step is not None and step.poll() is None:
        step.send_signal(signal.SIGUSR1)


def srun(nodes: Nodes, tasks: Mapping[str, int], *, cpus_per_task: int) -> list[str]:
    """Return the srun command of a step that shares CPUs and GPUs with other steps.

    tasks: {host: number of tasks}. If the numbers differ, SLURM_HOSTFILE must name a file that lists each task's host.
    """
    command = ["srun", "--overlap", f"--nodes={len(tasks)}", f"--ntasks={sum(tasks.values())}"]
    if len(set(tasks.values())) > 1:
        command += ["--distribution=arbitrary"]
    else:
        command += [f"--nodelist={','.join(tasks)}", f"--ntasks-per-node={max(tasks.values())}"]
    # Since Slurm 22.05 a step does not inherit it from its job, and would get one CPU per task.
    command += [f"--cpus-per-task={max(1, cpus_per_task)}"]
    command += [f"--het-group={nodes.het_group}"] if nodes.het_group is not None else []
    return command + ([f"--gpus-per-node={nodes.gpus}", "--gpu-bind=none"] if nodes.gpus else [])


def address(host: str) -> str:
    """Return the address of a node (Slurm's NodeAddr).

    It differs from the node's name if several Slurm nodes share a host.
    """
    told = subprocess.run(["scontrol", "show", "node", host], capture_output=True, text=True, check=True).stdout
    found = re.search(r"\bNodeAddr=(\S+)", told)
    return found.group(1) if found else host


def port_of(job: str) -> int:
    """Return the rendezvous port of a job's ranks. It depends on the job, so that jobs on one host do not collide."""
    return FIRST_PORT + int(job) % PORTS


def server_port_of(job: str, number: int) -> int:
    """Return the port on which the nodes of a job's server `number` meet."""
    return FIRST_SERVER_PORT + (int(job) + number) % SERVER_PORTS * PORTS_OF_SERVER


def tail(log: Path) -> str:
    lines = log.read_text(errors="replace").splitlines() if log.exists() else []
    return " | ".join(line.strip() for line in lines[-TAIL_LINES:]) or "(nothing)"


def say(text: str) -> None:
    print(f"megatron_rl: {text}", flush=True)


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("megatron_rl.launch.slurm", description="Train in this Slurm job.")
    parser.add_argument("config", type=Path, help="config file, e.g. configs/count_grpo.yaml")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="e.g. optimizer.lr=1e-5")
    parser.add_argument("--servers", type=int, help="rollout servers; default: rollout.server_count. 0: other jobs'")
    parser.add_argument("--ranks", type=int, help="trainer ranks; default: all GPUs left, or one a node. 0: only serve")
    parser.add_argument("--sweep", type=Path, help="of a job array: a file whose line N has the settings of task N")
    parser.add_argument("--container", default="", metavar="IMAGE", help="every step runs in it, by its python3")
    parser.add_argument("--container-runtime", choices=RUNTIMES, default="pyxis")
    parser.add_argument("--container-mounts", default="", metavar="FOLDER,FOLDER", help="besides the working folder")
    parser.add_argument("--srun", default="", metavar="OPTIONS", help="further options of every step's srun")
    return parser


def main(argv: list[str] | None = None) -> None:
    args = parser().parse_intermixed_args(argv)
    try:
        job = job_of(args, os.environ)
    except (ValueError, OSError) as error:
        sys.exit(f"megatron_rl.launch.slurm: {error}")
    if job.trains and not job.config.run.checkpoint_every_steps:
        say("run.checkpoint_every_steps = 0: a pre-emption, a lost node or the time limit starts this run afresh")
    code = job.run()
    if code == EXIT_STOPPED and (job.stop_signal is signal.SIGUSR1 or is_preempted(job.number)):
        say(f"job {job.number} is queued again and goes on")
        for number in (signal.SIGUSR1, signal.SIGTERM):
            signal.signal(number, signal.SIG_IGN)  # Slurm signals the job that it requeues
        subprocess.run(["scontrol", "requeue", job.number], check=False)
    elif code not in (0, EXIT_STOPPED) and job.trains:
        say(f"the trainer ended with exit code {code}; its ranks' logs are in {job.rank_logs}")
    sys.exit(code)


def job_of(args: argparse.Namespace, environment: Mapping[str, str]) -> Job:
    """Build the job from the command line and Slurm's environment. Raises ValueError if no such job is possible."""
    overrides = [*args.overrides, *overrides_of_task(environment, args)]
    config = load_config(args.config, overrides)
    config.rollout.check_servers()
    count, colocated = args.servers, config.rollout.colocated
    if count and colocated:
        raise ValueError(
            f"--servers {count}: with rollout.colocated = true the first rank of each node starts that node's servers, "
            f"rollout.server_count together; leave it out."
        )
    if count and config.learns_from_data:
        raise ValueError(f"--servers {count}: {config.chosen_data} trains on data alone and needs none; leave it out.")
    nodes = nodes_of_job(environment)
    serving, training = nodes[0], nodes[-1]
    if count is None:
        is_elsewhere = colocated or config.rollout.servers or config.learns_from_data
        count = 0 if is_elsewhere else config.rollout.server_count
    gpus = config.rollout.gpus_per_server if serving.gpus else 0
    for option in ("--node-rank", "--dist-init-addr"):
        if given := config.rollout.server_option(option):
            raise ValueError(f"rollout.server_args: {option} {given}: is set for each server by the job; leave it out.")
    nodes_each = config.rollout.nodes_per_server
    placement = place(
        serving, training, servers=count, ranks=args.ranks, gpus_per_server=gpus, nodes_per_server=nodes_each
    )
    if placement.ranks:
        config.check_world_size(sum(placement.ranks.values()))
    if colocated:
        config.rollout.check_share(len(placement.ranks), training.gpus)
        if training.gpus:
            config.rollout.check_for_gpus()
    mounts = [folder for folder in args.container_mounts.split(",") if folder]
    container = Container(image=args.container, runtime=args.container_runtime, mounts=mounts)
    return Job(
        config=config,
        number=environment["SLURM_JOB_ID"],
        serving=serving,
        training=training,
        placement=placement,
        train_arguments=[str(args.config), *overrides],
        container=container if args.container else None,
        srun_options=shlex.split(args.srun),
    )


def overrides_of_task(environment: Mapping[str, str], args: argparse.Namespace) -> list[str]:
    """Return the config overrides of one task of a job array.

    They give the task a folder of its own. Without a sweep, the seed is the task's number. With a sweep, the number
    (from 0) selects the sweep's line.
    """
    task = environment.get("SLURM_ARRAY_TASK_ID")
    if args.sweep and task is None:
        raise ValueError("--sweep: is for job arrays; start it with sbatch --array.")
    if task is None:
        return []
    folder = load_config(args.config, args.overrides).run.folder
    if not args.sweep:
        return [f"run.seed={task}", f"run.folder={folder}/seed-{task}"]
    lines = args.sweep.read_text().splitlines()
    if int(task) >= len(lines):
        raise ValueError(f"--sweep {args.sweep}: has {len(lines)} lines and none of number {task}; correct --array.")
    return [*shlex.split(lines[int(task)]), f"run.folder={folder}/sweep-{task}"]


def is_preempted(job: str) -> bool:
    """Return True if Slurm is preempting this job. Its tasks may have got SIGTERM even if this process has not."""
    told = subprocess.run(["scontrol", "show", "job", job], capture_output=True, text=True).stdout
    return "JobState=RUNNING" in told and re.search(r"\bPreemptTime=(?!None)", told) is not None


if __name__ == "__main__":
    main()
