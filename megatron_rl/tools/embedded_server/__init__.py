"""The embedded rollout server. It speaks SGLang's HTTP protocol on machines that cannot run SGLang.

Path of a request: `server.py` (HTTP) -> `protocol.py` (validation and responses) -> `batcher.py` (which rows run next)
-> `forward_passes.py` -> `transformer.py` (over the KV cache) and `sampling.py` (the next token), and back.
`reply_text.py` turns tokens into text if the model has a tokenizer. `weight_endpoints.py` receives weight updates.
"""
