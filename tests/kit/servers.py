"""Fixtures with rollout servers: tiny models, embedded servers, scripted ones, real SGLang, and a connected client."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from megatron_rl.config import RolloutConfig
from megatron_rl.rollout.sglang_engine import RemoteSGLangEngine
from megatron_rl.servers.server_process import SGLANG_CPU_PACKAGES
from megatron_rl.servers.supervisor import Supervisor
from tests.kit.run_tokens import TOKEN_FILE
from tests.kit.scripted_server import ScriptedServer
from tests.kit.served_models import make_tiny_model


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model"), seed=0)


@pytest.fixture(scope="session")
def other_tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same architecture with other weights."""
    return make_tiny_model(tmp_path_factory.mktemp("other_model"), seed=1)


@pytest.fixture(scope="session")
def embedded_servers(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[str]]:
    """URLs of two embedded servers of the tiny model. Tests that change weights put them back."""
    config = RolloutConfig(backend="embedded", server_count=2, start_timeout_s=60, token_file=TOKEN_FILE)
    with Supervisor(config, tiny_model, tmp_path_factory.mktemp("embedded")) as supervisor:
        yield supervisor.urls


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
    config = RolloutConfig(
        backend="sglang",
        start_timeout_s=400,
        server_args=["--max-total-tokens", "8192", "--random-seed", "1", "--mem-fraction-static", "0.5"],
        token_file=TOKEN_FILE,
    )
    with Supervisor(config, tiny_model, tmp_path_factory.mktemp("sglang")) as supervisor:
        yield supervisor


@pytest.fixture(scope="session")
def real_sglang(real_supervisor: Supervisor) -> str:
    return real_supervisor.urls[0]


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
        options = RolloutConfig(**{"request_timeout_s": 30.0, "token_file": TOKEN_FILE} | config)
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
