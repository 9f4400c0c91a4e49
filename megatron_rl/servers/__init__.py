"""The trainer's side of the rollout servers.

It has an HTTP client per server, the pool that distributes requests among them, the receiver of new weights, and the
supervisor that starts and restarts servers.
"""
