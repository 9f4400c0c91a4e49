"""Check that critic, reward model and teachers fit the policy. Only the models' config.json files are read."""

from __future__ import annotations

from megatron_rl.config import TrainConfig
from megatron_rl.weights.architecture import read_architecture
from megatron_rl.weights.decoder import Architecture


def check_companions(config: TrainConfig) -> None:
    """Raise ValueError for a critic, reward model or teacher that cannot be used with the policy."""
    policy = read_architecture(config.model.path)
    if config.has_critic:
        _check_vocabulary("critic.model", config.critic_engine.model.path, policy)
    if path := config.reward_model.path:
        _check_vocabulary("reward_model.path", path, policy)
        if read_architecture(path).head != "value":
            raise ValueError(
                f"reward_model.path = {path!r}: has no scalar head, so every score would be 0; give a sequence "
                f"classification model with one label."
            )
    options = config.teacher
    for path in options.engine_paths:  # only the vocabularies' sizes; whether tokens agree is seen from the tokenizers
        vocab = read_architecture(path).vocab
        if options.kl_in == "loss" and not options.top_k and vocab != policy.vocab:
            raise ValueError(
                f"teacher.kl_in = 'loss': the model in {path!r} has a vocabulary of {vocab} and the policy "
                f"{policy.vocab}, which are not cut alike; set teacher.top_k, or teacher.kl_in=advantage."
            )
        if options.top_k >= (least := min(vocab, policy.vocab)):
            raise ValueError(f"teacher.top_k = {options.top_k}: must be below the vocabulary of {least}; lower it.")


def _check_vocabulary(key: str, path: str, policy: Architecture) -> None:
    if (vocab := read_architecture(path).vocab) != policy.vocab:
        raise ValueError(
            f"{key} = {path!r}: has a vocabulary of {vocab} tokens and the policy {policy.vocab}; it must read the "
            f"policy's tokens, so give a model with the same tokenizer."
        )
