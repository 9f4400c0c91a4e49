"""The rollout journal: records every sampled group, so that a resumed run need not sample it again.

With `rollout.journal_replies` it also keeps the individual replies of unfinished episodes.

There is one append-only file per rollout rank and interval between checkpoints. Each process writes new files and never
modifies those of earlier ones. A group is written before any record of its outcome, and therefore before it is trained.
A written record survives the death of the process. It also survives a power failure once the next checkpoint has begun.
Unreadable parts are reported and left in place, and their prompts are sampled again.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import logging
import os
import struct
import threading
import zlib
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load as load_tensors
from torch import Tensor

from megatron_rl.launch import file_lock
from megatron_rl.launch.file_lock import PATIENCE_S
from megatron_rl.rollout.events import Episode, RolloutEvents
from megatron_rl.rollout.groups import trained_runs
from megatron_rl.types import LLMResponse, Runs, SampledTokens, TrajectoryBatch

logger = logging.getLogger(__name__)

FOLDER, SUFFIX, LOCK_SUFFIX = "journal", ".journal", ".lock"
_HEAD = struct.Struct("<4scQI")
"""Record header: magic, kind, payload bytes, CRC-32 of kind and payload."""
_MAGIC, _GROUP, _REPLY, _EVENT = b"mrj2", b"G", b"R", b"E"
_MAGIC_BEFORE = b"mrlj"
"""Magic of old journals, which had int64 columns and a version for each token."""
MOST_STEP_BYTES = 1 << 20  # of an environment's step with its state
_DTYPES = {
    **{torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"},
    **{torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8"},
    torch.bool: "BOOL",
}
"""Dtype -> its name in safetensors files. A column of another dtype could not be trained."""
WIDE = ("routes", "support", "adjustment")
"""Names in LLMResponse of the per-token columns that a reply may have in addition to its tokens."""
_METADATA_BYTES = struct.Struct("<Q")
"""Start of a safetensors blob: length of its JSON header in bytes."""


@dataclass(kw_only=True)
class Record:
    """A record that was read back. `event["event"]` is its kind.

    The payloads of groups and replies stay in the file.
    """

    event: dict[str, Any]
    path: Path
    start: int
    size: int
    branch: int = 0
    """Only in a resumed run: the last policy version that the writer's run and this run have in common."""

    def group(self) -> TrajectoryBatch:
        return TrajectoryBatch.from_columns(self._tensors())

    def reply(self) -> LLMResponse:
        columns = self._tensors()
        sampled = SampledTokens(
            columns["ids"], columns["logprobs"], Runs(columns["versions.values"], columns["versions.lengths"])
        )
        rest = self.event["rest"] | {name: columns.get(name) for name in WIDE}
        return LLMResponse(input_tokens=columns["input_ids"].tolist(), sampled=sampled, **rest)

    def fault(self) -> str:
        """Return a description of the damage if the payload is not what was written; '' if it is intact."""
        try:
            with open(self.path, "rb") as file:
                file.seek(self.start - _HEAD.size)
                head, payload = file.read(_HEAD.size), file.read(self.size)
        except OSError as error:
            return f"{self.path} cannot be read ({error.strerror})"
        if len(payload) == self.size:
            magic, kind, length, crc = _HEAD.unpack(head)
            if (magic, length, crc) == (_MAGIC, self.size, zlib.crc32(payload, zlib.crc32(kind))):
                return ""
        return f"{self.path} is damaged at byte {self.start:,}"

    def _tensors(self) -> dict[str, Tensor]:
        with open(self.path, "rb") as file:
            file.seek(self.start)
            return load_tensors(file.read(self.size))


class RolloutJournal(RolloutEvents):
    """Writes one rollout rank's journal. Evaluations and prompts without a number are not recorded.

    Raises RuntimeError, which ends the run, if a record cannot be written. fingerprint: see ResumePoint.
    """

    def __init__(
        self, folder: str | Path, *, run_attempt: int, rank: int, first_step: int, version: int, fingerprint: str
    ) -> None:
        self.folder, self.run_attempt, self.rank, self.step = Path(folder), run_attempt, rank, first_step
        self.opening = {"first_step": first_step, "version": version, "fingerprint": fingerprint}
        self._lock = threading.Lock()  # records come from the rollout's thread, checkpoints from the trainer's calls
        self._file, self._files, self._size = -1, 0, 0
        self.path = Path()
        """The file now being written."""
        self._records: dict[int, Record] = {}  # by prompt number, for groups that wait to be trained
        self._failed: RuntimeError | None = None
        self._replied: dict[str, set[str]] = {}  # by sample key, for unfinished episodes
        # Groups and replies are megabytes and a disk may be slow, so a thread writes them instead of the event loop.
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="journal")
        self._writing: Future[None] | None = None
        self.begin_file()

    def begin_file(self) -> None:
        """Begin a new file, as every checkpoint does. Return once the records so far are on the disk."""
        self.settle()
        with self._lock:
            if self._failed is not None:
                raise self._failed
            full, full_path = self._file, self.path
            self._files += 1
            name = f"{self.run_attempt:06}-{self.step:08}-{self._files:06}-{self.rank:04}{SUFFIX}"
            self.path = self.folder / name
            try:
                self.folder.mkdir(parents=True, exist_ok=True)
                self._file = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND, 0o644)
                self._size = 0
            except OSError as error:
                raise self._failure(error) from error
            self._write_event("opened", self.opening | {"step": self.step, "rank": self.rank})
        if full >= 0:
            try:  # without the lock, because the disk may take seconds, and the event loop writes new records
                os.fsync(full)
            except OSError as error:
                raise self._failure(error, full_path) from error
            finally:
                os.close(full)

    def record_of(self, number: int) -> Record:
        """Wait until a prompt's group is written, and return its record. Call this before the group's last event."""
        self.settle()
        return self._records[number]

    def settle(self) -> None:
        """Wait until every record so far is written. Raises RuntimeError if one could not be."""
        writing, self._writing = self._writing, None
        if writing is not None:
            writing.result()

    def close(self) -> None:
        self._writer.shutdown()
        with self._lock:
            if self._file >= 0:
                os.close(self._file)
                self._file = -1

    # -- events

    def accepted(self, episode: Episode, group: TrajectoryBatch) -> None:
        self._replied.pop(episode.data["sample_key"], None)
        if not is_numbered(episode.data):
            return
        versions = trained_runs(group).values
        about = {"event": "accepted", "prompt": episode.data["prompt_number"], "key": episode.data["sample_key"]}
        about |= {"versions": [int(versions.min()), int(versions.max())] if len(versions) else []}
        self._write_later(_GROUP, group.columns(), about)

    def replied(self, data: dict[str, Any], request: str, reply: LLMResponse) -> None:
        """Record a complete reply of an unfinished episode under the name `request`. Callable from any thread."""
        if not is_numbered(data) or reply.stop_reason == "abort" or not reply.output_len:
            return
        kept = self._replied.setdefault(data["sample_key"], set())
        if request in kept:  # from an earlier attempt
            return
        kept.add(request)
        sampled, versions = reply.sampled, reply.sampled.versions
        columns = {"input_ids": torch.tensor(reply.input_tokens, dtype=torch.int32)}
        columns |= {"ids": sampled.ids, "logprobs": sampled.logprobs}
        columns |= {"versions.values": versions.values, "versions.lengths": versions.lengths}
        columns |= {name: column for name in WIDE if (column := getattr(reply, name)) is not None}
        rest = {name: getattr(reply, name) for name in ("stop_reason", "text", "latency_s", "interruptions")}
        about = {"event": "replied", "prompt": data["prompt_number"], "key": data["sample_key"], "request": request}
        about |= {"versions": [int(versions.values.min()), int(versions.values.max())], "rest": rest}
        self._write_later(_REPLY, columns, about)

    def stepped(self, data: dict[str, Any], name: str, step: dict[str, Any]) -> None:
        """Record a step of an unfinished episode's environment, with the environment's state.

        A step that is too large is not recorded.
        """
        if not is_numbered(data):
            return
        content = json.dumps({"event": "stepped", "key": data["sample_key"], "name": name, "step": step}).encode()
        if len(content) <= MOST_STEP_BYTES:
            with self._lock:
                self._write(_EVENT, content)
        else:
            logger.warning(
                "%s: a step of its world takes %d bytes with its state; %d are kept in the journal. A killed run does "
                "it again.",
                *(data["sample_key"], len(content), MOST_STEP_BYTES),
            )

    def requeued(self, episode: Episode, why: str) -> None:
        self._note("requeued", [episode], why=why)

    def consumed(self, episodes: Sequence[Episode], version: int) -> None:
        if self._note("consumed", episodes, step=self.step, version=version):
            self.step += 1

    def rejected(self, episode: Episode, why: str) -> None:
        self._replied.pop(episode.data["sample_key"], None)
        self._note("rejected", [episode], why=why)

    def dead_lettered(self, episode: Episode, error: BaseException) -> None:
        self._replied.pop(episode.data["sample_key"], None)
        self._note("dead_lettered", [episode], why=f"{type(error).__name__}: {error}")

    def _note(self, event: str, episodes: Sequence[Episode], **rest: Any) -> bool:
        prompts = [episode.data["prompt_number"] for episode in episodes if is_numbered(episode.data)]
        if prompts:
            self.settle()  # a group's outcome must not be written before the group
            for number in prompts:
                self._records.pop(number, None)
            with self._lock:
                self._write_event(event, {"prompts": prompts} | rest)
        return bool(prompts)

    def _write_event(self, event: str, content: dict[str, Any]) -> None:
        self._write(_EVENT, json.dumps({"event": event} | content).encode())

    def _write_later(self, kind: bytes, columns: dict[str, Tensor], about: dict[str, Any]) -> None:
        """Queue a record to be written by another thread. Records are written in the order of the calls.

        The columns must not change until they are written.
        """

        def write() -> None:
            pieces = _blob(columns, about)
            with self._lock:
                start, path = self._write(kind, *pieces), self.path
            if kind == _GROUP:
                size = sum(len(piece) for piece in pieces)
                self._records[about["prompt"]] = Record(event=about, path=path, start=start, size=size)

        if self._failed is not None:
            raise self._failed
        self._writing = self._writer.submit(write)

    def _write(self, kind: bytes, *payload: bytes | memoryview) -> int:
        """Append a record to the file and return the offset of its payload."""
        if self._failed is not None:  # records after a torn one would not be read
            raise self._failed
        crc, size = zlib.crc32(kind), sum(len(part) for part in payload)
        for part in payload:
            crc = zlib.crc32(part, crc)
        try:
            # One call, so that a kill leaves at most one torn record, at the end of the file. Tensors are not copied.
            written = os.writev(self._file, [_HEAD.pack(_MAGIC, kind, size, crc), *payload])
        except OSError as error:
            raise self._failure(error) from error
        if written < _HEAD.size + size:
            raise self._failure(f"only {written:,} of a record's {_HEAD.size + size:,} bytes could be written")
        self._size += written
        return self._size - size

    def _failure(self, fault: object, path: Path | None = None) -> RuntimeError:
        self._failed = RuntimeError(f"rollout journal {path or self.path}: {fault}; make room on the disk and resume.")
        return self._failed


def is_numbered(data: dict[str, Any]) -> bool:
    """Return True for a prompt of a PromptIterator, whose number identifies it in journal and ledger."""
    return "prompt_number" in data


def _blob(columns: dict[str, Tensor], about: dict[str, Any]) -> list[bytes | memoryview]:
    """Return the pieces of a safetensors blob of the columns. Data of contiguous columns is not copied."""
    header: dict[str, Any] = {"__metadata__": {"record": json.dumps(about)}}
    pieces: list[bytes | memoryview] = []
    end = 0
    for name, column in sorted(columns.items(), key=lambda entry: -entry[1].dtype.itemsize):  # for alignment
        begin, end = end, end + column.nbytes
        header[name] = {"dtype": _DTYPES[column.dtype], "shape": list(column.shape), "data_offsets": [begin, end]}
        # For a single element torch keeps any stride and still calls it contiguous.
        flat = column.contiguous().as_strided((column.numel(),), (1,))
        pieces.append(memoryview(flat.view(torch.uint8).numpy()))
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    return [_METADATA_BYTES.pack(len(text)), text, *pieces]


# -- reading


def read_file(path: Path) -> tuple[list[Record], str]:
    """Return a file's records up to the first damaged one, and a description of the damage ('' if there is none)."""
    records: list[Record] = []
    size = path.stat().st_size
    with open(path, "rb") as file:
        while (at := file.tell()) < size:
            head = file.read(_HEAD.size)
            if len(head) < _HEAD.size:
                return records, f"{path.name} ends in the middle of a record, {size - at:,} bytes of it are left"
            magic, kind, length, crc = _HEAD.unpack(head)
            if magic == _MAGIC_BEFORE:
                return records, f"{path.name} is in the form of an earlier version of this program and is not read"
            if magic != _MAGIC or kind not in (_GROUP, _REPLY, _EVENT):
                return records, f"{path.name} is damaged from byte {at:,} on ({size - at:,} bytes are not read)"
            payload = file.read(length) if length <= size - file.tell() else b""
            if len(payload) < length:
                return records, f"{path.name} ends in the middle of a record, {size - at:,} bytes of it are left"
            if zlib.crc32(payload, zlib.crc32(kind)) != crc:
                return records, f"{path.name} is damaged from byte {at:,} on ({size - at:,} bytes are not read)"
            event = json.loads(payload) if kind == _EVENT else _about(payload)
            records.append(Record(event=event, path=path, start=at + _HEAD.size, size=length))
    return records, ""


def _about(blob: bytes) -> dict[str, Any]:
    (length,) = _METADATA_BYTES.unpack_from(blob)
    header = json.loads(blob[_METADATA_BYTES.size : _METADATA_BYTES.size + length])
    about: dict[str, Any] = json.loads(header["__metadata__"]["record"])
    return about


def _name_parts(path: Path) -> list[int]:
    """Return a file's run attempt, first step, number within its process, and rank. File names sort in this order."""
    return [int(part) for part in path.stem.split("-")]


def next_run_attempt(folder: str | Path) -> int:
    """Return a number for this start of the run. No earlier start has had it."""
    return max((_name_parts(path)[0] for path in Path(folder).glob(f"*{SUFFIX}")), default=0) + 1


def drop_files_before(folder: str | Path, step: int) -> None:
    """Delete each journal file if the next file of the same rank begins at `step` or an earlier step.

    The files of all ranks and run attempts are checked. Each rank's newest file has no next one, so it is kept.
    """
    of_rank: dict[int, list[Path]] = {}
    for path in sorted(Path(folder).glob(f"*{SUFFIX}")):
        of_rank.setdefault(_name_parts(path)[3], []).append(path)
    for files in of_rank.values():
        for path, following in itertools.pairwise(files):
            if _name_parts(following)[1] <= step:
                path.unlink()


class Restored:
    """Groups and replies that earlier processes have journaled, and that a run resumed at `version` may still train.

    The weights trained after the resumed checkpoint were lost with their process. The tokens that they sampled
    therefore count as sampled at the checkpoint's version. Two differences may be at most `max_staleness`: the current
    version minus a group's oldest version (counted in this way), and the group's newest lost version minus the
    checkpoint's version. A synchronous run therefore restores only groups of the step in which it was killed.
    """

    def __init__(
        self, folder: str | Path, *, run_attempt: int, version: int, max_staleness: int, fingerprint: str
    ) -> None:
        self.max_staleness = max_staleness
        self.faults: list[str] = []
        """Descriptions of unreadable parts, and of files whose run had other settings."""
        self.groups = self.replies = 0
        """Numbers of groups and of replies taken so far."""
        self._sampled: dict[str, Record] = {}
        self._replies: dict[tuple[str, str], Record] = {}
        self._steps: dict[tuple[str, str], dict[str, Any]] = {}
        branches: dict[int, int] = {run_attempt: version}
        for path in sorted(Path(folder).glob(f"*{SUFFIX}"), reverse=True):
            records, fault = read_file(path)
            if fault:
                self.faults.append(fault)
            attempt = _name_parts(path)[0]
            if attempt >= run_attempt or not records:
                continue
            opened = records[0].event
            branches.setdefault(attempt, opened["version"])
            if opened["fingerprint"] != fingerprint:
                groups = sum(record.event["event"] == "accepted" for record in records)
                self.faults.append(f"{path.name} is of a run with other settings, its {groups} groups are not used")
                continue
            # A later process that began at an earlier version discarded everything trained since that version.
            branch = min(start for other, start in branches.items() if other > attempt)
            for record in reversed(records):
                event, record.branch = record.event, branch
                # Files and records are read newest first, so the first one of a key counts.
                if event["event"] == "accepted":
                    self._sampled.setdefault(event["key"], record)
                elif event["event"] == "replied" and event["key"] not in self._sampled:  # the group has it
                    self._replies.setdefault((event["key"], event["request"]), record)
                elif event["event"] == "stepped" and event["key"] not in self._sampled:
                    self._steps.setdefault((event["key"], event["name"]), event["step"])

    def take(self, key: str, version: int) -> TrajectoryBatch | None:
        """Return the group that was sampled under `key`, if it is fresh enough for a trainer at `version`; else None.

        The group is returned only once.
        """
        if (record := self._young(self._sampled.pop(key, None), version)) is None:
            return None
        group = record.group()
        # This run has, or will have, other weights under versions above the branch.
        group["versions"] = group["versions"].clamp(max=record.branch)
        self.groups += 1
        return group

    def take_reply(self, key: str, request: str, version: int) -> LLMResponse | None:
        """Return an unfinished episode's reply to the request `request`, under the same conditions as `take`."""
        if (record := self._young(self._replies.pop((key, request), None), version)) is None:
            return None
        reply = record.reply()
        versions = Runs(reply.sampled.versions.values.clamp(max=record.branch), reply.sampled.versions.lengths)
        reply.sampled = dataclasses.replace(reply.sampled, versions=versions)
        self.replies += 1
        return reply

    def take_step(self, key: str, name: str) -> dict[str, Any] | None:
        """Return the environment step that was recorded under `name`; None if there is none. It is returned only once.

        The name depends on the dialogue so far.
        """
        return self._steps.pop((key, name), None)

    def _young(self, record: Record | None, version: int) -> Record | None:
        """Return the record if it is fresh enough for a trainer at `version`, else None."""
        if record is None or not record.event["versions"]:
            return None
        oldest, newest = record.event["versions"]
        age = version - min(oldest, record.branch)
        return record if 0 <= age <= self.max_staleness and newest - record.branch <= self.max_staleness else None


@dataclass(frozen=True)
class JournaledEpisode:
    """One episode's access to the journals of earlier processes and of this process.

    A reply is identified by its request: prompt tokens, options, sample, and a running count of identical requests. A
    turn whose prompt differs this time, for example because a tool answered differently, gets a new reply.
    """

    data: dict[str, Any]
    restored: Restored | None
    journal: RolloutJournal

    def take_reply(self, name: str, version: int) -> LLMResponse | None:
        """Return the reply journaled under `name`, if a trainer at `version` may still train on it; else None.

        The reply is returned only once.
        """
        return None if self.restored is None else self.restored.take_reply(self.data["sample_key"], name, version)

    def keep_reply(self, name: str, reply: LLMResponse) -> None:
        self.journal.replied(self.data, name, reply)

    def take_step(self, name: str) -> dict[str, Any] | None:
        step = None if self.restored is None else self.restored.take_step(self.data["sample_key"], name)
        if step is not None:
            self.keep_step(name, step)  # for the next process
        return step

    def keep_step(self, name: str, step: dict[str, Any]) -> None:
        self.journal.stepped(self.data, name, step)


@dataclass(frozen=True)
class Records:
    """An executor's access to the journals. journal: None if replies are not kept."""

    restored: Restored | None = None
    journal: RolloutJournal | None = None

    def group(self, data: dict[str, Any], version: int) -> TrajectoryBatch | None:
        """Return this prompt's group from an earlier process, if it is fresh enough; else None.

        It is returned only once.
        """
        return None if self.restored is None else self.restored.take(data["sample_key"], version)

    def of(self, data: dict[str, Any]) -> JournaledEpisode | None:
        return None if self.journal is None else JournaledEpisode(data, self.restored, self.journal)


NO_RECORDS = Records()


# -- writers: one process per rollout rank, until another process resumes the run


def wait_for_owners(folder: str | Path, patience_s: float = PATIENCE_S) -> None:
    """Wait until no process writes the journal.

    Raises BlockingIOError, which names a process that does, after `patience_s` seconds.
    """
    for path in sorted(Path(folder).glob(f"*{LOCK_SUFFIX}")):
        os.close(_lock(path, patience_s))


def take_lock(folder: str | Path, rank: int, patience_s: float = PATIENCE_S) -> int:
    """Lock a rank's journal. Return the lock's file descriptor.

    The lock is held until all copies of the descriptor are closed. Raises BlockingIOError if another process keeps the
    lock for `patience_s` seconds.
    """
    Path(folder).mkdir(parents=True, exist_ok=True)
    return _lock(Path(folder) / f"{rank:04}{LOCK_SUFFIX}", patience_s)


def _lock(path: Path, patience_s: float) -> int:
    try:
        return file_lock.take(path, patience_s)
    except file_lock.LockHeld as held:
        raise BlockingIOError(
            f"rollout journal {path.parent}: {held.owner} belongs to a run in this run.folder and still writes it; "
            f"wait until that run has ended, or kill it, and resume."
        ) from None
