"""Rollout servers: the embedded server that speaks SGLang's HTTP protocol where no SGLang can run.

The way of a request: `server.py` (HTTP) -> `protocol.py` (checks and answers) -> `batcher.py` (which rows run next) ->
`model.py` (forward over the KV cache) -> `sampling.py` (the next token) -> back. `text.py` turns tokens into text where
a tokenizer exists.
"""
