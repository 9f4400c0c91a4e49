"""What a run did: phase timers, the run's log on disk and on the console, and the report made from it.

Names of metrics are `room/thing_unit`; values are numbers of the whole job, already divided. Nothing here talks to a
process group: rank 0 logs what the training loop has summed.
"""
