"""A multi-turn environment: the policy opens boxes, and each box's note names the next box."""

from __future__ import annotations

from typing import Any

from megatron_rl.workflows.environments import Environment, Score, Turn


class Trail(Environment):
    """The boxes of a prompt from megatron_rl.data.tasks:trail. A reply opens one box, and is answered with its note.

    A dialogue has as many turns as boxes; a reply that is not a call ends it. Opening the box that the last note named
    earns 1 / (number of boxes), even after a wrong box was opened. The reward function is not used.

        world = Trail({"trail": [3, 7, 2], "call": "open "})  # begins at box 3, whose note is 7; box 2's note is 3
        await world.step("open 7\\n", score)  # Turn(messages=[{"role": "tool", "content": "2\\n"}], reward=1 / 3)
    """

    def __init__(self, data: dict[str, Any]) -> None:
        super().__init__(data)
        trail: list[int] = data["trail"]
        self._notes = dict(zip(trail, [*trail[1:], trail[0]], strict=True))
        self._wanted, self._turns_left = self._notes[trail[0]], len(trail)

    async def step(self, reply: str, score: Score) -> Turn:
        calls = {f"{self.data['call']}{box}": box for box in self._notes}
        box = calls.get(reply.strip())
        if box is None:
            return Turn()
        earned = (box == self._wanted) / len(self._notes)
        self._wanted, self._turns_left = self._notes[box], self._turns_left - 1
        note = {"role": "tool", "content": f"{self._wanted}\n"}
        return Turn(messages=[note] if self._turns_left else [], reward=earned)
