"""A workflow for benchmarks: every reply has the length that its prompt's `reply_tokens` asks for."""

from __future__ import annotations

import uuid
from typing import Any

from megatron_rl.types import LLMRequest
from megatron_rl.workflows import RLVRWorkflow
from megatron_rl.workflows.rendering import prompt_ids


class FixedLengths(RLVRWorkflow):
    """One reply per entry of `data["reply_tokens"]`, sampled until it has as many tokens."""

    def sample_requests(self, data: dict[str, Any]) -> list[LLMRequest]:
        rid, ids = uuid.uuid4().hex, prompt_ids(self.tokenizer, data)
        return [
            LLMRequest(rid=rid, input_ids=ids, gconfig=self.gconfig.new(max_new_tokens=tokens, ignore_eos=True))
            for tokens in data["reply_tokens"]
        ]
