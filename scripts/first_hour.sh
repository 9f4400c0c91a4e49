#!/usr/bin/env bash
# The first hour on a machine with GPUs: every part that later runs depend on, the simplest first. docs/first_hour.md says
# what each step must print, and what to do where it does not.
#
#   scripts/first_hour.sh [FOLDER]              # all steps; FOLDER is runs/first_hour
#   STEPS="nccl sglang" scripts/first_hour.sh   # these steps alone
#
# FOLDER gets a log for each step. At the end, FOLDER.tar.gz holds the logs, metrics and configs, but no weights and no
# replies: attach it to an issue. A step is skipped if a step that it needs has failed. The exit status is 1 if one failed.
set -uo pipefail
cd "$(dirname "$0")/.." || exit 1

folder=${1:-runs/first_hour}
python=${PYTHON:-.venv/bin/python}
only=${STEPS:-}
slowness=${FIRST_HOUR_SLOWNESS:-1} # multiplies every limit
export PYTHONUNBUFFERED=1 NCCL_DEBUG="${NCCL_DEBUG:-WARN}" NCCL_CUMEM_ENABLE="${NCCL_CUMEM_ENABLE:-0}"
mkdir -p "$folder" || exit 1
declare -A state=()
number=0

# step NAME "NEEDS" MINUTES COMMAND...: run it within its limit, its output in FOLDER/NN-NAME.txt.
step() {
  local name=$1 needs=$2 limit=$(($3 * 60 * slowness)) log need status began=$SECONDS
  shift 3
  number=$((number + 1))
  log=$folder/$(printf %02d "$number")-$name.txt
  if [[ -n $only && " $only " != *" $name "* ]]; then return; fi
  for need in $needs; do
    if [[ ${state[$need]:-} == failed || ${state[$need]:-} == skipped ]]; then
      state[$name]=skipped
      printf '%-10s skipped: needs %s\n' "$name" "$need" | tee "$log"
      return
    fi
  done
  if [[ -t 1 ]]; then printf '%-10s ...\r' "$name"; fi
  printf '$ %s\n' "$*" >"$log"
  timeout --kill-after=20 "$limit" "$@" >>"$log" 2>&1 </dev/null
  status=$?
  if ((status == 0)); then
    state[$name]=ok
    printf '%-10s ok, %s s: %s\n' "$name" "$((SECONDS - began))" "$(tail -n 1 "$log")"
  else
    state[$name]=failed
    if ((status == 124 || status == 137)); then echo "stopped at its limit of $limit s" >>"$log"; fi
    printf '%-10s FAILED with status %s, see %s: %s\n' "$name" "$status" "$log" "$(tail -n 1 "$log")"
  fi
}

# run NAME "NEEDS" MINUTES PLACE STEPS CONFIG ARGUMENT...: a run in FOLDER/PLACE, then a look at the metrics that it wrote.
run() {
  local name=$1 needs=$2 minutes=$3 place=$folder/$4 steps=$5 config=$6
  shift 6
  # shellcheck disable=SC2016  # the inner shell expands these
  step "$name" "$needs" "$minutes" bash -c '"${@:3}" && exec "$0" scripts/first_hour_check.py "$1" "$2"' \
    "$python" "$place" "$steps" \
    "$python" -m megatron_rl.cli launch "$config" "run.folder=$place" "run.steps=$steps" "$@"
}

qwen=(configs/gsm8k_qwen3_4b.yaml data.evaluation= data.evaluation_args={} run.evaluate_every_steps=0 run.save_at_end=false
  generation.max_new_tokens=512 batch.prompts_per_step=32)
turns=(rollout.colocated=true rollout.publication=ipc)

step machine "" 1 bash -c 'nvidia-smi && nvidia-smi topo -m && df -h /dev/shm . && free -g && ulimit -l -n && nvidia-smi -L'
step packages "" 3 "$python" scripts/first_hour_check.py --packages
step operators packages 3 "$python" -m megatron_rl.ops
step kernels operators 10 "$python" -m pytest -q -p no:cacheprovider -m gpu tests/gpu/test_operators_cuda.py
run embedded operators 5 embedded 3 configs/demo.yaml rollout.backend=embedded rollout.server_count=1 --ranks 1
run nccl embedded 5 nccl 3 configs/demo.yaml rollout.backend=embedded rollout.server_count=1 --ranks 4 parallel.tensor=2 \
  parallel.pipeline=2
run sglang embedded 10 sglang 3 configs/demo.yaml rollout.backend=sglang rollout.server_count=2 --ranks 2
run turns sglang 10 turns 3 configs/demo.yaml rollout.backend=sglang rollout.server_count=1 --ranks 1 "${turns[@]}"
step plan "" 1 "$python" -m megatron_rl.cli plan configs/gsm8k_qwen3_4b.yaml --nodes 1 --gpus-per-node 8 --device h100
run qwen "nccl sglang plan" 20 qwen 4 "${qwen[@]}" run.checkpoint_every_steps=2
run resume qwen 15 qwen 6 "${qwen[@]}" run.checkpoint_every_steps=2 --resume auto
run qwen-turns "qwen turns" 20 qwen-turns 3 "${qwen[@]}" "${turns[@]}" rollout.server_count=8 rollout.max_staleness=0

tar -czf "$folder.tar.gz" --exclude='*.safetensors' --exclude='*.distcp' --exclude='*.pt' --exclude='samples.jsonl' \
  --exclude='checkpoints' --exclude='journal*' -C "$(dirname "$folder")" "$(basename "$folder")"
echo "Logs and metrics are in $folder.tar.gz."
[[ " ${state[*]} " != *" failed "* ]]
