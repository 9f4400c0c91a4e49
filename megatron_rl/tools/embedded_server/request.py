"""One prompt and its reply, as they travel between the HTTP layer and the batcher."""

import random
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from megatron_rl.tools.embedded_server.sampling import SamplingParams


@dataclass(eq=False)
class Request:
    """One prompt and its reply. Fields up to `on_progress` are the caller's; the others belong to the batcher.

    request = Request(rid="a", prompt=[5, 6, 7], params=SamplingParams(max_new_tokens=16, sampling_seed=1))
    batcher.submit(request).result()
    request.output, request.logprobs, request.finish_reason
    """

    rid: str
    prompt: list[int]
    params: SamplingParams
    logprob_start: int | None = None
    """Score the prompt from this position on (None: no scoring)."""
    routes_from: int | None = None
    """Tell the routes of its tokens from this position on (None: tell none)."""
    on_progress: Callable[["Request"], None] | None = None
    """Called in the batcher's thread after every token."""
    done: Future = field(default_factory=Future)
    seed: int = 0
    tokens: list[int] = field(default_factory=list)
    """Prompt and output so far."""
    logprobs: list[float] = field(default_factory=list)
    input_logprobs: list[float | None] = field(default_factory=list)
    routes: Tensor | None = None
    """`[tokens, layers, slots]` int32, packed: of all tokens but the last, from `routes_from` on, at its end."""
    filled: int = 0
    """Tokens whose keys and values lie in the row."""
    row: int | None = None
    cached_tokens: int = 0
    retractions: int = 0
    accepted: bool = False
    """Past the door."""
    started: bool = False
    """Has been in a row."""
    spans: list[tuple[str, int]] = field(default_factory=list)
    """(weight version, number of output tokens when it ended), oldest first."""
    finish_reason: dict[str, Any] | None = None
    weight_version: str | None = None
    """The version when it finished."""
    created_s: float = field(default_factory=time.monotonic)
    started_s: float = 0.0
    """The time at which it was first in a row; 0 before. So for the next two."""
    first_token_s: float = 0.0
    finished_s: float = 0.0

    def __post_init__(self) -> None:
        self.tokens = list(self.prompt)
        seed = self.params.sampling_seed
        self.seed = random.getrandbits(63) if seed is None else seed

    @property
    def output(self) -> list[int]:
        return self.tokens[len(self.prompt) :]

    @property
    def generated(self) -> int:
        """Tokens of the output so far."""
        return len(self.tokens) - len(self.prompt)

    @property
    def room(self) -> int:
        """Tokens it may still generate."""
        return self.params.max_new_tokens - self.generated

    @property
    def next_score(self) -> int | None:
        """The next prompt position whose prediction is to be scored."""
        if self.logprob_start is None:
            return None
        position = self.logprob_start + len(self.input_logprobs)
        return position if position < len(self.prompt) - 1 else None

    def end_span(self, version: str) -> None:
        """The tokens since the last span were sampled with `version`."""
        begin = self.spans[-1][1] if self.spans else 0
        if self.generated > begin:
            # One step each: the event loop may be reading them for a stream.
            if self.spans and self.spans[-1][0] == version:
                self.spans[-1] = (version, self.generated)
            else:
                self.spans.append((version, self.generated))
