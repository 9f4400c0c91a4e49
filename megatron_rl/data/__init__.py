"""Training and evaluation prompts: files, hub data sets, built-in tasks and recipes, mixed in a resumable order."""
