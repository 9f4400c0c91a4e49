"""What a file of rows may hold, and how it says what it may not."""

import pytest

from megatron_rl.data.data_files import read_rows


def rows_of(tmp_path, content):
    (tmp_path / "rows.jsonl").write_bytes(content)
    return read_rows(str(tmp_path / "rows.jsonl"), key="data.train")


def test_files_of_other_systems_are_read(tmp_path):
    assert rows_of(tmp_path, b'\xef\xbb\xbf{"a": 1}\r\n\r\n{"a": "\xe2\x80\xa8"}\r\n') == [{"a": 1}, {"a": "\u2028"}]


@pytest.mark.parametrize(
    ("line", "fault"),
    [
        (b'{"a": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", "not JSON .it is nested too deeply"),
        (b'{"a": "\xff"}', "not JSON .'utf-8' codec"),
        (b'{"a": NaN}', "not JSON .NaN is no JSON"),
        (b'{"a": -Infinity}', "not JSON .-Infinity is no JSON"),
        (b'{"a": 1, "b": 2, "a": 3}', "not JSON .an object has 'a' twice"),
        (b'{"a": {"b": 1, "b": 2}}', "not JSON .an object has 'b' twice"),
        (b'{"a": ' + b"9" * 5000 + b"}", "not JSON .Exceeds the limit"),
        (b'{"a": "\\ud800"}', "not JSON .'utf-8' codec can't encode"),
        (b"[1, 2]", "is a list; write one JSON object per line"),
        (b'"text"', "is a str; write one JSON object per line"),
        (b"\x00\x00", "not JSON"),
        ('{"a": 1}'.encode("utf-16-le"), "not JSON"),
    ],
)
def test_a_bad_row_is_named_with_its_line(tmp_path, line, fault):
    with pytest.raises(ValueError, match=f"data.train = '.*rows.jsonl', line 3: {fault}") as refused:
        rows_of(tmp_path, b'{"a": 1}\n\n' + line + b'\n{"a": 2}\n')
    assert "\n" not in str(refused.value) and len(str(refused.value)) < 400
