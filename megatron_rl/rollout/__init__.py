"""Data generation: prompts in, trajectories out.

The way of a prompt: `prompts.py` -> `executor.py` (keeps episodes in flight) -> `workflows/` (what one episode
generates) -> `sglang.py` (a reply from some server, continued if it was interrupted) -> `server_client.py` (one HTTP
call, checked) -> `rewards/` -> a TrajectoryBatch.

In training all of it runs in a process beside the trainer: `process.py` is the trainer's hold on it, `channel.py`
carries the calls, `head.py` answers them.
"""
