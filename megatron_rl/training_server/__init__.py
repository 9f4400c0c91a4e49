"""A training server: clients of the package `tinker` train this package's engine over HTTP. docs/training_server.md.

http_api        -> routes, tenants' tokens; runs in the event loop's thread
service         -> order of requests, and what they do; runs in the main thread of rank 0
client_sessions -> sessions; client_models -> models and results; both outlive the process by journals
saved_weights   -> what clients have saved by name
ranks           -> work that all ranks do together on shared_engine, the engine of all models
slot_memory     -> how many models fit
sampler         -> rollout servers, on which saved weights are loaded by name
"""
