"""Which prompts a run sees, in which order: files, hub data sets, procedural tasks and recipes, mixed and resumable."""
