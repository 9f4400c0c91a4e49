"""Episodes in flight: which prompts may start, what becomes of each, and what of it survives a crash.

The way of a prompt: `data/prompts.py` -> `executor.py` (keeps episodes in flight) -> `workflows/` (what one episode
generates) -> `sglang_engine.py` (a reply from some server, continued if it was interrupted) -> `servers/client.py` (one
HTTP call, checked) -> `rewards/` -> a TrajectoryBatch.

In training all of it runs in a process beside the trainer: `process.py` is the trainer's end, `rpc.py` carries the
calls, `rollout_rank.py` answers them.
"""
