"""Repeats recorded steps of a run, and reports the first value that differs from the recorded one."""
