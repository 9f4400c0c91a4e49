"""The random distributions of a simulated week: rates and durations of failures, and reply lengths, with sources.

Values without a source are assumptions and are marked as such. No value was measured on the user's cluster.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from dataclasses import dataclass
from statistics import NormalDist

from megatron_rl.tools.plan.step_sizes import ReplyTokens

GPU_FAILURES_PER_S = 419 / (54 * 86_400 * 16_384)
"""Failure rate of one GPU: 419 unexpected interruptions in 54 days on 16,384 GPUs (The Llama 3 Herd of Models, arXiv
2407.21783). A failure ends the server that uses the GPU, or the trainer."""
SERVER_CRASHES_PER_S = 1 / (7 * 86_400)
"""Rate of software crashes of one server: out of memory, a hung scheduler. Assumed."""
SERVER_RESTART_S, TRAINER_RESTART_S = (300.0, 0.5), (600.0, 0.5)
"""Seconds from the death of a server or of the trainer until its restart is complete. Log-normal: (median, standard
deviation of the logarithm). Assumed."""
SLOW_SERVERS_PER_S = 1 / (1000 * 3600)
"""Rate at which a GPU begins to slow down its server. Assumed. arXiv 2505.05713 shows that large jobs have
stragglers."""
SLOW_FOR_S, SLOWNESS = (1800.0, 1.0), (1.1, 2.0)
"""SLOW_FOR_S: seconds that a slowdown lasts, log-normal: (median, standard deviation of the logarithm). SLOWNESS: range
of the uniformly distributed factor by which decoding slows down. Assumed."""
UPDATE_SLOWNESS = 0.1
"""Mean relative delay of an update due to its slowest rank. The delay is exponentially distributed. Assumed."""
PUBLICATION_SPREAD = 0.25
"""Standard deviation of the logarithm of a publication's duration. The median is the planned duration. Assumed."""
OF_PROMPTS = 0.5
"""Share of the variance of reply lengths that lies between prompts, not between replies to one prompt. Assumed.

Lengths are mapped to a normal distribution first.
"""


@dataclass(frozen=True)
class Chances:
    """The random draws of one run.

    Each kind of event has its own random generator, so an additional failure does not change the reply lengths.
    """

    seed: int

    def of(self, kind: str) -> random.Random:
        return random.Random(f"{self.seed} {kind}")

    def lengths(self, replies: ReplyTokens, samples: int) -> Iterator[list[int]]:
        """Yield groups of `samples` reply lengths in tokens, endlessly."""
        chance, normal = self.of("lengths"), NormalDist()
        prompt, reply = (math.sqrt(part) for part in (OF_PROMPTS, 1 - OF_PROMPTS))
        while True:
            middle = chance.gauss(0, prompt)
            yield [replies.quantile(normal.cdf(chance.gauss(middle, reply))) for _ in range(samples)]


def assumptions() -> list[str]:
    """Return the assumed distributions as sentences."""
    days = 1 / GPU_FAILURES_PER_S / 86_400
    return [
        f"a GPU fails every {days:,.0f} days on average (419 times in 54 days on 16,384 GPUs, arXiv 2407.21783), and "
        f"ends the server or the trainer that has it",
        f"a server crashes by software every {1 / SERVER_CRASHES_PER_S / 86_400:g} days",
        f"a server is back after {SERVER_RESTART_S[0] / 60:g} minutes, and gets requests from the next publication on; "
        f"the trainer after {TRAINER_RESTART_S[0] / 60:g}, from its newest checkpoint (medians, log-normal)",
        f"each GPU slows down its server every {1 / SLOW_SERVERS_PER_S / 3600:,.0f} hours, by {SLOWNESS[0]:g} to "
        f"{SLOWNESS[1]:g}, for {SLOW_FOR_S[0] / 60:g} minutes (median, log-normal)",
        f"an update takes {UPDATE_SLOWNESS:.0%} longer than planned (mean, exponential)",
        f"a publication's time is log-normal about what is planned (sigma {PUBLICATION_SPREAD:g})",
        f"reply lengths are the plan's, and {OF_PROMPTS:.0%} of their variance lies between prompts",
    ]
