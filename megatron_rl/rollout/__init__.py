"""Runs episodes: decides which prompts may start, how each episode ends, and which of its results survive a crash.

The path of a prompt: `data/prompts.py` -> `executor.py` (keeps episodes in flight) -> `workflows/` (what one episode
generates) -> `servers/generate.py` (a reply from some server, continued if it was interrupted) ->
`servers/reply_check.py` (validates one answer) -> `rewards/` -> a TrajectoryBatch.

In training all of this runs in a separate process, on one event loop. `process.py` is the trainer's proxy, `rpc.py`
carries the calls, and `rollout_rank.py` answers them. `sglang_engine.py` runs the same service on a thread.
"""
