"""Clients' sessions and their sampling sessions, which outlive this process."""

from __future__ import annotations

import threading
import time
import uuid
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megatron_rl.training_server.request_journal import JournalFile


class Refused(Exception):
    """Ends an HTTP request with this message and status."""

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status


@dataclass
class Session:
    """A client's session. seen: time, by time.monotonic, at which its client last gave a sign of life."""

    id: str
    tenant: str
    seen: float = field(default_factory=time.monotonic)
    is_over: bool = False


class Sessions:
    """All clients' sessions, recorded in a journal file.

    changed: condition that is held during each change, and notified when a session is over.
    """

    def __init__(self, file: Path, changed: threading.Condition) -> None:
        self._changed = changed
        self.by_id: dict[str, Session] = {}
        self.ended: set[str] = set()
        """Ids of models that an earlier process ended. They are not reopened."""
        self._samplers: dict[str, tuple[str, str | None]] = {}
        """Id of a sampling session -> (its tenant, the tinker path of its weights). The path is None for the base
        model."""
        self._journal = JournalFile(file)
        for event, _ in self._journal.records:
            if event["kind"] == "session":
                self.by_id[event["id"]] = Session(event["id"], event["tenant"])
            elif event["kind"] == "finished":
                self.by_id[event["id"]].is_over = True
            elif event["kind"] == "sampler":
                self._samplers[event["id"]] = (event["tenant"], event["path"])
            elif event["kind"] == "ended":
                self.ended.add(event["id"])
        self._journal.records.clear()

    def create(self, tenant: str) -> str:
        with self._changed:
            session = Session(uuid.uuid4().hex, tenant)
            self._journal.add({"kind": "session", "id": session.id, "tenant": tenant})
            self.by_id[session.id] = session
            return session.id

    def get(self, tenant: str, name: Any) -> Session:
        """Return a session of this tenant, and note that its client is alive.

        Raises Refused if the tenant has no such session, or if it is over.
        """
        found = self.by_id.get(str(name))
        if found is None or found.tenant != tenant:
            raise Refused(f"session_id = {name!r}: there is no such session.", 404)
        if found.is_over:
            raise Refused(f"session_id = {name!r}: its client has finished it; make a new ServiceClient.", 410)
        found.seen = time.monotonic()
        return found

    def finish(self, tenant: str, name: str) -> None:
        with self._changed:
            session = self.get(tenant, name)
            self._journal.add({"kind": "finished", "id": name})
            session.is_over = True
            self._changed.notify_all()

    def note_ended(self, model: str) -> None:
        """Note that a model was ended, so that a restarted server does not open it again."""
        self._journal.add({"kind": "ended", "id": model})

    def add_sampler(self, tenant: str, session: Session, number: Any, path: str | None) -> str:
        """Create a sampling session, unless the client has asked for this one before. Return its id.

        number: the client's number of the sampling session. path: tinker path of its weights; None for the base model.
        Raises Refused if `number` is no integer.
        """
        if type(number) is not int:
            raise Refused(f"sampling_session_seq_id = {number!r}: must be an integer.", 400)
        name = f"{session.id}:sample:{number}"
        with self._changed:
            if name not in self._samplers:
                self._journal.add({"kind": "sampler", "id": name, "tenant": tenant, "path": path})
                self._samplers[name] = (tenant, path)
        return name

    def sampler(self, tenant: str, name: Any) -> str | None:
        """Return the tinker path of the weights that a sampling session uses; None for the base model.

        Raises Refused if the tenant has no such sampling session.
        """
        owner, path = self._samplers.get(str(name), ("", None))
        if owner != tenant:
            raise Refused(f"sampling_session_id = {name!r}: there is no such sampling session.", 404)
        return path
