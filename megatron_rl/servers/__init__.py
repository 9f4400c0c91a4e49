"""The trainer's side of the rollout servers.

This package has an HTTP client per server, the pool that distributes requests among servers, the receiver of new
weights, and the supervisor that starts and restarts servers.
"""
