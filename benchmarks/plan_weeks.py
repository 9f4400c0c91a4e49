"""Weeks of every config for clusters, simulated: samples a second, what faults cost, and what other settings give.

    python benchmarks/plan_weeks.py --write

Nothing is measured. The loop, its gate and the rules of interruption are the run's (plan/week.py); the times of a
token and of an update are the plan's; faults, lengths and publications are drawn (plan/chances.py), for each of
`--weeks` anew. `planned` is without faults. Below are samples a second in a day with
other settings, best first, of which one is the config's; all of a config have the same faults and lengths.
"""

from __future__ import annotations

import re
import statistics
import textwrap
from pathlib import Path

import frame
from rehearse_configs import CLUSTERS, MODELS, nodes_of

from megatron_rl.config import load_config
from megatron_rl.tools.plan import chances as drawn
from megatron_rl.tools.plan.devices import DEVICES
from megatron_rl.tools.plan.fit import plans_of
from megatron_rl.tools.plan.plan import Cluster, Plan
from megatron_rl.tools.plan.plan_command import prompt_tokens, with_models
from megatron_rl.tools.plan.week_text import best_first, compared, simulate_days

SEED = 0


def planned(path: Path) -> Plan:
    """Return the plan with the config's servers, and all other GPUs of its nodes for the trainer."""
    config = with_models(load_config(path), MODELS)
    servers = config.rollout.server_count
    cluster = Cluster(nodes=nodes_of(path), gpus_per_node=8, device=DEVICES["h100"], servers=servers)
    plans = plans_of(config, prompt_tokens(config), cluster)
    return max(plans, key=lambda plan: plan.trainer_gpus)


def row(plan: Plan, days: float, weeks: int) -> str:
    found = [simulate_days(plan, days, seed=SEED + week) for week in range(weeks)]
    rates, records = [rate for rate, _ in found], [record for _, record in found]

    def mean(name: str) -> float:
        return statistics.mean(getattr(record, name) for record in records)

    samples = f"{plan.batch.requests / plan.split.step_s:9.2f}{statistics.mean(rates):11.2f}"
    deaths = f"{mean('server_deaths'):9.1f}{mean('trainer_deaths'):9.1f}"
    shares = "".join(f"{mean(name):8.2%}" for name in ("lost_tokens", "stale_tokens", "lost_time"))
    return f"{samples}{deaths}{shares}{mean('wait'):8.0%}"


def main(argv: list[str] | None = None) -> None:
    parser = frame.parser(__doc__)
    parser.add_argument("--only", default="", help="configs whose names have this")
    parser.add_argument("--days", type=float, default=7.0, help="of a week")
    parser.add_argument("--weeks", type=int, default=2)
    args = frame.arguments(parser, argv, only="gsm8k_qwen3_4b", days=0.02, weeks=1)
    paths = [path for path in sorted((frame.ROOT / "configs").glob("*.yaml")) if re.search(CLUSTERS, path.stem)]
    plans = {path.stem: planned(path) for path in paths if args.only in path.stem}
    print(f"simulated, {args.weeks} x {args.days:g} days, H100 SXM 80 GB\n")
    print(f"{'':<30}  planned  samples/s  servers  trainer    lost   stale    time    wait")
    for name, plan in plans.items():
        print(f"{name:<30}{row(plan, args.days, args.weeks)}", flush=True)
    print(f"\n{'':<30}{'max_staleness':<28}{'interruption':<44}servers")
    for name, plan in plans.items():
        rates = {key: best_first(found) for key, found in compared(plan, args.days / 7).items()}
        print(f"{name:<30}{rates['max_staleness']:<28}{rates['interruption']:<44}{rates['servers']}", flush=True)
    if not args.only:
        print(f"\n{textwrap.fill('Drawn: ' + '; '.join(drawn.assumptions()) + '.', 118)}")


if __name__ == "__main__":
    frame.run(main)
