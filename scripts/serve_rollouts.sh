#!/usr/bin/env bash
# Rollout servers in a job of their own. They register in run.folder/registry (or rollout.registry), where the trainers of
# the same run find them; they may come, go and come again while it lasts.
#
#   sbatch --nodes 4 scripts/serve_rollouts.sh CONFIG run.folder=runs/one rollout.server_count=32
#   sbatch --nodes 8 scripts/train_grpo.sh CONFIG run.folder=runs/one rollout.server_count=32 --servers 0
#
# Options of sbatch on the command line win over those below; settings are those of train_grpo.sh. Each server logs below
# run.folder/servers.
#SBATCH --job-name=rollouts
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=1
#SBATCH --exclusive
#SBATCH --time=24:00:00
#SBATCH --requeue
#SBATCH --signal=B:USR1@60
#SBATCH --open-mode=append
#SBATCH --output=%x-%j.log
set -euo pipefail

: "${PYTHON:=.venv/bin/python}"                # a plain environment; runs the steps too, where there is no container
: "${CONTAINER:=}" "${CONTAINER_RUNTIME:=pyxis}" "${CONTAINER_MOUNTS:=}"
export PYTHONUNBUFFERED=1
export NCCL_DEBUG="${NCCL_DEBUG:-WARN}"
export NCCL_CUMEM_ENABLE="${NCCL_CUMEM_ENABLE:-0}"                        # as the trainer has it, whose group they join

# exec: --signal's notice goes to this process, which stops the servers and queues the job again.
exec "$PYTHON" -m megatron_rl.launch.slurm --ranks 0 --container "$CONTAINER" --container-runtime "$CONTAINER_RUNTIME" \
  --container-mounts "$CONTAINER_MOUNTS" "$@"
