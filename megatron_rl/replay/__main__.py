"""One rank of a replay: python -m megatron_rl.replay RUN --step N."""

from megatron_rl.replay.replay_command import main

if __name__ == "__main__":
    main()
