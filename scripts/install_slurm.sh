#!/usr/bin/env bash
# Installs Slurm and munge from the distribution's packages, for tests/slurm; needs root and apt-get, takes 30 seconds.
# Exit code 3 where it cannot: the tests say so then and are skipped.
set -euo pipefail
export PATH="$PATH:/usr/sbin"
missing=()
for name in sbatch slurmctld slurmd munged setpriv; do
  command -v "$name" >/dev/null || missing+=("$name")
done
if [[ ${#missing[@]} -eq 0 ]]; then exit 0; fi
if [[ $EUID -ne 0 ]] || ! command -v apt-get >/dev/null; then
  echo "install_slurm.sh: ${missing[*]} not found, and there is no root or no apt-get here to install slurm-wlm and munge;" \
    "tests/slurm are skipped" >&2
  exit 3
fi
echo "==> installing Slurm, whose batch scripts are tested on it (once; half a minute; make test SLURM=0 goes without)"
install=(env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends slurm-wlm munge util-linux)
if ! { "${install[@]}" || { apt-get update -qq && "${install[@]}"; }; } >/dev/null 2>&1; then
  echo "install_slurm.sh: apt-get could not install slurm-wlm and munge; tests/slurm are skipped" >&2
  exit 3
fi
