"""A real Slurm of four nodes on this host, for tests: munge, slurmctld and four slurmd in a folder of its own.

Nothing is shared with another Slurm or munge on the host: sockets, key and ports are the cluster's. Its daemons end
with the process that started it, however that ends.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from tests.kit.waiting import LATE_S, wait_until

COMMANDS = ("sbatch", "srun", "scancel", "scontrol", "sinfo", "squeue", "sacct", "munge", "setpriv")
DAEMONS = ("slurmctld", "slurmd", "munged")
ROOT = Path(__file__).parents[2]
POLL_S = 0.2
"""Between two questions to the cluster, each of which starts a process."""
ENDED = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "PREEMPTED")
NODES = ("n1", "n2", "n3", "n4")
GPU_NODES = NODES[2:]

CONFIG = """\
ClusterName=test
# Jobs choose ports by their numbers, and another checkout's tests may have a cluster on this host.
FirstJobId={first_job}
SlurmctldHost={host}(127.0.0.1)
SlurmUser=root
AuthType=auth/munge
# A job that is queued again waits until its credentials have expired, two minutes by default.
AuthInfo=socket={root}/munge.socket,cred_expire=10
StateSaveLocation={root}/state
SlurmdSpoolDir={root}/spool-%n
SlurmdLogFile={root}/slurmd-%n.log
SlurmctldLogFile={root}/slurmctld.log
SlurmdPidFile={root}/slurmd-%n.pid
SlurmctldPidFile={root}/slurmctld.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
MpiDefault=none
SwitchType=switch/none
ReturnToService=2
# SIGTERM comes so long before SIGKILL, and daemons answer each other so late, as a tests' machine may be a busy one.
KillWait=600
MessageTimeout=100
BatchStartTimeout=600
SlurmdParameters=config_overrides
JobCompType=jobcomp/filetxt
JobCompLoc={root}/jobs.txt
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
# Heterogeneous jobs are started by the backfill scheduler alone, which looks every 30 seconds by default; batch jobs
# wait up to 3 seconds for others to be started with.
SchedulerParameters=bf_interval=1,sched_interval=1,batch_sched_delay=0
SlurmctldPort={ports[0]}
# Files stand for devices, so that jobs are given GPUs by number.
GresTypes=gpu
NodeName=n1 NodeAddr=127.0.0.1 Port={ports[1]} CPUs=8 RealMemory=2000 State=UNKNOWN
NodeName=n2 NodeAddr=127.0.0.1 Port={ports[2]} CPUs=8 RealMemory=2000 State=UNKNOWN
NodeName=n3 NodeAddr=127.0.0.1 Port={ports[3]} CPUs=8 Gres=gpu:2 RealMemory=2000 State=UNKNOWN
NodeName=n4 NodeAddr=127.0.0.1 Port={ports[4]} CPUs=8 Gres=gpu:2 RealMemory=2000 State=UNKNOWN
PartitionName=main Nodes=n1,n2 Default=YES MaxTime=INFINITE State=UP OverSubscribe=YES:4 GraceTime=600
PartitionName=urgent Nodes=n1,n2 MaxTime=INFINITE State=UP PriorityTier=10
PartitionName=gpu Nodes=n3,n4 MaxTime=INFINITE State=UP
"""


class Cluster:
    """Submits jobs and asks about them."""

    def __init__(self, environment: dict[str, str], logs: Path) -> None:
        self.environment = environment | {"PYTHON": sys.executable, "PYTHONPATH": str(ROOT)}
        self.logs = logs

    def __call__(self, *command: str, **more: str) -> str:
        """Run a command with more in its environment and return what it printed, or else what it said as an error."""
        done = subprocess.run(
            command, env=self.environment | more, cwd=ROOT, capture_output=True, text=True, timeout=LATE_S
        )
        assert done.returncode == 0, f"{command}: {done.stdout}{done.stderr}"
        return done.stdout or done.stderr

    def sbatch(self, name: str, *arguments: str, **more: str) -> str:
        """Submit a job that logs to `log(name)`; return its number."""
        return self("sbatch", "--parsable", f"--output={self.log(name)}", *arguments, **more).strip()

    def log(self, name: str) -> Path:
        return self.logs / f"{name}.log"

    def told(self, name: str) -> str:
        log = self.log(name)
        return log.read_text() if log.exists() else ""

    def about(self, job: str) -> dict[str, str]:
        """What `scontrol show job` says; of a heterogeneous job its first component."""
        first, _, _ = self("scontrol", "show", "job", job).partition("\n\n")
        return dict(word.split("=", 1) for word in first.split() if "=" in word)

    def state(self, job: str) -> str:
        return self.about(job)["JobState"]

    def accounted_state(self, job: str) -> str:
        """What `sacct` says of a job that has ended."""
        return self("sacct", "-c", "-f", f"{self.logs}/cluster/jobs.txt", "-j", job, "-n", "-o", "State").strip()

    def wait_for_state(self, job: str, name: str, *states: str) -> None:
        """Wait until the job has one of the states; AssertionError shows its log where it ended in another."""
        what = lambda: f"{self.state(job)}: {self.told(name)}"  # noqa: E731
        wait_until(lambda: self.state(job) in {*states, *ENDED}, what, limit_s=LATE_S, poll_s=POLL_S)
        assert self.state(job) in states, f"{self.state(job)}: {self.told(name)}"


def missing() -> str:
    """Why no cluster can be started here; '' where one can."""
    absent = [name for name in COMMANDS if shutil.which(name) is None]
    absent += [name for name in DAEMONS if _daemon(name) is None]
    if absent:
        return f"Slurm is not installed ({', '.join(absent)}); scripts/install_slurm.sh installs it"
    return "" if os.geteuid() == 0 else "slurmd starts jobs as root only"


@contextlib.contextmanager
def running_cluster(root: Path) -> Iterator[dict[str, str]]:
    """Start a cluster and yield the environment for its commands; stop its jobs and daemons at the end."""
    root.mkdir(parents=True)
    config = root / "slurm.conf"
    host, ports = socket.gethostname().partition(".")[0], _free_ports(1 + len(NODES))
    config.write_text(CONFIG.format(host=host, root=root, ports=ports, first_job=1 + secrets.randbelow(1_000_000)))
    for node in NODES:
        (root / f"spool-{node}").mkdir()
    (root / "state").mkdir()
    for gpu in (root / f"{node}-gpu{number}" for node in GPU_NODES for number in range(2)):
        gpu.touch()
    (root / "gres.conf").write_text(
        "".join(f"NodeName={node} Name=gpu File={root}/{node}-gpu[0-1]\n" for node in GPU_NODES)
    )
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM_", "SBATCH_"))}
    environment["SLURM_CONF"] = str(config)
    daemons: list[subprocess.Popen[bytes]] = []
    try:
        daemons.append(_start_munge(root, environment))
        daemons.append(_start(root, environment, "slurmctld", "-D", "-f", str(config)))
        for node in NODES:
            daemons.append(_start(root, environment, "slurmd", "-D", "-N", node, "-f", str(config)))
        idle = {node: "idle" for node in NODES}
        wait_until(lambda: _states(environment) == idle, lambda: f"not idle: {_daemons_said(root)}", poll_s=POLL_S)
        yield environment
    finally:
        _ask(environment, "scancel", "--user", "root", "--full")
        with contextlib.suppress(AssertionError):  # slurmd ends what is left
            wait_until(lambda: not _ask(environment, "squeue", "--noheader"), limit_s=30.0, poll_s=POLL_S)
        for daemon in reversed(daemons):
            daemon.terminate()
        for daemon in daemons:
            with contextlib.suppress(subprocess.TimeoutExpired):
                daemon.wait(20)
            daemon.kill()
            daemon.wait()


def _start_munge(root: Path, environment: dict[str, str]) -> subprocess.Popen[bytes]:
    key, munge_socket = root / "munge.key", root / "munge.socket"
    key.write_bytes(secrets.token_bytes(128))
    key.chmod(0o400)
    # Force: it wants its folder open to all users, which a test's is not.
    files = [f"--{name}-file={root}/munge.{name}" for name in ("key", "pid", "log", "seed")]
    daemon = _start(root, environment, "munged", "--force", "--foreground", f"--socket={munge_socket}", *files)
    try:
        wait_until(lambda: _ask(environment, "munge", "-n", "-S", str(munge_socket)), lambda: _daemons_said(root))
    except AssertionError:
        daemon.kill()
        raise
    return daemon


def _start(root: Path, environment: dict[str, str], name: str, *arguments: str) -> subprocess.Popen[bytes]:
    with (root / f"{name}.out").open("ab") as log:
        command = ["setpriv", "--pdeathsig", "TERM", str(_daemon(name)), *arguments]
        return subprocess.Popen(command, stdout=log, stderr=log, env=environment)


def _daemon(name: str) -> str | None:
    return shutil.which(name, path=f"{os.environ.get('PATH', '')}:/usr/sbin")


def _ask(environment: dict[str, str], *command: str) -> str:
    """What a command prints; '' where it fails."""
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=LATE_S).stdout


def _states(environment: dict[str, str]) -> dict[str, str]:
    return dict(line.split() for line in _ask(environment, "sinfo", "-h", "--Node", "--format=%N %T").splitlines())


def _daemons_said(root: Path) -> str:
    return "".join(f"\n{path.name}:\n{path.read_text(errors='replace')}" for path in root.glob("*.out"))


def _free_ports(count: int) -> list[int]:
    probes = [socket.socket() for _ in range(count)]
    for probe in probes:
        probe.bind(("127.0.0.1", 0))
    ports = [probe.getsockname()[1] for probe in probes]
    for probe in probes:
        probe.close()
    return ports
