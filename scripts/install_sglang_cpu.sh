#!/usr/bin/env bash
# Install real SGLang beside a virtual environment on a machine without CUDA, for the tests in tests/servers.
# Usage: scripts/install_sglang_cpu.sh PYTHON        e.g. .venv/bin/python; needs torch and transformers of constraints.txt
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

# Print what of some files of requirements is not there, where Python also looks into a folder.
missing() {
  PYTHONPATH=$1 "$python" - "${@:2}" <<'EOF'
import importlib.metadata as metadata, sys
from packaging.requirements import Requirement
lines = [line.partition("#")[0].strip() for path in sys.argv[1:] for line in open(path)]
for wanted in [Requirement(line) for line in lines if line]:
    found = [it.version for it in metadata.distributions(name=wanted.name)][:1]
    if (wanted.marker is None or wanted.marker.evaluate()) and not (found and wanted.specifier.contains(found[0])):
        print(wanted)
EOF
}

lacking=$(missing "$target" "$requirements"/sglang-cpu*.txt && missing "$older" "$requirements/sglang-older.txt" \
  && missing "$router" "$requirements/sglang-router.txt")
if [ -z "$lacking" ]; then
  echo "sglang is installed in $target"
  exit 0
fi

# A constraint keeps pip from moving the packages that the trainer was tested with.
constraints=$(mktemp)
trap 'rm -f "$constraints"' EXIT
"$python" -m pip freeze | grep -E '^(torch|transformers|tokenizers|numpy|safetensors)==' >"$constraints"

install() {
  "$python" -m pip --disable-pip-version-check install --quiet --quiet --no-compile "$@"
}
install -c "$constraints" -r "$requirements/sglang-cpu-imports.txt"
rm -rf "$target" "$older" "$router"
# A torch for CUDA has brought its triton.
install --no-deps --target "$target" -r <(missing "" "$requirements/sglang-cpu.txt")
install --no-deps --target "$older" -r "$requirements/sglang-older.txt"
install --no-deps --target "$router" -r "$requirements/sglang-router.txt"
