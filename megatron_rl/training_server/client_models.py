"""A client's model: its requests, their results, and the journal from which a restarted server restores them.

requests-SEQ.journal   requests since SEQ, and results that may still be asked for
resume/SEQ             checkpoint after request SEQ
"""

from __future__ import annotations

import shutil
from collections import Counter
from concurrent.futures import Future
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import orjson

from megatron_rl.training_server.request_journal import JournalFile
from megatron_rl.training_server.shared_engine import Adapted

KEPT_RESULTS = 256
"""Number of results that a model keeps after they were fetched, because a client may lose an answer and ask again."""
PASSES = {"forward": False, "forward_backward": True}
"""Kinds of requests that several models can run together. Each maps to whether it computes gradients."""


@dataclass
class Result:
    """The answer to a request. is_proto: True if `body` is a protocol buffer, False if it is JSON."""

    body: bytes
    is_proto: bool = False
    was_fetched: bool = False


def json_result(**body: Any) -> Result:
    return Result(orjson.dumps(body))


@dataclass
class Request:
    seq: int
    kind: str
    event: dict[str, Any]
    """The client's JSON body. It is empty for a forward or backward pass, whose protocol buffer is in `body`."""
    body: bytes


@dataclass(eq=False)
class Model:
    """A client's model. seq: number of the last request that has run; -1 before the model was created."""

    id: str
    tenant: str
    session: str
    folder: Path
    journal: JournalFile
    seq: int = -1
    adapted: Adapted | None = None
    is_placed: bool = False
    """True while the model has one of the engine's slots."""
    steps: int = 0
    """Optimizer steps since the last checkpoint."""
    carried_bytes: int = 0
    """Size of the journal when it was begun: what was copied into it from the journal before."""
    pending: dict[int, Request] = field(default_factory=dict)
    futures: dict[int, Future[Result]] = field(default_factory=dict)
    tries: Counter[int] = field(default_factory=Counter)
    """Request number -> number of attempts at that request during which the server ended."""

    @classmethod
    def new(cls, name: str, tenant: str, session: str, folder: Path) -> Model:
        return cls(name, tenant, session, folder, JournalFile(folder / "requests-000000000.journal"))

    @classmethod
    def reopened(cls, folder: Path, said: dict[str, Any]) -> Model | None:
        """Reopen the model of an earlier process. Return None if its client's session was over.

        said: content of the model's model.json.
        """
        paths = sorted(folder.glob("requests-*.journal"))
        if not paths:
            return None
        for old in paths[:-1]:
            old.unlink()
        model = cls(said["id"], said["tenant"], said["session"], folder, JournalFile(paths[-1]))
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
                model.enqueue(Request(seq, kind, event, body))
        model.journal.records.clear()
        return model

    @property
    def head(self) -> Request | None:
        """The request that runs next; None if the client has not sent it yet."""
        return self.pending.get(self.seq + 1)

    @property
    def resume_folder(self) -> Path:
        """Folder of the checkpoint that was written after the last request that has run."""
        return self.folder / "resume" / str(self.seq)

    def accept(self, request: Request) -> None:
        """Write a request into the journal. From here on it will run, even if this process ends."""
        event = {key: value for key, value in request.event.items() if key not in ("seq", "kind")}
        self.journal.add({"seq": request.seq, "kind": request.kind, **event}, request.body)
        self.enqueue(request)

    def enqueue(self, request: Request) -> None:
        self.pending[request.seq] = request
        self.futures[request.seq] = Future()

    def begin(self, request: Request) -> None:
        self.journal.add({"kind": "begun", "seq": request.seq})

    def finish(self, request: Request, result: Result, *, is_saved: bool) -> None:
        """Store a request's result and hand it to those that wait for it.

        is_saved: a checkpoint has been written after this request, so a new journal begins.
        """
        self.seq = request.seq
        del self.pending[request.seq]
        fetched = [seq for seq, future in self.futures.items() if future.done() and future.result().was_fetched]
        for seq in fetched[:-KEPT_RESULTS]:
            del self.futures[seq]
        if is_saved:
            self._begin_journal(result)
        else:
            self.journal.add({"kind": "done", "seq": request.seq})
        self.futures[request.seq].set_result(result)

    def _begin_journal(self, result: Result) -> None:
        """Replace the journal by a new one that starts from the checkpoint just written.

        The new journal holds the results of this request and of earlier ones, and the requests that still wait.
        """
        self.steps, seq = 0, self.seq
        path = self.folder / f"requests-{seq + 1:09d}.journal"
        aside = path.with_suffix(".new")
        aside.unlink(missing_ok=True)
        journal = JournalFile(aside)
        assert self.adapted is not None
        journal.add({"kind": "resumed", "seq": seq, "adapted": asdict(self.adapted)})
        done = {n: future.result() for n, future in self.futures.items() if future.done()} | {seq: result}
        for number, one in done.items():
            journal.add({"kind": "result", "seq": number, "is_proto": one.is_proto}, one.body)
        for waiting in self.pending.values():
            journal.add({"seq": waiting.seq, "kind": waiting.kind, **waiting.event}, waiting.body)
        aside.rename(path)  # from here on a restart begins with this checkpoint
        self.journal.close()
        self.journal.path.unlink()
        journal.path, self.journal, self.carried_bytes = path, journal, journal.size
        for old in (self.folder / "resume").iterdir():
            if old.name != str(seq):
                shutil.rmtree(old)

    def close(self) -> None:
        """End the model and delete its journal and checkpoint. Weights that its client has saved by name stay."""
        self.journal.close()
        for future in self.futures.values():
            if not future.done():
                future.set_result(json_result(error="the session is over.", category="user"))
        for path in [*self.folder.glob("requests-*.journal"), *self.folder.glob("sampler_weights/snapshot-*.json")]:
            path.unlink()
        for path in [self.folder / "resume", *self.folder.glob("sampler_weights/snapshot-*")]:
            shutil.rmtree(path, ignore_errors=True)
