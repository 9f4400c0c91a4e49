"""The text of a reply that the embedded server streams: each part begins with the one before."""

from types import SimpleNamespace

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from megatron_rl.tools.embedded_server.protocol import reply_text
from megatron_rl.tools.embedded_server.reply_text import Text

ALPHABET = sorted(pre_tokenizers.ByteLevel.alphabet())
KINDS = {
    "bytes": (ALPHABET, decoders.ByteLevel()),
    "bytes as words": (
        [f"<0x{n:02X}>" for n in range(256)],
        decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()]),
    ),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("said", ["a 日本 b", "naïve", "👩‍👩‍👧 end", "é", "x\ufffdy"])
def test_half_a_character_is_held_back_in_a_stream_until_it_is_whole(kind, said, tmp_path):
    tokens, decoder = KINDS[kind]
    tokenizer = Tokenizer(models.WordLevel({token: number for number, token in enumerate(tokens)}, unk_token=tokens[0]))
    tokenizer.decoder = decoder
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    text = Text.load(tmp_path)
    byte_of = pre_tokenizers.ByteLevel(add_prefix_space=False)
    if kind == "bytes":
        ids = [tokenizer.token_to_id(letter) for word, _ in byte_of.pre_tokenize_str(said) for letter in word]
    else:
        ids = list(said.encode())
    params = SimpleNamespace(no_stop_trim=False, skip_special_tokens=True, stop=())
    request = SimpleNamespace(params=params, finish_reason=None)
    parts = [reply_text(request, ids[:count], False, text) for count in range(len(ids) + 1)]
    for earlier, later in zip(parts, [*parts[1:], said], strict=True):
        assert later.startswith(earlier), "a client appends what is new"
    assert reply_text(request, ids, True, text) == said
