#!/usr/bin/env bash
# Print the path of a Python that runs here and can make a virtual environment, of the first of the versions that has one.
# Usage: scripts/find_python.sh VERSION...        e.g. scripts/find_python.sh 3.12 3.11
# Each candidate is run: a name on PATH may be pyenv's shim of a version that is not chosen, which only prints an error.
set -euo pipefail

candidates() {
  type -ap "python$1" python3 python || true
  # Where pyenv, uv and conda keep versions that PATH does not name; the newest first.
  {
    ls -d "${PYENV_ROOT:-$HOME/.pyenv}/versions/$1".*/bin/"python$1" || true
    ls -d "${UV_PYTHON_INSTALL_DIR:-$HOME/.local/share/uv/python}/cpython-$1".*/bin/"python$1" || true
    ls -d "$HOME"/{mini,ana}conda3{,/envs/*}/bin/"python$1" "$HOME"/miniforge3{,/envs/*}/bin/"python$1" || true
  } 2>/dev/null | sort -Vr
}

for version; do
  while read -r candidate; do
    # A system's Python may lack ensurepip, without which its virtual environments have no pip.
    if found=$("$candidate" - "$version" 2>/dev/null <<'PYTHON'
import ensurepip, ssl, sys, venv
if sys.version_info[:2] != tuple(map(int, sys.argv[1].split("."))):
    sys.exit(1)
print(sys.executable)
PYTHON
    ); then
      echo "$found"
      exit 0
    fi
  done < <(candidates "$version")
done
echo "no Python of version ${*} runs here: install one with its venv module (apt-get install python3.12-venv, pyenv" \
  "install 3.12, uv python install 3.12), or name one: make PYTHON=/path/to/python3.12" >&2
exit 1
