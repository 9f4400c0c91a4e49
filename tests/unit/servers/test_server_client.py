import pytest

from megatron_rl.servers.reply_check import lengths_of
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


@pytest.mark.parametrize(
    ("ends", "late", "lengths"),
    [
        ([2, 5], 1, [3, 2]),
        ([2], 1, [2]),
        ([2, 3, 5], 1, [3, 1, 1]),  # a span of one token, from an update right after another
        ([2, 3, 5], 0, [2, 1, 2]),
    ],
)
def test_step_that_was_under_way_at_a_pause_in_place_counts_for_the_weights_that_made_it(ends, late, lengths):
    assert lengths_of([{"end": end} for end in ends], ends[-1], late=late) == lengths
