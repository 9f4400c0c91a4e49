#!/usr/bin/env bash
# Download the packages that a bare GPU machine (Python 3.12, torch, transformers there already) lacks.
# Usage: benchmarks/gpu_wheels.sh FOLDER
set -euo pipefail

folder=${1:?usage: benchmarks/gpu_wheels.sh FOLDER}
platforms=()
for name in manylinux_2_28_x86_64 manylinux_2_27_x86_64 manylinux_2_17_x86_64 manylinux2014_x86_64; do
  platforms+=(--platform "$name")
done
python3 -m pip download -q --no-deps --only-binary=:all: --python-version 3.12 --implementation cp "${platforms[@]}" \
  -d "$folder" megatron-core==0.16.1 tensordict==0.12.1 pyvers orjson uvloop omegaconf==2.4.0 cloudpickle psutil rich \
  pytest pytest-timeout pluggy iniconfig einops
ls -l "$folder"
