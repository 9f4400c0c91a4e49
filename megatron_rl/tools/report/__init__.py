"""A run's report and the comparison of runs, made from its log. Needs neither torch nor megatron."""
