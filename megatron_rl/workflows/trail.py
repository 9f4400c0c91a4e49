"""A world in which the policy uses a tool turn after turn: each box that it opens says which one to open next."""

from __future__ import annotations

from typing import Any

from megatron_rl.workflows.environments import Environment, Score, Turn


class Trail(Environment):
    """The boxes of a prompt of megatron_rl.data.tasks:trail. A reply opens one, and is answered with the note in it.

    A dialogue has as many turns as there are boxes, and another reply than such a call ends it. Each call of the box
    that the note before it names earns its part of 1, also behind a wrong one. The reward function is not asked.

    For example:

        world = Trail({"trail": [3, 7, 2], "call": "open "})  # begins at box 3, whose note is 7; box 2's is 3 again
        await world.step("open 7\\n", score)  # Turn(messages=[{"role": "tool", "content": "2\\n"}], reward=1 / 3)
    """

    def __init__(self, data: dict[str, Any]) -> None:
        super().__init__(data)
        trail: list[int] = data["trail"]
        self._notes = dict(zip(trail, [*trail[1:], trail[0]], strict=True))
        self._wanted, self._turns_left = self._notes[trail[0]], len(trail)

    async def step(self, reply: str, score: Score) -> Turn:
        box = self._called(reply.strip())
        if box is None:
            return Turn()
        earned = (box == self._wanted) / len(self._notes)
        self._wanted, self._turns_left = self._notes[box], self._turns_left - 1
        note = {"role": "tool", "content": f"{self._wanted}\n"}
        return Turn(messages=[note] if self._turns_left else [], reward=earned)

    def _called(self, text: str) -> int | None:
        """Return the box that a reply opens, None where it is no call."""
        calls = {f"{self.data['call']}{box}": box for box in self._notes}
        return calls.get(text)
