"""A live page of a run: `megatron-rl watch RUN`."""
