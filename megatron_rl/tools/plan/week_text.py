"""`megatron-rl plan --week`: simulates a planned run for a week with faults, and compares a few settings."""

from __future__ import annotations

import textwrap
from dataclasses import dataclass, replace

from megatron_rl.tools.plan import chances as drawn
from megatron_rl.tools.plan import devices
from megatron_rl.tools.plan.chances import Chances
from megatron_rl.tools.plan.fit import plans_of
from megatron_rl.tools.plan.plan import Plan
from megatron_rl.tools.plan.plan_text import WIDTH
from megatron_rl.tools.plan.simulation import Workload
from megatron_rl.tools.plan.week import Days, Job, Record

DAY_S = 86_400.0
REPLIES_OF_STEP, REPLIES_OF_DAY = 512, 350_000
"""Maximum number of replies simulated per step and per day. If the run has more, each simulated reply stands for
several."""
KEYS = 64
"""A server's mean sequence length is rounded to buckets of this many tokens, so that decoding times can be cached."""
COMPARED_DAYS = 1.0
"""Simulated days of each setting in the comparison."""
NOTE = "Simulated: no run on GPUs has checked these figures. The times of a token and of an update are the plan's."


@dataclass(frozen=True)
class Scale:
    """Scale of a simulation: `replies` real replies per simulated reply, `groups` real groups per simulated group."""

    replies: int
    groups: int

    @classmethod
    def of(cls, plan: Plan) -> Scale:
        prompts, samples = plan.batch.prompts, plan.batch.requests // plan.batch.prompts
        most = min(REPLIES_OF_STEP, REPLIES_OF_DAY * plan.least_s / DAY_S)
        # First merge replies within a group, but keep at least two if there are two: a group waits for its longest.
        of_group = [n for n in range(1, samples + 1) if samples % n == 0 and (samples == n == 1 or samples // n > 1)]
        replies = next((n for n in of_group if plan.batch.requests / n <= most), of_group[-1])
        groups = next(n for n in range(1, prompts + 1) if plan.batch.requests / replies / n <= most or n == prompts)
        return cls(replies, groups)


def simulate_days(plan: Plan, days: float, *, seed: int = 0) -> tuple[float, Record]:
    """Return the samples trained per second, and the full record.

    Plans that are simulated with the same seed have the same random faults and reply lengths.
    """
    chances, samples = Chances(seed), plan.batch.requests / plan.batch.prompts
    record = Days(workload(plan, chances), job(plan), chances).run(days * DAY_S)
    simulated = max(1, plan.batch.prompts // Scale.of(plan).groups)
    return record.groups_per_s * samples * plan.batch.prompts / simulated, record


def workload(plan: Plan, chances: Chances) -> Workload:
    """Return a plan's workload, scaled down. A simulated reply costs as much as the real ones that it stands for."""
    scale, batch, rollout = Scale.of(plan), plan.batch, plan.config.rollout
    each = scale.replies * scale.groups
    slots = max(1, round(plan.slots / each))
    rounding = slots * each / plan.slots  # replies that a full simulated server stands for, over the real slots
    known: dict[tuple[float, int], float] = {}

    def token_s(replies: float, tokens: float) -> float:
        key = replies, int(tokens) // KEYS
        if key not in known:
            known[key] = rounding * plan.decoder.seconds(replies / slots * plan.slots, (key[1] + 0.5) * KEYS)
        return known[key]

    return Workload(
        servers=plan.servers,
        slots=slots,
        token_s=token_s,
        read_s=plan.read_s * each,
        prompt_tokens=plan.tokens.mean,
        groups=chances.lengths(plan.replies, batch.requests // batch.prompts // scale.replies),
        groups_per_step=max(1, batch.prompts // scale.groups),
        groups_at_once=max(1, batch.episodes_running // scale.groups),
        max_staleness=plan.max_staleness,
        drops_stale=rollout.stale == "drop",
        update_s=plan.update_s,
        publish_s=plan.publish_s + plan.turns_s,
        max_cache_age=rollout.max_cache_age,
    )


def job(plan: Plan) -> Job:
    kept = sum(memory.kept for memory in plan.trainer.by_model.values())
    return Job(
        server_gpus=plan.server.gpus,
        trainer_gpus=plan.trainer_gpus,
        interruption=plan.config.rollout.interruption,
        checkpoint_every=plan.config.run.checkpoint_every_steps,
        checkpoint_s=kept / devices.HOST_BANDWIDTH,  # only the copy to host memory; the write overlaps the next steps
    )


def settings(plan: Plan) -> dict[str, dict[str, Plan]]:
    """Return {setting: {value: plan}} with up to three values of each setting, one of them the plan's own."""
    rollout = plan.config.rollout

    def changed(servers: int = plan.servers, **changes: object) -> Plan | None:
        try:
            config = replace(plan.config, rollout=replace(rollout, **changes))  # type: ignore[arg-type]
            plans = plans_of(config, plan.tokens, replace(plan.cluster, servers=servers))
        except ValueError:  # no layout has so many servers, or the publication allows only one interruption
            return None
        fitting = [p for p in plans if p.fits and (servers != plan.servers or p.trainer_gpus == plan.trainer_gpus)]
        return max(fitting, key=lambda p: p.trainer_gpus, default=None)

    found: dict[str, dict[str, Plan]] = {"max_staleness": {}, "interruption": {}, "servers": {str(plan.servers): plan}}
    if plan.max_staleness:
        for staleness in sorted({max(1, rollout.max_staleness // 2), rollout.max_staleness, 2 * rollout.max_staleness}):
            found["max_staleness"] |= kept(str(staleness), changed(max_staleness=staleness))
    for mode in ("abort", "retract", "in_place"):
        age = max(1, rollout.max_cache_age) if mode == "in_place" else rollout.max_cache_age
        found["interruption"] |= kept(mode, changed(interruption=mode, max_cache_age=age))
    if not plan.shares_gpus and not rollout.servers:
        fewer = ((count, changed(count)) for count in range(plan.servers - 1, 0, -1))
        # Fewer servers only help if more GPUs then train.
        less = next(((n, p) for n, p in fewer if p is not None and p.trainer_gpus > plan.trainer_gpus), None)
        most = plan.cluster.gpus // plan.server.gpus
        more = next(((n, p) for n in range(plan.servers + 1, most) if (p := changed(n)) is not None), None)
        for entry in (less, more):
            found["servers"] |= {str(entry[0]): entry[1]} if entry is not None else {}
        found["servers"] = dict(sorted(found["servers"].items(), key=lambda item: int(item[0])))
    return found


def kept(name: str, plan: Plan | None) -> dict[str, Plan]:
    return {} if plan is None else {name: plan}


def compared(plan: Plan, days: float) -> dict[str, dict[str, float]]:
    """Return {setting: {value: samples per second}}, with the same faults and lengths for all."""
    own = simulate_days(plan, days)[0]
    return {
        key: {value: own if other is plan else simulate_days(other, days)[0] for value, other in plans.items()}
        for key, plans in settings(plan).items()
    }


def best_first(rates: dict[str, float]) -> str:
    return ", ".join(f"{value} {rate:.2f}" for value, rate in sorted(rates.items(), key=lambda item: -item[1]))


def week_text(plan: Plan) -> str:
    """Return the results of a simulated week and its assumptions as text."""
    rate, record = simulate_days(plan, 7)
    planned = plan.batch.requests / plan.split.step_s
    rows = {
        "samples": f"{rate:.2f} a second; without faults {planned:.2f}",
        "deaths": f"{record.server_deaths} of servers, {record.trainer_deaths} of the trainer",
        "lost tokens": f"{record.lost_tokens:.2%} died with them, {record.stale_tokens:.2%} became too old",
        "lost time": f"{record.lost_time:.2%} of the trainer's; it waits for replies for {record.wait:.0%}",
    }
    rows |= {f"by {key}": best_first(rates) for key, rates in compared(plan, COMPARED_DAYS).items()}
    width = 2 + max(map(len, rows))
    assumed = f"Settings: samples a second in {COMPARED_DAYS:g} day. Drawn: {'; '.join(drawn.assumptions())}."
    lines = ["a week, simulated", *(f"  {name:<{width}}{value}" for name, value in rows.items())]
    return "\n".join([*lines, *textwrap.wrap(assumed, WIDTH), NOTE])
