"""Sampling of the next token, with SGLang's sampling parameters.

Token k of a request uses random numbers that depend only on (seed, k), so a reply does not depend on the rest of the
batch. Sampling is an exponential race: each token gets a random exponential time, with its probability as the rate,
and the token with the shortest time is sampled. A draft head uses the same random numbers. So it mostly samples the
same token, if its distribution is similar.

A token's log-probability is taken from softmax(logits / temperature), before top-k, top-p and min-p. On request, a
token's support is returned too: the tokens that these filters kept, and the log-probability among them.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from megatron_rl.ops import packed_logprobs
from megatron_rl.ops.support_columns import adjusted
from megatron_rl.support import Adjusting
from megatron_rl.tools.embedded_server.fields import shown

_MASK64 = (1 << 64) - 1
GREEDY_BELOW = 1e-6
"""Below this temperature, sampling is greedy, as in SGLang. Dividing by a smaller temperature would overflow."""
HOTTEST = 1e37
"""Maximum temperature; higher ones are lowered to this. Sampling is then uniform. 1 / HOTTEST still fits in float32."""
RACING = 4096
"""Each token id below this has its own random time. All other ids share one time, and a uniform number chooses among
them.

The distribution is the same for any value. Most tokenizers number tokens by frequency, so the frequent tokens have
their own times. A draft head guesses only ids below this.
"""
MOST_BIASES = MOST_STOP_IDS = 1024
MOST_STOP_LETTERS = 256
"""Maximum length of a stop string. Stop strings are searched for after every token."""
GRAMMARS = {"json_schema", "regex", "ebnf", "structural_tag"}
NOT_SUPPORTED = GRAMMARS | {"stop_regex", "custom_params", "beam_width"}


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplingParams:
    """The fields and defaults of SGLang's sampling_params.

    For example:

        SamplingParams.parse({"temperature": 0, "max_new_tokens": 16}, vocab_size=512).greedy  # True
    """

    max_new_tokens: int = 128
    min_new_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    min_p: float = 0.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    stop: tuple[str, ...] = ()
    stop_token_ids: frozenset[int] = frozenset()
    ignore_eos: bool = False
    no_stop_trim: bool = False
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True  # changes nothing with fast tokenizers
    n: int = 1
    sampling_seed: int | None = None

    @property
    def greedy(self) -> bool:
        return self.top_k == 1

    @property
    def filters(self) -> bool:
        return not self.greedy and (self.top_k > 0 or self.top_p < 1 or self.min_p > 0)

    @property
    def adjusts_logits(self) -> bool:
        return bool(self.logit_bias or self.min_new_tokens or self.counts_tokens)

    @property
    def counts_tokens(self) -> bool:
        return bool(self.frequency_penalty or self.presence_penalty or self.repetition_penalty != 1)

    @property
    def adjusting(self) -> Adjusting:
        return Adjusting(
            repetition_penalty=self.repetition_penalty,
            frequency_penalty=self.frequency_penalty,
            presence_penalty=self.presence_penalty,
            logit_bias=self.logit_bias,
        )

    def stop_ids(self, eos_token_ids: frozenset[int]) -> frozenset[int]:
        """Return the tokens that end a reply. As in SGLang, ignore_eos also disables stop_token_ids."""
        return frozenset() if self.ignore_eos else self.stop_token_ids | eos_token_ids

    @classmethod
    def parse(cls, body: Any, vocab_size: int, names: Mapping[str, str] | None = None) -> "SamplingParams":
        """Check a JSON object field by field; ValueError that names the field, the value and the rule.

        names: field -> the client's name for it, for error messages. The default is `sampling_params.<field>`.
        """

        def named(name: str) -> str:
            return (names or {}).get(name, f"sampling_params.{name[:100]}")

        if body is None:
            return cls()
        if not isinstance(body, dict):
            raise ValueError(f"sampling_params = {shown(body)}: must be an object")
        fields: dict[str, Any] = {}
        for name, value in body.items():
            if name in NOT_SUPPORTED:
                if value is not None:
                    remedy = "leave it out, or serve the model with SGLang" if name in GRAMMARS else "leave it out"
                    raise ValueError(f"{named(name)} is not supported by the embedded server; {remedy}")
            elif name == "stream_interval":
                continue  # affects only how often stream chunks are sent
            elif name not in _CHECKS:
                raise ValueError(f"unknown field {named(name)}; known are {', '.join(sorted(_CHECKS))}")
            elif value is not None:
                accepted, rule = _CHECKS[name]
                if not accepted(value):
                    raise ValueError(f"{named(name)} = {shown(value)}: must be {rule}")
                fields[name] = value
        if isinstance(fields.get("stop"), str):
            fields["stop"] = [fields["stop"]]
        fields["stop"] = tuple(fields.get("stop", ()))
        fields["stop_token_ids"] = frozenset(fields.get("stop_token_ids", ()))
        fields["logit_bias"] = tuple({int(k): float(v) for k, v in fields.get("logit_bias", {}).items()}.items())
        for token, _ in fields["logit_bias"]:
            if token >= vocab_size:
                raise ValueError(
                    f"{named('logit_bias')}: token id {token} must be below the vocabulary size {vocab_size}"
                )
        if fields.get("temperature", 1.0) < GREEDY_BELOW:
            fields |= {"temperature": 1.0, "top_k": 1}
        fields["temperature"] = min(fields.get("temperature", 1.0), HOTTEST)
        params = cls(**fields)
        if params.min_new_tokens > params.max_new_tokens:
            raise ValueError(
                f"{named('min_new_tokens')} = {params.min_new_tokens}: must be at most max_new_tokens = "
                f"{params.max_new_tokens}"
            )
        return params


def _is_int(low: int, high: int = 2**63 - 1):
    return lambda x: type(x) is int and low <= x <= high


def _is_number(low: float, high: float, *, open_low: bool = False):
    return lambda x: type(x) in (int, float) and math.isfinite(x) and low <= x <= high and not (open_low and x == low)


def _is_bool(x: Any) -> bool:
    return type(x) is bool


def _is_ids(x: Any) -> bool:
    return isinstance(x, list) and len(x) <= MOST_STOP_IDS and all(type(i) is int and 0 <= i < 2**31 for i in x)


def _is_stop(x: Any) -> bool:
    stops = [x] if isinstance(x, str) and x else x
    if not isinstance(stops, list):
        return x == ""
    return len(stops) <= 32 and all(isinstance(s, str) and 0 < len(s) <= MOST_STOP_LETTERS for s in stops)


def _is_bias(x: Any) -> bool:
    number = _is_number(-1e30, 1e30)
    if not isinstance(x, dict) or len(x) > MOST_BIASES:
        return False
    return all(key.isascii() and key.isdecimal() and len(key) <= 10 and number(value) for key, value in x.items())


_CHECKS = {
    "max_new_tokens": (_is_int(0), "an integer >= 0"),
    "min_new_tokens": (_is_int(0), "an integer >= 0"),
    "temperature": (_is_number(0, math.inf), "a finite number >= 0"),
    "top_p": (_is_number(0, 1, open_low=True), "a number in (0, 1]"),
    "top_k": (lambda x: type(x) is int and (x == -1 or 1 <= x < 2**31), "-1 (all) or an integer in [1, 2^31)"),
    "min_p": (_is_number(0, 1), "a number in [0, 1]"),
    "frequency_penalty": (_is_number(-2, 2), "a number in [-2, 2]"),
    "presence_penalty": (_is_number(-2, 2), "a number in [-2, 2]"),
    "repetition_penalty": (_is_number(0, 2, open_low=True), "a number in (0, 2]"),
    "logit_bias": (_is_bias, f"an object of at most {MOST_BIASES} numbers by token id"),
    "stop": (_is_stop, f"a string or at most 32 non-empty strings, each of at most {MOST_STOP_LETTERS} letters"),
    "stop_token_ids": (_is_ids, f"a list of at most {MOST_STOP_IDS} token ids"),
    "ignore_eos": (_is_bool, "true or false"),
    "no_stop_trim": (_is_bool, "true or false"),
    "skip_special_tokens": (_is_bool, "true or false"),
    "spaces_between_special_tokens": (_is_bool, "true or false"),
    "n": (_is_int(1, 4096), "an integer in [1, 4096]"),
    "sampling_seed": (_is_int(-(2**63)), "a 64-bit integer"),
}


def mix64(value: int) -> int:
    """Apply splitmix64's finalizer: a bijection of 64-bit integers. Every output bit depends on every input bit."""
    value = (value + 0x9E3779B97F4A7C15) & _MASK64
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK64
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK64
    return value ^ (value >> 31)


def derive_seed(seed: int, index: int) -> int:
    """Return the seed of sample `index` of a request with n > 1."""
    return mix64(mix64(seed & _MASK64) + index)


def key_of(seed: int, k: int) -> int:
    """Return the 64 bits that determine all random numbers for token k of a request with this seed."""
    return mix64(mix64(seed & _MASK64) ^ k)


def uniform(key: int) -> float:
    """Convert a key (`key_of`) to a number that is uniformly distributed in [0, 1)."""
    # A float64 has 53 bits of precision.
    return (key >> 11) * 2.0**-53


def times(keys: Sequence[int], count: int) -> Tensor:
    """Return random times `[B, count + 1]` float64: one for each id below `count`, then the one all other ids share.

    The times are standard exponential. keys: results of `key_of`, one per row.
    """
    # The shared time is drawn first, so that no time depends on the size of the vocabulary.
    rows = [np.random.Generator(np.random.SFC64(key)).standard_exponential(count + 1) for key in keys]
    return torch.from_numpy(np.stack(rows)).roll(-1, 1)


def adjust_logits(row: Tensor, params: SamplingParams, output: Sequence[int], stop_ids: frozenset[int]) -> None:
    """Apply penalties, logit_bias and min_new_tokens to one row `[V]` in place.

    As in SGLang, this happens before the logits are divided by the temperature, only generated tokens count, and the
    repetition penalty comes after the two others and before logit_bias. The trainer uses the same `Adjusting.changes`,
    so the trainer's logits are bitwise equal to these.
    """
    adjusting = params.adjusting
    if adjusting.size:
        counted, counts = np.unique(np.array(output if adjusting.counts else [], dtype=np.int64), return_counts=True)
        tokens = np.union1d(counted, np.array([token for token, _ in adjusting.logit_bias], dtype=np.int64))
        seen = np.zeros(len(tokens), dtype=np.int64)
        seen[np.searchsorted(tokens, counted)] = counts
        ids, changes = (torch.from_numpy(part).to(row.device) for part in (tokens, adjusting.changes(tokens, seen)))
        row[ids] = adjusted(row[ids], changes)[0]
    if stop_ids and len(output) < params.min_new_tokens:
        row[[i for i in stop_ids if i < len(row)]] = -math.inf


def sample(
    logits: Tensor, params: Sequence[SamplingParams], keys: Sequence[int], wants: Sequence[int] = ()
) -> tuple[list[int], list[float], list[tuple[list[int], float]]]:
    """Sample one token per row of `[B, V]` float32 logits. Return the ids, their log-probabilities and supports.

    keys: results of `key_of`, one per row. wants: indices of the rows for which the result of `support_of` is returned.
    A row that contains NaN gets a NaN log-probability and an arbitrary id inside the vocabulary.
    """
    temperatures = torch.tensor([p.temperature for p in params], dtype=torch.float64, device=logits.device)
    chosen, kept = choose(logits, params, keys, temperatures)
    # Log-probabilities are those of the unfiltered distribution. The trainer uses the same operator and temperature
    # value, so equal logits have bitwise equal log-probabilities in trainer and server, in any batch.
    logprobs = torch.zeros(len(params), device=logits.device)
    for temperature in {p.temperature for p in params}:
        labels = chosen.where(temperatures == temperature, -100)  # rows of other temperatures are not read
        logprobs += packed_logprobs(logits, labels, temperature=temperature)
    ids = chosen.tolist()
    return ids, logprobs.tolist(), [support_of(logits[i], kept[i], ids[i], params[i]) for i in wants]


def choose(
    logits: Tensor, params: Sequence[SamplingParams], keys: Sequence[int], temperatures: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Sample one token per row of `[B, V]` logits. Return the ids `[B]` and the filtered probabilities `[B, V]`.

    The probabilities of excluded tokens are 0, and the others are not rescaled. temperatures: `[B]` float64; None takes
    them from `params`.
    """
    if temperatures is None:
        temperatures = torch.tensor([p.temperature for p in params], dtype=torch.float64, device=logits.device)
    probs = torch.softmax(logits if (temperatures == 1).all() else logits / temperatures.float()[:, None], -1)
    greedy = [i for i, p in enumerate(params) if p.greedy]
    filtered = [i for i, p in enumerate(params) if p.filters]
    if len(greedy) == len(params):
        return probs.argmax(-1), probs
    kept = probs
    if filtered:
        kept = probs.clone()
        kept[filtered] = filter_probs(probs[filtered], [params[i] for i in filtered])
    chosen = _race(kept, keys)
    if greedy:
        chosen[greedy] = probs[greedy].argmax(-1)
    return chosen, kept


def support_of(logits: Tensor, kept: Tensor, token: int, params: SamplingParams) -> tuple[list[int], float]:
    """Return a token's support, which begins with the token itself, and the token's log-probability in it.

    The support consists of the sampled `token` and all ids at which `kept` `[V]` is nonzero.
    """
    if params.greedy:
        return [token], 0.0
    others = [other for other in kept.nonzero()[:, 0].tolist() if other != token]
    support = [token, *others]
    # In the trainer's order, so that the trainer's log-probabilities are bitwise equal.
    only, first = logits[support][None], torch.zeros(1, dtype=torch.int64, device=logits.device)
    return support, float(packed_logprobs(only, first, temperature=params.temperature))


def _race(weights: Tensor, keys: Sequence[int]) -> Tensor:
    """Sample an id from each row of weights `[B, V]`, which need not sum to 1."""
    count = min(RACING, weights.shape[1])
    arrivals = times(keys, count).to(weights.device)
    speeds, chosen = (weights[:, :count] / arrivals[:, :count]).max(-1)
    if count == weights.shape[1]:
        return chosen
    others = (weights[:, count:].sum(-1) / arrivals[:, count] > speeds).nonzero()[:, 0]
    if len(others):
        uniforms = [uniform(keys[row]) for row in others.tolist()]
        uniforms = torch.tensor(uniforms, dtype=torch.float64, device=weights.device)
        chosen[others] = count + _invert_cdf(weights[others, count:], uniforms)
    return chosen


def _invert_cdf(probs: Tensor, uniforms: Tensor) -> Tensor:
    """Return each row's first id whose cumulative weight exceeds the row's uniform number times its total weight.

    probs: weights `[B, V]`, whose rows need not sum to 1.
    """
    cdf = probs.cumsum(-1)
    total = cdf[:, -1:]
    # Rounding may raise the target to the total, which no entry exceeds. Stay just below it.
    target = torch.minimum((uniforms[:, None] * total).float(), total * (1 - 2.0**-23))
    return torch.searchsorted(cdf, target, right=True)[:, 0].clamp_(max=probs.shape[1] - 1)


def filter_probs(probs: Tensor, params: Sequence[SamplingParams]) -> Tensor:
    """Return `probs` `[B, V]` with 0 for the tokens that top-k, top-p or min-p excludes.

    As in SGLang, each filter is evaluated on the unfiltered probabilities.
    """
    vocab_size = probs.shape[1]

    def column(values: list[float]) -> Tensor:
        return torch.tensor(values, device=probs.device)[:, None]

    top_k = column([p.top_k if p.top_k > 0 else vocab_size for p in params])
    top_p, min_p = column([p.top_p for p in params]), column([p.min_p for p in params])
    # The top 1024 almost always suffice. Sorting the whole vocabulary costs ten times as much.
    for width in (min(1024, vocab_size), vocab_size):
        values, ids = probs.topk(width)
        rank = torch.arange(width, device=probs.device)
        keep = (rank < top_k) & (values.cumsum(-1) - values <= top_p) & (values >= min_p * values[:, :1])
        # If every row excludes its least likely candidate, it excludes all less likely tokens too.
        if width == vocab_size or not keep[:, -1].any():
            break
    return torch.zeros_like(probs).scatter_(1, ids, values * keep)
