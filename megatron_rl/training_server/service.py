"""The order in which clients' requests run, and what they do.

Rank 0 has one Service. Its HTTP thread accepts requests and waits for their results. Its main thread runs them, in the
order of each model's sequence numbers. Models take turns: a turn ends with an optimizer step, after MOST_IN_TURN
requests, or when the model has no request left. A forward or backward pass of the model whose turn it is runs together
with waiting passes of other models (shared_engine.py).

A request is in its model's journal before the client hears that it was accepted. A restarted server loads the model's
last checkpoint and runs the requests after it again, so that none is lost and no optimizer step counts twice.
"""

from __future__ import annotations

import json
import logging
import threading
import time
from concurrent.futures import Future
from dataclasses import asdict, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from megatron_rl.training_server import request_checks as checks
from megatron_rl.training_server import wire
from megatron_rl.training_server.client_models import PASSES, Model, Request, Result, json_result
from megatron_rl.training_server.client_sessions import Refused, Sessions
from megatron_rl.training_server.ranks import FAILURES, Ranks
from megatron_rl.training_server.saved_weights import SavedWeights, check_name, facts_of, note_facts, write_whole
from megatron_rl.training_server.shared_engine import Adapted

logger = logging.getLogger(__name__)

REST_S = 60.0
"""After this many seconds without a request, rank 0 calls the other ranks. Otherwise their wait for a call would time
out."""
QUIET_S = 600.0
"""A session whose client has been silent for this many seconds loses its models, once another model needs their
slots."""
MOST_QUEUED = 4096
MOST_QUEUED_BYTES = 512 * 1024**2
"""Maximum total size of one tenant's waiting requests. Further ones get status 429, and the client repeats them
later."""
MOST_TRIES = 8
"""A request during which the server has ended this many times is not run again, but fails."""
MOST_IN_TURN = 8
"""Maximum number of requests in a model's turn."""
MOST_TOGETHER = 16
"""Maximum number of models whose passes run together."""
MOST_JOURNAL_BYTES = 256 * 1024**2
"""A model gets a checkpoint after this many bytes of new requests, even if it has made no optimizer step."""


class Service:
    """The models of all tenants, and the requests to them.

    slots: number of models that the engine holds. checkpoint_every: number of a model's optimizer steps between two of
    its checkpoints.
    """

    def __init__(
        self,
        folder: Path,
        ranks: Ranks,
        *,
        base_model: str,
        slots: int,
        checkpoint_every: int,
        quiet_s: float = QUIET_S,
    ) -> None:
        self.ranks, self.base_model = ranks, base_model
        self.slots, self.checkpoint_every, self.quiet_s = slots, checkpoint_every, quiet_s
        engine = ranks.engine
        self.lora, self.vocab = engine.config.lora, engine.arch.vocab
        self.longest = engine.arch.max_positions
        if not engine.config.allow_longer_sequences:
            self.longest = min(self.longest, engine.config.tokens_per_microbatch - 1)
        self._changed = threading.Condition(threading.RLock())
        self.sessions = Sessions(folder / "server.journal", self._changed)
        self.weights = SavedWeights(folder / "models")
        self.models: dict[str, Model] = {}
        self._is_stopping = False
        self._turn: Model | None = None
        self._left_in_turn = 0
        for path in sorted((folder / "models").glob("*/model.json")):
            said = json.loads(path.read_text())
            if said["id"] not in self.sessions.ended and (model := Model.reopened(path.parent, said)) is not None:
                self.models[model.id] = model

    # -- the HTTP thread

    def create_model(self, tenant: str, body: dict[str, Any], kind: str = "create") -> str:
        """Accept the request to make a new model, and return the request's id.

        kind: `create` for a fresh model, `load` for one from saved weights.
        """
        session = self.sessions.get(tenant, body.get("session_id"))
        number = body.get("model_seq_id")
        if type(number) is not int or number < 0:
            raise Refused(f"model_seq_id = {number!r}: must be an integer of at least 0.", 400)
        named = body.get("base_model")
        if named not in (None, self.base_model):
            raise Refused(f"base_model = {named!r}: this server has {self.base_model!r} alone; ask for that.", 400)
        if body.get("optimizer_config") not in (None, {"type": "adamw"}):
            raise Refused("optimizer_config: this server has adamw alone; leave it out.", 400)
        if kind == "create":
            checks.adapted_of(body.get("lora_config"), self.lora.rank, "")
        else:
            self.weights.find(tenant, body.get("path"), "weights")
        with self._changed:
            name = f"{session.id}:train:{number}"
            if name not in self.models:
                folder = self.weights.folder_of(name)
                folder.mkdir(parents=True, exist_ok=True)
                said = {"id": name, "tenant": tenant, "session": session.id}
                write_whole(folder / "model.json", said | {"user_metadata": body.get("user_metadata")})
                self.models[name] = Model.new(name, tenant, session.id, folder)
            return self.submit(tenant, name, 0, kind, body)

    def submit(self, tenant: str, name: Any, seq: Any, kind: str, event: dict[str, Any], body: bytes = b"") -> str:
        """Accept a request to the model `name` and return the request's id.

        seq: the request's number among those to the model. event: the client's JSON body. body: the client's protocol
        buffer, if the request has one. A request that is sent again gets the same id and runs only once.
        """
        with self._changed:
            model = self.model(tenant, name)
            if type(seq) is not int or not 0 <= seq < 2**31:
                raise Refused(f"seq_id = {seq!r}: must be an integer in [0, 2^31).", 400)
            if seq not in model.futures:
                if seq <= model.seq:
                    raise Refused(f"seq_id = {seq}: its result is no longer kept.", 410)
                waits = [r for m in self.models.values() if m.tenant == tenant for r in m.pending.values()]
                size = sum(len(request.body) for request in waits)
                if len(waits) >= MOST_QUEUED or (waits and size + len(body) > MOST_QUEUED_BYTES):
                    raise Refused(f"{len(waits):,} requests of {size:,} bytes wait; send this one again later.", 429)
                model.accept(Request(seq, kind, event, body))
                self._changed.notify_all()
            return f"{model.id}:{seq}"

    def model(self, tenant: str, name: Any) -> Model:
        found = self.models.get(str(name))
        if found is None or found.tenant != tenant:
            raise Refused(f"model_id = {name!r}: there is no such model, or it was ended.", 404)
        return found

    def future(self, tenant: str, request_id: str) -> tuple[Future[Result], Model]:
        """Return the future of a request's result, and the request's model. request_id: as returned by `submit`."""
        name, _, seq = request_id.rpartition(":")
        model = self.model(tenant, name)
        if not seq.isdecimal() or int(seq) not in model.futures:
            rule = "there is no such request, or its result is no longer kept"
            raise Refused(f"request_id = {request_id!r}: {rule}.", 404)
        return model.futures[int(seq)], model

    # -- the main thread

    def run(self) -> None:
        """Run requests until `stop` is called. Only the main thread of rank 0 calls this."""
        self._resume_all()
        while chosen := self._next():
            with self._changed:
                for model, request in chosen:
                    model.begin(request)
            for (model, request), result in zip(chosen, self._results(chosen), strict=True):
                if is_due := self._is_due(model, request):
                    self.ranks.call("save", model.id, model.folder / "resume" / str(request.seq))
                with self._changed:
                    if request.kind == "optim_step":
                        self._turn = None
                    model.finish(request, result, is_saved=is_due)
        self.ranks.call("stop")

    def stop(self) -> None:
        with self._changed:
            self._is_stopping = True
            self._changed.notify_all()

    def _next(self) -> list[tuple[Model, Request]]:
        """Wait for a request that can run. Return it, and the passes of other models that run together with it.

        Returns [] after `stop`.
        """
        with self._changed:
            while not self._is_stopping:
                self._end_finished()
                if self._turn is None or not self._left_in_turn or not self._is_ready(self._turn):
                    # A list, because placing a model may end another.
                    self._turn = next((model for model in list(self.models.values()) if self._is_ready(model)), None)
                    self._left_in_turn = MOST_IN_TURN
                if self._turn is not None:
                    # The last in the order of the dictionary has its next turn last.
                    self.models[self._turn.id] = self.models.pop(self._turn.id)
                    self._left_in_turn -= 1
                    return [(model, _head(model)) for model in [self._turn, *self._along_with(self._turn)]]
                if not self._changed.wait(REST_S):
                    self.ranks.call("rest")
            return []

    def _along_with(self, first: Model) -> list[Model]:
        """Return the other models whose next request can run in one pass with that of `first`."""
        if not self._may_run_with_others(first):
            return []
        others = [model for model in self.models.values() if model is not first and self._may_run_with_others(model)]
        return [model for model in others if _head(model).kind == _head(first).kind][: MOST_TOGETHER - 1]

    def _may_run_with_others(self, model: Model) -> bool:
        # A request during which the server has ended before might end it again, and then for others, too.
        if (head := model.head) is None or head.kind not in PASSES or model.tries[head.seq]:
            return False
        return model.is_placed and self.ranks.is_at_hand(model.id)

    def _is_ready(self, model: Model) -> bool:
        return model.head is not None and (model.is_placed or self._has_slot())

    def _has_slot(self) -> bool:
        """Return True if a slot is free. If none is, first try to end an idle model whose client is gone."""
        while sum(model.is_placed for model in self.models.values()) >= self.slots:
            quiet = time.monotonic() - self.quiet_s
            idle = [model for model in self.models.values() if model.is_placed and model.head is None]
            gone = next((model for model in idle if self.sessions.by_id[model.session].seen < quiet), None)
            if gone is None:
                return False
            self._end(gone)
        return True

    def _end_finished(self) -> None:
        for model in [model for model in self.models.values() if self.sessions.by_id[model.session].is_over]:
            self._end(model)

    def _end(self, model: Model) -> None:
        """End a model and free its slot. Weights that its client has saved by name stay."""
        self.sessions.note_ended(model.id)
        if self._turn is model:
            self._turn = None
        if model.is_placed:
            self.ranks.call("drop", model.id)
        del self.models[model.id]
        model.close()

    def _is_due(self, model: Model, request: Request) -> bool:
        """Return True if the model needs a checkpoint after this request.

        That is the case after a load, after every `checkpoint_every` optimizer steps, and if the journal has grown too
        large. A model with gradients that wait for an optimizer step gets none.
        """
        model.steps += request.kind == "optim_step"
        state = self.ranks.models.get(model.id)
        if state is None or state.gradients is not None:
            return False
        has_grown = model.journal.size - model.carried_bytes > MOST_JOURNAL_BYTES
        return request.kind == "load" or model.steps >= self.checkpoint_every or has_grown

    # -- what requests do

    def _results(self, chosen: list[tuple[Model, Request]]) -> list[Result]:
        """Run one request, or the passes of several models together. Return one result per request."""
        if len(chosen) == 1:
            return [self._result(*chosen[0])]
        asked: dict[int, wire.ForwardBackward] = {}
        refused: dict[int, Result] = {}
        for number, (model, request) in enumerate(chosen):
            try:
                asked[number] = self._asked(model, request)
            except ValueError as error:
                refused[number] = _failure(model, request, error)
        try:
            with_gradients = PASSES[chosen[0][1].kind]
            found = self.ranks.call("compute", list(asked.values()), with_gradients) if asked else []
        except FAILURES as error:  # one of them is at fault: each alone has its own result
            logger.info("a pass of %d models failed, and each is run alone: %s", len(asked), error)
            return [refused.get(number) or self._result(*one) for number, one in enumerate(chosen)]
        answers = {number: _answer(*one) for number, one in zip(asked, found, strict=True)}
        return [(refused | answers)[number] for number in range(len(chosen))]

    def _result(self, model: Model, request: Request) -> Result:
        try:
            return self._run(model, request)
        except (*FAILURES, Refused) as error:
            return _failure(model, request, error)

    def _asked(self, model: Model, request: Request) -> wire.ForwardBackward:
        """Decode the forward or backward pass that a request asks for, and check its data. Raises ValueError."""
        asked = wire.read_forward_backward(request.body)
        data = checks.checked_data(asked.data, asked.loss, asked.options, vocab=self.vocab, longest=self.longest)
        return replace(asked, model_id=model.id, data=data)

    def _run(self, model: Model, request: Request) -> Result:
        kind, event = request.kind, request.event
        if model.tries[request.seq] >= MOST_TRIES:
            raise ValueError(f"{kind}: the server has ended {MOST_TRIES} times while it ran this request; send less.")
        if kind == "create":
            self._place(model, checks.adapted_of(event.get("lora_config"), self.lora.rank, model.id))
            return json_result(type="create_model", model_id=model.id)
        if kind == "load":
            folder = self.weights.find(model.tenant, event.get("path"), "weights")
            adapted = Adapted(**facts_of(folder)["adapted"])
            if not model.is_placed:
                self._place(model, adapted)
            elif model.adapted != adapted:
                rule = f"holds {adapted}, and the model has {model.adapted}"
                way_out = "make a new client with create_training_client_from_state"
                raise ValueError(f"path = {event['path']!r}: {rule}; {way_out}.")
            self.ranks.call("load", model.id, folder, bool(event.get("optimizer")))
            return json_result(type="load_weights", path=event["path"], model_id=model.id)
        if not model.is_placed:
            raise ValueError("the model was not created, as the error of its creation says; make a new client.")
        if kind in PASSES:
            ((loss, logprobs),) = self.ranks.call("compute", [self._asked(model, request)], PASSES[kind])
            return _answer(loss, logprobs)
        if kind == "optim_step":
            step = checks.adam_step(event)
            applied, norm = self.ranks.call("optim_step", model.id, step)
            if not applied:
                raise ValueError(f"optim_step: the gradient's norm is {norm}, so the weights were left as they are.")
            return json_result(metrics={"grad_norm": norm, "learning_rate": step.lr})
        assert kind in ("weights", "sampler_weights"), kind
        return self._save(model, request)

    def _place(self, model: Model, adapted: Adapted) -> None:
        self.ranks.call("create", model.id, adapted)
        model.adapted, model.is_placed = adapted, True

    def _save(self, model: Model, request: Request) -> Result:
        kind, event = request.kind, request.event
        is_named = kind == "weights" or event.get("path") is not None
        name = check_name(event.get("path")) if is_named else f"snapshot-{request.seq}"
        folder = model.folder / kind / name
        facts = facts_of(folder)
        if not facts or facts["seq"] < request.seq:
            if facts and not event.get("overwrite"):
                raise ValueError(f"name = {name!r}: there are weights of this name; take another, or overwrite=True.")
            folder.parent.mkdir(exist_ok=True)
            self.ranks.call("save" if kind == "weights" else "export", model.id, folder)
            assert model.adapted is not None
            facts = {"seq": request.seq, "adapted": asdict(model.adapted), "time": datetime.now(UTC).isoformat()}
            note_facts(folder, facts | {"user_metadata": event.get("user_metadata")})
        path = f"tinker://{model.id}/{kind}/{name}"
        if kind == "weights":
            return json_result(type="save_weights", path=path)
        if is_named:
            return json_result(type="save_weights_for_sampler", path=path)
        session = self.sessions.by_id[model.session]
        sampler = self.sessions.add_sampler(model.tenant, session, event.get("sampling_session_seq_id"), path)
        return json_result(type="save_weights_for_sampler", sampling_session_id=sampler)

    def _resume_all(self) -> None:
        """Load every model that has a checkpoint back into the engine.

        A model without a checkpoint is created again by its first request.
        """
        for model in list(self.models.values()):
            if model.adapted is None:
                continue
            self._place(model, model.adapted)
            self.ranks.call("load", model.id, model.resume_folder, True)
            logger.info("%s: resumed after request %d; %d wait", model.id, model.seq, len(model.pending))


def _head(model: Model) -> Request:
    assert model.head is not None
    return model.head


def _answer(loss: float, logprobs: list[Any]) -> Result:
    return Result(wire.forward_backward_response(logprobs, {"loss:sum": loss}), is_proto=True)


def _failure(model: Model, request: Request, error: Exception) -> Result:
    logger.info("%s request %d (%s) failed: %s", model.id, request.seq, request.kind, error)
    return json_result(error=str(error), category="user" if isinstance(error, ValueError | Refused) else "server")
