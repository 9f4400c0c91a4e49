"""`megatron-rl serve-training CONFIG`: a training server on this rank, or on the ranks that torchrun or Slurm started.

megatron-rl serve-training configs/demo.yaml lora.rank=32
torchrun --nproc-per-node 2 -m megatron_rl.training_server configs/demo.yaml lora.rank=32 parallel.tensor=2
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import secrets
import signal
import ssl
import sys
import threading
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from omegaconf import OmegaConf

from megatron_rl.config import TrainConfig, load_config
from megatron_rl.config.loading import member, read_sections
from megatron_rl.config.rules import refuse
from megatron_rl.launch import file_lock, own_gpu, start_up
from megatron_rl.launch.cores import free_cores
from megatron_rl.launch.placement import ranks_of_step
from megatron_rl.launch.run_token import token_in
from megatron_rl.life import process_exit
from megatron_rl.life.last_words import one_line
from megatron_rl.tools.embedded_server.listening import is_loopback, listen, port_number

if TYPE_CHECKING:
    from megatron_rl.training_server.ranks import Ranks

PREFIX = "tml-"
"""Prefix of API keys. The client refuses keys without it."""
UNUSED = {"data.train": "no-data", "algo.advantage": "reinforce"}
"""Config keys that a training run requires and this server does not read -> a valid value for them."""
OFFLOAD = "optimizer.megatron.optimizer_cpu_offload"


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "megatron-rl serve-training", description="Serve the training API of the package `tinker`."
    )
    parser.add_argument("config", type=Path, help="its model, lora, parallel, optimizer, rollout and run count")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="e.g. lora.rank=32; 0 trains the whole model")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (default 127.0.0.1)")
    parser.add_argument("--port", type=port_number, default=8000, help="0 picks a free one (default 8000)")
    parser.add_argument("--tls", type=Path, nargs=2, metavar=("CERT", "KEY"), help="PEM files; serve https")
    parser.add_argument(
        "--tenants",
        type=Path,
        metavar="FILE",
        help="JSON file {name: file with the tenant's API key}; default: one, with the key in run.folder/api_key",
    )
    parser.add_argument("--model-name", help="what clients call the base model; default: model.path")
    parser.add_argument(
        "--slots",
        type=int,
        help="most models at a time (default: by the plan's memory, up to 64; 1 whole model)",
    )
    parser.add_argument(
        "--checkpoint-every", type=int, default=20, help="optimizer steps of a model between checkpoints (default 20)"
    )
    parser.add_argument("--ready-file", type=Path, help="the URL is written there once the server listens")
    return parser


def main(argv: list[str] | None = None) -> None:
    args = parser().parse_intermixed_args(argv)
    os.environ |= ranks_of_step(os.environ)
    with one_line("megatron-rl serve-training"):
        config = config_for(args)
        own_gpu.set_variables(config)
        with start_up.importing():
            import torch

            from megatron_rl import platform

            platform.prepare(may_use_transformer_engine=config.may_use_transformer_engine)
            from megatron_rl.training_server.ranks import Ranks
            from megatron_rl.training_server.shared_engine import SharedEngine
            from megatron_rl.training_server.slot_memory import Room, room_of, slots_of
        engine = SharedEngine(config.actor, megatron=config.megatron)
        engine.initialize()
        local_ranks = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
        # Equal on all ranks: other summation orders make replicas drift.
        torch.set_num_threads(engine.groups.least(config.run.threads_per_rank or max(1, free_cores() // local_ranks)))
        memory = torch.cuda.get_device_properties(engine.device).total_memory if platform.has_cuda() else None
        sizes = {"world_size": engine.groups.world_size, "local_ranks": local_ranks}
        own = room_of(config, engine.arch, **sizes, device_bytes=memory)
        room = Room(engine.groups.least(own.on_device), engine.groups.least(own.in_host), own.model_bytes)
        args.slots, engine.kept_on_device = slots_of(args.slots, room, config), room.on_device
        ranks = Ranks(engine)
        if engine.groups.is_main:
            serve(args, config, ranks)
        else:
            for number in (signal.SIGTERM, signal.SIGINT):
                signal.signal(number, signal.SIG_IGN)  # rank 0 stops the others
            ranks.follow()
        engine.destroy()


def config_for(args: argparse.Namespace) -> TrainConfig:
    """Return the checked config. Raises ValueError."""
    for key in ("slots", "checkpoint_every"):
        if getattr(args, key) is not None and getattr(args, key) < 1:
            raise ValueError(f"--{key.replace('_', '-')} {getattr(args, key)}: must be at least 1.")
    given = OmegaConf.to_container(read_sections(args.config), resolve=False)
    unused = [f"{key}={value}" for key, value in UNUSED.items() if member(given, key) in (None, "???")]
    config = load_config(args.config, [*unused, *args.overrides])
    config.check_world_size(int(os.environ.get("WORLD_SIZE", 1)))
    kind, megatron, rollout = config.draft.kind, config.optimizer.megatron, config.rollout
    for key, value, why in (
        ("optimizer.overlap", config.optimizer.overlap, "weights would still be exchanged when models take turns"),
        (OFFLOAD, megatron.get("optimizer_cpu_offload"), "models that wait are in host memory"),
        ("draft.kind", kind != "none" and kind, "a training server's models have no draft head"),
        ("rollout.servers", rollout.servers, "a training server starts its rollout servers itself"),
        ("rollout.registry", rollout.registry, "a training server starts its rollout servers itself"),
    ):
        if value:
            refuse(key, value, f"{why}; leave it out")
    return config


def tokens_of(args: argparse.Namespace, folder: Path) -> dict[str, str]:
    """Return {API key: tenant}. The keys are read from files. A missing file is created, with a new key and mode 600.

    Raises ValueError if a key is invalid, or two tenants have the same one.
    """
    files = {"default": str(folder / "api_key")}
    if args.tenants is not None:
        files = json.loads(args.tenants.read_text(encoding="utf-8"))
    found = {api_key(Path(file), f"--tenants: {name}"): name for name, file in files.items()}
    if len(found) < len(files):
        raise ValueError(f"--tenants {args.tenants}: two tenants have the same token; give each a file of its own.")
    return found


def api_key(file: Path, key: str = "api_key") -> str:
    """Return the API key in a file. If there is no file, create it with a new key. key: option's name for errors."""
    if not file.exists():
        file.parent.mkdir(parents=True, exist_ok=True)
        with open(os.open(file, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600), "w") as new:
            new.write(f"{PREFIX}{secrets.token_hex(32)}\n")
    token = token_in(file, key=key)
    if not token.startswith(PREFIX):
        raise ValueError(f"{key} = {str(file)!r}: the client takes only keys that begin with {PREFIX}; write one so.")
    return token


def serve(args: argparse.Namespace, config: TrainConfig, ranks: Ranks) -> None:
    """Serve clients until SIGTERM or Ctrl-C. Only rank 0 calls this."""
    from megatron_rl.servers.supervisor import Supervisor
    from megatron_rl.training_server.http_api import TrainingAPI, serving
    from megatron_rl.training_server.sampler import Sampler
    from megatron_rl.training_server.service import Service
    from megatron_rl.weights.adapter_rules import last_parts

    engine, folder = ranks.engine, Path(config.run.folder)
    lock = file_lock.keep_folder(folder, "training_server.lock", "a training server")
    tokens, listener = tokens_of(args, folder), listen(args.host, args.port)
    tls = None
    if args.tls is not None:
        tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        tls.load_cert_chain(*args.tls)
    elif not is_loopback(args.host):
        print(f"--host {args.host}: other hosts reach it without encryption; add --tls CERT KEY.", file=sys.stderr)
    adapters = replace(config.lora, targets=last_parts(engine.arch, config.lora)) if config.lora.rank else None
    rollout = replace(config.rollout, token_file=config.rollout.token_file or str(folder / "token"))
    supervisor = Supervisor(
        rollout.with_time_for(config.model.path),
        config.model.path,
        folder / "servers",
        dtype=config.model.dtype,
        context_length=engine.arch.max_positions,
        lora=adapters,
        threads_per_server=config.run.threads_per_rank or free_cores(),
    )
    service = Service(
        folder / "training_server",
        ranks,
        base_model=args.model_name or config.model.path,
        slots=args.slots,
        checkpoint_every=args.checkpoint_every,
    )
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: service.stop())
    with supervisor:
        loop, stopped, is_up = asyncio.new_event_loop(), asyncio.Event(), threading.Event()
        sampler = Sampler(
            lambda: supervisor.starts,
            token_in(supervisor.token_file),
            backend=supervisor.backend,
            is_whole=config.lora.rank == 0,
            base=Path(config.model.path),
            patience_s=rollout.start_timeout_s,
        )

        async def serve_clients() -> None:
            async with serving(TrainingAPI(service, sampler, tokens), listener, tls):
                is_up.set()
                await stopped.wait()

        thread = process_exit.start_thread(lambda: loop.run_until_complete(serve_clients()), name="training-api")
        is_up.wait()
        url = f"{'https' if tls else 'http'}://{args.host}:{listener.getsockname()[1]}"
        if args.ready_file is not None:
            args.ready_file.with_suffix(".new").write_text(url)
            args.ready_file.with_suffix(".new").rename(args.ready_file)
        about = f"model {service.base_model}; slots: {service.slots}; API key: {folder / 'api_key'}"
        print(f"training server ready at {url} ({about})", flush=True)
        service.run()
        loop.call_soon_threadsafe(stopped.set)
        thread.join()
    os.close(lock)
