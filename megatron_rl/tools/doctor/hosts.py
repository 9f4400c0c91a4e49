"""Checks the hosts of a Slurm job: the limits of each, their clocks, and whether they reach each other.

The checks run as a Slurm step with one process per node (host_probe.py).
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from megatron_rl.launch.placement import Nodes, nodes_of_job
from megatron_rl.launch.slurm import address, port_of, srun
from megatron_rl.tools.doctor.host_probe import MARK
from megatron_rl.tools.doctor.machine_checks import Finding, is_free

MOST_CLOCK_S = 0.5
"""Largest accepted difference of two hosts' clocks. Logs and traces of several hosts are ordered by these clocks."""
JOIN_S = 120.0
"""Time limit in seconds of each check in which the hosts of a job take part together."""


def check_hosts(folder: Path, environment: Mapping[str, str] = os.environ) -> Iterator[Finding]:
    """Check all hosts of the Slurm job in which the doctor runs. Yields nothing outside a job.

    The two components of a heterogeneous job are checked one after the other. A component with a single host only gets
    a check that the ranks' port is free.
    """
    if "SLURM_JOB_ID" not in environment:
        return
    port = port_of(environment["SLURM_JOB_ID"])
    folder.mkdir(parents=True, exist_ok=True)
    for nodes in nodes_of_job(environment):
        if environment.get("SLURMD_NODENAME") == nodes.hosts[0] and not is_free(port):
            cause = f"is taken, and this job's ranks meet there; end what listens on it (ss -ltnp 'sport = :{port}')"
            yield Finding(who="hosts", where=f"{nodes.hosts[0]}, port {port}", cause=cause)
        elif len(nodes.hosts) > 1:
            yield from _look_at(nodes, port, folder)


def _look_at(nodes: Nodes, port: int, folder: Path) -> Iterator[Finding]:
    hosts = nodes.hosts
    words = ["--hosts", ",".join(hosts), "--meet", f"{address(hosts[0])}:{port}", "--folder", str(folder)]
    step = srun(nodes, dict.fromkeys(hosts, 1), cpus_per_task=1)
    step += ["--kill-on-bad-exit=0", f"--wait={int(JOIN_S)}"]
    command = [*step, sys.executable, "-m", "megatron_rl.tools.doctor.host_probe", "--timeout-s", str(JOIN_S), *words]
    done = subprocess.run(command, capture_output=True, text=True)
    told = [line.partition(MARK)[2] for line in done.stdout.splitlines() if MARK in line]
    if not told:
        said = " ".join((done.stderr or done.stdout).split())[-300:]
        yield Finding(who="hosts", where=", ".join(hosts), cause=f"the step that looks at them failed: {said}")
        return
    yield from judge(json.loads(told[0]))


def judge(found: list[dict[str, Any]]) -> Iterator[Finding]:
    """Yield a finding for each fault of the hosts. found: the result of `host_probe.probe` on rank 0."""
    for it in found:
        if it.get("silent"):
            cause = f"does not reach {found[0]['host']}, or its process ended; look for a firewall between the two"
            yield Finding(who="hosts", where=it["host"], cause=cause)
    heard = [it for it in found if not it.get("silent")]
    for it in heard:
        for where, cause in it["faults"]:
            yield Finding(who="hosts", where=f"{it['host']}, {where}", cause=cause)
        if it["unreached"]:
            cause = f"cannot connect to {', '.join(it['unreached'])}; look for a firewall, or wrong names in /etc/hosts"
            yield Finding(who="hosts", where=it["host"], cause=cause)
    ahead = {it["host"]: it["clock_s"] for it in heard}
    first, last = min(ahead, key=lambda it: ahead[it]), max(ahead, key=lambda it: ahead[it])
    if (apart := ahead[last] - ahead[first]) > MOST_CLOCK_S:
        cause = f"is {apart:.1f} s ahead of {first}'s; synchronise the clocks (chronyd or ntpd)"
        yield Finding(who="hosts", where=f"{last}, clock", cause=cause)
    for backend, way_out in (
        ("gloo", "name the interface that all hosts share in GLOO_SOCKET_IFNAME"),
        ("nccl", "name the interface that all hosts share in NCCL_SOCKET_IFNAME, and see NCCL_DEBUG=INFO"),
    ):
        if failed := [it for it in heard if it.get(backend)]:
            cause = f"a sum over all hosts failed ({failed[0][backend]}); {way_out}"
            yield Finding(who="hosts", where=f"{failed[0]['host']}, {backend}", cause=cause)
