"""Convert weights between Hugging Face folders and Megatron shards, and send them to rollout servers."""
