"""Fixtures with rollout servers: tiny models, embedded servers, scripted ones, real SGLang, and a connected client."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from safetensors.torch import load_file
from torch import Tensor

from megatron_rl.config import RolloutConfig
from megatron_rl.launch.ports import free_port
from megatron_rl.rollout.sglang_engine import RemoteSGLangEngine
from megatron_rl.servers import membership, server_process
from megatron_rl.servers.server_process import SGLANG_CPU_PACKAGES
from megatron_rl.servers.supervisor import Supervisor
from tests.kit.run_tokens import TOKEN_FILE
from tests.kit.scripted_server import ScriptedServer
from tests.kit.served_models import make_tiny_model
from tests.kit.waiting import LATE_S, wait_until

NEVER_LATE = {f"{what}_timeout_s": LATE_S for what in ("request", "control", "start")}
"""What a test that is about no deadline gives clients and servers."""
SGLANG_ARGUMENTS = ["--max-total-tokens", "8192", "--random-seed", "1", "--mem-fraction-static", "0.5"]
"""Of a tiny model on a CPU. What others take of the host's memory while it starts counts as taken by its weights."""


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model"), seed=0)


@pytest.fixture(scope="session")
def other_tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same architecture with other weights."""
    return make_tiny_model(tmp_path_factory.mktemp("other_model"), seed=1)


@pytest.fixture
def weights(other_tiny_model: Path) -> dict[str, Tensor]:
    """What a test publishes: other weights than those that the servers began with."""
    return load_file(other_tiny_model / "model.safetensors")


@pytest.fixture(scope="session")
def embedded_servers(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[str]]:
    """URLs of two embedded servers of the tiny model. Tests that change weights put them back."""
    from tests.kit.programs import fork_programs

    config = RolloutConfig(backend="embedded", server_count=2, token_file=TOKEN_FILE, **NEVER_LATE)
    supervisor = Supervisor(config, tiny_model, tmp_path_factory.mktemp("embedded"))
    # A session's fixtures come before the one by which a folder's programs are forked.
    with pytest.MonkeyPatch.context() as patch:
        fork_programs(patch)
        supervisor.start()
    try:
        yield supervisor.urls
    finally:
        supervisor.stop()


@pytest.fixture(scope="session")
def needs_sglang() -> None:
    """Skip where real SGLang for the CPU is missing."""
    if not (SGLANG_CPU_PACKAGES / "sglang").is_dir():
        pytest.skip("SGLang is not installed; run scripts/install_sglang_cpu.sh with this interpreter")


@pytest.fixture(scope="session")
def real_supervisor(
    needs_sglang: None, tiny_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Supervisor]:
    """One real SGLang server on the CPU, shared by the session: it takes 20 s and 2 GB."""
    config = RolloutConfig(backend="sglang", server_args=SGLANG_ARGUMENTS, token_file=TOKEN_FILE, **NEVER_LATE)
    with Supervisor(config, tiny_model, tmp_path_factory.mktemp("sglang")) as supervisor:
        yield supervisor


@pytest.fixture(scope="session")
def real_sglang(real_supervisor: Supervisor) -> str:
    return real_supervisor.urls[0]


@pytest.fixture(scope="module")
def router() -> Iterator[str]:
    """URL of a real SGLang router without servers, which asks those that it gets by turns."""
    # Apart from SGLang, which its launcher would import where it could.
    folder = SGLANG_CPU_PACKAGES.with_name("sglang-router")
    paths = [path for path in (str(folder), os.environ.get("PYTHONPATH")) if path]
    if not (folder / "sglang_router").is_dir() and importlib.util.find_spec("sglang_router") is None:
        pytest.skip("sglang-router is not installed; run scripts/install_sglang_cpu.sh with this interpreter")
    url = f"http://127.0.0.1:{free_port('127.0.0.1')}"
    command = [sys.executable, "-m", "sglang_router.launch_router", "--host", "127.0.0.1", "--policy", "round_robin"]
    command += ["--port", url.rpartition(":")[2], "--prometheus-port", str(free_port("127.0.0.1"))]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths)}
    process = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL)

    def answers() -> bool:
        try:
            return urllib.request.urlopen(f"{url}/liveness", timeout=LATE_S).status == 200
        except OSError:
            return False

    wait_until(lambda: process.poll() is not None or answers(), "the router does not start")
    assert process.poll() is None, "the router has ended"
    yield url
    process.kill()
    process.wait()


@pytest.fixture
def connect() -> Iterator[Callable[..., RemoteSGLangEngine]]:
    """Make clients: connect(urls, seed=..., on_drop=..., run_name=..., **RolloutConfig fields)."""
    engines = []

    def make(
        addr: str | list[str],
        seed: int | None = None,
        on_drop: Callable[[str, str], None] | None = None,
        run_name: str = "",
        **config: object,
    ) -> RemoteSGLangEngine:
        options = RolloutConfig(**NEVER_LATE | {"token_file": TOKEN_FILE} | config)
        engines.append(RemoteSGLangEngine(options, seed=seed, on_drop=on_drop, run_name=run_name))
        engines[-1].initialize(addr)
        return engines[-1]

    yield make
    for engine in engines:
        engine.destroy()


@pytest.fixture
def scripted() -> Iterator[Callable[..., ScriptedServer]]:
    """Make servers that misbehave: scripted(version=..., ...)."""
    servers = []

    def make(**options: object) -> ScriptedServer:
        servers.append(ScriptedServer(**options))
        return servers[-1]

    yield make
    for server in servers:
        server.stop()


@pytest.fixture
def put_back(
    connect: Callable[..., RemoteSGLangEngine], tiny_model: Path
) -> Iterator[Callable[[str | list[str]], None]]:
    """Call it with the URLs of servers that other tests use too: they get their first weights back."""
    used: list[str | list[str]] = []
    yield used.append
    for urls in used:
        restored = connect(urls)
        restored.resume()
        restored.update_weights(tiny_model, 0)


@pytest.fixture
def quick_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Clients look at servers that they lost all the time."""
    monkeypatch.setattr(membership, "LOOK_EVERY_S", 0.02)


@pytest.fixture
def from_command_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    """Supervisors start their servers with interpreters of their own, where the module's others are forked."""
    monkeypatch.setattr(server_process, "subprocess", subprocess)
