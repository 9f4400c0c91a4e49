"""Entry point of the process that a worker pool starts; see worker.py."""

from megatron_rl.rewards.worker import main

if __name__ == "__main__":
    main()
