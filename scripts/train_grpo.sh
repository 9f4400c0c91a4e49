#!/usr/bin/env bash
# GRPO on a Slurm cluster: the job's first nodes (or GPUs) serve rollouts, the others train.
#
#   sbatch --nodes 12 scripts/train_grpo.sh configs/count_grpo.yaml rollout.server_count=32 optimizer.lr=1e-6
#   sbatch --nodes 4 : --nodes 8 --exclusive scripts/train_grpo.sh CONFIG      # a heterogeneous job: servers : trainers
#   sbatch --array 1-5 scripts/train_grpo.sh CONFIG                            # five seeds; --sweep FILE: a line each
#   sbatch --nodes 8 scripts/train_grpo.sh CONFIG --servers 0                  # servers are those of serve_rollouts.sh
#   CONTAINER=image.sif CONTAINER_RUNTIME=apptainer sbatch scripts/train_grpo.sh CONFIG
#
# Options of sbatch on the command line win over those below; `megatron-rl plan CONFIG` prints a whole line. Those of the
# script: .venv/bin/python -m megatron_rl.launch.slurm --help. Each rank and each server logs below run.folder.
#SBATCH --job-name=grpo
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --exclusive
#SBATCH --time=24:00:00
#SBATCH --requeue
#SBATCH --signal=B:USR1@180
#SBATCH --open-mode=append
#SBATCH --output=%x-%j.log
set -euo pipefail

: "${PYTHON:=.venv/bin/python}"                # a plain environment; runs the steps too, where there is no container
: "${CONTAINER:=}" "${CONTAINER_RUNTIME:=pyxis}" "${CONTAINER_MOUNTS:=}"
export PYTHONUNBUFFERED=1
export NCCL_DEBUG="${NCCL_DEBUG:-WARN}"
export NCCL_CUMEM_ENABLE="${NCCL_CUMEM_ENABLE:-0}"                        # as SGLang has it, which joins the trainer's group
# Ranks set CUDA_DEVICE_MAX_CONNECTIONS themselves where their layout wants it. Steps have this job's environment: nodes
# with several networks want NCCL_SOCKET_IFNAME and GLOO_SOCKET_IFNAME, e.g. `sbatch --export=ALL,GLOO_SOCKET_IFNAME=ib0`.

# exec: --signal's notice goes to this process, which hands it to the ranks. The steps' commands are echoed.
exec "$PYTHON" -m megatron_rl.launch.slurm --container "$CONTAINER" --container-runtime "$CONTAINER_RUNTIME" \
  --container-mounts "$CONTAINER_MOUNTS" "$@"
