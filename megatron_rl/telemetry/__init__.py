"""Records of a run: phase timers, spans and traces, its log on disk and on the console, and loggers beside it.

Names of metrics are `room/thing_unit`; values are numbers of the whole job, already divided. Nothing here talks to a
process group: rank 0 logs what the training loop has summed.
"""
