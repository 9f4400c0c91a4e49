"""Checks a run's prompts, tokenizer, stop tokens, sampling and rewards."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from megatron_rl.config import GenerationConfig, TrainConfig
from megatron_rl.rollout.factory import check_reward
from megatron_rl.tools.doctor.finding import Finding
from megatron_rl.workflows.rendering import prompt_ids

LOOKED_AT = 200
"""Maximum number of prompts that are checked."""
UNLIKELY = 1e-6
"""Replies whose probability under the configured sampling is lower than this are reported as an error."""

Reply = tuple[list[int], Tensor, Tensor]
"""Ids `[T]` of a prompt and its reply, mask `[T]` bool of the sampled tokens, and the server's log-probs `[T]`."""


def check_prompts(
    rows: Sequence[dict[str, Any]], tokenizer: PreTrainedTokenizerBase, vocab: int, context: int, longest_reply: int
) -> Iterator[Finding]:
    """Check the first rendered prompts: token ids, BOS, chat template and room for the reply.

    Yields at most one finding per kind of fault. vocab: number of tokens in the model's vocabulary. context: the
    server's maximum sequence length in tokens. longest_reply: in tokens.
    """
    bos, found = tokenizer.bos_token_id, dict[str, Finding]()
    specials = [token for token in tokenizer.all_special_tokens if len(token) > 3]
    for number, row in enumerate(rows[:LOOKED_AT], start=1):
        where, ids = f"data.train, prompt {number}", prompt_ids(tokenizer, row)
        said = row.get("prompt") or "".join(str(it.get("content", "")) for it in row.get("messages", []))
        templated = [token for token in specials if str(said).count(token)]
        if max(ids, default=0) >= vocab:
            cause = f"has token {max(ids)}, and the model has {vocab}: the tokenizer is another model's"
        elif bos is not None and len(ids) > 1 and ids[0] == ids[1] == bos:
            cause = f"begins with BOS ({tokenizer.bos_token!r}) twice"
        elif row.get("messages") and templated:
            cause = f"its messages contain {templated[0]!r}, and the chat template adds it again: it is applied twice"
        elif len(ids) + longest_reply > context:
            cause = f"has {len(ids)} tokens and may get {longest_reply} more, and a server's context is {context}"
        else:
            continue
        found.setdefault(cause.split(" ")[0] + cause[-20:], Finding(who="data", where=where, cause=cause))
    yield from found.values()


def check_stop_tokens(
    tokenizer: PreTrainedTokenizerBase, generation: GenerationConfig, eos_ids: Iterable[int]
) -> Iterator[Finding]:
    """Check that servers stop at the chat template's end of a turn, or else at the tokenizer's EOS."""
    stops = set(eos_ids) | set(generation.stop_token_ids)
    if generation.ignore_eos:
        return
    ends, origin = tokenizer.eos_token_id, "the tokenizer's EOS"
    if tokenizer.chat_template:
        turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "THEREPLY"}]
        after = tokenizer.apply_chat_template(turns, tokenize=False).partition("THEREPLY")[2]
        ids = tokenizer(after, add_special_tokens=False)["input_ids"]
        if ids and ids[0] in tokenizer.all_special_ids:
            ends, origin = ids[0], "the chat template's end of a turn"
    if ends is not None and ends not in stops and not generation.stop:
        token = tokenizer.convert_ids_to_tokens(ends)
        cause = f"{origin}, {token!r} ({ends}), does not end a reply; servers stop at {sorted(stops)}"
        yield Finding(who="server", where="stop tokens", cause=cause)


def check_replies(
    replies: Sequence[Reply],
    logits: Sequence[Tensor],
    generation: GenerationConfig,
    eos_ids: Iterable[int],
    tolerance: float,
    explain: Callable[[], str] = lambda: "",
) -> Iterator[Finding]:
    """Check the log-probs of replies, how the replies were sampled, and that stop tokens end them.

    logits: the reference model's logits for each reply, `[T, V]`; row t predicts token t + 1. tolerance: largest
    accepted difference of log-probs, in nats. explain: function that returns the cause of wrong log-probs, "" if it is
    unknown. It is called only if no other temperature explains them.
    """
    columns = [_sampled(ids, mask, told, rows) for (ids, mask, told), rows in zip(replies, logits, strict=True)]
    rows, tokens, told = (torch.cat([column[part] for column in columns]) for part in range(3))
    place = torch.cat([mask.nonzero()[:, 0] for _, mask, _ in replies])
    own = _logprobs(rows, tokens, generation.temperature)
    wrong = ~((told - own).abs() <= tolerance)
    if bool(wrong.any()):
        first = int(wrong.nonzero()[0, 0])
        where = f"log-probs, position {int(place[first])}, token {int(tokens[first])}"
        cause = _other_temperature(rows, tokens, told, tolerance) or explain() or "no known error explains it"
        yield Finding(who="server", where=where, cause=cause)
        return
    if cause := _drawn(rows, tokens, generation):
        yield Finding(who="server", where="sampling", cause=cause)
    eos = set(eos_ids) if not generation.ignore_eos else set()
    for number, (ids, mask, _) in enumerate(replies):
        inner = [t for t in mask.nonzero()[:-1, 0].tolist() if ids[t] in eos]
        if inner:
            cause = f"the stop token {ids[inner[0]]} does not end it: position {inner[0]} of {len(ids)}"
            yield Finding(who="server", where=f"reply {number}", cause=cause)
            return


def _sampled(ids: list[int], mask: Tensor, told: Tensor, logits: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    at = mask.nonzero()[:, 0]
    return logits[at - 1].float(), torch.tensor(ids)[at], told[at].float()


def _drawn(rows: Tensor, tokens: Tensor, generation: GenerationConfig) -> str:
    """Describe how tokens were sampled, if they are too unlikely at the configured temperature; else return "".

    The result is always "" if top_k, top_p or min_p is configured.
    """
    expected = (rows / generation.temperature).log_softmax(-1)
    own, order = expected.gather(1, tokens[:, None])[:, 0], expected.sort(-1, descending=True)
    rank = (order.indices == tokens[:, None]).int().argmax(-1)
    above = order.values.exp().cumsum(-1) - order.values.exp()  # [n, V] probability of all more likely tokens
    kept, count = float(above.gather(1, rank[:, None]).max()), len(tokens)
    if generation.top_k > 0 or generation.top_p < 1 or generation.min_p > 0:
        return ""
    chances = order.values.exp()
    mean = (chances * order.values).sum(-1)
    spread = float((chances * (order.values - mean[:, None]).square()).sum(-1).sum().sqrt())
    is_shifted = abs(float((own - mean).sum())) > 8 * spread
    if not (is_shifted or max(kept, 1e-3) ** count < UNLIKELY):
        return ""
    # Which explains the tokens better: a part of the distribution, or another temperature?
    of_part = float((own - (chances * (above <= kept)).sum(-1).log()).sum())
    likely = {t / 10: float(_logprobs(rows, tokens, t / 10).sum()) for t in range(1, 31)}
    temperature = max(likely, key=lambda it: likely[it])
    if likely[temperature] > of_part:
        return (
            f"{count} sampled tokens are drawn at another temperature than {generation.temperature:g}: about "
            f"{temperature:g}"
        )
    return (
        f"{count} sampled tokens are all among the most likely {kept:.2f} of the distribution, as with top_p = "
        f"{kept:.2f} or top_k = {int(rank.max()) + 1}, and generation.top_p = {generation.top_p:g}"
    )


def _logprobs(rows: Tensor, tokens: Tensor, temperature: float) -> Tensor:
    return (rows / temperature).log_softmax(-1).gather(1, tokens[:, None])[:, 0]


def _other_temperature(rows: Tensor, tokens: Tensor, told: Tensor, tolerance: float) -> str:
    for temperature in (0.5, 0.6, 0.7, 0.8, 0.9, 1.0, 1.1, 1.2, 1.5, 2.0):
        if float((_logprobs(rows, tokens, temperature) - told).abs().max()) <= tolerance:
            return f"they are those of temperature {temperature:g}"
    return ""


def check_rewards(config: TrainConfig, row: dict[str, Any], tokenizer: PreTrainedTokenizerBase) -> Iterator[Finding]:
    """Check that the reward is deterministic: compute it twice, for the prompt's own answer as the reply."""
    values = [check_reward(config, row, tokenizer).value for _ in range(2)]
    if values[0] != values[1]:
        cause = (
            f"the same reply to the same prompt gets {values[0]:g} and {values[1]:g}: the reward is not deterministic"
        )
        yield Finding(who="reward", where=config.rollout.reward or "rollout.recipe", cause=cause)
