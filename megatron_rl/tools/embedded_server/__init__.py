"""The embedded rollout server, which speaks SGLang's HTTP protocol where no SGLang can run.

The way of a request: `server.py` (HTTP) -> `protocol.py` (checks and responses) -> `batcher.py` (which rows run next)
-> `forward_passes.py` -> `transformer.py` (over the KV cache) and `sampling.py` (the next token) -> back.
`reply_text.py` turns tokens into text where a tokenizer exists. Weights come by `weight_endpoints.py`.
"""
