"""Episodes in flight: which prompts may start, what becomes of each, and what of it survives a crash.

The way of a prompt: `data/prompts.py` -> `executor.py` (keeps episodes in flight) -> `workflows/` (what one episode
generates) -> `servers/generate.py` (a reply from some server, continued if it was interrupted) ->
`servers/reply_check.py` (the check of one answer) -> `rewards/` -> a TrajectoryBatch.

In training all of it runs in a process beside the trainer, on one event loop: `process.py` is the trainer's proxy,
`rpc.py` carries the calls, `rollout_rank.py` answers them. `sglang_engine.py` runs the same service on a thread.
"""
