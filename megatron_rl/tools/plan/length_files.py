"""Reads a file with the token counts of the user's own trajectories, for a plan or a rehearsal.

Each line is one trajectory: the number of tokens of its prompt, then of its reply. If the second number is missing, the
reply may have any length up to generation.max_new_tokens.

    812 1530
    344 96
    501
"""

from __future__ import annotations

from pathlib import Path

from megatron_rl.config import TrainConfig

UNKNOWN = 0
"""Reply length of a line that has only a prompt length."""


def read_lengths(path: Path, config: TrainConfig, context: int) -> list[tuple[int, int]]:
    """Return (prompt tokens, reply tokens) of each line.

    context: the model's maximum sequence length in tokens. Raises ValueError for a line that is malformed or exceeds a
    limit of the config or the model, and for a file that is empty or unreadable.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, ValueError) as error:
        raise ValueError(f"--lengths {path}: cannot be read ({error}); give a file of numbers of tokens.") from error
    found = [
        _lengths_of(line, f"--lengths {path}, line {number}: {line.strip()[:40]!r}", config, context)
        for number, line in enumerate(lines, start=1)
        if line.strip()
    ]
    if not found:
        raise ValueError(f"--lengths {path}: has no line; each has a prompt's tokens, and its reply's.")
    return found


def _lengths_of(line: str, place: str, config: TrainConfig, context: int) -> tuple[int, int]:
    words = line.split()
    if len(words) > 2 or not all(word.isdecimal() and int(word) > 0 for word in words):
        raise ValueError(f"{place}: must be the tokens of a prompt, or of a prompt and its reply, each at least 1.")
    prompt, reply = int(words[0]), int(words[1]) if len(words) == 2 else UNKNOWN
    if 0 < config.data.max_prompt_tokens < prompt:
        raise ValueError(
            f"{place}: the prompt exceeds data.max_prompt_tokens = {config.data.max_prompt_tokens}; raise that, or "
            f"leave the line out."
        )
    if reply > config.generation.max_new_tokens:
        raise ValueError(
            f"{place}: the reply exceeds generation.max_new_tokens = {config.generation.max_new_tokens}; raise that, "
            f"or leave the line out."
        )
    longest = reply or config.generation.max_new_tokens
    if prompt + longest > context:
        raise ValueError(
            f"{place}: with a reply of {longest} more than the model's context of {context}; lower "
            f"generation.max_new_tokens, or leave the line out."
        )
    return prompt, reply
