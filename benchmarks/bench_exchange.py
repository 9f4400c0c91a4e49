"""Bytes that each rank receives in a step's exchange, and seconds of its plan, beside sending everything to everybody.

    python benchmarks/bench_exchange.py

Real ranks over gloo have log-normal lengths of tokens, each rank those of its own prompts. Bytes are what the kernel
says that a rank's sockets have received, and a share is the bytes of what the rank's replica trains.
  planned     exchange.share_out: numbers of trajectories to all ranks, tokens to the replica that trains them.
  everything  each rank broadcasts its batch to all others, and each rank takes its share out of the whole.
Then the plan of a large world, made by one process as every rank makes it, and the bytes that follow from it. Times are
medians over repeats, each the slowest rank's.
"""

from __future__ import annotations

import argparse
import itertools
import math
import multiprocessing
import os
import socket
import statistics
import struct
import tempfile
from types import SimpleNamespace

import frame
import torch
import torch.distributed as dist

from megatron_rl.batch import delivery, exchange
from megatron_rl.parallel import Axis, ParallelGroups
from megatron_rl.types import TrajectoryBatch, prefix_sums

TCP_INFO_BYTES_RECEIVED = 128
"""Offset of tcpi_bytes_received in Linux's tcp_info, in bytes."""


def received_bytes() -> int:
    """Return the bytes that this process's TCP connections have received."""
    total = 0
    for name in os.listdir("/proc/self/fd"):
        try:
            if not os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                continue
            with socket.socket(fileno=os.dup(int(name))) as one:
                if one.family in (socket.AF_INET, socket.AF_INET6) and one.type == socket.SOCK_STREAM:
                    info = one.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 192)
                    total += struct.unpack_from("Q", info, TCP_INFO_BYTES_RECEIVED)[0]
        except OSError:  # closed meanwhile
            continue
    return total


def log_normal_lengths(count: int, mean: float, longest: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.empty(count, dtype=torch.float64).log_normal_(math.log(mean) - 0.5, 1.0, generator=generator)
    return lengths.long().clamp(2, longest)


def made_batch(lengths: torch.Tensor, samples: int, prompt: int, seed: int) -> TrajectoryBatch:
    """Make groups of `samples` replies to one prompt of `prompt` tokens, or of half of what a trajectory has."""
    generator, count = torch.Generator().manual_seed(seed), int(lengths.sum())
    cu_seqlens = prefix_sums(lengths)
    position = torch.arange(count) - cu_seqlens[:-1].repeat_interleave(lengths)
    is_reply = position >= torch.minimum(lengths // 2, torch.tensor(prompt)).repeat_interleave(lengths)
    ids = torch.where(is_reply, torch.randint(0, 150_000, (count,), generator=generator), position)
    tokens = {
        "input_ids": ids.int(),
        "loss_mask": is_reply,
        "logprobs": torch.zeros(count),
        "versions": torch.where(is_reply, 7, -1).int(),
    }
    group = torch.arange(len(lengths)) // samples
    sequences = {"rewards": torch.rand(len(lengths)), "group": group, "prompt_index": group + 1000}
    return TrajectoryBatch(tokens, sequences, cu_seqlens)


def bytes_of(batch: TrajectoryBatch) -> int:
    return sum(column.numel() * column.element_size() for column in batch.columns().values())


def groups_of(rank: int, ranks: int, tensor: int) -> ParallelGroups:
    control = dist.group.WORLD
    one, tensors = Axis(control, 1, 0), Axis(control, tensor, rank % tensor)
    data = Axis(control, ranks // tensor, rank // tensor)
    rest = {"pipeline": one, "context": one, "expert": one, "expert_tensor": one, "expert_data": data}
    return ParallelGroups(
        tensor=tensors, data=data, data_context=data, control=control, rank=rank, world_size=ranks, **rest
    )


def planned(own: TrajectoryBatch | None, groups: ParallelGroups, updates: int) -> list[TrajectoryBatch]:
    return exchange.share_out(own, groups, updates=updates, seed=1, share_prompts=True).shares()


def everything(own: TrajectoryBatch | None, groups: ParallelGroups, updates: int) -> list[TrajectoryBatch]:
    """Bare broadcasts of each rank's columns, joined on every rank, and the same shares taken out of the whole."""
    columns = {} if own is None else own.columns()
    headers = [[] for _ in range(groups.world_size)]
    header = [(name, column.dtype, len(column)) for name, column in columns.items()]
    dist.all_gather_object(headers, header, group=groups.control)
    parts = []
    for source, layout in enumerate(headers):
        if not layout:
            continue
        sizes = [length * dtype.itemsize for _, dtype, length in layout]
        flat = torch.empty(sum(sizes), dtype=torch.uint8)
        if source == groups.rank:
            flat = torch.cat([column.contiguous().view(torch.uint8) for column in columns.values()])
        dist.broadcast(flat, src=source, group=groups.control)
        found = zip(layout, torch.split(flat, sizes), strict=True)
        parts.append(TrajectoryBatch.from_columns({name: part.clone().view(dtype) for (name, dtype, _), part in found}))
    return shares_of_whole(TrajectoryBatch.cat(parts), groups, updates)


def shares_of_whole(whole: TrajectoryBatch, groups: ParallelGroups, updates: int) -> list[TrajectoryBatch]:
    """Divide a step by its tokens, as a rank can that has all of them."""
    order = torch.randperm(len(whole), generator=torch.Generator().manual_seed(1))
    parts = [whole.select(sorted(chosen.tolist())) for chosen in order.tensor_split(updates)]
    return [exchange.own_share(part, groups, share_prompts=True) for part in parts]


WAYS = {"planned": planned, "everything": everything}


def rank_of_a_world(rank: int, ranks: int, tensor: int, args: argparse.Namespace, folder: str, answers) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=ranks)
    groups = groups_of(rank, ranks, tensor)
    own = None
    if groups.is_rollout_rank:
        lengths = log_normal_lengths(args.sequences, args.mean, args.longest, seed=groups.data.rank)
        own = made_batch(lengths, args.samples, args.prompt, seed=groups.data.rank)
    found = []
    for repeat, name in itertools.product(range(args.repeats + 1), WAYS):
        dist.barrier()
        before, shares = received_bytes(), []
        seconds = frame.seconds(lambda way=WAYS[name], shares=shares: shares.extend(way(own, groups, args.updates)))
        dist.barrier()  # others' bytes may still come
        received = received_bytes() - before
        if repeat > 0:  # the first connects
            found.append((name, seconds, received, sum(map(bytes_of, shares))))
    answers.put((rank, found))
    dist.barrier()
    dist.destroy_process_group()


def measure(ranks: int, tensor: int, args: argparse.Namespace) -> dict[str, tuple[float, float, float]]:
    """Return by way: seconds of the slowest rank, the most bytes that one received, and that as a part of its share."""
    context = multiprocessing.get_context("spawn")  # a fork of a process with threads of OpenMP would hang in them
    answers = context.Queue()
    with tempfile.TemporaryDirectory() as folder:
        given = (ranks, tensor, args, folder, answers)
        processes = [context.Process(target=rank_of_a_world, args=(rank, *given)) for rank in range(ranks)]
        for process in processes:
            process.start()
        of_ranks = [answers.get(timeout=600)[1] for _ in processes]
        for process in processes:
            process.join()
    result = {}
    for name in WAYS:
        rows = [[entry[1:] for entry in found if entry[0] == name] for found in of_ranks]
        slowest = [max(times) for times in zip(*([seconds for seconds, *_ in row] for row in rows), strict=True)]
        most = max(received for row in rows for _, received, _ in row)
        ratio = max(received / share for row in rows for _, received, share in row)
        result[name] = statistics.median(slowest), most, ratio
    return result


def large_world(args: argparse.Namespace) -> tuple[float, float, float, float]:
    """Plan a step for many replicas; return the seconds, the least and most bytes of a rank, and the most by its share.

    The rank has sent all that it had, and receives all that it trains.
    """
    lengths = log_normal_lengths(args.planned, args.planned_mean, args.longest, seed=0)
    own = made_batch(torch.full((args.samples,), 2 * args.prompt), args.samples, args.prompt, seed=0)  # one group's
    a_token = sum(column.element_size() for column in own.tokens.values())
    versions = [column for name, column in own.columns().items() if name.startswith("versions.")]  # in runs of tokens
    runs = sum(column.numel() * column.element_size() for column in versions) // len(own)
    sequences = {"group": torch.arange(len(lengths)) // args.samples}
    place = torch.arange(len(lengths)) % args.samples
    shared = torch.minimum(lengths // 2, torch.tensor(args.prompt))
    # In the order of tokens the one with the shorter prompt comes first; in a group all have the least in common.
    least = shared.view(-1, args.samples).amin(1).repeat_interleave(args.samples)
    begin = torch.stack([place, least.where(place > 0, 0)], dim=1)
    groups = SimpleNamespace(data=SimpleNamespace(size=args.replicas, rank=0))
    options = {"updates": args.updates, "seed": 1, "begin": begin}
    plans = []
    work = lambda: plans.append(exchange.plan_step(sequences, lengths, groups, **options))  # noqa: E731
    seconds = statistics.median(frame.seconds(work) for _ in range(args.repeats))
    owner = plans[0].owner
    count = torch.bincount(owner, minlength=args.replicas)
    tokens = torch.zeros(args.replicas, dtype=torch.int64).index_add_(0, owner, lengths)
    # Of each trajectory length, reward and how it begins like another; of each prompt its numbers and the replies.
    table = len(lengths) * (4 + 4 + 4 + 2) + len(lengths) // args.samples * 3 * 8 + args.replicas * 2 * 8
    share = tokens * a_token + count * (sum(column.element_size() for column in own.sequences.values()) + runs)
    received = tokens * a_token + count * runs + table + 8 * len(delivery.token_layout(own))
    return seconds, int(received.min()), int(received.max()), float((received / share).max())


def by_tokens(args: argparse.Namespace) -> float:
    """Return the seconds in which a rank of the large world takes its share out of all tokens."""
    lengths = log_normal_lengths(args.planned, args.today_mean, args.longest, seed=0)
    whole = made_batch(lengths, args.samples, args.prompt, seed=0)
    groups = SimpleNamespace(data=SimpleNamespace(size=args.replicas, rank=0))
    return frame.seconds(lambda: shares_of_whole(whole, groups, args.updates))


def main(argv: list[str] | None = None) -> None:
    parser = frame.parser(__doc__)
    parser.add_argument("--worlds", nargs="+", default=["2x1", "4x1", "8x1", "2x4"], help="replicas x ranks of each")
    parser.add_argument("--sequences", type=int, default=64, help="of each replica's rollout rank")
    parser.add_argument("--mean", type=float, default=16_384, help="tokens of a sequence")
    parser.add_argument("--longest", type=int, default=131_072)
    parser.add_argument("--samples", type=int, default=16, help="replies of a prompt")
    parser.add_argument("--prompt", type=int, default=512, help="tokens of a prompt, at most")
    parser.add_argument("--updates", type=int, default=1)
    parser.add_argument("--replicas", type=int, default=512, help="of the large world")
    parser.add_argument("--planned", type=int, default=16_384, help="sequences of the large world")
    parser.add_argument("--planned-mean", type=float, default=16_384)
    parser.add_argument("--today-mean", type=float, default=1024, help="where a share is taken out of all tokens")
    parser.add_argument("--repeats", type=int, default=5)
    quick = {
        "worlds": ["2x1"],
        "sequences": 8,
        "mean": 64,
        "samples": 4,
        "planned": 64,
        "planned_mean": 64,
        "replicas": 4,
        "today_mean": 64,
        "repeats": 1,
    }
    args = frame.arguments(parser, argv, **quick)

    machine = frame.Machine()
    print(f"{args.sequences} sequences of {args.mean:.0f} tokens on average from each replica, {args.samples} a prompt")
    print(f"{'ranks':>5}  {'replicas':>8}  {'way':<12}{'s':>8}{'received, MB':>14}{'of its share':>14}")
    for world in args.worlds:
        replicas, tensor = map(int, world.split("x"))
        for name, (seconds, received, ratio) in measure(replicas * tensor, tensor, args).items():
            row = f"{replicas * tensor:>5}  {replicas:>8}  {name:<12}{seconds:>8.3f}"
            print(f"{row}{received / 1e6:>14.1f}{ratio:>13.2f}x")
    seconds, least, most, ratio = large_world(args)
    print(
        f"{args.planned} sequences of {args.planned_mean:.0f} tokens for {args.replicas} replicas: planned in "
        f"{seconds:.3f} s, a rank receives {least / 1e6:.1f} to {most / 1e6:.1f} MB, at most {ratio:.3f}x its share"
    )
    print(
        f"a share taken out of all tokens, of sequences of {args.today_mean:.0f}: {by_tokens(args):.3f} s on every rank"
    )
    print(f"{machine}, torch {torch.__version__}, 1 thread a rank")


if __name__ == "__main__":
    frame.run(main)
