"""Checks the hosts of a job together. The doctor runs `python -m megatron_rl.tools.doctor.host_probe` on each host.

The hosts meet at rank 0's TCP store. Each host checks its own limits, connects to all others, compares its clock with
rank 0's, and takes part in an all-reduce by gloo and, if all hosts have GPUs, by NCCL. Rank 0 prints all results.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import struct
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megatron_rl.launch.ports import address_towards, free_port
from megatron_rl.tools.doctor.machine_checks import check_machine

PINGS = 10
CONNECT_S = 10.0
AT_ONCE = 32
"""Maximum number of connections that a host opens at the same time."""
MARK = "doctor-hosts: "
"""Prefix of the output line with the result. srun and libraries print other lines."""


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--hosts", required=True, help="host names in rank order, separated by commas")
    parser.add_argument("--meet", required=True, help="ADDRESS:PORT of rank 0")
    parser.add_argument("--folder", type=Path, required=True, help="the run's folder; its disk's speed is measured")
    parser.add_argument("--timeout-s", type=float, default=120.0)
    args = parser.parse_args(argv)
    hosts, rank = args.hosts.split(","), int(os.environ["SLURM_PROCID"])
    found = probe(hosts, rank, args.meet, args.folder, timeout_s=args.timeout_s)
    if rank == 0:
        print(MARK + json.dumps(found), flush=True)


def probe(hosts: list[str], rank: int, meet: str, folder: Path, *, timeout_s: float) -> list[dict[str, Any]]:
    """Check the hosts. Return their results in rank order on rank 0, [] elsewhere. Collective: every host calls it.

    Keys of a host's result: `host`, its name; `faults`, pairs of place and cause; `clock_s`, seconds by which its clock
    is ahead of rank 0's; `unreached`, names of hosts that it cannot connect to; `gloo` and `nccl`, the error of the
    all-reduce, if there is one. A host that does not answer in time has the key `silent` instead.
    """
    address, _, port = meet.rpartition(":")
    limit = timedelta(seconds=timeout_s)
    store = dist.TCPStore(address, int(port), len(hosts), rank == 0, limit, wait_for_workers=False)
    listener, own = _listen(address, is_first=rank == 0)
    store.set(f"at-{rank}", own)
    faults = [(it.where, it.cause) for it in check_machine(folder, f".doctor-{rank}")]
    answers: dict[str, Any] = {"host": hosts[rank], "faults": faults, "has_gpu": torch.cuda.is_available()}
    places = _all_of(store, [f"at-{other}" for other in range(len(hosts))], timeout_s)
    with ThreadPoolExecutor(AT_ONCE) as threads:
        reached = list(threads.map(_reaches, filter(None, places)))
    known = [host for host, place in zip(hosts, places, strict=True) if place]
    answers["unreached"] = [host for host, is_reached in zip(known, reached, strict=True) if not is_reached]
    answers["clock_s"] = 0.0 if rank == 0 or not (places[0] and reached[0]) else ahead_of(places[0])
    answers["gloo"] = _sum("gloo", store, rank, len(hosts), limit) if all(places) else None
    store.set(f"found-{rank}", json.dumps(answers))
    found: list[dict[str, Any]] = []
    if rank == 0:  # rank 0 waits longer than an all-reduce may take
        told = _all_of(store, [f"found-{other}" for other in range(len(hosts))], 2 * timeout_s if all(places) else 0.0)
        found = [json.loads(it) if it else {"host": host, "silent": True} for host, it in zip(hosts, told, strict=True)]
        store.set("nccl", str(int(all(it.get("has_gpu") and it.get("gloo") == "" for it in found))))
    tries_nccl = _all_of(store, ["nccl"], 3 * timeout_s) == ["1"]
    if tries_nccl:  # last, because NCCL may end the process if it fails
        store.set(f"nccl-{rank}", _sum("nccl", store, rank, len(hosts), limit) or "none")
    if rank == 0:
        told = _all_of(store, [f"nccl-{other}" for other in range(len(hosts))], 2 * timeout_s) if tries_nccl else []
        errors = {it["host"]: error or "its process ended" for it, error in zip(found, told, strict=False)}
        for it in found:
            error = errors.get(it["host"], "none")
            it["nccl"] = None if error == "none" else error
        store.set("end", "1")
    _all_of(store, ["end"], 3 * timeout_s)  # the store ends with rank 0's process
    listener.close()
    return found


def _all_of(store: Any, keys: list[str], within_s: float) -> list[str | None]:
    """Wait until all keys are set, at most `within_s` seconds. Return their values; None for keys that are not set."""
    deadline, found = time.monotonic() + within_s, []
    for key in keys:
        try:
            store.wait([key], timedelta(seconds=max(0.1, deadline - time.monotonic())))
            found.append(store.get(key).decode())
        except RuntimeError:  # torch's DistStoreError, or rank 0 has ended
            found.append(None)
    return found


def _listen(towards: str, *, is_first: bool) -> tuple[socket.socket, str]:
    """Start a server that answers each received byte with the time (float64). Return its socket and ADDRESS:PORT.

    towards: rank 0's address.
    """
    address = towards if is_first else address_towards(towards)
    listener = socket.create_server(("", free_port("")))

    def answer(connection: socket.socket) -> None:
        with connection:
            while connection.recv(1):
                connection.sendall(struct.pack("<d", time.time()))

    def accept() -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:  # closed at the end
                return
            threading.Thread(target=answer, args=(connection,), daemon=True).start()

    threading.Thread(target=accept, daemon=True).start()
    return listener, f"{address}:{listener.getsockname()[1]}"


def _connect(place: str) -> socket.socket:
    address, _, port = place.rpartition(":")
    return socket.create_connection((address, int(port)), timeout=CONNECT_S)


def _reaches(place: str) -> bool:
    try:
        _connect(place).close()
    except OSError:
        return False
    return True


def ahead_of(place: str) -> float:
    """Return how many seconds this host's clock is ahead of the clock of the host that listens at `place`.

    The fastest of PINGS answers is used. The error is at most half of its round-trip time.
    """
    best = (float("inf"), 0.0)
    with _connect(place) as connection:
        for _ in range(PINGS):
            begin = time.time()
            connection.sendall(b"?")
            (theirs,) = struct.unpack("<d", connection.recv(8, socket.MSG_WAITALL))
            end = time.time()
            best = min(best, (end - begin, (begin + end) / 2 - theirs))
    return best[1]


def _sum(backend: str, store: Any, rank: int, size: int, limit: timedelta) -> str:
    """All-reduce one number per host. Return the error; "" if the sum is right."""
    try:
        dist.init_process_group(
            backend, store=dist.PrefixStore(backend, store), rank=rank, world_size=size, timeout=limit
        )
        number = torch.tensor([rank + 1.0], device="cuda:0" if backend == "nccl" else "cpu")
        dist.all_reduce(number)
        dist.destroy_process_group()
    except Exception as error:  # torch's backends raise errors of many kinds
        return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
    return "" if float(number) == size * (size + 1) / 2 else f"the sum is {float(number):g}"


if __name__ == "__main__":
    main()
