"""Records of a run: phase timers, spans and traces, the run's log on disk and console, and external loggers.

Metrics are named `group/quantity_unit`. Their values are those of the whole job, and means are already divided by their
counts. This package uses no process group: rank 0 logs what the training loop has summed over ranks.
"""
