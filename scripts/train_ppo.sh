#!/usr/bin/env bash
# PPO with a critic on a Slurm cluster: the job's first nodes (or GPUs) serve rollouts, the others train.
#
#   sbatch --nodes 12 scripts/train_ppo.sh configs/count_ppo_critic.yaml rollout.server_count=32 optimizer.lr=1e-6
#
# Options, examples and environment are those of train_grpo.sh, which this hands over to; only the job's name differs.
#SBATCH --job-name=ppo
#SBATCH --nodes=2
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
