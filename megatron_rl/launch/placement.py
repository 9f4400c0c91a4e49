"""Placement of a Slurm job's processes: reads Slurm's variables and assigns rollout servers and ranks to nodes.

Servers get the job's first nodes, and ranks get the last ones. On a node with both, such as that of a one-node job,
servers get the first GPUs. In a heterogeneous job, the first component runs the servers and the second one the ranks.
"""

from __future__ import annotations

import re
import subprocess
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Nodes:
    """The nodes of a job, or of one component of a heterogeneous job.

    Every node has at least `cpus` CPUs and `gpus` GPUs.
    """

    hosts: list[str]
    cpus: int
    gpus: int
    het_group: int | None = None


@dataclass(frozen=True, kw_only=True)
class ServerPlace:
    """Placement of one server: its hosts, of which the first is the head, and its GPUs on each host, if it has any."""

    hosts: tuple[str, ...]
    gpus: range = range(0)


@dataclass(frozen=True, kw_only=True)
class Placement:
    servers: list[ServerPlace]
    ranks: dict[str, int]
    """Number of ranks per host, in rank order."""


def nodes_of_job(environment: Mapping[str, str]) -> list[Nodes]:
    """Return the nodes of each component of the job. A job has one component, or two if it is heterogeneous.

    environment: the environment variables that Slurm has set.
    """
    if "SLURM_JOB_ID" not in environment:
        raise ValueError("SLURM_JOB_ID: is not set; start this with sbatch, e.g. sbatch scripts/train_grpo.sh CONFIG.")
    components = int(environment.get("SLURM_HET_SIZE", 1))
    if components > 2:
        raise ValueError(
            f"SLURM_HET_SIZE = {components}: a heterogeneous job must have two components, servers : trainers."
        )
    if components < 2:
        return [_nodes(environment, "", environment.get("SLURM_GPUS_ON_NODE"))]
    gpus = [environment.get(f"SLURM_GPUS_PER_NODE_HET_GROUP_{group}") for group in range(2)]
    return [_nodes(environment, f"_HET_GROUP_{group}", gpus[group], group) for group in range(2)]


def _nodes(environment: Mapping[str, str], suffix: str, gpus: str | None, het_group: int | None = None) -> Nodes:
    listed = environment[f"SLURM_JOB_NODELIST{suffix}"]
    named = subprocess.run(["scontrol", "show", "hostnames", listed], capture_output=True, text=True)
    if named.returncode != 0:
        raise ValueError(
            f"SLURM_JOB_NODELIST{suffix} = {listed!r}: scontrol cannot name its hosts: {named.stderr.strip()}; start "
            f"the job by sbatch, on nodes that reach Slurm's controller."
        )
    return Nodes(
        hosts=named.stdout.split(),
        cpus=min(counts(environment[f"SLURM_JOB_CPUS_PER_NODE{suffix}"])),  # nodes of a job may differ
        gpus=int((gpus or "0").rpartition(":")[2]),  # "8" or "h100:8"
        het_group=het_group,
    )


def counts(text: str) -> list[int]:
    """Parse a list of counts per node in Slurm's notation: `2(x3),1` -> [2, 2, 2, 1]."""
    found = re.findall(r"(\d+)(?:\(x(\d+)\))?", text)
    return [int(count) for count, times in found for _ in range(int(times or 1))]


def place(
    serving: Nodes,
    training: Nodes,
    *,
    servers: int,
    ranks: int | None,
    gpus_per_server: int,
    nodes_per_server: int = 0,
) -> Placement:
    """Place servers on the nodes `serving` and ranks on the nodes `training`, which may be the same nodes.

    ranks: number of ranks. None chooses one rank per remaining GPU, or per remaining node if there are no GPUs.
    nodes_per_server: number of nodes of each server. 0 chooses the smallest number that has a server's GPUs.
    Raises ValueError, which says what does not fit.
    """
    spare = int(serving is training and ranks != 0)
    places = _place_servers(serving, servers, gpus_per_server, nodes_per_server, spare=spare)
    room = _room(training, places)
    only_serves = ranks == 0 and bool(places)
    if ranks is None:
        ranks = sum(room.values()) if training.gpus else len(room)
    if ranks > sum(room.values()) or not (ranks or only_serves):
        unit, option = ("GPUs", "--gpus-per-node") if training.gpus else ("CPUs", "--cpus-per-task")
        raise ValueError(
            f"--ranks {ranks}: the nodes {', '.join(training.hosts)} have {sum(room.values())} {unit} for ranks beside "
            f"{len(places)} servers. Ask Slurm for more with --nodes, --exclusive or {option}, or start fewer with "
            f"--servers or --ranks."
        )
    return Placement(servers=places, ranks=_share_out(ranks, room, fill=training.gpus > 0))


def _place_servers(nodes: Nodes, count: int, gpus: int, nodes_each: int, *, spare: int) -> list[ServerPlace]:
    """Place `count` servers on GPUs, from the first node on. Without GPUs, distribute them over the nodes in turn.

    gpus: number of GPUs of each server. nodes_each: number of nodes of each server. spare: number of nodes at the end
    of the list that get no server if there are other nodes.
    """
    if count == 0:
        return []
    if not nodes.gpus:
        hosts = nodes.hosts[: max(1, len(nodes.hosts) - spare)]
        return [ServerPlace(hosts=(hosts[number % len(hosts)],)) for number in range(count)]
    nodes_each = nodes_each or -(-gpus // nodes.gpus)
    each, rest = divmod(gpus, nodes_each)
    if rest or each > nodes.gpus:
        raise ValueError(
            f"rollout.server_args: {gpus} GPUs of a server (--tp x --pp-size) / {nodes_each} nodes = "
            f"{gpus / nodes_each:g} on each: must be a whole number of the {nodes.gpus} of a node; correct --tp or "
            f"--nnodes."
        )
    # Groups of whole nodes, because all nodes of a server provide equally many GPUs. A node's other GPUs go to ranks.
    groups = [tuple(nodes.hosts[n : n + nodes_each]) for n in range(0, len(nodes.hosts) - nodes_each + 1, nodes_each)]
    starts = range(0, nodes.gpus - each + 1, each)
    room = [ServerPlace(hosts=hosts, gpus=range(n, n + each)) for hosts in groups for n in starts]
    if count > len(room):
        raise ValueError(
            f"--servers {count}: {len(nodes.hosts)} nodes of {nodes.gpus} GPUs hold {len(room)} servers of {gpus} "
            f"(rollout.server_args: --tp). Ask Slurm for more with --nodes, or start fewer."
        )
    return room[:count]


def _room(nodes: Nodes, servers: list[ServerPlace]) -> dict[str, int]:
    """Return the number of ranks that fit on each node in addition to the servers."""
    if nodes.gpus:
        taken = Counter(host for place in servers for host in place.hosts for _ in place.gpus)
        return {host: nodes.gpus - taken[host] for host in nodes.hosts if taken[host] < nodes.gpus}
    serving = {host for place in servers for host in place.hosts}
    return {host: nodes.cpus for host in nodes.hosts if host not in serving or len(nodes.hosts) == 1}


def _share_out(ranks: int, room: dict[str, int], *, fill: bool) -> dict[str, int]:
    """Return {node: number of ranks}. room: {node: number of ranks that fit}.

    fill: True to fill the last nodes first, False to share the ranks evenly.
    """
    shares = dict.fromkeys(room, 0)
    while ranks:
        # From the back, because servers have the first nodes. The dict keeps the hosts in rank order.
        for host in reversed(room):
            more = min(room[host] if fill else 1, room[host] - shares[host], ranks)
            shares[host], ranks = shares[host] + more, ranks - more
    return {host: count for host, count in shares.items() if count}


def ranks_of_step(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the environment variables that torch needs for a rank that srun has started.

    Return {} if this process is in no job step, or if RANK is set already.
    """
    if "RANK" in environment or "SLURM_STEP_ID" not in environment or "MASTER_PORT" not in environment:
        return {}
    here = counts(environment["SLURM_STEP_TASKS_PER_NODE"])[int(environment["SLURM_NODEID"])]
    # The step sees all GPUs of its node (--gpu-bind=none), and servers have the first ones.
    servers_gpus = max(0, int(environment.get("SLURM_GPUS_ON_NODE", 0)) - here)
    return {
        "RANK": environment["SLURM_PROCID"],
        "LOCAL_RANK": str(servers_gpus + int(environment["SLURM_LOCALID"])),
        "WORLD_SIZE": environment["SLURM_STEP_NUM_TASKS"],
        "LOCAL_WORLD_SIZE": str(here),
    }
