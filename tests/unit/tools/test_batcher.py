"""The embedded server below HTTP: model, sampling and batcher, against transformers and against themselves."""

import dataclasses
import functools
import json
import math
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
import transformers

from megatron_rl import routes
from megatron_rl.ops import VocabShard, lm_head_logprobs, packed_logprobs
from megatron_rl.tools.embedded_server import sampling
from megatron_rl.tools.embedded_server.batcher import Batcher
from megatron_rl.tools.embedded_server.decoder_config import DEFAULTS, DecoderConfig, inverse_frequencies
from megatron_rl.tools.embedded_server.request import Request
from megatron_rl.tools.embedded_server.sampling import SamplingParams
from megatron_rl.tools.embedded_server.transformer import Decoder, KVCache, Span
from megatron_rl.types import Trajectory, TrajectoryBatch
from tests.kit.waiting import LIMIT_S
from tests.megatron.routed import RoutedModel

VOCAB, CONTEXT = 512, 256
CPU = torch.device("cpu")
# Layer 0 is a mixture, layer 1 is dense.
EXPERTS = {
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 40,
    "norm_topk_prob": True,
    "mlp_only_layers": [1],
}
FAMILIES = {
    "llama": (transformers.LlamaConfig, transformers.LlamaForCausalLM),
    "mistral": (functools.partial(transformers.MistralConfig, sliding_window=None), transformers.MistralForCausalLM),
    "qwen2": (transformers.Qwen2Config, transformers.Qwen2ForCausalLM),
    "qwen3": (transformers.Qwen3Config, transformers.Qwen3ForCausalLM),
    "qwen3_moe": (functools.partial(transformers.Qwen3MoeConfig, **EXPERTS), transformers.Qwen3MoeForCausalLM),
    "qwen3_moe_raw_weights": (
        functools.partial(transformers.Qwen3MoeConfig, **EXPERTS | {"norm_topk_prob": False}),
        transformers.Qwen3MoeForCausalLM,
    ),
}


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # tiny matrices
    yield
    torch.set_num_threads(threads)


def hf_model(family: str, *, tied: bool = False, **changes):
    config_class, model_class = FAMILIES[family]
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "vocab_size": VOCAB, "head_dim": 16}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": CONTEXT}
    config = config_class(
        **(sizes | heads | {"tie_word_embeddings": tied, "initializer_range": 0.3, "eos_token_id": 7} | changes)
    )
    torch.manual_seed(0)
    model = model_class(config).eval()
    with torch.no_grad():
        for name, tensor in model.named_parameters():
            if "norm" in name or name.endswith("bias"):  # transformers starts these at 1 and 0, which hides mistakes
                tensor.add_(torch.randn_like(tensor) * 0.3)
    return model


def load(model, folder) -> Decoder:
    model.save_pretrained(folder)
    decoder = Decoder(DecoderConfig.read(folder), dtype=torch.float32, device=CPU, context_length=CONTEXT)
    decoder.load(folder)
    return decoder


@pytest.fixture(scope="module")
def hf():
    return hf_model("qwen3")


@pytest.fixture(scope="module")
def decoder(hf, tmp_path_factory) -> Decoder:
    return load(hf, tmp_path_factory.mktemp("qwen3"))


@contextmanager
def running(decoder: Decoder, **options) -> Iterator[Batcher]:
    defaults = {"max_running_requests": 8, "context_length": CONTEXT, "max_total_tokens": 8 * CONTEXT}
    batcher = Batcher(decoder, **(defaults | options))
    thread = threading.Thread(target=batcher.run, daemon=True)
    thread.start()
    try:
        yield batcher
    finally:
        batcher.stop()
        thread.join(LIMIT_S)
        assert not thread.is_alive()


def make_request(
    prompt: list[int], rid: str = "r", logprob_start: int | None = None, on_progress=None, **params
) -> Request:
    params = {"max_new_tokens": 16, "ignore_eos": True} | params
    return Request(
        rid=rid,
        prompt=prompt,
        params=SamplingParams.parse(params, VOCAB),
        logprob_start=logprob_start,
        on_progress=on_progress,
    )


def finish(batcher: Batcher, *requests: Request) -> list[Request]:
    futures = [batcher.submit(request) for request in requests]
    return [future.result(LIMIT_S) for future in futures]


def prompt_of(length: int, seed: int = 0) -> list[int]:
    return torch.randint(8, VOCAB, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


class Gate:
    """Stops the batcher's thread when a request has `tokens` output tokens, until `open`."""

    def __init__(self, tokens: int):
        self.tokens, self.reached, self.go = tokens, threading.Event(), threading.Event()

    def __call__(self, request: Request) -> None:
        if len(request.logprobs) == self.tokens:
            self.reached.set()
            assert self.go.wait(LIMIT_S)


# The model


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_equal_those_of_transformers(family, tied, tmp_path):
    reference = hf_model(family, tied=tied)
    decoder, cache, ids = load(reference, tmp_path), None, prompt_of(50)
    cache = KVCache(decoder.config, torch.float32, CPU)
    cache.resize(1, 64, [])
    with torch.inference_mode():
        ours = decoder.logits(decoder.prefill(torch.tensor(ids), [Span(0, 0, 50)], cache))
        theirs = reference(torch.tensor([ids])).logits[0]
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5 * theirs.abs().max().item())


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "linear", "factor": 3.0},
        {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
    ],
    ids=lambda rope: rope["rope_type"],
)
def test_scaled_rope_equals_that_of_transformers(rope):
    model = hf_model("llama", rope_parameters=rope | {"rope_theta": 500.0})
    torch.testing.assert_close(inverse_frequencies(rope | {"rope_theta": 500.0}, 16), model.model.rotary_emb.inv_freq)


def test_unknown_rope_is_refused_by_name():
    with pytest.raises(ValueError, match="rope_type = 'yarn'"):
        inverse_frequencies({"rope_type": "yarn", "rope_theta": 1e4}, 16)


@pytest.mark.parametrize("kind", DEFAULTS)
def test_a_key_that_the_servers_config_json_lacks_has_the_value_of_transformers_class(kind, tmp_path):
    fields = {field.name: field.default for field in dataclasses.fields(transformers.CONFIG_MAPPING[kind])}
    assert {key: fields[key] for key in DEFAULTS[kind]} == DEFAULTS[kind]
    (tmp_path / "config.json").write_text(json.dumps({"model_type": kind, "sliding_window": None}))
    assert DecoderConfig.read(tmp_path).max_positions == fields["max_position_embeddings"]


@pytest.mark.parametrize(
    "said,of_generation,ends",
    [({}, None, {2}), ({"eos_token_id": None}, None, set()), ({"eos_token_id": 7}, [7, 9], {7, 9}), ({}, 9, {2, 9})],
)
def test_the_ends_of_both_files_end_a_reply_as_in_sglang(said, of_generation, ends, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"} | said))
    if of_generation is not None:
        (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": of_generation}))
    assert DecoderConfig.read(tmp_path).eos_token_ids == ends
    assert transformers.AutoConfig.from_pretrained(tmp_path).eos_token_id == said.get("eos_token_id", 2)


def test_unknown_model_type_is_refused_by_name(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "mamba"}')
    with pytest.raises(ValueError, match="model_type = 'mamba'"):
        DecoderConfig.read(tmp_path)


def test_window_within_the_context_is_refused(tmp_path):
    hf_model("mistral", sliding_window=CONTEXT // 2).config.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=f"sliding_window = {CONTEXT // 2}: the embedded server attends to all"):
        DecoderConfig.read(tmp_path)


def test_decoding_ragged_rows_equals_the_full_forward(decoder):
    """Rows 1, 2 and 5 of 6 (a gap), of lengths 3, 30 and 17; row 2 is prefilled in two pieces."""
    rows, lengths = [1, 2, 5], [3, 30, 17]
    prompts = [prompt_of(length + 4, seed=length) for length in lengths]
    cache = KVCache(decoder.config, torch.float32, CPU)
    cache.resize(6, 64, [])
    with torch.inference_mode():
        whole = []
        for prompt in prompts:
            alone = KVCache(decoder.config, torch.float32, CPU)
            alone.resize(1, 64, [])
            whole.append(decoder.prefill(torch.tensor(prompt), [Span(0, 0, len(prompt))], alone))
        pieces = [(1, 0, 3), (2, 0, 20), (5, 0, 17)]
        packed = [token for prompt, (_, _, count) in zip(prompts, pieces, strict=True) for token in prompt[:count]]
        decoder.prefill(torch.tensor(packed), [Span(*piece) for piece in pieces], cache)
        decoder.prefill(torch.tensor(prompts[1][20:30]), [Span(2, 20, 10)], cache)
        for k in range(4):
            at = [length + k for length in lengths]
            hidden = decoder.decode([p[i] for p, i in zip(prompts, at, strict=True)], at, rows, cache)
            torch.testing.assert_close(
                hidden, torch.stack([w[i] for w, i in zip(whole, at, strict=True)]), rtol=1e-4, atol=1e-4
            )


@pytest.mark.slow
def test_a_request_has_the_routes_of_all_rows_that_it_read_also_of_a_prefix_that_it_took_over(tmp_path):
    model = hf_model("qwen3_moe")
    decoder, common = load(model, tmp_path), prompt_of(70)
    routed = RoutedModel(model, tmp_path)
    with running(decoder, max_running_requests=2) as batcher:
        asked = [make_request(common + [9, 10, n], f"r{n}", max_new_tokens=40 * n) for n in range(1, 5)]
        for number, request in enumerate(asked):
            request.routes_from = 5 * number
        replies = finish(batcher, *asked)
    assert sum(reply.cached_tokens > 0 for reply in replies) >= 2
    for reply in replies:
        batch = TrajectoryBatch.from_trajectories([[trajectory_of(reply)]])
        expected, form = routed.routes(batch)[reply.routes_from : -1], routed.form
        found = reply.routes[:, list(form.layers)]
        assert not reply.routes[:, 1].any(), "the dense layer"
        assert torch.equal(routes.experts_of(found), routes.experts_of(expected))
        torch.testing.assert_close(routes.weights_of(found), routes.weights_of(expected), rtol=0, atol=1e-5)


def trajectory_of(reply: Request) -> Trajectory:
    tokens, count = torch.tensor(reply.tokens), len(reply.tokens)
    mask = torch.arange(count) >= len(reply.prompt)
    return Trajectory(
        input_ids=tokens, loss_mask=mask, logprobs=torch.zeros(count), versions=mask.long() - 1, reward=0.0
    )


def test_greedy_reply_equals_generate_of_transformers(hf, decoder):
    prompt = prompt_of(20)
    out = hf.generate(
        torch.tensor([prompt]), max_new_tokens=30, do_sample=False, output_logits=True, return_dict_in_generate=True,
        eos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    theirs = out.sequences[0, 20:].tolist()
    logprobs = torch.cat(out.logits).log_softmax(-1).gather(1, out.sequences[0, 20:, None])[:, 0]
    with running(decoder) as batcher:
        (reply,) = finish(batcher, make_request(prompt, max_new_tokens=30, temperature=0))
    assert reply.output == theirs
    torch.testing.assert_close(torch.tensor(reply.logprobs), logprobs, rtol=1e-4, atol=1e-4)


def test_a_weight_written_by_name_is_the_one_the_forward_pass_reads(hf, tmp_path):
    decoder = load(hf, tmp_path)
    before = decoder.checksums()
    decoder.write("model.layers.1.self_attn.k_proj.weight", torch.zeros(32, 64))
    after = decoder.checksums()
    assert [name for name in before if before[name] != after[name]] == ["model.layers.1.self_attn.k_proj.weight"]
    assert decoder.layers[1].qkv[64:96].eq(0).all() and decoder.layers[1].qkv[:64].ne(0).any()
    assert set(before) == {name for name, _ in hf.named_parameters()}


# Sampling


def test_hash_is_splitmix64():
    assert sampling.mix64(0) == 0xE220A8397B1DCDAF  # first output of the published generator with seed 0


def test_uniforms_of_neighbouring_seeds_and_steps_look_independent():
    values = torch.tensor([[sampling.uniform(sampling.key_of(seed, k)) for k in range(100)] for seed in range(100)])
    counts = torch.histc(values, bins=50, min=0, max=1)
    assert ((counts - 200) ** 2 / 200).sum() < 100  # chi-square, 49 degrees of freedom: mean 49, deviation 10
    for shifted in (values[1:], values[:, 1:]):
        pair = torch.stack([values[: len(shifted), : shifted.shape[1]].flatten(), shifted.flatten()])
        assert torch.corrcoef(pair)[0, 1].abs() < 0.04


# 20: all tokens race. 3: most of them share a time, and a uniform number decides among these.
@pytest.mark.parametrize("racing", [20, 3])
def test_draws_follow_the_softmax_at_the_temperature(monkeypatch, racing):
    monkeypatch.setattr(sampling, "RACING", racing)
    logits, draws = torch.randn(20, generator=torch.Generator().manual_seed(1)) * 2, 4000
    params = [SamplingParams(temperature=0.7)] * draws
    keys = [sampling.key_of(5, k) for k in range(draws)]
    ids, logprobs, _ = sampling.sample(logits.repeat(draws, 1), params, keys)
    expected = (logits / 0.7).softmax(-1)
    assert torch.tensor(logprobs).sub(expected.log()[ids]).abs().max() < 1e-5
    counts = torch.bincount(torch.tensor(ids), minlength=20)
    likely = expected * draws >= 5
    chi_square = ((counts - expected * draws) ** 2 / (expected * draws))[likely].sum()
    assert chi_square < 60  # at most 19 degrees of freedom: mean 19, deviation 6


def test_the_last_possible_uniform_draws_a_possible_token():
    weights = torch.tensor([[1.0, 1.0, 0.0, 1.0, 0.0]])
    for uniform, token in ((1 - 2.0**-53, 3), (0.0, 0)):
        assert sampling._invert_cdf(weights, torch.tensor([uniform], dtype=torch.float64)).tolist() == [token]


def test_a_heads_race_has_the_policys_times_and_so_its_winner(monkeypatch):
    monkeypatch.setattr(sampling, "RACING", 300)
    logits = torch.randn(500, 700, generator=torch.Generator().manual_seed(4))
    logits[:, 300:] -= 4.0  # few of these are sampled, and none can be guessed
    keys = [sampling.key_of(7, k) for k in range(500)]
    params = [SamplingParams()] * 500
    ids, _ = sampling.choose(logits, params, keys)
    guesses, _ = sampling.choose(logits[:, :300], params, keys)
    assert torch.equal(ids == guesses, ids < 300) and 0 < (ids >= 300).sum() < 50
    # A guess of a similar distribution is right with nearly the share of probability that the two have in common.
    other = logits + 0.5 * torch.randn(500, 700, generator=torch.Generator().manual_seed(5))
    guesses, _ = sampling.choose(other[:, :300], params, keys)
    common = torch.minimum(logits.softmax(-1), other.softmax(-1)).sum(-1).mean()
    assert common / (2 - common) - 0.07 < (ids == guesses).float().mean() < common + 0.07


# 40: the short sort decides; 3000 > 1024 with flat probabilities: the full sort is needed.
@pytest.mark.slow
@pytest.mark.parametrize("vocab_size", [40, 3000])
@pytest.mark.parametrize("top_k, top_p, min_p", [(5, 1, 0), (-1, 0.6, 0), (-1, 1, 0.3), (8, 0.5, 0.1), (-1, 0.95, 0)])
def test_filters_equal_a_plain_reference(vocab_size, top_k, top_p, min_p):
    probs = (torch.randn(3, vocab_size, generator=torch.Generator().manual_seed(2)) * 0.1).softmax(-1)
    kept = sampling.filter_probs(probs, [SamplingParams(top_k=top_k, top_p=top_p, min_p=min_p)] * 3)
    for row, kept_row in zip(probs.tolist(), kept.tolist(), strict=True):
        before, survivors = 0.0, set()
        for rank, i in enumerate(sorted(range(vocab_size), key=lambda i: -row[i])):
            if (top_k < 0 or rank < top_k) and before <= top_p and row[i] >= min_p * max(row):
                survivors.add(i)
            before += row[i]
        wrong = survivors ^ {i for i, p in enumerate(kept_row) if p > 0}
        assert len(wrong) <= 1  # rounding of the running sum may move the last one
        assert all(p in (0.0, row[i]) for i, p in enumerate(kept_row))


def test_filtered_sampling_reports_the_unfiltered_logprob():
    logits = torch.tensor([[2.0, 1.0, 0.0]])
    ids, logprobs, _ = sampling.sample(logits.clone(), [SamplingParams(top_p=0.5)], [99])
    assert ids == [0] and logprobs[0] == pytest.approx(logits.log_softmax(-1)[0, 0].item(), abs=1e-6)


def test_a_log_probability_is_the_trainers_of_the_same_logits_in_every_bit():
    """The trainer's head multiplies by its weight: by the identity it has the server's logits."""
    logits = torch.randn(40, 700, generator=torch.Generator().manual_seed(3)) * 4
    kinds = [{}, {"temperature": 0.7}, {"temperature": 1.3, "top_p": 0.6}, {"temperature": 0}, {"top_k": 5}]
    params = [SamplingParams.parse(kinds[i % 5], 700) for i in range(40)]
    ids, logprobs, _ = sampling.sample(logits.clone(), params, [sampling.key_of(1, k) for k in range(40)])
    whole = VocabShard(0, 700, 700)
    for start, temperature in enumerate((1.0, 0.7, 1.3, 1.0, 1.0)):
        rows = slice(start, None, 5)  # in another batch than the server's
        labels = torch.tensor(ids[rows])
        theirs, _ = lm_head_logprobs(logits[rows], torch.eye(700), labels, shard=whole, temperature=temperature)
        assert theirs.tolist() == logprobs[rows]
        assert packed_logprobs(logits[rows], labels, temperature=temperature).tolist() == logprobs[rows]


def test_penalties_and_biases_by_hand():
    row = torch.tensor([1.0, -1.0, 2.0, 0.5, 3.0])
    params = SamplingParams.parse(
        {"repetition_penalty": 2.0, "frequency_penalty": 0.5, "presence_penalty": 0.25, "logit_bias": {"3": 1.5},
         "min_new_tokens": 4}, VOCAB,
    )  # fmt: skip
    sampling.adjust_logits(row, params, output=[1, 2, 2], stop_ids=frozenset([4]))
    # 0: not generated. 1: (-1 - .5 - .25) * 2. 2: (2 - 2*.5 - .25) / 2. 3: .5 + 1.5. 4: may not stop yet.
    torch.testing.assert_close(row, torch.tensor([1.0, -3.5, 0.375, 2.0, -math.inf]))


@pytest.mark.parametrize(
    "field, value",
    [
        ("temperature", -1),
        ("temperature", "hot"),
        ("temperature", True),
        ("top_p", 0),
        ("top_p", 1.1),
        ("top_k", 0),
        ("top_k", 2.0),
        ("max_new_tokens", -1),
        ("max_new_tokens", "8"),
        ("n", 0),
        ("stop", [1]),
        ("stop", [""]),
        ("stop_token_ids", ["a"]),
        ("logit_bias", {"x": 1}),
        ("logit_bias", {"9999": 1}),
        ("repetition_penalty", 0),
        ("sampling_seed", 2**64),
        ("regex", "a+"),
        ("beam_width", 2),
        ("no_such_field", 1),
    ],
)
def test_bad_sampling_fields_are_refused_by_name(field, value):
    with pytest.raises(ValueError, match=f"sampling_params.{field}"):
        SamplingParams.parse({field: value}, VOCAB)


def test_null_means_the_default_and_temperature_zero_is_greedy():
    assert SamplingParams.parse({"top_p": None, "stop": None, "regex": None}, VOCAB) == SamplingParams()
    assert SamplingParams.parse({"temperature": 0}, VOCAB) == SamplingParams(top_k=1)


# The batcher


def test_a_seeded_reply_does_not_depend_on_its_neighbours(decoder):
    def target() -> Request:
        return make_request(prompt_of(12), sampling_seed=3, max_new_tokens=24)

    with running(decoder) as batcher:
        (alone,) = finish(batcher, target())
        others = [make_request(prompt_of(5 + 9 * i, seed=i), rid=str(i), temperature=0.1 + i) for i in range(6)]
        crowded = finish(batcher, *others[:3], target(), *others[3:])[3]
    assert crowded.output == alone.output
    assert crowded.logprobs == pytest.approx(alone.logprobs, abs=1e-4)


def test_replies_without_a_seed_differ(decoder):
    with running(decoder) as batcher:
        replies = finish(batcher, *(make_request(prompt_of(9), rid=str(i)) for i in range(4)))
    assert len({tuple(reply.output) for reply in replies}) == 4


def test_a_common_prefix_is_computed_once_and_changes_no_number(decoder):
    shared, seeds = prompt_of(40), range(6)

    def group() -> list[Request]:
        prompts = [shared + prompt_of(i, seed=100 + i) for i in seeds]
        return [make_request(p, rid=str(i), sampling_seed=i) for i, p in enumerate(prompts)]

    with running(decoder, reuse_prefixes=False) as batcher:
        plain = finish(batcher, *group())
    with running(decoder) as batcher:
        first = finish(batcher, *group())
        again = finish(batcher, *group())
        assert batcher.stats.cached_tokens == sum(r.cached_tokens for r in first + again)
    assert [r.cached_tokens for r in plain] == [0] * 6
    assert first[0].cached_tokens == 0
    assert all(r.cached_tokens >= 39 for r in first[1:] + again)
    for reply, *others in zip(plain, first, again, strict=True):
        for other in others:
            assert other.output == reply.output
            assert other.logprobs == pytest.approx(reply.logprobs, abs=1e-4)


def test_a_groups_prompt_is_computed_once_whatever_it_shares_with_other_groups(decoder):
    prompts = [prompt_of(16) + prompt_of(4, seed=100 + i) for i in range(2)]
    group = [make_request(p, rid=f"{i} {k}") for i, p in enumerate(prompts) for k in range(4)]
    with running(decoder) as batcher:
        batcher.pause("in_place").result(LIMIT_S)
        futures = [batcher.submit(request) for request in group]  # all of them are there in the first turn
        batcher.resume()
        cached = [future.result(LIMIT_S).cached_tokens for future in futures]
    assert cached == [0, 19, 19, 19, 16, 19, 19, 19]


def test_flush_forgets_prefixes(decoder):
    with running(decoder) as batcher:
        finish(batcher, make_request(prompt_of(40)))
        assert batcher.flush().result(LIMIT_S)
        (reply,) = finish(batcher, make_request(prompt_of(40)))
    assert reply.cached_tokens == 0


@pytest.mark.parametrize("start", [0, 13])
def test_prompt_scores_equal_those_of_transformers(hf, decoder, start):
    prompt = prompt_of(50)
    with torch.no_grad():
        logprobs = hf(torch.tensor([prompt])).logits[0].log_softmax(-1)
    expected = logprobs[:-1].gather(1, torch.tensor(prompt[1:])[:, None])[start:, 0]
    with running(decoder, prefill_tokens_per_turn=16) as batcher:
        finish(batcher, make_request(prompt))  # a cached prefix must not swallow scores
        (reply,) = finish(batcher, make_request(prompt, logprob_start=start, max_new_tokens=0))
    assert reply.finish_reason == {"type": "length", "length": 0} and reply.output == []
    torch.testing.assert_close(torch.tensor(reply.input_logprobs), expected, rtol=1e-4, atol=1e-4)


def test_stop_ids_and_end_of_sequence(decoder):
    with running(decoder, eos_token_ids=[7]) as batcher:
        (reply,) = finish(batcher, make_request(prompt_of(9), sampling_seed=1))
        third = reply.output[2]
        (stopped,) = finish(
            batcher, make_request(prompt_of(9), sampling_seed=1, ignore_eos=False, stop_token_ids=[third])
        )
        (ignored,) = finish(batcher, make_request(prompt_of(9), sampling_seed=1, stop_token_ids=[third]))
        (biased,) = finish(
            batcher, make_request(prompt_of(9), ignore_eos=False, logit_bias={"7": 1000}, min_new_tokens=3)
        )
    assert stopped.finish_reason == {"type": "stop", "matched": third}
    assert stopped.output == reply.output[: reply.output.index(third) + 1]
    assert ignored.output == reply.output  # SGLang: ignore_eos switches off stop_token_ids too
    assert len(biased.output) == 4 and biased.finish_reason == {"type": "stop", "matched": 7}


@pytest.mark.parametrize("mode", ["in_place", "retract"])
def test_a_paused_request_continues_as_if_nothing_had_happened(decoder, mode):
    with running(decoder) as batcher:
        (plain,) = finish(batcher, make_request(prompt_of(12), sampling_seed=3))
        gate = Gate(tokens=5)
        future = batcher.submit(make_request(prompt_of(12), sampling_seed=3, on_progress=gate))
        assert gate.reached.wait(LIMIT_S)
        paused = batcher.pause(mode)
        gate.go.set()
        paused.result(LIMIT_S)
        held = batcher.submit(make_request(prompt_of(4), rid="held"))
        assert batcher.flush().result(LIMIT_S) == (mode == "retract")
        assert not future.done() and not held.done()
        batcher.call(lambda: batcher.weights_changed("new")).result(LIMIT_S)
        batcher.resume().result(LIMIT_S)
        reply = future.result(LIMIT_S)
        assert held.result(LIMIT_S).spans == [("new", 16)]
    assert reply.output == plain.output
    assert reply.logprobs == pytest.approx(plain.logprobs, abs=1e-4)
    assert reply.spans == [("default", 5), ("new", 16)]
    assert reply.retractions == (mode == "retract")


def test_abort_pause_ends_what_was_accepted_and_holds_the_rest(decoder):
    with running(decoder, max_running_requests=1) as batcher:
        gate = Gate(tokens=3)
        first = batcher.submit(make_request(prompt_of(12), on_progress=gate))
        assert gate.reached.wait(LIMIT_S)
        queued = batcher.submit(make_request(prompt_of(12), rid="queued"))
        paused = batcher.pause("abort")
        gate.go.set()
        paused.result(LIMIT_S)
        assert first.result(LIMIT_S).finish_reason["message"] == "Aborted"
        assert len(first.result().output) == len(first.result().logprobs) == 3
        assert queued.result(LIMIT_S).finish_reason["message"] == "Abort in waiting queue"
        late = batcher.submit(make_request(prompt_of(12), rid="late"))
        batcher.call(lambda: None).result(LIMIT_S)
        assert not late.done()
        batcher.resume()
        assert len(late.result(LIMIT_S).output) == 16


def test_an_exclusive_call_waits_for_accepted_requests_and_holds_later_ones(decoder):
    with running(decoder) as batcher:
        gate = Gate(tokens=3)
        before = batcher.submit(make_request(prompt_of(12), on_progress=gate))
        assert gate.reached.wait(LIMIT_S)
        seen = []
        call = batcher.call(lambda: seen.append((before.done(), after.done())), exclusive=True)
        after = batcher.submit(make_request(prompt_of(12), rid="after"))
        gate.go.set()
        call.result(LIMIT_S)
        after.result(LIMIT_S)
    assert seen == [(True, False)]


@pytest.mark.slow
def test_a_full_cache_retracts_the_youngest_and_changes_no_token(decoder):
    def crowd() -> list[Request]:
        return [make_request(prompt_of(30, i), rid=str(i), sampling_seed=i, max_new_tokens=150) for i in range(6)]

    with running(decoder) as batcher:
        roomy = finish(batcher, *crowd())
    with running(decoder, max_total_tokens=2 * CONTEXT) as batcher:
        tight = finish(batcher, *crowd())
        assert batcher.cache.rows * batcher.cache.capacity <= 2 * CONTEXT
    assert [r.output for r in tight] == [r.output for r in roomy]
    assert sum(r.retractions for r in tight) > 0 and sum(r.retractions for r in roomy) == 0


def test_rows_left_with_nan_do_not_poison_later_requests(hf, tmp_path):
    decoder = load(hf, tmp_path)
    good = (
        decoder.parameters["model.norm.weight"].clone(),
        decoder.parameters["model.layers.0.mlp.down_proj.weight"].clone(),
    )
    with running(decoder) as batcher:
        (plain,) = finish(batcher, make_request(prompt_of(10), sampling_seed=1))
        decoder.write("model.layers.0.mlp.down_proj.weight", good[1] * math.nan)
        broken = finish(batcher, *(make_request(prompt_of(60, i), rid=str(i)) for i in range(3)))
        decoder.write("model.layers.0.mlp.down_proj.weight", good[1])
        batcher.call(lambda: batcher.weights_changed("fixed")).result(LIMIT_S)
        (healed,) = finish(batcher, make_request(prompt_of(10), sampling_seed=1))
    assert [r.finish_reason for r in broken] == [{"type": "stop", "matched": "NaN happened"}] * 3
    assert all(len(r.logprobs) == len(r.output) == 1 for r in broken)
    assert healed.output == plain.output


def test_a_failing_forward_pass_fails_its_requests_and_all_later_ones(decoder, monkeypatch):
    with running(decoder) as batcher:

        def out_of_memory(*_, **__):
            raise MemoryError("no memory left")

        monkeypatch.setattr(decoder, "decode", out_of_memory)
        (reply,) = finish(batcher, make_request(prompt_of(9)))
        assert reply.finish_reason["type"] == "abort" and reply.finish_reason["status_code"] == 500
        assert "no memory left" in reply.finish_reason["message"] == f"The embedded server failed: {batcher.failure}"
        (later,) = finish(batcher, make_request(prompt_of(9)))
        assert later.finish_reason["status_code"] == 500
        assert batcher.call(lambda: "alive").result(LIMIT_S) == "alive"


def test_stopping_answers_everyone(decoder):
    with running(decoder) as batcher:
        gate = Gate(tokens=2)
        future = batcher.submit(make_request(prompt_of(9), on_progress=gate))
        assert gate.reached.wait(LIMIT_S)
        batcher.stop()
        gate.go.set()
        assert future.result(LIMIT_S).finish_reason["status_code"] == 503


@pytest.mark.slow
def test_commands_that_come_while_one_looks_through_them_do_not_end_the_thread(decoder):
    """An exclusive command waits, so that all later ones are looked through while others append."""
    with running(decoder) as batcher:
        gate = Gate(tokens=2)
        reply = batcher.submit(make_request(prompt_of(9), max_new_tokens=40, on_progress=gate))
        assert gate.reached.wait(LIMIT_S)
        exclusive = batcher.call(lambda: "done", exclusive=True)
        gate.go.set()
        callers = [
            threading.Thread(target=lambda: [batcher.call(lambda: None, exclusive=i % 2 == 0) for i in range(1000)])
            for _ in range(4)
        ]
        for caller in callers:
            caller.start()
        for caller in callers:
            caller.join(LIMIT_S)
        assert len(reply.result(LIMIT_S).output) == 40 and exclusive.result(LIMIT_S) == "done"
        assert batcher.call(lambda: "alive").result(LIMIT_S) == "alive" and batcher.failure is None


def test_a_thread_that_dies_leaves_nobody_waiting_and_says_so(decoder, monkeypatch):
    with running(decoder) as batcher:
        gate = Gate(tokens=2)
        reply = batcher.submit(make_request(prompt_of(9), on_progress=gate))
        assert gate.reached.wait(LIMIT_S)
        monkeypatch.setattr(batcher, "_next_command", lambda: 1 / 0)
        command = batcher.call(lambda: None)
        gate.go.set()
        assert reply.result(LIMIT_S).finish_reason["status_code"] == 500
        for future in (command, batcher.call(lambda: None), batcher.submit(make_request(prompt_of(9)))):
            with pytest.raises(RuntimeError, match="its thread died: ZeroDivisionError"):
                future.result(LIMIT_S)
    assert batcher.has_died and "its thread died" in batcher.failure
