#!/usr/bin/env bash
# Everything that needs a GPU, in one command: tests against Hugging Face, then a training step's speed, in one table.
# Usage: benchmarks/gpu_suite.sh [RESULTS_FOLDER] [WHEELS_FOLDER]
# On a machine without a network, WHEELS_FOLDER holds what benchmarks/gpu_wheels.sh downloaded elsewhere.
set -euo pipefail
cd "$(dirname "$0")/.."

results=${1:-benchmarks/results}
wheels=${2:-}
python=${PYTHON:-python3}
mkdir -p "$results"

if [ -n "$wheels" ]; then
  site=$(mktemp -d)
  "$python" -m pip install -q --no-index --no-deps --no-compile --no-cache-dir --upgrade --target "$site" "$wheels"/*.whl
  export PYTHONPATH="$site"
fi
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}" HF_HUB_OFFLINE=1 CUDA_DEVICE_MAX_CONNECTIONS=1

"$python" csrc/build.py --cuda yes --architectures 90a

{
  echo "# GPU suite"
  echo
  date -u "+%Y-%m-%d, commit $(git rev-parse --short HEAD 2>/dev/null || echo unknown)"
  "$python" -c 'import torch, megatron.core as m
print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, megatron-core {m.__version__}")'
  echo
  echo "## Tests"
  echo
  echo '```'
  "$python" -m pytest tests/gpu -m gpu -q -p no:cacheprovider 2>&1 | tail -n 15
  echo '```'
  echo
  echo "## Operators under compute-sanitizer"
  echo
  echo '```'
  if command -v compute-sanitizer >/dev/null; then
    PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --error-exitcode 1 "$python" -m pytest -q -p no:cacheprovider \
      tests/gpu/test_operators_cuda.py -k "float64 or policy_loss or advantages" 2>&1 | tail -n 4
  else
    echo "compute-sanitizer is not installed"
  fi
  echo '```'
  echo
  echo "## Operators"
  echo
  "$python" -W ignore benchmarks/bench_ops_cuda.py
  echo
  echo "## Training step"
  echo
  "$python" -W ignore benchmarks/bench_train_step.py
} | tee "$results/gpu_suite.md"
