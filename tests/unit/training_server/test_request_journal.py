"""What is in a journal's file after it is opened again, also if the process ended while it wrote."""

import pytest

from megatron_rl.training_server.request_journal import JournalFile

RECORDS = [({"seq": 0, "kind": "create"}, b""), ({"seq": 1, "kind": "pass"}, b"\0body\n" * 100)]


def written(path):
    journal = JournalFile(path)
    for event, body in RECORDS:
        journal.add(event, body)
    journal.close()
    return path.read_bytes()


@pytest.mark.parametrize("lost", [0, 1, 300, 630])
def test_a_record_that_was_cut_off_is_dropped_and_the_next_one_follows_the_last_whole_one(lost, tmp_path):
    path = tmp_path / "a" / "file"
    content = written(path)
    path.write_bytes(content[: len(content) - lost])
    journal = JournalFile(path)
    assert journal.records == RECORDS[: 1 if lost else 2]
    journal.add({"seq": 2}, b"more")
    journal.close()
    assert JournalFile(path).records == [*RECORDS[: 1 if lost else 2], ({"seq": 2}, b"more")]


def test_what_follows_a_damaged_record_is_not_read(tmp_path):
    path = tmp_path / "file"
    content = bytearray(written(path))
    content[60] ^= 1
    path.write_bytes(content)
    assert JournalFile(path).records == RECORDS[:1]
