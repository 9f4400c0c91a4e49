"""Reports of runs and comparisons between runs, made from their logs. Needs neither torch nor megatron."""
