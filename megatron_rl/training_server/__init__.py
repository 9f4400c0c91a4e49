"""A training server: clients of the package `tinker` train this package's engine over HTTP. docs/training_server.md.

http_api  -> routes, tenants' tokens; runs in the event loop's thread
service   -> sessions, models, futures and the order of their requests; journal.py makes them outlive this process
trainer   -> the engine, which each tenant's model occupies in turn; runs in the main thread of every rank
sampler   -> rollout servers, on which saved weights are loaded by name
"""
