import pytest

from megatron_rl.servers.reply_check import named_spans, spread
from megatron_rl.servers.server_http import ServerError, message_of
from megatron_rl.servers.server_info import parse_version


def test_versions_are_compared_as_numbers():
    assert parse_version("0.5.12.post1", "url") == (0, 5, 12)
    assert parse_version("0.5.9", "url") < parse_version("0.5.21", "url")
    with pytest.raises(ServerError, match="http://x/server_info: version = 'dev'"):
        parse_version("dev", "http://x")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b'{"error":{"message":"too long","code":400}}', "too long"),
        (b'{"error":"unknown field x"}', "unknown field x"),
        (b'{"object":"error","message":"bad shape","code":400}', "bad shape"),
        (b'{"success":false,"message":"no group"}', "no group"),
        (b"Not flushed", "Not flushed"),
        (b"", "(empty answer)"),
    ],
)
def test_message_is_found_in_every_shape_of_an_error(content, message):
    assert message_of(content) == message


def test_step_that_was_under_way_at_a_pause_in_place_counts_for_the_weights_that_made_it():
    spans = [{"version": "4", "start": 0, "end": 2}, {"version": "5", "start": 2, "end": 5}]
    assert spread([4, 5], [2, 5], 5, late=1).each().tolist() == [4, 4, 4, 5, 5]
    assert spread([4], [2], 2, late=1).each().tolist() == [4, 4]
    # A span of one token, from an update right after another.
    spans = [spans[0], {"version": "5", "start": 2, "end": 3}, {"version": "6", "start": 3, "end": 5}]
    assert spread([4, 5, 6], [2, 3, 5], 5, late=1).each().tolist() == [4, 4, 4, 5, 6]
    assert named_spans(spans, 5, late=1) == [("4", 3), ("5", 1), ("6", 1)]
    assert named_spans(spans, 5, late=0) == [("4", 2), ("5", 1), ("6", 2)]
