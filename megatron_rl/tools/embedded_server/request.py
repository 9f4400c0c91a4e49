"""The request object that the HTTP layer passes to the batcher: one prompt and its reply."""

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
    """One prompt and its reply. The caller sets the fields up to `on_progress`; the batcher owns the others.

    For example:

        request = Request(rid="a", prompt=[5, 6, 7], params=SamplingParams(max_new_tokens=16, sampling_seed=1))
        batcher.submit(request).result()
        request.output, request.logprobs, request.finish_reason
    """

    rid: str
    prompt: list[int]
    params: SamplingParams
    logprob_start: int | None = None
    """First prompt position whose log-probability is computed (None: no scoring)."""
    routes_from: int | None = None
    """First position whose expert routes are returned (None: no routes)."""
    tells_support: bool = False
    """True to return for each output token its support (the tokens it was sampled from) and its log-probability among
    these."""
    on_progress: Callable[["Request"], None] | None = None
    """Function called in the batcher's thread after every token."""
    done: Future = field(default_factory=Future)
    seed: int = 0
    tokens: list[int] = field(default_factory=list)
    """Prompt and output so far."""
    logprobs: list[float] = field(default_factory=list)
    supports: list[list[int]] = field(default_factory=list)
    support_logprobs: list[float] = field(default_factory=list)
    input_logprobs: list[float | None] = field(default_factory=list)
    routes: Tensor | None = None
    """`[tokens, layers, slots]` int32, one slot per chosen expert, packed as in megatron_rl/routes.py.

    Set when the request finishes. Covers the tokens from `routes_from` on, except the last token.
    """
    filled: int = 0
    """Number of tokens whose keys and values are in the cache row."""
    row: int | None = None
    cached_tokens: int = 0
    retractions: int = 0
    drafted: int = 0
    """Number of positions whose keys and values a draft head has written."""
    guessed_passes: int = 0
    """Number of passes of the model that read guessed tokens of this request."""
    right_guesses: int = 0
    """Number of guessed tokens that became tokens of the reply."""
    accepted: bool = False
    """True once the request has moved from the batcher's door to its queue."""
    started: bool = False
    """True once the request has been given a cache row."""
    spans: list[tuple[str, int]] = field(default_factory=list)
    """(weight version, number of output tokens at the end of the span) per span, oldest first."""
    finish_reason: dict[str, Any] | None = None
    weight_version: str | None = None
    """Weight version when the request finished."""
    created_s: float = field(default_factory=time.monotonic)
    started_s: float = 0.0
    """time.monotonic() when the request first got a cache row; 0 until then."""
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
        return len(self.tokens) - len(self.prompt)

    @property
    def room(self) -> int:
        """Number of tokens still allowed by max_new_tokens."""
        return self.params.max_new_tokens - self.generated

    @property
    def next_score(self) -> int | None:
        """Next prompt position whose hidden state is needed to score the token after it; None if no more is needed."""
        if self.logprob_start is None:
            return None
        position = self.logprob_start + len(self.input_logprobs)
        return position if position < len(self.prompt) - 1 else None

    def end_span(self, version: str) -> None:
        """Record that the output tokens after the last recorded span were sampled with `version`."""
        begin = self.spans[-1][1] if self.spans else 0
        if self.generated > begin:
            # One atomic list operation each: the event loop may be reading `spans` for a stream.
            if self.spans and self.spans[-1][0] == version:
                self.spans[-1] = (version, self.generated)
            else:
                self.spans.append((version, self.generated))
