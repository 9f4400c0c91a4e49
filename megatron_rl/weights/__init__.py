"""Weights between Hugging Face folders, Megatron shards and rollout servers."""
