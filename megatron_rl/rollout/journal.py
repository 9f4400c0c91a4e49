"""The rollout journal: every group that was sampled, so that a killed run's successor need not sample it again.

With `rollout.journal_replies` it has the single replies of episodes that go on, too.

Append-only files, one per rollout rank and stretch between two checkpoints; each process writes files of its own and
never touches those of earlier ones. A group is written by a thread, before any record of what became of it and so
before it is trained. A record is there as soon as it is written, whatever happens to the process; it is on the disk
(for a power failure) once its batch is trained and a checkpoint begins. What cannot be read is named and left as it is,
and its prompts are sampled again.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import struct
import threading
import zlib
from collections.abc import Iterator, Sequence
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
"""Magic, kind, bytes of the payload, CRC-32 of kind and payload."""
_MAGIC, _GROUP, _REPLY, _EVENT = b"mrj2", b"G", b"R", b"E"
MOST_STEP_BYTES = 1 << 20
"""Of what an environment did and its state."""
_MAGIC_BEFORE = b"mrlj"
"""Of journals whose columns were int64, with a version for each token."""
_DTYPES = {
    **{torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"},
    **{torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8"},
    torch.bool: "BOOL",
}
"""The names of dtypes in safetensors. A column of another one cannot be trained on either."""
_METADATA_BYTES = struct.Struct("<Q")
"""The first bytes of a safetensors blob: the length of its JSON header."""


@dataclass(kw_only=True)
class Record:
    """One record as read back. `event` has its `event` name; a group's or reply's payload stays in the file."""

    event: dict[str, Any]
    path: Path
    start: int
    size: int

    def group(self) -> TrajectoryBatch:
        return TrajectoryBatch.from_columns(self._tensors())

    def reply(self) -> LLMResponse:
        columns = self._tensors()
        sampled = SampledTokens(
            columns["ids"], columns["logprobs"], Runs(columns["versions.values"], columns["versions.lengths"])
        )
        rest = self.event["rest"] | {"routes": columns.get("routes")}
        return LLMResponse(input_tokens=columns["input_ids"].tolist(), sampled=sampled, **rest)

    def fault(self) -> str:
        """Return why the payload is not what was written; empty where it is."""
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
    """Writes one rollout rank's journal. Evaluation and prompts without a place in the data set are left out.

    run_attempt: number of this start of the run, from its first one. fingerprint: of all settings that a sampled group
    depends on. RuntimeError, which ends the run, where a record cannot be written: it could not be resumed as promised.
    """

    def __init__(
        self, folder: str | Path, *, run_attempt: int, rank: int, first_step: int, version: int, fingerprint: str
    ) -> None:
        self.folder, self.run_attempt, self.rank, self.step = Path(folder), run_attempt, rank, first_step
        self.opening = {"first_step": first_step, "version": version, "fingerprint": fingerprint}
        self._lock = threading.Lock()  # records come from the rollout's thread, checkpoints from the trainer's calls
        self._file, self._files, self._size = -1, 0, 0
        self.path: Path
        """Of the file that is written now."""
        self._records: dict[int, Record] = {}  # by the prompt's number, of groups that wait to be trained
        self._failed: RuntimeError | None = None
        self._replied: dict[str, set[str]] = {}  # by sample key, of episodes that go on
        # Groups and replies are megabytes, and a disk may be slow: the event loop does not wait for them.
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="journal")
        self._writing: Future[None] | None = None
        self.begin_file()

    def begin_file(self) -> None:
        """Continue in a new file, as with every checkpoint, and return once the records so far are on the disk.

        New ones do not wait for that, which may take seconds: they come on the event loop.
        """
        self.settle()
        with self._lock:
            if self._failed is not None:
                raise self._failed
            full = self._file
            full_path = self.path if full >= 0 else None
            try:
                self._files += 1
                self.path = (
                    self.folder / f"{self.run_attempt:06}-{self.step:08}-{self._files:06}-{self.rank:04}{SUFFIX}"
                )
                self.folder.mkdir(parents=True, exist_ok=True)
                self._file = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND, 0o644)
                self._size = 0
            except OSError as error:
                raise self._failure(error) from error
            self._write_event("opened", self.opening | {"step": self.step, "rank": self.rank})
        if full >= 0:
            try:
                os.fsync(full)
            except OSError as error:
                raise self._failure(error, full_path) from error
            finally:
                os.close(full)

    def record_of(self, number: int) -> Record:
        """Return where the group of a prompt is, before its last event was recorded. Waits for the writer."""
        self.settle()
        return self._records[number]

    def settle(self) -> None:
        """Return once every record so far is written; RuntimeError where one could not be."""
        writing, self._writing = self._writing, None
        if writing is not None:
            writing.result()

    def close(self) -> None:
        self._writer.shutdown()
        with self._lock:
            if self._file >= 0:
                os.close(self._file)
                self._file = -1

    # -- events -------------------------------------------------------------------------------------------------------

    def accepted(self, episode: Episode, group: TrajectoryBatch) -> None:
        self._replied.pop(episode.data["sample_key"], None)
        if not is_numbered(episode.data):
            return
        versions = trained_runs(group).values
        about = {"event": "accepted", "prompt": episode.data["prompt_number"], "key": episode.data["sample_key"]}
        about |= {"versions": [int(versions.min()), int(versions.max())] if len(versions) else []}
        self._write_later(_GROUP, group.columns(), about)

    def replied(self, data: dict[str, Any], request: str, reply: LLMResponse) -> None:
        """Keep a reply of an unfinished episode; `request` names it among those of the episode. No event: any thread.

        One that was given up, or has no token, is no reply. One that an episode's next attempt is given again is kept
        already.
        """
        if not is_numbered(data) or reply.stop_reason == "abort" or not reply.output_len:
            return
        kept = self._replied.setdefault(data["sample_key"], set())
        if request in kept:
            return
        kept.add(request)
        sampled = reply.sampled
        columns = {"input_ids": torch.tensor(reply.input_tokens, dtype=torch.int32)}
        columns |= {"ids": sampled.ids, "logprobs": sampled.logprobs}
        columns |= {"versions.values": sampled.versions.values, "versions.lengths": sampled.versions.lengths}
        columns |= {} if reply.routes is None else {"routes": reply.routes}
        rest = {name: getattr(reply, name) for name in ("stop_reason", "text", "latency_s", "interruptions")}
        about = {"event": "replied", "prompt": data["prompt_number"], "key": data["sample_key"], "request": request}
        versions = sampled.versions.values
        about |= {"versions": [int(versions.min()), int(versions.max())], "rest": rest}
        self._write_later(_REPLY, columns, about)

    def stepped(self, data: dict[str, Any], name: str, step: dict[str, Any]) -> None:
        """Keep what the world of an unfinished episode did, with its state; one that is too large is left out."""
        content = json.dumps({"event": "stepped", "key": data["sample_key"], "name": name, "step": step}).encode()
        if is_numbered(data) and len(content) <= MOST_STEP_BYTES:
            with self._lock:
                self._write(_EVENT, content)
        elif is_numbered(data):
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
            self.settle()  # what became of a group is never there without the group
            for number in prompts:
                self._records.pop(number, None)
            with self._lock:
                self._write_event(event, {"prompts": prompts} | rest)
        return bool(prompts)

    def _write_event(self, event: str, content: dict[str, Any]) -> None:
        self._write(_EVENT, json.dumps({"event": event} | content).encode())

    def _write_later(self, kind: bytes, columns: dict[str, Tensor], about: dict[str, Any]) -> None:
        """Write from another thread, in the order of these calls. Nobody changes the columns meanwhile."""

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
        """Append a record to the file; return where its payload starts."""
        if self._failed is not None:  # nobody would read what follows a torn record
            raise self._failed
        crc, size = zlib.crc32(kind), sum(len(part) for part in payload)
        for part in payload:
            crc = zlib.crc32(part, crc)
        try:
            # One call: a kill leaves a whole record or a torn one at the end, never two that are mixed. The tensors are
            # written from where they lie.
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
    """Return True for a prompt of a PromptIterator; its number is its name in journal and ledger."""
    return "prompt_number" in data


def _blob(columns: dict[str, Tensor], about: dict[str, Any]) -> list[bytes | memoryview]:
    """Return a safetensors blob in pieces, without a copy of the columns' bytes."""
    header: dict[str, Any] = {"__metadata__": {"record": json.dumps(about)}}
    pieces: list[bytes | memoryview] = []
    end = 0
    for name, column in sorted(columns.items(), key=lambda entry: -entry[1].dtype.itemsize):  # so that all are aligned
        begin, end = end, end + column.nbytes
        header[name] = {"dtype": _DTYPES[column.dtype], "shape": list(column.shape), "data_offsets": [begin, end]}
        # Of one entry torch keeps any stride, and calls it contiguous.
        flat = column.contiguous().as_strided((column.numel(),), (1,))
        pieces.append(memoryview(flat.view(torch.uint8).numpy()))
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    return [_METADATA_BYTES.pack(len(text)), text, *pieces]


# -- reading -----------------------------------------------------------------------------------------------------------


def read_file(path: Path) -> tuple[list[Record], str]:
    """Return the records of one file up to the first that is not whole, and what is wrong with that one ('' if none).

    Every payload is compared with its checksum.
    """
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


def next_run_attempt(folder: str | Path) -> int:
    """Return a number that no start of the run has had."""
    return max((_run_attempt_of(path) for path in Path(folder).glob(f"*{SUFFIX}")), default=0) + 1


def _run_attempt_of(path: Path) -> int:
    return int(path.name.split("-")[0])


def _step_of(path: Path) -> int:
    return int(path.name.split("-")[1])


def drop_files_before(folder: str | Path, step: int) -> None:
    """Delete the files, of all ranks and attempts, that end before `step`. A rank's newest one stays."""
    of_rank: dict[str, list[Path]] = {}
    for path in sorted(Path(folder).glob(f"*{SUFFIX}")):
        of_rank.setdefault(path.stem.split("-")[3], []).append(path)
    for files in of_rank.values():
        for path, following in zip(files, files[1:], strict=False):
            if _step_of(following) <= step:
                path.unlink()


@dataclass(kw_only=True)
class Sampled:
    """A group or reply of an earlier process, whose policy and this run's were the same up to version `branch`."""

    record: Record
    branch: int


class Restored:
    """The groups and replies of earlier processes that a run which resumes at `version` may still train.

    A token counts as sampled by the last version that its policy and this run have in common: at a version that was
    lost with its process, it is as old as the checkpoint. Neither that age nor the distance of the lost version from
    the checkpoint may exceed `max_staleness`; a synchronous run so takes the groups of the step it was killed in only.
    """

    def __init__(
        self, folder: str | Path, *, run_attempt: int, version: int, max_staleness: int, fingerprint: str
    ) -> None:
        self.max_staleness = max_staleness
        self.faults: list[str] = []
        """The parts that cannot be read or are another run's, file by file."""
        self.groups = self.replies = 0
        """Taken so far."""
        self._sampled: dict[str, Sampled] = {}
        self._replies: dict[tuple[str, str], Sampled] = {}
        self._steps: dict[tuple[str, str], dict[str, Any]] = {}
        branches: dict[int, int] = {run_attempt: version}
        for path in sorted(Path(folder).glob(f"*{SUFFIX}"), reverse=True):
            records, fault = read_file(path)
            if fault:
                self.faults.append(fault)
            attempt = _run_attempt_of(path)
            if attempt >= run_attempt or not records:
                continue
            opened = records[0].event
            branches.setdefault(attempt, opened["version"])
            if opened["fingerprint"] != fingerprint:
                groups = sum(record.event["event"] == "accepted" for record in records)
                self.faults.append(f"{path.name} is of a run with other settings, its {groups} groups are not used")
                continue
            # A process that began later, at an earlier version, has thrown away what was trained since.
            branch = min(start for other, start in branches.items() if other > attempt)
            for record in reversed(records):
                event, sampled = record.event, Sampled(record=record, branch=branch)
                # Files and records are read newest first, so the first one of a key is the one that counts.
                if event["event"] == "accepted":
                    self._sampled.setdefault(event["key"], sampled)
                elif event["event"] == "replied" and event["key"] not in self._sampled:  # else the group came of it
                    self._replies.setdefault((event["key"], event["request"]), sampled)
                elif event["event"] == "stepped" and event["key"] not in self._sampled:
                    self._steps.setdefault((event["key"], event["name"]), event["step"])

    def __len__(self) -> int:
        return len(self._sampled)

    def take(self, key: str, version: int) -> TrajectoryBatch | None:
        """Return the group sampled under `key`, once, if it is young enough for a trainer at `version`."""
        sampled = self._sampled.pop(key, None)
        if sampled is None or not self._is_young(sampled, version):
            return None
        group = sampled.record.group()
        # A version above the branch is one that this run has, or will have, with other weights.
        group["versions"] = group["versions"].clamp(max=sampled.branch)
        self.groups += 1
        return group

    def take_reply(self, key: str, request: str, version: int) -> LLMResponse | None:
        """Return the reply to that request of the unfinished episode, once, under the same conditions."""
        sampled = self._replies.pop((key, request), None)
        if sampled is None or not self._is_young(sampled, version):
            return None
        reply = sampled.record.reply()
        versions = Runs(reply.sampled.versions.values.clamp(max=sampled.branch), reply.sampled.versions.lengths)
        reply.sampled = dataclasses.replace(reply.sampled, versions=versions)
        self.replies += 1
        return reply

    def take_step(self, key: str, name: str) -> dict[str, Any] | None:
        """Return what the world of the unfinished episode did there. Of the replies' tokens: if these are taken."""
        return self._steps.pop((key, name), None)

    def _is_young(self, sampled: Sampled, version: int) -> bool:
        if not sampled.record.event["versions"]:
            return False
        oldest, newest = sampled.record.event["versions"]
        age = version - min(oldest, sampled.branch)
        return bool(0 <= age <= self.max_staleness and newest - sampled.branch <= self.max_staleness)


@dataclass(frozen=True)
class JournaledEpisode:
    """One episode's part of the journals: an EpisodeRecord.

    A reply has the name of its request: prompt tokens, options, sample, and how many like it came before in its
    episode. So each turn gets its own reply whatever was finished first, and a turn whose prompt came out differently
    this time, such as by a tool's other answer, gets a new one.
    """

    data: dict[str, Any]
    restored: Restored | None
    journal: RolloutJournal

    def take_reply(self, name: str, version: int) -> LLMResponse | None:
        return None if self.restored is None else self.restored.take_reply(self.data["sample_key"], name, version)

    def keep_reply(self, name: str, reply: LLMResponse) -> None:
        self.journal.replied(self.data, name, reply)

    def take_step(self, name: str) -> dict[str, Any] | None:
        step = None if self.restored is None else self.restored.take_step(self.data["sample_key"], name)
        if step is not None:
            self.keep_step(name, step)  # for the process after this one
        return step

    def keep_step(self, name: str, step: dict[str, Any]) -> None:
        self.journal.stepped(self.data, name, step)


@dataclass(frozen=True)
class Records:
    """What an executor asks of the journals. journal: None where replies are not kept."""

    restored: Restored | None = None
    journal: RolloutJournal | None = None

    def group(self, data: dict[str, Any], version: int) -> TrajectoryBatch | None:
        """Return the group of this prompt that an earlier process finished, once, if it is young enough."""
        return None if self.restored is None else self.restored.take(data["sample_key"], version)

    def of(self, data: dict[str, Any]) -> JournaledEpisode | None:
        return None if self.journal is None else JournaledEpisode(data, self.restored, self.journal)


NO_RECORDS = Records()


def consumed_by_step(folder: str | Path) -> Iterator[tuple[int, list[int]]]:
    """Yield (step, prompts) of every batch that the run's present weights were trained on, of all attempts and ranks.

    A batch of a step that a later process repeated is not among them.
    """
    attempts: dict[int, tuple[int, list[dict[str, Any]]]] = {}
    for path in sorted(Path(folder).glob(f"*{SUFFIX}")):
        events = [record.event for record in read_file(path)[0]]
        if events:
            _, batches = attempts.setdefault(_run_attempt_of(path), (events[0]["first_step"], []))
            batches += [event for event in events if event["event"] == "consumed"]
    for attempt, (_, batches) in sorted(attempts.items()):
        # What it trained from there on, a later attempt has done again.
        end = min((first for other, (first, _) in attempts.items() if other > attempt), default=None)
        yield from ((b["step"], b["prompts"]) for b in batches if end is None or b["step"] < end)


# -- who writes it: one process per rollout rank, and none once another process has resumed the run


def wait_for_owners(folder: str | Path, patience_s: float = PATIENCE_S) -> None:
    """Return once nobody writes the journal in `folder`; BlockingIOError names whoever still does after a while."""
    for path in sorted(Path(folder).glob(f"*{LOCK_SUFFIX}")):
        os.close(_lock(path, patience_s))


def take_lock(folder: str | Path, rank: int, patience_s: float = PATIENCE_S) -> int:
    """Return an open file that holds the lock of a rollout rank's journal until its last copy is closed.

    A trainer hands it to its rollout process, which has it from birth to death, whatever happens to either.

    BlockingIOError where another process keeps it.
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
