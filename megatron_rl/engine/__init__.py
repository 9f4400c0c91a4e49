"""Training engines on Megatron-Core."""
