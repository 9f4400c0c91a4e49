"""The embedded rollout server, which speaks SGLang's HTTP protocol where no SGLang can run.

The way of a request: `server.py` (HTTP) -> `protocol.py` (checks and responses) -> `batcher.py` (which rows run next)
-> `transformer.py` (forward over the KV cache) -> `sampling.py` (the next token) -> back. `reply_text.py` turns tokens
into text where a tokenizer exists.
"""
