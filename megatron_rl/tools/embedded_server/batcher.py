"""Continuous batching: decides which requests run in the next forward pass, and in which rows of the KV cache.

One thread runs `Batcher.run`. Only that thread touches the model, the cache and the requests; other threads call
`submit`, `abort`, `pause`, `resume` and `call`. A new request first waits at the door, which is closed while the
batcher is paused or a weight update is pending. The request then waits in the queue, and finally runs in a row:

    submit -> door -> waiting -> running -> finished
                        ^------- retracted: others need its row, or a pause returns it to the queue

Each turn admits requests, prefills at most `prefill_tokens_per_turn` tokens, then decodes one token in every
row whose prompt is complete, or several if a draft head guesses them.
Tests assert that tokens and log-probabilities do not depend on the batch, on prefix reuse or on retraction.
"""

import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import torch

from megatron_rl.tools.embedded_server.drafting_decoder import DraftingDecoder
from megatron_rl.tools.embedded_server.forward_passes import decode, guesses, next_tokens, prefill
from megatron_rl.tools.embedded_server.hits import Hits
from megatron_rl.tools.embedded_server.kv_rows import KVRows
from megatron_rl.tools.embedded_server.request import Request
from megatron_rl.tools.embedded_server.transformer import Decoder, KVCache

logger = logging.getLogger(__name__)

FAILED = "The embedded server failed: "
MEMORY = ("weights", "kv_cache")
"""SGLang's names for the parts of a server's memory that can be released."""
RELEASED = "released"
"""Weight version after the weights are released, until new ones are published. No policy version has this name."""


class Stopped(RuntimeError):
    """Raised for a request or command that cannot run because the batcher's thread has ended."""


@dataclass
class _Command:
    run: Callable[[], Any]
    exclusive: bool
    done: Future = field(default_factory=Future)


@dataclass
class Stats:
    """Counters since the server started. tokens_per_s is the latest throughput, averaged over at least one second."""

    prompt_tokens: int = 0
    cached_tokens: int = 0
    generated_tokens: int = 0
    finished_requests: int = 0
    guessed_passes: int = 0
    right_guesses: int = 0
    """guessed_passes, right_guesses: sums of the fields of these names over all requests."""
    tokens_per_s: float = 0.0


class Batcher:
    """Continuous batching over the rows of one KV cache.

        batcher = Batcher(decoder, max_running_requests=8, context_length=512, max_total_tokens=4096)
        threading.Thread(target=batcher.run).start()
        request = Request(rid="a", prompt=[5, 6, 7], params=SamplingParams(max_new_tokens=16))
        batcher.submit(request).result().output
        batcher.stop()

    decode_text: function of (token ids, skip_special_tokens) that returns text; needed for stop strings.
    draft_tokens: maximum number of tokens that the draft head guesses per request before each pass. 0: no draft head.
    tokens_per_pass: maximum number of tokens in a pass with guesses, over all requests. Fewer tokens are guessed if a
    pass would exceed this.
    """

    def __init__(
        self,
        model: Decoder,
        *,
        max_running_requests: int,
        context_length: int,
        max_total_tokens: int,
        eos_token_ids: Iterable[int] = (),
        decode_text: Callable[[list[int], bool], str] | None = None,
        weight_version: str = "default",
        reuse_prefixes: bool = True,
        prefill_tokens_per_turn: int = 2048,
        draft_tokens: int = 0,
        tokens_per_pass: int = 64,
    ):
        self.model = model
        self.draft_tokens, self.tokens_per_pass = draft_tokens, tokens_per_pass
        self.cache = KVCache(model.config, model.dtype, model.device, has_draft=isinstance(model, DraftingDecoder))
        self.kv_rows = KVRows(
            self.cache,
            max_rows=max_running_requests,
            context_length=context_length,
            guessed_tokens=draft_tokens,
            max_total_tokens=max_total_tokens,
            reuse_prefixes=reuse_prefixes,
        )
        self.hits = Hits()
        self.eos_token_ids = frozenset(eos_token_ids)
        self.decode_text = decode_text
        self.weight_version = weight_version
        self.prefill_tokens_per_turn = prefill_tokens_per_turn
        self.stats = Stats()
        self.failure: str | None = None
        """Reason why the batcher can no longer run. Set after a forward pass raised or its thread died, never reset."""
        self.has_died = False
        """True if the thread ended without `stop`. The server must then be restarted."""
        self.paused = False
        self.released: set[str] = set()
        """Parts of MEMORY that are released. Nothing is generated unless this is empty."""
        self._door: deque[Request] = deque()
        self._waiting: deque[Request] = deque()
        self._running: list[Request] = []
        self._accepted: set[Request] = set()
        """Accepted requests that are not finished."""
        self._commands: deque[_Command] = deque()
        self._stopping = False
        self._has_ended = False
        self._wake = threading.Condition()
        self._window = (time.monotonic(), 0)

    # Called from any thread

    def submit(self, request: Request) -> Future:
        """Queue a request. The future's result is the request itself, once it has finished."""
        return self._hand_over(request, self._door)

    def call(self, function: Callable[[], Any], *, exclusive: bool = False) -> Future:
        """Run `function` in the batcher's thread between two turns. Return the future of the function's result.

        exclusive: first wait until all accepted requests have finished, and accept no new ones meanwhile. On a paused
        batcher an exclusive call runs at once.
        """
        return self._hand_over(_Command(function, exclusive), self._commands)

    def _hand_over(self, item: Any, queue: deque) -> Future:
        with self._wake:
            if self._has_ended:
                item.done.set_exception(self._stopped())
            else:
                queue.append(item)
                self._wake.notify()
        return item.done

    def _stopped(self) -> Stopped:
        return Stopped(self.failure or "the server is shutting down")

    def abort(self, rid: str | None) -> Future:
        """Abort the request with id `rid`, or all requests if `rid` is None. Unknown ids are ignored."""
        return self.call(lambda: self._abort(lambda request: rid is None or request.rid == rid))

    def abort_request(self, request: Request) -> Future:
        return self.call(lambda: self._abort(lambda other: other is request))

    def pause(self, mode: str) -> Future:
        """Pause generation between two turns. The returned future is done when generation is paused.

        mode: `abort` ends all accepted requests. `retract` returns running requests to the queue and drops their
        cached keys and values. `in_place` keeps running requests in their rows.
        """

        def run() -> None:
            # The pause covers requests that arrived before it: abort them too, or queue them ahead of later ones.
            if not self.paused:
                self._open_door()
            self.paused = True
            if mode == "abort":
                self._abort(lambda request: request.accepted)
            elif mode == "retract":
                for request in reversed(self._running[:]):  # each goes to the queue's front, so reverse keeps the order
                    self._retract(request)

        return self.call(run)

    def resume(self) -> Future:
        def run() -> None:
            self.require(*MEMORY)
            self.paused = False

        return self.call(run)

    def flush(self) -> Future:
        return self.call(self.flush_now)

    def require(self, *tags: str) -> None:
        """Raise ValueError if one of these parts of MEMORY is released."""
        if missing := [tag for tag in tags if tag in self.released]:
            raise ValueError(
                f"{' and '.join(missing)}: released by /release_memory_occupation; call /resume_memory_occupation first"
            )

    def stop(self) -> None:
        """End `run` and abort all unfinished requests."""
        with self._wake:
            self._stopping = True
            self._wake.notify()

    @property
    def running_requests(self) -> int:
        return len(self._running)

    @property
    def waiting_requests(self) -> int:
        return len(self._waiting) + len(self._door)

    @property
    def used_tokens(self) -> int:
        return sum(request.filled for request in list(self._running))

    # Called in the batcher's thread

    def flush_now(self) -> bool:
        """Forget all cached prefixes and return True.

        Return False and forget nothing if a request is running, or if one is waiting and the batcher is not paused.
        """
        if not self.can_flush():
            return False
        self.kv_rows.forget_prefixes()
        return True

    def can_flush(self) -> bool:
        return not self._running and (self.paused or not (self._waiting or self._door))

    def release(self, tags: Iterable[str]) -> None:
        """Free parts of MEMORY. If `can_flush` is False, raise ValueError and free nothing."""
        if not self.can_flush():
            raise ValueError(
                f"release_memory_occupation: {self.running_requests} running and {self.waiting_requests} queued "
                f"requests; pause with mode abort or retract first"
            )
        for tag in set(tags) - self.released:
            self.released.add(tag)
            if tag == "weights":
                self.model.free()
                self.weights_changed(RELEASED)
            else:
                self.kv_rows.free()

    def regain(self, tags: Iterable[str]) -> None:
        """Allocate released parts of MEMORY again. Their contents are not restored."""
        for tag in set(tags) & self.released:
            self.released.remove(tag)
            if tag == "weights":
                self.model.allocate()

    def weights_changed(self, version: str | None) -> None:
        """Record a weight update: start a new epoch, and set the weight version unless it is None.

        New requests then reuse no keys of the old weights. If the version changes, the tokens generated so far are
        recorded as sampled with the old version.
        """
        self.kv_rows.epoch += 1
        self.hits.forget()
        self.set_version(version)

    def set_version(self, version: str | None) -> None:
        if version is not None and version != self.weight_version:
            for request in (*self._running, *self._waiting):
                request.end_span(self.weight_version)
            self.weight_version = version

    @torch.inference_mode()
    def run(self) -> None:
        """Run until `stop` or an exception, which is logged. Either way, all open requests get a response."""
        try:
            self._run()
        # The bug is reported nowhere else, and /health must report it.
        except BaseException as error:
            logger.critical("the batcher's thread died; the server must be started again", exc_info=True)
            self.has_died = True
            self._fail(f"its thread died: {type(error).__name__}: {error}")
        finally:
            with self._wake:
                self._has_ended = True
            self._abort(lambda request: True, message="The server is shutting down", status=503)
            for command in self._commands:
                if not command.done.done():
                    command.done.set_exception(self._stopped())

    def _run(self) -> None:
        while True:
            with self._wake:
                while not (self._stopping or self._can_turn()):
                    self._wake.wait()
                    # Idle time does not count for the throughput.
                    self._window = (time.monotonic(), self.stats.generated_tokens)
                if self._stopping:
                    break
            self._run_commands()
            if self.paused or self.released:
                continue
            try:
                self._turn()
            # Whatever a forward pass raises, clients must get a response and /health must answer 503.
            except Exception as error:
                logger.exception("the batcher failed; %d requests end with status 500", len(self._accepted))
                self._fail(f"{type(error).__name__}: {error}")

    def _can_turn(self) -> bool:
        if self.paused or self.released:
            return bool(self._commands)
        return bool(self._commands or self._door or self._waiting or self._running)

    def _run_commands(self) -> None:
        while (command := self._next_command()) is not None:
            if not command.done.set_running_or_notify_cancel():
                continue  # its client has disconnected
            try:
                command.done.set_result(command.run())
            # The error goes to the caller; this thread must survive to serve the others.
            except Exception as error:
                command.done.set_exception(error)

    def _next_command(self) -> _Command | None:
        """Remove and return the first command that may run now, or None."""
        with self._wake:  # other threads must not append during the iteration
            must_wait = not self.paused and bool(self._running or self._waiting)
            # A later abort or pause may be what ends the wait of an exclusive command.
            command = next((c for c in self._commands if not (c.exclusive and must_wait)), None)
            if command is not None:
                self._commands.remove(command)
            return command

    def _turn(self) -> None:
        self._open_door()
        if self.failure is not None:
            self._abort(lambda request: True)
            return
        self._admit()
        # This budget bounds how long prefill delays the next token of the decoding requests.
        budget = self.prefill_tokens_per_turn
        while computed := prefill(self.model, self.kv_rows, self._running, budget):
            budget -= computed
            self._admit()  # requests that waited for the prefix just computed
        self._decode()
        self._count()

    def _open_door(self) -> None:
        # A weight update waits for the requests accepted before it. Later ones stay at the door until it is done, or
        # they could delay it forever.
        with self._wake:
            if any(command.exclusive for command in self._commands):
                return
        while self._door:
            request = self._door.popleft()
            request.accepted = True
            self._accepted.add(request)
            self._waiting.append(request)

    # Admission

    def _admit(self) -> None:
        if not self._waiting:
            return
        # Resize once for all waiting requests: growing row by row would copy the cache each time.
        running = len(self._running)
        self._fit(min(running + len(self._waiting), self.kv_rows.max_rows), self._longest(), least_rows=max(running, 1))
        deferred: list[Request] = []
        while self._waiting and len(self._running) < self.kv_rows.max_rows:
            request, running = self._waiting.popleft(), len(self._running)
            longest = max(self._longest(), len(request.tokens) + self.draft_tokens)
            if not self._fit(running + 1, longest, least_rows=running + 1):
                self._waiting.appendleft(request)
                break  # no request may overtake it, or a long prompt might never run
            prefix = self.kv_rows.find_prefix(request)
            # A running request is computing the same prefix, as the first sample of a group does: wait for its keys.
            if prefix.more_is_coming:
                deferred.append(request)
                continue
            self.kv_rows.admit(request, prefix)
            self._running.append(request)
            if not request.started:
                request.started, request.cached_tokens = True, prefix.length
                request.started_s = time.monotonic()
                self.stats.prompt_tokens += len(request.prompt)
                self.stats.cached_tokens += prefix.length
        self._waiting.extendleft(reversed(deferred))
        self.kv_rows.copy_prefixes()

    def _longest(self) -> int:
        """Return the number of tokens that a row must hold for the next pass over the longest running request."""
        return max((len(request.tokens) + self.draft_tokens for request in self._running), default=0)

    def _fit(self, rows: int, tokens: int, *, least_rows: int) -> bool:
        """Resize the cache to `rows` rows of `tokens` tokens, or to as many rows as memory allows.

        Returns False and changes nothing if fewer than `least_rows` rows fit. If fewer rows fit than requests are
        running, the youngest requests are retracted.
        """
        if rows <= len(self.kv_rows) and tokens <= self.cache.capacity:
            return True
        wanted, capacity = self.kv_rows.size_for(rows, tokens, self._longest())
        if wanted < least_rows:
            return False
        while len(self._running) > wanted:
            self._retract(self._running[-1])
        if (wanted, capacity) != (len(self.kv_rows), self.cache.capacity):
            self.kv_rows.resize(wanted, capacity)
        return True

    def _retract(self, request: Request) -> None:
        self._running.remove(request)
        self.kv_rows.release(request, keep=False)
        request.filled = 0
        request.retractions += 1
        self._waiting.appendleft(request)

    # Decoding

    def _decode(self) -> None:
        ready = [r for r in self._running if r.filled == len(r.tokens) - 1]
        for request in [r for r in ready if r.room <= 0]:  # max_new_tokens = 0: only the prompt is scored
            self._finish(request, {"type": "length", "length": len(request.output)})
        ready = [r for r in ready if r.room > 0]
        if not ready:
            return
        # If the requests have grown too long to fit together, this retracts the youngest, which then have no row.
        self._fit(len(self._running), max(len(r.tokens) for r in ready) + self.draft_tokens, least_rows=1)
        batch = sorted((r for r in ready if r.row is not None), key=lambda r: r.row)
        guessed: list[list[int]] = [[] for _ in batch]
        most = min(self.draft_tokens, max(r.room for r in batch) - 1, self.tokens_per_pass // len(batch) - 1)
        count = self.hits.best_count(len(batch), most)
        if count:
            assert isinstance(self.model, DraftingDecoder)
            guessed = guesses(self.model, self.kv_rows, batch, count, self.draft_tokens + 1)
            self._count_guesses(batch, passes=1)
        hidden = decode(self.model, self.kv_rows, batch, guessed)  # [B, 1 + count, H]
        # One product for all tokens: with few rows, most of its time goes to reading the output layer.
        logits = self.model.logits(hidden.flatten(0, 1)).view(*hidden.shape[:2], -1)
        places = list(range(len(batch)))
        for number in range(count + 1):
            requests = [batch[place] for place in places]
            chosen, logprobs = next_tokens(logits[places, number], requests, self.eos_token_ids)
            for request, token, logprob in zip(requests, chosen, logprobs, strict=True):
                self._accept(request, token, logprob)
            self.stats.generated_tokens += len(requests)
            if number:
                self._count_guesses(requests, right=1)
            if number < count:
                right = [guessed[place][number] == token for place, token in zip(places, chosen, strict=True)]
                self.hits.count(sum(right), len(right))
                places = [place for place, is_right in zip(places, right, strict=True) if is_right]
                places = [place for place in places if batch[place].finish_reason is None]
            if not places:
                break

    def _count_guesses(self, requests: list[Request], *, passes: int = 0, right: int = 0) -> None:
        for counts in (*requests, *[self.stats] * len(requests)):
            counts.guessed_passes += passes
            counts.right_guesses += right

    def _accept(self, request: Request, token: int, logprob: float) -> None:
        params = request.params
        request.tokens.append(token)
        request.logprobs.append(logprob)
        request.first_token_s = request.first_token_s or time.monotonic()
        self.kv_rows.advance(request, 1)
        reason: dict[str, Any] | None = None
        # SGLang ends a request with NaN logits like this. JSON has no NaN, so the log-probability is sent as 0.
        if math.isnan(logprob):
            self.kv_rows.wipe(request)
            reason = {"type": "stop", "matched": "NaN happened"}
            request.logprobs[-1] = 0.0
            request.support_logprobs[-1:] = [0.0] * request.tells_support
        elif request.room == 0:
            reason = {"type": "length", "length": request.generated}
        elif token in params.stop_ids(self.eos_token_ids):
            reason = {"type": "stop", "matched": token}
        elif params.stop and (matched := self._matched_stop(request)) is not None:
            reason = {"type": "stop", "matched": matched}
        if reason is not None:
            self._finish(request, reason)
        elif request.on_progress is not None:
            request.on_progress(request)

    def _matched_stop(self, request: Request) -> str | None:
        # A token is at least one byte, so this many tokens contain every stop string that ends in the newest token.
        tail = max(len(stop.encode()) for stop in request.params.stop) + 4
        text = self.decode_text(request.output[-tail:], request.params.skip_special_tokens)
        return next((stop for stop in request.params.stop if stop in text), None)

    # Endings

    def _finish(self, request: Request, reason: dict[str, Any]) -> None:
        if request.row is not None:
            self._running.remove(request)
            if request.routes_from is not None and request.filled == len(request.tokens) - 1:
                request.routes = self.cache.routes[request.row, request.routes_from : request.filled].clone()
            # New requests cannot use keys from before a weight update.
            self.kv_rows.release(request, keep=self.kv_rows[request.row].epoch == self.kv_rows.epoch)
        self._accepted.discard(request)
        request.end_span(self.weight_version)
        request.weight_version = self.weight_version
        request.finish_reason = reason
        request.finished_s = time.monotonic()
        self.stats.finished_requests += 1
        if request.done.set_running_or_notify_cancel():
            request.done.set_result(request)

    def _fail(self, cause: str) -> None:
        """Finish all accepted requests with status 500, because a turn has raised an exception.

        The turn may have left queues and rows half updated, so they are reset.
        """
        self.failure = cause
        for request in list(self._accepted):
            request.row = None
            self._finish(request, _aborted(FAILED + cause, 500))
        self._waiting.clear()
        self._running.clear()
        self.kv_rows.reset()

    def _abort(
        self, chosen: Callable[[Request], bool], *, message: str | None = None, status: int | None = None
    ) -> None:
        if self.failure is not None:
            message, status = FAILED + self.failure, 500
        for queue in (self._door, self._waiting):
            with self._wake:  # other threads append to the door
                taken = [request for request in queue if chosen(request)]
                for request in taken:
                    queue.remove(request)
            for request in taken:
                queued = "Aborted" if request.started else "Abort in waiting queue"
                self._finish(request, _aborted(message or queued, status))
        for request in [r for r in self._running if chosen(r)]:
            self._finish(request, _aborted(message or "Aborted", status))

    def _count(self) -> None:
        now = time.monotonic()
        since, generated = self._window
        if now - since >= 1.0:
            self.stats.tokens_per_s = (self.stats.generated_tokens - generated) / (now - since)
            self._window = (now, self.stats.generated_tokens)


def _aborted(message: str, status: int | None) -> dict[str, Any]:
    """Return SGLang's finish reason for an abort.

    status: HTTP status of the error that the client gets instead of a reply; None if it gets the reply so far.
    """
    return {"type": "abort", "message": message, "status_code": status, "err_type": None}
