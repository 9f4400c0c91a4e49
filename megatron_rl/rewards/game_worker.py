"""Plays one game of the package textarena in a worker process, without importing torch.

A request is `{"seed": 3}`, which starts a game, or `{"move": text}`. An answer is `{"seat": 0, "text": observation}`,
`{"rewards": {"0": 1.0}}` at the end, or `{"error": message}`.
"""

from __future__ import annotations

import random
from typing import Any

from megatron_rl.rewards.faults import words_of


def playing(game: str, args: dict[str, Any], seats: int) -> Any:
    """Load textarena and return the function that plays. Call this in the process that forks the games' processes."""
    try:
        import textarena
    except ImportError:
        return lambda request: {"error": "textarena is not installed; run pip install 'megatron-rl[worlds]'"}
    return Table(textarena, game, args, seats)


class Table:
    """One game, from start to end."""

    def __init__(self, textarena: Any, game: str, args: dict[str, Any], seats: int) -> None:
        self.textarena, self.game, self.args, self.seats = textarena, game, args, seats

    def __call__(self, request: dict[str, Any]) -> dict[str, Any]:
        try:
            return self._begin(request["seed"]) if "seed" in request else self._move(request["move"])
        except Exception as error:  # raised by the game's code
            return {"error": words_of(error)[:2000]}

    def _begin(self, seed: int) -> dict[str, Any]:
        import numpy

        numpy.random.seed(seed)
        random.seed(seed)
        self.world = self.rules = self.textarena.make(self.game, **self.args)
        # Wrappers that format moves are kept for step(). Those that repeat earlier messages are bypassed.
        while isinstance(self.rules, self.textarena.Wrapper):
            self.rules = self.rules.env
        self.world.reset(num_players=self.seats, seed=seed)
        return self._told()

    def _move(self, move: str) -> dict[str, Any]:
        is_done, _ = self.world.step(action=move)
        if not is_done:
            return self._told()
        rewards, _ = self.rules.close()
        return {"rewards": {str(seat): float(reward) for seat, reward in rewards.items()}}

    def _told(self) -> dict[str, Any]:
        seat, news = self.rules.get_observation()
        others = [(who, text) for who, text, _ in news if who != seat]
        names = {self.textarena.GAME_ID: ""} | {who: f"[Player {who}] " for who in range(self.seats)}
        return {"seat": seat, "text": "\n".join(f"{names[who]}{text}" for who, text in others) or "Your move."}
