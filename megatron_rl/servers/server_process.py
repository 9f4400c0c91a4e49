"""Starts one rollout server process: embedded or real SGLang, with or without a GPU."""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from megatron_rl import life
from megatron_rl.api import SGLANG_DELTA_LOADER, SGLANG_FOLDER_LOADER, SGLANG_ROUND_LOADER
from megatron_rl.config import DraftConfig, LoraConfig, RolloutConfig
from megatron_rl.launch.ports import free_port
from megatron_rl.launch.start_up import python_path

if TYPE_CHECKING:  # it needs torch, and the commands that start servers do not
    from megatron_rl.routes import RouteForm

SGLANG_CPU = Path(__file__).parents[1] / "tools" / "sglang_cpu"
"""Folder with stand-ins for those parts of CUDA that SGLang needs."""
SGLANG_CPU_PACKAGES = Path(sys.prefix) / "share" / "sglang-cpu"
"""Folder in which scripts/install_sglang_cpu.sh installs SGLang, separate from the trainer's packages."""
WATCHDOG = Path(life.__file__).parent / "watchdog.py"
LOG_TAIL_LINES = 30
NO_WEIGHTS = "none"
"""Name of weights that were never loaded. It is not a valid policy version."""
KEEP_FREED_MEMORY = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(2**40), "MALLOC_ARENA_MAX": "1"}
"""glibc settings that make a CPU server reuse freed memory instead of faulting in new pages every turn."""
EXPANDABLE = re.compile(r"(expandable_segments\s*:\s*)true", re.IGNORECASE)
"""Matches a setting of torch's allocator that SGLang's --enable-memory-saver refuses."""
SGLANG_CPU_ARGS = [
    *("--device", "cpu", "--attention-backend", "torch_native", "--mem-fraction-static", "0.05"),
    # Without it an idle scheduler keeps a core busy.
    *("--skip-server-warmup", "--sleep-on-idle"),
]


@dataclass(kw_only=True)
class Server:
    """One started server process."""

    number: int
    process: subprocess.Popen[bytes]
    log: Path
    url: str | None
    """Base URL. None until an embedded server has written its ready file."""
    ready_file: Path | None
    watchdog: subprocess.Popen[bytes] | None
    is_ready: bool = False
    fault: str = ""
    """Reason why the server was killed; the first one if there were several. '' if it was not killed."""
    looked_at: float = field(default_factory=time.monotonic)
    """Monotonic time at which the supervisor's thread for this server last checked it."""

    @property
    def name(self) -> str:
        return f"rollout server {self.number} (pid {self.process.pid})"

    def tail(self) -> str:
        lines = self.log.read_text(errors="replace").splitlines()
        return "\n".join(lines[-LOG_TAIL_LINES:]) or "(its log is empty)"

    def kill(self, fault: str) -> None:
        """Kill the server and its workers, which are in its process group."""
        self.fault = self.fault or fault  # the first fault, because later ones are consequences
        with contextlib.suppress(ProcessLookupError):  # the group is gone
            os.killpg(self.process.pid, signal.SIGKILL)

    def how_it_ended(self) -> str:
        if self.fault:
            return f"was killed: {self.fault}"
        code = self.process.returncode
        return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"exited with status {code}"


@dataclass(kw_only=True)
class ServerLauncher:
    """Starts servers of one model. Their logs are written to `folder`."""

    config: RolloutConfig
    model_path: Path
    folder: Path
    dtype: str = "float32"
    context_length: int | None = None
    dummy_weights: bool = False
    """True if servers skip loading weights from the model's folder.

    The trainer then publishes weights before the first request.
    """
    lora: LoraConfig | None = None
    """Settings of the adapters that the trainer publishes before the first request. None without adapters."""
    threads_per_server: int = 1
    host: str = "127.0.0.1"
    devices: list[list[str]] | None = None
    routes: RouteForm | None = None
    """Form in which the servers report the experts of tokens. None if they need not report them."""
    draft: DraftConfig = field(default_factory=DraftConfig)
    draft_folder: Path | None = None
    """Folder with the draft head's config.json, which SGLang reads when it starts."""

    def __post_init__(self) -> None:
        backend = self.config.backend
        self.backend = backend if backend != "auto" else "sglang" if has_cuda() else "embedded"
        if self.draft.kind != "none" and self.backend == "sglang" and not has_cuda():
            raise ValueError(
                f"draft.kind = {self.draft.kind!r}: SGLang decodes with a draft head on a GPU. On a CPU it has no "
                f"kernels for it without AMX, and takes the likeliest token whatever the temperature is; set "
                f"draft.kind=none, or rollout.backend=embedded."
            )

    @property
    def token_file(self) -> Path:
        """Path of the file with the servers' token: rollout.token_file, or by default a file in `folder`."""
        return Path(self.config.token_file or self.folder / "token")

    def launch(self, number: int, url: str | None = None) -> Server:
        """Start server `number`. url: the server's earlier URL if it is restarted, which it then gets again."""
        log, ready_file = self.folder / f"server-{number}.log", None
        restarts, port = url is not None, int(url.rpartition(":")[2]) if url else 0
        if self.backend == "embedded":
            ready_file = self.folder / f"server-{number}.url"
            ready_file.unlink(missing_ok=True)
            command = self.embedded_command(ready_file, port)  # with port 0 the server chooses one
            url = None  # read again from the ready file, which shows that it listens
        else:
            port = port or free_port(self.host)
            url = f"http://{self.host}:{port}"
            command = self.sglang_command(port)
        command += self.config.server_args
        with log.open("ab" if restarts else "wb") as output:
            output.write((" ".join(command) + "\n").encode())
            output.flush()
            process = subprocess.Popen(
                command,  # without the token, which `ps` would show; the server reads it from a file
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=self.environment(number),
                # A separate process group: Ctrl-C reaches only the trainer, which then stops its servers in order.
                start_new_session=True,
            )
        watchdog = None
        if self.backend == "sglang":  # the embedded server watches its parent itself
            watchdog = subprocess.Popen(
                [sys.executable, "-S", "-E", str(WATCHDOG), str(process.pid)],
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )
        return Server(number=number, process=process, log=log, url=url, ready_file=ready_file, watchdog=watchdog)

    def embedded_command(self, ready_file: Path, port: int) -> list[str]:
        command = [sys.executable, "-m", "megatron_rl.tools.embedded_server.server", str(self.model_path)]
        command += ["--host", self.host, "--token-file", str(self.token_file)]
        command += ["--port", str(port), "--ready-file", str(ready_file), "--parent-pid", str(os.getpid())]
        if self.routes is not None and self.routes.has_weights:
            command.append("--return-expert-weights")
        if self.config.exact:
            command.append("--exact")
        if self.draft.kind != "none":
            command += ["--speculative-algorithm", "EAGLE", "--speculative-num-steps", str(self.draft.tokens)]
            command += ["--tokens-per-pass", str(self.draft.tokens_per_pass)]
        return command + self._shared_arguments()

    def sglang_command(self, port: int) -> list[str]:
        command = [sys.executable, "-m", "megatron_rl.servers.sglang_launch", "--token-file", str(self.token_file)]
        command += ["--model-path", str(self.model_path), "--host", self.host, "--port", str(port)]
        command += self._shared_arguments()
        command += ["--custom-weight-loader", SGLANG_DELTA_LOADER, SGLANG_ROUND_LOADER, SGLANG_FOLDER_LOADER]
        if self.draft.kind != "none":  # a chain of guesses; rollout.server_args come later
            assert self.draft_folder is not None, "SGLang reads the head's config.json"
            command += ["--speculative-algorithm", "EAGLE", "--speculative-draft-model-path", str(self.draft_folder)]
            command += ["--speculative-num-steps", str(self.draft.tokens), "--speculative-eagle-topk", "1"]
            command += ["--speculative-num-draft-tokens", str(self.draft.tokens + 1)]
            command += ["--speculative-draft-load-format", "dummy"] if self.dummy_weights else []
        if self.lora is not None:
            command += ["--enable-lora", "--max-lora-rank", str(self.lora.rank), "--max-loras-per-batch", "2"]
            command += ["--lora-target-modules", *self.lora.targets]
            command += [] if has_cuda() else ["--lora-backend", "torch_native"]
        if not has_cuda():
            command += SGLANG_CPU_ARGS
        elif self.config.colocated:
            command.append("--enable-memory-saver")
        return command

    def _shared_arguments(self) -> list[str]:
        arguments = ["--dtype", self.dtype, "--weight-version", NO_WEIGHTS if self.dummy_weights or self.lora else "0"]
        if self.context_length is not None:
            arguments += ["--context-length", str(self.context_length)]
        if self.dummy_weights:
            arguments += ["--load-format", "dummy"]
        if self.routes is not None:
            arguments.append("--enable-return-routed-experts")
        return arguments

    def environment(self, number: int) -> dict[str, str]:
        environment = dict(os.environ)
        # A server must not mistake itself for a rank of the trainer.
        for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
            environment.pop(name, None)
        # Otherwise each server uses all cores, and several slow each other down.
        environment["OMP_NUM_THREADS"] = str(self.threads_per_server)
        if self.backend == "embedded" and not has_cuda():
            environment |= KEEP_FREED_MEMORY
        first_paths: list[str] = []
        if self.backend == "sglang" and not has_cuda():
            first_paths = [str(SGLANG_CPU), str(SGLANG_CPU_PACKAGES)]
            environment |= {"SGLANG_USE_CPU_ENGINE": "1", "HF_HUB_OFFLINE": "1"}
            # With a CUDA build of torch, SGLang would find NCCL and use it. Without the library it uses gloo.
            environment["SGLANG_NCCL_SO_PATH"] = os.devnull
            environment.pop("PYTHONDONTWRITEBYTECODE", None)  # keep its compiled modules
        tells_weights = self.routes is not None and self.routes.has_weights
        plugins = ["register_routes"] * tells_weights + ["register_adapters"] * (self.lora is not None)
        if self.backend == "sglang" and plugins:
            first_paths.append(str(write_plugins(self.folder / "sglang_plugins", plugins)))
        environment["PYTHONPATH"] = os.pathsep.join([*first_paths, python_path()])
        if self.backend == "sglang" and self.config.colocated:
            for name in {"PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"} & environment.keys():
                environment[name] = EXPANDABLE.sub(r"\1False", environment[name])
        if self.devices is not None:
            environment["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, self.devices[number]))
        return environment


def write_plugins(folder: Path, functions: list[str]) -> Path:
    """Write files that register functions of sglang_plugins.py as SGLang plugins, and return `folder`.

    SGLang finds the plugins if `folder` is on its PYTHONPATH.
    """
    about = folder / "megatron_rl_plugins-1.dist-info"
    about.mkdir(parents=True, exist_ok=True)
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: megatron_rl_plugins\nVersion: 1\n")
    lines = [f"{function} = megatron_rl.servers.sglang_plugins:{function}\n" for function in functions]
    (about / "entry_points.txt").write_text("[sglang.srt.plugins]\n" + "".join(lines))
    return folder


def has_cuda() -> bool:
    """Return True if torch has CUDA or ROCm. Without a GPU driver, torch is not imported, which would take a second."""
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        if not Path("/dev/kfd").exists():  # AMD's devices, which torch calls CUDA, too
            return False
    import torch

    return torch.cuda.is_available()
