"""Streamed replies: server-sent events, each of which repeats the whole reply so far."""

from __future__ import annotations

import re
from collections.abc import Callable

import orjson

from megatron_rl.api import RequestRefused
from megatron_rl.servers.server_http import BUSY, ServerError, message_of

MOST_EVENTS = 512
"""Maximum server-sent events per reply. Each repeats all tokens so far, so their total size grows quadratically."""
OUTPUT_IDS, UNFINISHED = re.compile(rb'"output_ids":\s*(\[[^\]]*\])'), re.compile(rb'"finish_reason":\s*null')


class EventStream:
    """Parser for a streamed reply. The last event is the whole reply."""

    def __init__(self, on_tokens: Callable[[list[int]], None]) -> None:
        self._on_tokens = on_tokens
        self.rest, self._last = bytearray(), b""
        self.count = 0
        """Number of the reply's tokens received so far."""

    @property
    def is_begun(self) -> bool:
        return self.count > 0

    def take(self, piece: bytes) -> None:
        """Parse the next piece of the body. Raises RequestRefused or ServerError if it has an event with an error."""
        self.rest += piece
        *events, rest = self.rest.split(b"\n\n")
        self.rest = rest
        for event in events:
            content = bytes(event).removeprefix(b"data: ")
            if content.startswith(b'{"error"'):
                raise self._error(content)
            if (found := OUTPUT_IDS.search(content)) is not None:
                ids = orjson.loads(found[1])
                self._last, self.count = content, len(ids)
                try:
                    self._on_tokens(ids)
                except OSError as error:  # the caller's error, not the server's
                    raise RuntimeError(f"on_tokens: {type(error).__name__}: {error}") from error

    def _error(self, content: bytes) -> Exception:
        error = orjson.loads(content)["error"]
        code, words = (error.get("code"), message_of(content)) if isinstance(error, dict) else (None, str(error))
        if isinstance(code, int) and 400 <= code < 500 and code not in BUSY:
            return RequestRefused(words, code)
        return ServerError(f"the stream ended: {words}")

    def reply(self, what: str) -> bytes:
        """Return the body of the whole reply, in the form of an answer that was not streamed.

        A stream that was cut off becomes an aborted reply. Raises ServerError if no reply has begun. what: endpoint,
        for the error message.
        """
        if not self._last:
            raise ServerError(f"{what}: the stream had no reply.")
        return UNFINISHED.sub(b'"finish_reason":{"type":"abort","message":"the stream was cut off"}', self._last)
