"""Start of a run's processes, and their stop when the run ends."""
