"""The embedded server decodes ahead with a draft head: its replies are those without one, in fewer passes."""

import contextlib
import dataclasses
import math

import pytest
import torch
from safetensors.torch import load_file, save_file
from test_batcher import running as running_batcher

from megatron_rl.servers import reply_check
from megatron_rl.tools.embedded_server import protocol, server
from megatron_rl.tools.embedded_server.decoder_config import DecoderConfig
from megatron_rl.tools.embedded_server.drafting_decoder import DraftingDecoder
from megatron_rl.tools.embedded_server.hits import Hits, pass_time
from megatron_rl.tools.embedded_server.request import Request
from megatron_rl.tools.embedded_server.sampling import SamplingParams
from megatron_rl.tools.embedded_server.transformer import Decoder, KVCache, Span
from megatron_rl.weights.architecture import read_architecture
from megatron_rl.weights.draft_files import shapes_for, write_draft
from tests.kit.served_models import save_tiny_qwen
from tests.kit.tokenizers import make_tokenizer
from tests.kit.waiting import LIMIT_S

VOCAB, CONTEXT, GUESSES = 512, 128, 3
CPU = torch.device("cpu")


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # tiny matrices
    yield
    torch.set_num_threads(threads)


def write_random_head(folder, seed=0):
    arch, generator = read_architecture(folder), torch.Generator().manual_seed(seed)
    shapes = shapes_for(arch).items()
    tensors = {name: torch.randn(shape, generator=generator) * 0.1 for name, shape in shapes}
    write_draft(folder, tensors, arch)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = save_tiny_qwen(tmp_path_factory.mktemp("model"), make_tokenizer(), vocab_size=VOCAB, tied=True)
    write_random_head(folder)
    return folder


def decoder_of(folder, *, has_draft):
    config, made_by = DecoderConfig.read(folder), DraftingDecoder if has_draft else Decoder
    decoder = made_by(config, dtype=torch.float32, device=CPU, context_length=CONTEXT + GUESSES)
    decoder.load(folder)
    return decoder


@pytest.fixture(scope="module")
def plain(folder):
    return decoder_of(folder, has_draft=False)


@pytest.fixture(scope="module")
def drafting(folder):
    return decoder_of(folder, has_draft=True)


@pytest.fixture(scope="module")
def foreseeable(folder, tmp_path_factory):
    """A model whose next token depends on the last one only, and a head that knows its distribution exactly."""
    target = save_tiny_qwen(tmp_path_factory.mktemp("foreseeable"), make_tokenizer(), vocab_size=VOCAB)
    write_random_head(target)
    for path in (target / "model.safetensors", target / "draft" / "model.safetensors"):
        weights = load_file(path)
        for name, weight in weights.items():
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                weight.zero_()  # a layer then passes on what it gets
            if name.endswith("norm.weight"):
                weight.fill_(1.0)
            if name == "model.embed_tokens.weight":
                weight[weight.eq(0).all(-1)] = 1.0  # the padding's row
                weight /= weight.square().mean(-1, keepdim=True).sqrt()  # the final norm then changes nothing
            if name == "lm_head.weight":
                weight /= 2.0  # many tokens are likely
            if name.endswith("input_proj.weight"):
                weight.copy_(torch.eye(64, 128).roll(64, 1))  # the embedding of the token behind the state
        save_file(weights, path, metadata={"format": "pt"})
    return decoder_of(target, has_draft=True)


class Always(Hits):
    """Guesses as many tokens as it may, whatever came of it."""

    def best_count(self, requests, most):
        return max(most, 0)


@contextlib.contextmanager
def running(decoder, draft_tokens, hits=Always, **options):
    sizes = {"context_length": CONTEXT, "max_total_tokens": 8 * CONTEXT, "tokens_per_pass": 1024}
    with running_batcher(decoder, draft_tokens=draft_tokens, **(sizes | options)) as batcher:
        batcher.hits = hits()
        yield batcher


def prompt_of(length, seed=0):
    return torch.randint(8, VOCAB, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def asked(prompts, **params):
    params = {"max_new_tokens": 20, "ignore_eos": True} | params
    return [
        Request(rid=f"{n}", prompt=prompt, params=SamplingParams.parse({"sampling_seed": n} | params, VOCAB))
        for n, prompt in enumerate(prompts)
    ]


def replies(decoder, draft_tokens, prompts, options=None, tells_support=False, **params):
    requests = asked(prompts, **params)
    for request in requests:
        request.tells_support = tells_support
    with running(decoder, draft_tokens, **(options or {})) as batcher:
        futures = [batcher.submit(request) for request in requests]
        return [future.result(LIMIT_S) for future in futures], batcher.stats


COMMON = prompt_of(30)
PROMPTS = [*(prompt_of(length, length) for length in (1, 2, 9, 17)), COMMON, COMMON, [*COMMON[:20], 9, 9]]
"""Prompts shorter than the guesses, and some with a prefix whose keys and states are reused."""
KINDS = {
    "greedy": {"temperature": 0},
    "sampled": {},
    "hot": {"temperature": 1.7, "max_new_tokens": 7},
    "cut_off": {"top_k": 20, "top_p": 0.9, "min_p": 0.01},
    "penalised": {"frequency_penalty": 0.5, "repetition_penalty": 1.3, "logit_bias": {"17": 2.0}, "temperature": 0},
    "one_token": {"max_new_tokens": 1},
    "stopped": {"stop_token_ids": list(range(60)), "ignore_eos": False, "min_new_tokens": 3},
}


@pytest.mark.parametrize("kind", KINDS)
def test_replies_are_those_without_a_draft_head(plain, drafting, kind):
    tells = kind == "cut_off"
    expected, _ = replies(plain, 0, PROMPTS, tells_support=tells, **KINDS[kind])
    found, _ = replies(drafting, GUESSES, PROMPTS, tells_support=tells, **KINDS[kind])
    for one, other in zip(found, expected, strict=True):
        assert one.output == other.output and one.finish_reason == other.finish_reason
        assert one.logprobs == pytest.approx(other.logprobs, abs=1e-5)
        assert [set(support) for support in one.supports] == [set(support) for support in other.supports]


def test_replies_are_the_same_where_rows_are_taken_away_and_the_context_is_full(plain, drafting):
    full = {"max_new_tokens": CONTEXT - 100}
    prompts = [prompt_of(100, seed) for seed in range(3)]
    cramped = {"max_total_tokens": 2 * CONTEXT, "max_running_requests": 4}
    expected, _ = replies(plain, 0, prompts, **full)
    found, _ = replies(drafting, GUESSES, prompts, cramped, **full)
    assert sum(request.retractions for request in found) > 0, "the case that was to be tested"
    assert [request.output for request in found] == [request.output for request in expected]


@pytest.mark.parametrize("kind", [{"temperature": 0}, {"temperature": 0.8}, {"top_k": 5}], ids=str)
def test_a_head_that_knows_the_policy_is_always_right(foreseeable, kind):
    prompts = PROMPTS[2:]  # a head knows no embedding at position 0
    found, stats = replies(foreseeable, GUESSES, prompts, max_new_tokens=20, **kind)
    for request in found:
        info = protocol.meta_info(request, request.output, True, "0")
        assert (info["spec_verify_ct"], info["spec_num_correct_drafts"]) == (5, 15), "20 tokens"
        assert info["spec_accept_length"] == 1 + GUESSES
    if "temperature" not in kind or kind["temperature"]:
        assert len({tuple(request.output) for request in found}) == len(found), "they were sampled"
    assert (stats.guessed_passes, stats.right_guesses) == (5 * len(found), 15 * len(found))


def test_nothing_is_guessed_while_many_requests_run(plain, drafting, foreseeable):
    # Six requests would read 12 tokens with one guess each. The one that is left alone may guess three.
    few = {"tokens_per_pass": 11}
    lengths = [5] * 5 + [60]
    prompts = [prompt_of(20, seed) for seed in range(6)]

    def run(decoder, draft_tokens, **options):
        requests = asked(prompts)
        requests = [
            Request(rid=r.rid, prompt=r.prompt, params=dataclasses.replace(r.params, max_new_tokens=length))
            for r, length in zip(requests, lengths, strict=True)
        ]
        with running(decoder, draft_tokens, **options) as batcher:
            batcher.pause("in_place").result(LIMIT_S)  # so that all begin in the same turn
            futures = [batcher.submit(request) for request in requests]
            batcher.resume().result(LIMIT_S)
            return [future.result(LIMIT_S) for future in futures], batcher

    (*_, alone), _ = run(foreseeable, GUESSES, **few)
    assert (alone.guessed_passes, alone.right_guesses) == (math.ceil(55 / 4), 55 - 14)
    expected, _ = run(plain, 0)
    found, batcher = run(drafting, GUESSES, **few)
    assert [request.output for request in found] == [request.output for request in expected]
    # The head has read what the model had read before it was asked for guesses.
    (last,) = [r for r in found if len(r.output) == 60]
    (row,) = [n for n in range(len(batcher.kv_rows)) if batcher.kv_rows[n].tokens == last.tokens[: last.filled]]
    fresh, count = cache_of(drafting), last.drafted - GUESSES - 1
    tokens = torch.tensor(last.tokens)
    with torch.inference_mode():
        drafting.prefill(tokens[:count], [Span(0, 0, count)], fresh, tokens[1 : count + 1])
    torch.testing.assert_close(batcher.cache.keys[-1][row, :, :count], fresh.keys[-1][0, :, :count], atol=1e-4, rtol=0)


def test_a_head_that_is_never_right_is_soon_not_asked_until_new_weights_arrive(plain, drafting):
    prompts = [prompt_of(20)] * 4
    expected, _ = replies(plain, 0, prompts, max_new_tokens=100)
    with running(drafting, GUESSES, hits=Hits) as batcher:
        batcher.hits.count(0, 300)
        futures = [batcher.submit(request) for request in asked(prompts, max_new_tokens=100)]
        found = [future.result(LIMIT_S) for future in futures]
        assert [request.output for request in found] == [request.output for request in expected]
        assert batcher.stats.guessed_passes == 0
        for version in "123456":
            batcher.call(lambda version=version: batcher.weights_changed(version)).result(LIMIT_S)
        (request,) = asked(prompts[:1])
        assert batcher.submit(request).result(LIMIT_S).guessed_passes > 0


def test_as_many_tokens_are_guessed_as_make_tokens_arrive_fastest():
    hits = Hits()
    hits._right, hits._tried = 600.0, 1000.0
    assert hits.share == pytest.approx(0.6)
    assert pass_time(1, 0) == pytest.approx(0.7 + 1 / 24) and pass_time(2, 3) == pytest.approx(1 + 8 / 24 + 0.21)
    # By hand, tokens / time. 1 request: 1 / 0.742, 1.96 / 1.265, 2.176 / 1.377. 4 requests: 1.96 / 1.64, 2.176 / 1.877.
    # 16 requests: 1 / 1.667, 1.6 / 2.403, 1.96 / 3.14. 64 requests: 1 / 3.667, 1.6 / 6.403.
    assert [hits.best_count(requests, 3) for requests in (1, 4, 16, 64)] == [3, 2, 1, 0]
    assert [hits.best_count(1, most) for most in (2, 1, 0, -1)] == [2, 1, 0, 0]


def test_a_reply_without_a_draft_head_tells_of_no_passes(plain):
    (request, *_), _ = replies(plain, 0, PROMPTS)
    assert not any(key.startswith("spec_") for key in protocol.meta_info(request, request.output, True, "0"))


def test_a_head_is_loaded_from_its_folder_or_from_the_models_files(folder, drafting, tmp_path):
    own = load_file(folder / "draft" / "model.safetensors")
    for name, tensor in own.items():
        assert torch.equal(drafting.parameters[f"draft.{name}"], tensor), name
    (tmp_path / "config.json").write_bytes((folder / "config.json").read_bytes())
    model = load_file(folder / "model.safetensors")
    save_file(model, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match="16 tensors are missing, the first is draft.model.mtp_layers.0.final"):
        decoder_of(tmp_path, has_draft=True)
    published = {f"draft.{name}": tensor for name, tensor in own.items()}
    save_file(model | published, tmp_path / "model.safetensors")
    assert decoder_of(tmp_path, has_draft=True).checksums() == drafting.checksums()
    with pytest.raises(ValueError, match="draft.model.mtp_layers.0.*: the qwen3 model has no such tensor"):
        decoder_of(tmp_path, has_draft=False)


def test_a_server_is_started_with_both_options_or_none_and_tells_them(folder):
    given = ["--speculative-algorithm", "EAGLE", "--speculative-num-steps", "2", "--tokens-per-pass", "9"]
    made = server.build_server(folder, server.parser().parse_args([str(folder), *given]))
    assert isinstance(made.batcher.model, DraftingDecoder) and made.batcher.tokens_per_pass == 9
    assert made.batcher.draft_tokens == made.information.options["speculative_num_steps"] == 2
    with pytest.raises(ValueError, match="--speculative-num-steps: must be given together"):
        server.build_server(folder, server.parser().parse_args([str(folder), *given[:2]]))
    with pytest.raises(ValueError, match="--speculative-num-steps 0: must be at least 1"):
        server.build_server(folder, server.parser().parse_args([str(folder), *given[:3], "0"]))


@pytest.mark.parametrize("told", [(5, 15), (0, 0), (None, 3), (True, 1), (3, -1), (21, 0)], ids=str)
def test_counts_of_guesses_that_cannot_be_are_left_out(told):
    found = reply_check.guesses_of({"spec_verify_ct": told[0], "spec_num_correct_drafts": told[1]}, 20)
    good = told in ((5, 15), (0, 0))
    assert found == ({"guessed_passes": told[0], "right_guesses": told[1]} if good else {})


@pytest.mark.thorough
@pytest.mark.parametrize("kind", [{}, {"temperature": 0.5, "top_k": 9}], ids=str)
def test_pairs_of_sampled_tokens_have_the_policys_distribution(plain, drafting, kind):
    # Chi-square of 20,000 pairs of tokens, of which the second is mostly guessed wrong and sometimes right.
    count, likely = 20_000, 12
    found, _ = replies(drafting, GUESSES, [COMMON] * count, {"max_running_requests": 64, "max_total_tokens": 64 * 128},
                       max_new_tokens=2, **kind)  # fmt: skip
    observed = {}
    for request in found:
        observed[tuple(request.output)] = observed.get(tuple(request.output), 0) + 1
    # The exact distribution, from log-probabilities that a server without a head gives for each first token.
    support = {"temperature": kind.get("temperature", 1.0), "top_k": kind.get("top_k", -1)}
    first = exact(plain, COMMON, **support)
    expected = {}
    for token in first.topk(likely).indices.tolist():
        second = exact(plain, [*COMMON, token], **support)
        for other in second.topk(likely).indices.tolist():
            if (share := float(first[token] * second[other]) * count) >= 5:
                expected[token, other] = share
    rest = count - sum(expected.values())
    pairs = [(observed.get(pair, 0), share) for pair, share in expected.items()]
    if rest > 5:
        pairs.append((count - sum(seen for seen, _ in pairs), rest))
    statistic = sum((seen - share) ** 2 / share for seen, share in pairs)
    freedom = len(pairs) - 1
    assert freedom > 5
    # Five standard deviations of the statistic, which is about normal.
    assert abs(statistic - freedom) < 5 * math.sqrt(2 * freedom)


def cache_of(decoder):
    cache = KVCache(decoder.config, torch.float32, CPU, has_draft=isinstance(decoder, DraftingDecoder))
    cache.resize(1, CONTEXT, [])
    return cache


def exact(decoder, tokens, *, temperature, top_k):
    hidden = decoder.prefill(torch.tensor(tokens), [Span(0, 0, len(tokens))], cache_of(decoder))[-1:]
    probs = (decoder.logits(hidden)[0].double() / temperature).softmax(-1)
    if top_k > 0:
        probs = torch.zeros_like(probs).scatter(0, probs.topk(top_k).indices, probs.topk(top_k).values)
    return probs / probs.sum()
