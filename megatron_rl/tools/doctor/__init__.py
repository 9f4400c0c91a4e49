"""Finds the first point at which the trainer, transformers and a rollout server disagree about the same tokens."""
