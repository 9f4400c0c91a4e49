"""Sessions, models and the requests to them, which outlive this process.

Rank 0 has one Service. Its HTTP thread accepts requests and waits for their results; its main thread runs them, one at
a time, in the order of each model's sequence numbers. Models take turns: a turn ends with an optimizer step, or when
the model has no request left. What was accepted is in a journal of the model before the client hears of it. A restarted
server loads the model's last checkpoint and runs the requests after it again, so that none is lost and no optimizer
step counts twice.

    run.folder/training_server/server.journal             sessions, samplers, ended models
    .../models/MODEL/model.json                           its tenant
    .../models/MODEL/requests-SEQ.journal                 requests since SEQ, and results that may still be asked for
    .../models/MODEL/resume/SEQ                           checkpoint after request SEQ
    .../models/MODEL/{weights,sampler_weights}/NAME       what the client has saved, each with NAME.json
"""

from __future__ import annotations

import json
import logging
import re
import shutil
import threading
import time
import uuid
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import orjson

from megatron_rl.training_server import request_checks as checks
from megatron_rl.training_server import wire
from megatron_rl.training_server.ranks import FAILURES, Ranks
from megatron_rl.training_server.request_journal import JournalFile
from megatron_rl.training_server.shared_engine import Adapted

logger = logging.getLogger(__name__)

REST_S = 60.0
"""After this long without a request, rank 0 wakes the other ranks, whose wait would time out at some point."""
QUIET_S = 600.0
"""A session without a heartbeat for this long loses its models as soon as another client needs their place."""
MOST_QUEUED = 4096
MOST_QUEUED_BYTES = 512 * 1024**2
"""Maximum bytes of one tenant's waiting requests. Further ones get status 429, and the client repeats them later."""
MOST_TRIES = 8
"""If the server has ended this many times while it ran a request, the restarted server gives the request up."""
KEPT_RESULTS = 256
"""Results of a model that stay available after they were fetched, for a client that lost the answer."""
TINKER = re.compile(r"tinker://([^/]+)/(weights|sampler_weights)/([^/]+)")


class Refused(Exception):
    """Ends an HTTP request with this message and status."""

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status


@dataclass
class Result:
    """The answer to a request. is_proto: True if `body` is a protocol buffer, False if it is JSON."""

    body: bytes
    is_proto: bool = False
    was_fetched: bool = False


@dataclass
class Request:
    seq: int
    kind: str
    event: dict[str, Any]
    """The client's JSON body. For a forward or backward pass, `body` has its protocol buffer instead."""
    body: bytes


@dataclass
class Session:
    id: str
    tenant: str
    seen: float = field(default_factory=time.monotonic)
    is_over: bool = False


@dataclass(eq=False)
class Model:
    """A client's model. seq: the number of the last request that has run, -1 before it was created."""

    id: str
    tenant: str
    session: str
    folder: Path
    journal: JournalFile
    seq: int = -1
    adapted: Adapted | None = None
    is_placed: bool = False
    """True while it has one of the engine's slots."""
    steps: int = 0
    """Optimizer steps since the last checkpoint."""
    pending: dict[int, Request] = field(default_factory=dict)
    futures: dict[int, Future[Result]] = field(default_factory=dict)
    tries: Counter[int] = field(default_factory=Counter)
    """Number of times that the server began this request and ended before it had the result."""

    @property
    def head(self) -> Request | None:
        return self.pending.get(self.seq + 1)


class Service:
    """Sessions, models and requests of all tenants.

    slots: number of models that the engine holds in turn. checkpoint_every: optimizer steps of a model between its
    checkpoints. quiet_s: see QUIET_S.
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
        self.folder, self.ranks, self.base_model = folder, ranks, base_model
        self.slots, self.checkpoint_every, self.quiet_s = slots, checkpoint_every, quiet_s
        engine = ranks.engine
        self.lora, self.vocab = engine.config.lora, engine.arch.vocab
        self.longest = engine.arch.max_positions
        if not engine.config.allow_longer_sequences:
            self.longest = min(self.longest, engine.config.tokens_per_microbatch - 1)
        self.sessions: dict[str, Session] = {}
        self.models: dict[str, Model] = {}
        self.samplers: dict[str, tuple[str, str | None]] = {}
        """Sampling session -> (its tenant, the tinker path of its weights or None for the base model)."""
        self._changed = threading.Condition(threading.RLock())
        self._is_stopping = False
        self._turn: Model | None = None
        self._journal = JournalFile(folder / "server.journal")
        ended = set()
        for event, _ in self._journal.records:
            if event["kind"] == "session":
                self.sessions[event["id"]] = Session(event["id"], event["tenant"])
            elif event["kind"] == "finished":
                self.sessions[event["id"]].is_over = True
            elif event["kind"] == "sampler":
                self.samplers[event["id"]] = (event["tenant"], event["path"])
            elif event["kind"] == "ended":
                ended.add(event["id"])
        self._journal.records.clear()
        for path in sorted((folder / "models").glob("*/model.json")):
            said = json.loads(path.read_text())
            if said["id"] not in ended:
                with self._changed:
                    self._reopen(path.parent, said)

    # -- the HTTP thread: sessions

    def create_session(self, tenant: str) -> str:
        with self._changed:
            session = Session(uuid.uuid4().hex, tenant)
            self._journal.add({"kind": "session", "id": session.id, "tenant": tenant})
            self.sessions[session.id] = session
            return session.id

    def session(self, tenant: str, name: Any) -> Session:
        """Return a session of this tenant, and note that its client lives."""
        found = self.sessions.get(str(name))
        if found is None or found.tenant != tenant:
            raise Refused(f"session_id = {name!r}: there is no such session.", 404)
        if found.is_over:
            raise Refused(f"session_id = {name!r}: its client has finished it; make a new ServiceClient.", 410)
        found.seen = time.monotonic()
        return found

    def finish_session(self, tenant: str, name: str) -> None:
        with self._changed:
            session = self.session(tenant, name)
            self._journal.add({"kind": "finished", "id": name})
            session.is_over = True
            self._changed.notify_all()

    # -- the HTTP thread: models and requests

    def create_model(self, tenant: str, body: dict[str, Any], kind: str = "create") -> str:
        """Accept a new model and return the request's id. kind: `create`, or `load` for one from saved weights."""
        session = self.session(tenant, body.get("session_id"))
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
            self.weights(tenant, body.get("path"), "weights")
        with self._changed:
            name = f"{session.id}:train:{number}"
            if name not in self.models:
                folder = self._folder_of(name)
                folder.mkdir(parents=True, exist_ok=True)
                said = {"id": name, "tenant": tenant, "session": session.id}
                said["user_metadata"] = body.get("user_metadata")
                aside = folder / ".model.json"
                aside.write_text(json.dumps(said))
                aside.replace(folder / "model.json")
                journal = JournalFile(folder / "requests-000000000.journal")
                self.models[name] = Model(name, tenant, session.id, folder, journal)
            return self.submit(tenant, name, 0, kind, body)

    def submit(self, tenant: str, name: Any, seq: Any, kind: str, event: dict[str, Any], body: bytes = b"") -> str:
        """Accept a request to a model and return its id. A request that is sent again has the same id and runs once."""
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
                event = {key: value for key, value in event.items() if key not in ("seq", "kind")}
                model.journal.add({"seq": seq, "kind": kind, **event}, body)
                self._enqueue(model, Request(seq, kind, event, body))
            return f"{model.id}:{seq}"

    def _enqueue(self, model: Model, request: Request) -> None:
        model.pending[request.seq] = request
        model.futures[request.seq] = Future()
        self._changed.notify_all()

    def model(self, tenant: str, name: Any) -> Model:
        found = self.models.get(str(name))
        if found is None or found.tenant != tenant:
            raise Refused(f"model_id = {name!r}: there is no such model, or it was ended.", 404)
        return found

    def future(self, tenant: str, request_id: str) -> tuple[Future[Result], Model]:
        """Return the future of a request to a model, by the id that `submit` gave it."""
        name, _, seq = request_id.rpartition(":")
        model = self.model(tenant, name)
        if not seq.isdecimal() or int(seq) not in model.futures:
            raise Refused(
                f"request_id = {request_id!r}: there is no such request, or its result is no longer kept.", 404
            )
        return model.futures[int(seq)], model

    def add_sampler(self, tenant: str, session: Session, number: Any, path: str | None) -> str:
        """Return the id of a sampling session, the same if it is asked for again."""
        if type(number) is not int:
            raise Refused(f"sampling_session_seq_id = {number!r}: must be an integer.", 400)
        name = f"{session.id}:sample:{number}"
        with self._changed:
            if name not in self.samplers:
                self._journal.add({"kind": "sampler", "id": name, "tenant": tenant, "path": path})
                self.samplers[name] = (tenant, path)
        return name

    def sampler(self, tenant: str, name: Any) -> str | None:
        """Return the tinker path that a sampling session samples from; None for the base model."""
        owner, path = self.samplers.get(str(name), ("", None))
        if owner != tenant:
            raise Refused(f"sampling_session_id = {name!r}: there is no such sampling session.", 404)
        return path

    # -- saved weights

    def weights(self, tenant: str, path: Any, *kinds: str) -> Path:
        """Return the folder of saved weights of the tenant. kinds: `weights`, `sampler_weights`."""
        match = TINKER.fullmatch(path) if isinstance(path, str) else None
        if match and match[2] in kinds and checks.NAME.fullmatch(match[3]):
            folder = self._folder_of(match[1])
            said = json.loads(file.read_text()) if (file := folder / "model.json").is_file() else {"tenant": None}
            if said["tenant"] == tenant and self.facts_of(found := folder / match[2] / match[3]):
                return found
        raise Refused(f"path = {path!r}: there are no such {' or '.join(kinds)}; give what a save has returned.", 404)

    def facts_of(self, folder: Path) -> dict[str, Any]:
        """Return what was noted about saved weights; {} if there are none."""
        file = folder.with_name(f"{folder.name}.json")
        return dict(json.loads(file.read_text())) if file.is_file() else {}

    def saved(self, tenant: str, model: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
        """Yield the tenant's saved weights, (tinker path, facts), of one model or of all."""
        for file in sorted((self.folder / "models").glob("*/model.json")):
            said = json.loads(file.read_text())
            if said["tenant"] != tenant or model not in ("", said["id"]):
                continue
            for facts in sorted([*file.parent.glob("weights/*.json"), *file.parent.glob("sampler_weights/*.json")]):
                yield f"tinker://{said['id']}/{facts.parent.name}/{facts.stem}", json.loads(facts.read_text())

    def delete(self, tenant: str, path: str) -> None:
        folder = self.weights(tenant, path, "weights", "sampler_weights")
        folder.with_name(f"{folder.name}.json").unlink()
        shutil.rmtree(folder, ignore_errors=True)

    def _folder_of(self, model: str) -> Path:
        if not re.fullmatch(r"[0-9a-f]{32}:train:\d{1,9}", model):
            raise Refused(f"{model!r}: is no model of this server.", 404)
        return self.folder / "models" / model.replace(":", "-")

    # -- the main thread

    def run(self) -> None:
        """Run requests until `stop`. Rank 0's main thread calls this."""
        self._resume_all()
        while (chosen := self._next()) is not None:
            model, request = chosen
            with self._changed:
                model.journal.add({"kind": "begun", "seq": request.seq})
            try:
                result = self._run(model, request)
            except (*FAILURES, Refused) as error:
                logger.info("%s request %d (%s) failed: %s", model.id, request.seq, request.kind, error)
                is_user = isinstance(error, ValueError | Refused)
                result = Result(orjson.dumps({"error": str(error), "category": "user" if is_user else "server"}))
            if is_due := self._is_due(model, request):
                self.ranks.call("save", model.id, model.folder / "resume" / str(request.seq))
            with self._changed:
                self._finish(model, request, result, is_saved=is_due)
        self.ranks.call("stop")

    def stop(self) -> None:
        with self._changed:
            self._is_stopping = True
            self._changed.notify_all()

    def _next(self) -> tuple[Model, Request] | None:
        """Wait for a request that can run. Return None after `stop`."""
        with self._changed:
            while not self._is_stopping:
                self._end_finished()
                if self._turn is None or not self._is_ready(self._turn):
                    # A list, because placing a model may end another.
                    self._turn = next((model for model in list(self.models.values()) if self._is_ready(model)), None)
                if self._turn is not None:
                    # The last in the order of the dictionary has its next turn last.
                    self.models[self._turn.id] = self.models.pop(self._turn.id)
                    head = self._turn.head
                    assert head is not None
                    return self._turn, head
                if not self._changed.wait(REST_S):
                    self.ranks.call("rest")
            return None

    def _is_ready(self, model: Model) -> bool:
        return model.head is not None and (model.is_placed or self._has_slot())

    def _has_slot(self) -> bool:
        """Return True if a model can be placed, after ending those of clients that are gone if need be."""
        while sum(model.is_placed for model in self.models.values()) >= self.slots:
            quiet = time.monotonic() - self.quiet_s
            idle = [model for model in self.models.values() if model.is_placed and model.head is None]
            gone = next((model for model in idle if self.sessions[model.session].seen < quiet), None)
            if gone is None:
                return False
            self._end(gone)
        return True

    def _end_finished(self) -> None:
        for model in [model for model in self.models.values() if self.sessions[model.session].is_over]:
            self._end(model)

    def _end(self, model: Model) -> None:
        """Forget a model whose session is over. What the client has saved by name stays."""
        self._journal.add({"kind": "ended", "id": model.id})
        if self._turn is model:
            self._turn = None
        if model.is_placed:
            self.ranks.call("drop", model.id)
        del self.models[model.id]
        model.journal.close()
        for future in model.futures.values():
            if not future.done():
                future.set_result(Result(orjson.dumps({"error": "the session is over.", "category": "user"})))
        for path in [*model.folder.glob("requests-*.journal"), *model.folder.glob("sampler_weights/snapshot-*.json")]:
            path.unlink()
        for path in [model.folder / "resume", *model.folder.glob("sampler_weights/snapshot-*")]:
            shutil.rmtree(path, ignore_errors=True)

    def _is_due(self, model: Model, request: Request) -> bool:
        """Return True if a checkpoint is due: after a load, and every few optimizer steps."""
        model.steps += request.kind == "optim_step"
        state = self.ranks.models.get(model.id)
        if state is None or state.gradients is not None:
            return False
        return request.kind == "load" or model.steps >= self.checkpoint_every

    def _finish(self, model: Model, request: Request, result: Result, *, is_saved: bool) -> None:
        """Note a result. is_saved: a checkpoint after this request has been written."""
        model.seq = request.seq
        del model.pending[request.seq]
        if request.kind == "optim_step":
            self._turn = None
        fetched = [seq for seq, future in model.futures.items() if future.done() and future.result().was_fetched]
        for seq in fetched[:-KEPT_RESULTS]:
            del model.futures[seq]
        if is_saved:
            self._begin_journal(model, result)
        else:
            model.journal.add({"kind": "done", "seq": request.seq})
        model.futures[request.seq].set_result(result)

    # -- what requests do

    def _run(self, model: Model, request: Request) -> Result:
        kind, event = request.kind, request.event
        if model.tries[request.seq] >= MOST_TRIES:
            raise ValueError(f"{kind}: the server has ended {MOST_TRIES} times while it ran this request; send less.")
        if kind == "create":
            self._place(model, checks.adapted_of(event.get("lora_config"), self.lora.rank, model.id))
            return _json(type="create_model", model_id=model.id)
        if kind == "load":
            folder = self.weights(model.tenant, event.get("path"), "weights")
            facts = self.facts_of(folder)
            adapted = Adapted(**facts["adapted"])
            if not model.is_placed:
                self._place(model, adapted)
            elif model.adapted != adapted:
                raise ValueError(
                    f"path = {event['path']!r}: holds {adapted}, and the model has {model.adapted}; make a new client "
                    f"with create_training_client_from_state."
                )
            self.ranks.call("load", model.id, folder, bool(event.get("optimizer")))
            return _json(type="load_weights", path=event["path"], model_id=model.id)
        if not model.is_placed:
            raise ValueError("the model was not created, as the error of its creation says; make a new client.")
        if kind == "pass":
            asked = wire.read_forward_backward(request.body)
            data = checks.checked_data(asked.data, asked.loss, asked.options, vocab=self.vocab, longest=self.longest)
            name = "forward" if asked.forward_only else "forward_backward"
            loss, logprobs = self.ranks.call(name, model.id, data, asked.loss, asked.options)
            return Result(wire.forward_backward_response(logprobs, {"loss:sum": loss}), is_proto=True)
        if kind == "optim_step":
            step = checks.adam_step(event)
            applied, norm = self.ranks.call("optim_step", model.id, step)
            if not applied:
                raise ValueError(f"optim_step: the gradient's norm is {norm}, so the weights were left as they are.")
            return _json(metrics={"grad_norm": norm, "learning_rate": step.lr})
        assert kind in ("weights", "sampler_weights"), kind
        return self._save(model, request)

    def _place(self, model: Model, adapted: Adapted) -> None:
        self.ranks.call("create", model.id, adapted)
        model.adapted, model.is_placed = adapted, True

    def _save(self, model: Model, request: Request) -> Result:
        kind, event = request.kind, request.event
        is_named = kind == "weights" or event.get("path") is not None
        name = checks.check_name(event.get("path")) if is_named else f"snapshot-{request.seq}"
        folder, facts = model.folder / kind / name, self.facts_of(model.folder / kind / name)
        if not facts or facts["seq"] < request.seq:
            if facts and not event.get("overwrite"):
                raise ValueError(f"name = {name!r}: there are weights of this name; take another, or overwrite=True.")
            folder.parent.mkdir(exist_ok=True)
            self.ranks.call("save" if kind == "weights" else "export", model.id, folder)
            size = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
            assert model.adapted is not None
            facts = {"seq": request.seq, "adapted": asdict(model.adapted), "time": datetime.now(UTC).isoformat()}
            facts |= {"size_bytes": size, "user_metadata": event.get("user_metadata")}
            aside = folder.with_name(f".{name}.json")
            aside.write_text(json.dumps(facts))
            aside.replace(folder.with_name(f"{name}.json"))
        path = f"tinker://{model.id}/{kind}/{name}"
        if kind == "weights":
            return _json(type="save_weights", path=path)
        if is_named:
            return _json(type="save_weights_for_sampler", path=path)
        session = self.sessions[model.session]
        sampler = self.add_sampler(model.tenant, session, event.get("sampling_session_seq_id"), path)
        return _json(type="save_weights_for_sampler", sampling_session_id=sampler)

    # -- life after a restart

    def _begin_journal(self, model: Model, result: Result) -> None:
        """Begin a journal after the checkpoint of the model's last request, with that request's and earlier results."""
        model.steps, seq = 0, model.seq
        path = model.folder / f"requests-{seq + 1:09d}.journal"
        path.with_suffix(".new").unlink(missing_ok=True)
        journal = JournalFile(path.with_suffix(".new"))
        assert model.adapted is not None
        journal.add({"kind": "resumed", "seq": seq, "adapted": asdict(model.adapted)})
        done = {n: future.result() for n, future in model.futures.items() if future.done()} | {seq: result}
        for number, one in done.items():
            journal.add({"kind": "result", "seq": number, "is_proto": one.is_proto}, one.body)
        for waiting in model.pending.values():
            journal.add({"seq": waiting.seq, "kind": waiting.kind, **waiting.event}, waiting.body)
        path.with_suffix(".new").rename(path)  # from here on a restart begins with this checkpoint
        model.journal.close()
        model.journal.path.unlink()
        journal.path, model.journal = path, journal
        for old in (model.folder / "resume").iterdir():
            if old.name != str(seq):
                shutil.rmtree(old)

    def _reopen(self, folder: Path, said: dict[str, Any]) -> None:
        """Read the journal of a model that an earlier process had."""
        paths = sorted(folder.glob("requests-*.journal"))
        if not paths:
            return
        for old in paths[:-1]:
            old.unlink()
        model = Model(said["id"], said["tenant"], said["session"], folder, JournalFile(paths[-1]))
        for event, body in model.journal.records:
            kind, seq = event.pop("kind"), event.pop("seq")
            if kind == "resumed":
                model.seq, model.adapted = seq, Adapted(**event["adapted"])
            elif kind == "result":
                model.futures[seq] = Future()
                model.futures[seq].set_result(Result(body, event["is_proto"]))
            elif kind in ("begun", "done"):
                model.tries[seq] = 0 if kind == "done" else model.tries[seq] + 1
            else:
                self._enqueue(model, Request(seq, kind, event, body))
        model.journal.records.clear()
        self.models[model.id] = model

    def _resume_all(self) -> None:
        """Put the models with a checkpoint back into the engine. Those without one begin with their first request."""
        for model in [model for model in self.models.values() if model.adapted is not None]:
            assert model.adapted is not None
            self._place(model, model.adapted)
            self.ranks.call("load", model.id, model.folder / "resume" / str(model.seq), True)
            logger.info("%s: resumed after request %d; %d wait", model.id, model.seq, len(model.pending))


def _json(**body: Any) -> Result:
    return Result(orjson.dumps(body))
