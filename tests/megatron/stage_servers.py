"""Servers' ranks without servers: forked processes that join the senders' groups, receive, and say what they hold.

Rank 0 of the trainer has `Servers`, which tells them over a store what a server would be told over HTTP.
"""

from __future__ import annotations

import pickle
import time
from concurrent.futures import ThreadPoolExecutor

import torch
import torch.distributed as dist

from megatron_rl.api import ChecksumForm, HeldWeights
from megatron_rl.weights.update_group import (
    TensorSpec,
    checksum,
    join_update_group,
    leave_update_group,
    unpack_bucket,
)

FORM = ChecksumForm("embedded", None)


class Servers:
    """WeightReceiver on rank 0: tells each server rank in turn what to do, over a store, and waits in threads."""

    def __init__(self, store, count, host="127.0.0.1", address="127.0.0.1"):
        """host: where the servers are; address: the trainer's."""
        self.host, self.address = host, address
        self.store, self.alive, self.sent, self.dropped = store, list(range(count)), [0] * count, {}
        self.threads, self.calls, self.version, self.membership = ThreadPoolExecutor(9 * count), [], None, 0
        self.is_over = False

    @property
    def server_ranks(self):
        return {f"http://{self.host}:{number}": 1 for number in self.alive}

    def tell(self, *message):
        self.calls.append(message[0])
        return {f"http://{self.host}:{number}": self.ask(number, message) for number in self.alive}

    def ask(self, number, message):
        turn = self.sent[number]
        self.sent[number] += 1
        self.store.set(f"message {number} {turn}", pickle.dumps(message))

        def answer():
            while not self.store.check([f"answer {number} {turn}"]):
                if self.is_over or self.store.check([f"dead {number}"]):
                    raise RuntimeError("its connection is lost")
                time.sleep(0.005)
            return pickle.loads(self.store.get(f"answer {number} {turn}"))

        return self.threads.submit(answer)

    def end(self):
        """Tell all servers, dropped ones too, that nothing more will come."""
        self.is_over = True
        for number in range(len(self.sent)):
            self.ask(number, ("end",))

    def trainer_address(self):
        return self.address

    def join_weight_group(self, **where):
        world = 1 + len(self.alive)
        self.calls.append("join")
        return {
            f"http://{self.host}:{number}": self.ask(number, ("join", where | {"rank": 1 + place, "world_size": world}))
            for place, number in enumerate(self.alive)
        }

    def leave_weight_group(self, *, name):
        return self.tell("leave", name)

    def load_bucket(self, *, version, **bucket):
        return self.load_round([bucket], version)

    def load_round(self, buckets, version, pickled=""):
        return self.tell("load", buckets)

    def drop(self, server, reason):
        self.dropped[server] = reason
        self.alive.remove(int(server.rpartition(":")[2]))
        self.membership += 1

    def unreachable(self):
        dead = [number for number in self.alive if self.store.check([f"dead {number}"])]
        return {f"http://{self.host}:{number}": "gives no sign of life" for number in dead}

    def held_weights(self):
        return self.tell("held")

    def checksum_forms(self):
        return dict.fromkeys(self.server_ranks, FORM)

    def begin_weight_update(self, version):
        pass

    def end_weight_update(self, version):
        pass

    pause = resume = lambda self: None  # noqa: E731

    def finish_update(self, version):
        self.version = version


def serve(store, number, fault):
    """A server's rank. fault: the load at which it dies, or the tensor of which it gets one number wrong."""
    groups, held, turn, loads = {}, {}, 0, 0
    while True:
        kind, *details = pickle.loads(store.get(f"message {number} {turn}"))
        answer = None
        if kind == "join":
            (where,) = details
            groups[where["name"]] = join_update_group(**where)
        elif kind == "leave":
            if group := groups.pop(details[0], None):
                leave_update_group(group)
        elif kind == "load":
            loads += 1
            if loads == fault:
                store.set(f"dead {number}", "")
                for group in groups.values():
                    leave_update_group(group)  # the others see its connections break
                return {}
            try:
                held |= received(groups, details[0])
            except RuntimeError:  # another one died: this request fails
                turn += 1
                continue
            if fault in held:
                held[fault].view(-1)[0] += 1
        elif kind == "held":
            answer = HeldWeights("7", {name: checksum(tensor) for name, tensor in held.items()})
        else:
            return held
        store.set(f"answer {number} {turn}", pickle.dumps(answer))
        turn += 1


def received(groups, buckets):
    """The tensors of buckets that arrive at the same time."""
    tensors, arriving = {}, []
    for bucket in buckets:
        dtypes = [getattr(torch, name) for name in bucket["dtypes"]]
        specs = [TensorSpec(*spec) for spec in zip(bucket["names"], dtypes, map(tuple, bucket["shapes"]), strict=True)]
        flat = torch.empty(sum(spec.nbytes for spec in specs), dtype=torch.uint8)
        own = unpack_bucket(flat, specs)
        group = groups[bucket["group"]]
        pieces = [flat] if bucket["flattened"] else own
        arriving += [dist.broadcast(piece, group=group, group_src=0, async_op=True) for piece in pieces]
        tensors |= zip(bucket["names"], own, strict=True)
    try:
        for broadcast in arriving:
            broadcast.wait()
    finally:
        del broadcast
        arriving.clear()
    return tensors
