"""Adapters for environments of other packages: tool servers, environments, task folders, games."""
