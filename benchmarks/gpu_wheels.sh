#!/usr/bin/env bash
# Download what a bare GPU machine (Python 3.12, torch, transformers there already) lacks: packages, and the peers that
# the operators are measured beside. Usage: benchmarks/gpu_wheels.sh FOLDER
# PYTHON names an interpreter with torch, which flash-attn's source package asks for while it is downloaded.
set -euo pipefail

folder=${1:?usage: benchmarks/gpu_wheels.sh FOLDER}
python=${PYTHON:-python3}
flash_attention=2.8.3.post2
platforms=()
for name in manylinux_2_28_x86_64 manylinux_2_27_x86_64 manylinux_2_17_x86_64 manylinux2014_x86_64; do
  platforms+=(--platform "$name")
done
fetch() {
  "$python" -m pip download -q --no-deps --only-binary=:all: --python-version 3.12 --implementation cp \
    "${platforms[@]}" -d "$folder" "$@"
}

fetch megatron-core==0.19.2 tensordict==0.12.1 pyvers orjson uvloop omegaconf==2.4.0 cloudpickle psutil rich \
  pytest pytest-timeout pluggy iniconfig einops
fetch liger-kernel==0.8.5 cut-cross-entropy==25.1.1

# QuACK's newest needs CUTLASS libraries of 90 MB; this one is the newest whose compiler can be carried. Packed with LZMA
# it takes 42 MB instead of 59.
fetch quack-kernels==0.2.4 nvidia-cutlass-dsl==4.3.5 apache-tvm-ffi==0.1.15.post2 torch-c-dlpack-ext==0.1.5
"$python" - "$folder"/nvidia_cutlass_dsl-*.whl <<'PYTHON'
import os, sys, zipfile
with zipfile.ZipFile(sys.argv[1]) as old, zipfile.ZipFile(sys.argv[1] + ".small", "w", zipfile.ZIP_LZMA) as new:
    for entry in old.infolist():
        new.writestr(entry.filename, old.read(entry))
os.replace(sys.argv[1] + ".small", sys.argv[1])
PYTHON

# One file of flash-attn, for the benchmark only.
source=$(mktemp -d)
FLASH_ATTENTION_SKIP_CUDA_BUILD=TRUE "$python" -m pip download -q --no-deps --no-binary=:all: --no-build-isolation \
  -d "$source" "flash-attn==$flash_attention"
tar xzf "$source"/flash_attn-*.tar.gz -C "$source"
file=$folder/flash_attn_cross_entropy.py
cp "$source"/flash_attn-*/flash_attn/ops/triton/cross_entropy.py "$file"
echo "__version__ = \"$flash_attention\"" >>"$file"
rm -r "$source"
du -sh "$folder"
