#!/usr/bin/env bash
# Everything that needs a GPU, in one command of at most nine minutes: build, tests, compute-sanitizer, the operators
# beside their peers, a training step, and where SGLang is installed a real run with it. What it prints at its end begins
# with a yes or no to each bar that the project has set itself (suite_bars.py).
# Usage: benchmarks/gpu_suite.sh [RESULTS_FOLDER] [WHEELS_FOLDER]
# On a machine without a network, WHEELS_FOLDER holds what benchmarks/gpu_wheels.sh downloaded elsewhere. Each part has a
# time limit, and its whole output in RESULTS_FOLDER; all that is printed is in gpu_suite.md, its figures in
# gpu_suite.json, gpu_peers.json, device_rates.json and train_step.json. A part that fails does not stop the next one; the exit status is 1 if any failed.
set -uo pipefail
cd "$(dirname "$0")/.." || exit 1

results=${1:-benchmarks/results}
wheels=${2:-}
python=${PYTHON:-python3}
slowness=${SUITE_SLOWNESS:-1}  # multiplies every limit
end=$((SECONDS + ${SUITE_SECONDS:-530} * slowness))
mkdir -p "$results" || exit 1
failed=()

# part NAME SECONDS COMMAND...: run it within its limit and what is left of the whole; stderr goes to NAME.txt.
part() {
  local name=$1 limit=$(($2 * slowness)) left=$((end - SECONDS))
  shift 2
  if ((left < limit)); then limit=$left; fi
  if ((limit < 5)); then echo "not begun: the suite's time is used up" && return 1; fi
  echo "gpu_suite: $name, at most $limit s" >&3
  timeout --kill-after=10 "$limit" "$@" 2>>"$results/$name.txt"
}

# outcome NAME STATUS: say so where a part failed.
outcome() {
  if (($2 == 124 || $2 == 137)); then echo "**$1 was stopped at its time limit**"; fi
  if (($2 != 0)); then echo "**$1 failed with status $2: $1.txt**" && failed+=("$1"); fi
}

# logged NAME SECONDS COMMAND...: all output to NAME.txt.
logged() { part "$@" >>"$results/$1.txt"; }

# last NAME LINES STATUS: the end of a part's output, in the markdown.
last() {
  printf '\n## %s\n\n```\n' "$1"
  tail -n "$2" "$results/$1.txt"
  printf '```\n'
  outcome "$1" "$3"
}

# beside NAME SECONDS COMMAND...: begin a part in which nothing is timed; `told` waits for it and shows its end.
beside() { logged "$@" & started+=("$1 $!"); }

told() {
  local pair
  for pair in "${started[@]}"; do
    wait "${pair#* }"
    last "${pair% *}" 8 $?
  done
}

sanitize() {
  PYTORCH_NO_CUDA_MEMORY_CACHING=1 beside "$1" 150 compute-sanitizer --tool "$1" --error-exitcode 1 "$python" -m pytest \
    -q -p no:cacheprovider -m gpu tests/gpu/test_operators_cuda.py -k "float64 or policy_loss or advantages"
}

install_wheels() {
  local line status site=$1
  "$python" -m pip install -q --no-index --no-deps --no-compile --no-cache-dir --upgrade --target "$site" "$wheels"/*.whl
  status=$?
  cp "$wheels"/*.py "$site" 2>/dev/null
  cat "$site"/*.pth 2>/dev/null | while read -r line || [ -n "$line" ]; do
    if [ -d "$site/$line" ]; then printf ':%s' "$site/$line"; fi
  done >"$site/.paths"
  return $status
}

suite() {
  local status site
  local started=()
  if [ -n "$wheels" ]; then
    site=$(mktemp -d)
    install_wheels "$site" >"$results/install.txt" 2>&1
    status=$?
    if ((status != 0)); then last install 15 "$status"; else rm "$results/install.txt"; fi
    PYTHONPATH=$site$(cat "$site/.paths")
  fi
  export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1 HF_HUB_OFFLINE=1 CUDA_DEVICE_MAX_CONNECTIONS=1

  logged build 90 "$python" csrc/build.py --cuda yes --architectures 90a
  status=$?
  logged build 30 "$python" -m megatron_rl.ops || status=1
  last build 12 "$status"

  # Nothing is timed here, so these share the device.
  if command -v compute-sanitizer >/dev/null; then
    sanitize memcheck
    sanitize racecheck
  else
    printf '\ncompute-sanitizer is not installed.\n'
  fi
  beside tests 150 "$python" -m pytest tests/gpu -m gpu -q -p no:cacheprovider --ignore tests/gpu/test_runs_cuda.py
  beside runs 150 "$python" -m pytest tests/gpu/test_runs_cuda.py -m gpu -q -p no:cacheprovider
  told

  printf '\n## Operators\n\n'
  part operators 90 "$python" -W ignore benchmarks/bench_ops_cuda.py --ours --results "$results" --seconds 70
  outcome operators $?
  part rates 40 "$python" benchmarks/device_rates.py --json "$results/device_rates.json"
  outcome rates $?

  printf '\n## Training step\n\n'
  part step 130 "$python" -W ignore benchmarks/bench_train_step.py --rounds 1 --json "$results/train_step.json"
  outcome step $?

  if "$python" -c 'import sglang' 2>/dev/null && [ -f models/smollm2-135m-instruct/config.json ]; then
    logged sglang 120 "$python" -m megatron_rl.train configs/demo.yaml rollout.backend=sglang run.steps=3
    last sglang 15 $?
  else
    printf '\n## sglang\n\nNot run: the package sglang or models/smollm2-135m-instruct is not here.\n'
  fi

  printf '\n## Operators beside those of others\n\n'
  part peers 160 "$python" -W ignore benchmarks/bench_ops_cuda.py --results "$results" --seconds 120
  outcome peers $?

  printf '\n%s\n' "Parts that failed: ${failed[*]:-none}."
  ((${#failed[@]} == 0))
}

# answers STATUS: what is printed, the bars first.
answers() {
  echo "# GPU suite"
  echo
  echo "$(date -u +%Y-%m-%d), commit $(git rev-parse --short HEAD 2>/dev/null || echo unknown)"
  nvidia-smi --query-gpu=name,driver_version,clocks.sm,clocks.mem,temperature.gpu --format=csv,noheader 2>/dev/null
  if (($1 != 0)); then echo "**A part failed: the last line says which.**"; fi
  echo
  "$python" benchmarks/suite_bars.py "$results"
  cat "$results/parts.md"
}

exec 3>&2
rm -f "$results"/{install,build,tests,runs,memcheck,racecheck,operators,rates,step,sglang,peers}.txt
rm -f "$results"/{gpu_suite,gpu_peers,device_rates,train_step}.json
suite >"$results/parts.md"
status=$?
answers "$status" | tee "$results/gpu_suite.md"
rm "$results/parts.md"
exit "$status"
