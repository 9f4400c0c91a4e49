"""The doctor in a job of two nodes: a step looks at each host and at what is between them."""

from __future__ import annotations

import re

import pytest
from cluster import ROOT, Cluster

from megatron_rl.launch.slurm import port_of

pytestmark = [pytest.mark.slow, pytest.mark.thorough]  # tests/unit/tools/test_doctor_machine.py has the parts

SCRIPT = """#!/bin/bash
cd {root}
{before}
$PYTHON - <<'END'
from pathlib import Path
from megatron_rl.tools.doctor.hosts import check_hosts
for finding in check_hosts(Path("{folder}")):
    print("FAULT:", finding)
print("looked at")
END
"""


def told(cluster: Cluster, tmp_path, before: str = "") -> tuple[str, list[str]]:
    """The job's number and what the doctor says in it of faults, but for a disk that is slow."""
    script = tmp_path / "job.sh"
    script.write_text(SCRIPT.format(root=ROOT, folder=tmp_path / "run", before=before))
    name = tmp_path.name
    job = cluster.sbatch(name, "--nodes=2", "--ntasks-per-node=1", str(script))
    cluster.wait_for_state(job, name, "COMPLETED")
    said = cluster.told(name)
    assert "looked at" in said, said
    return job, [line for line in re.findall(r"FAULT: (.*)", said) if "MB/s" not in line]


def test_nothing_is_said_of_hosts_that_reach_each_other(cluster, tmp_path):
    assert told(cluster, tmp_path)[1] == []
    assert list((tmp_path / "run").iterdir()) == []


def test_a_port_of_the_job_that_is_taken_is_named(cluster, tmp_path):
    taken = (
        "$PYTHON -c 'import os, socket, sys, time; from megatron_rl.launch.slurm import port_of; "
        'kept = socket.create_server(("", port_of(os.environ["SLURM_JOB_ID"]))); print("taken", flush=True); '
        "time.sleep(1e6)' > {folder} & coproc=$!\nuntil grep -q taken {folder}; do sleep 0.1; done"
    ).format(folder=tmp_path / "taken.txt")
    job, (finding,) = told(cluster, tmp_path, before=taken + "\ntrap 'kill $coproc' EXIT")
    assert finding.startswith(f"hosts, n1, port {port_of(job)}: is taken, and this job's ranks meet there")


def test_a_limit_of_one_host_is_named_with_the_host(cluster, tmp_path):
    findings = told(cluster, tmp_path, before="ulimit -n 1024")[1]
    assert sorted(text.partition(":")[0] for text in findings) == ["hosts, n1, open files", "hosts, n2, open files"]
