#!/usr/bin/env bash
# Training on answers on a Slurm cluster (SFT). All nodes train, none serves.
#
#   sbatch --nodes 4 scripts/train_sft.sh configs/count_sft.yaml run.checkpoint_every_steps=50
#
# Options, examples and environment are those of train_grpo.sh, which this hands over to; there are no servers to ask for.
#SBATCH --job-name=sft
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=1
#SBATCH --exclusive
#SBATCH --time=24:00:00
#SBATCH --requeue
#SBATCH --signal=B:USR1@180
#SBATCH --open-mode=append
#SBATCH --output=%x-%j.log
set -euo pipefail

# exec, as --signal's notice goes to this process; the working folder is that of sbatch.
exec bash scripts/train_grpo.sh "$@"
