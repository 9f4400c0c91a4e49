#!/usr/bin/env bash
# Install real SGLang beside a virtual environment on a machine without CUDA, for the tests in tests/servers.
# Usage: scripts/install_sglang_cpu.sh PYTHON        e.g. .venv/bin/python; needs torch 2.13.0 and transformers there
# About a minute the first time, a second when everything is there. An older version comes along, for the protocol
# without weight sessions: only the package itself, which runs on the other one's dependencies. And so does its router.
set -euo pipefail

python=${1:?usage: scripts/install_sglang_cpu.sh PYTHON}
requirements=$(cd "$(dirname "$0")/.." && pwd)/requirements
# A folder that only SGLang's own processes have on their path: its torchvision is a CUDA build, and in the environment
# itself it would break every import of a transformers model.
target=$("$python" -c 'import sys; print(sys.prefix)')/share/sglang-cpu
older=$target-0.5.19
router=${target%-cpu}-router

is_installed() {
  PYTHONPATH=$1 "$python" - "${@:2}" <<'EOF'
import importlib.metadata as metadata, sys
for path in sys.argv[1:]:
    for line in open(path):
        name, _, wanted = line.split("#")[0].strip().partition("==")
        if name and metadata.version(name) != (wanted or metadata.version(name)):
            sys.exit(f"{name} is not {wanted}")
EOF
}

if is_installed "$target" "$requirements"/sglang-cpu*.txt 2>/dev/null \
  && is_installed "$older" "$requirements/sglang-older.txt" 2>/dev/null \
  && is_installed "$router" "$requirements/sglang-router.txt" 2>/dev/null; then
  echo "sglang is installed in $target"
  exit 0
fi

# A constraint keeps pip from moving the packages that the trainer was tested with.
constraints=$(mktemp)
trap 'rm -f "$constraints"' EXIT
"$python" -m pip freeze | grep -E '^(torch|transformers|tokenizers|numpy|safetensors)==' >"$constraints"

set -x
"$python" -m pip install --quiet --quiet --no-compile -c "$constraints" -r "$requirements/sglang-cpu-imports.txt"
rm -rf "$target" "$older" "$router"
"$python" -m pip install --quiet --quiet --no-compile --no-deps --target "$target" -r "$requirements/sglang-cpu.txt"
"$python" -m pip install --quiet --quiet --no-compile --no-deps --target "$older" -r "$requirements/sglang-older.txt"
"$python" -m pip install --quiet --quiet --no-compile --no-deps --target "$router" -r "$requirements/sglang-router.txt"
