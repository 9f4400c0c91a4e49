"""Finds the first place where trainer, transformers and rollout servers compute something else from the same tokens."""
