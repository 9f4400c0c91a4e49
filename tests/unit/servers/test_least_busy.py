"""Ranks that know nothing of each other share the servers evenly: the rule, and simulated with lengths and deaths."""

import argparse
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from megatron_rl.servers.generate import least_busy

ROOT = Path(__file__).resolve().parents[3]


def place(urls, *, ranks, groups):
    """Let each rank, which has its servers in an order of its own, begin so many groups; return groups by server."""
    of_all = Counter({url: 0 for url in urls})
    for rank in range(ranks):
        serving = [SimpleNamespace(url=url, calls=set()) for url in urls[rank % len(urls) :] + urls[: rank % len(urls)]]
        for group in range(groups):
            server = least_busy(serving, rank=rank, ranks=ranks)
            server.calls.add(group)
            of_all[server.url] += 1
    return of_all


@settings(deadline=None)
@given(
    servers=st.integers(1, 70), dead=st.sets(st.integers(0, 69)), ranks=st.integers(1, 70), groups=st.integers(0, 20)
)
@example(servers=64, dead=set(), ranks=64, groups=8)
@example(servers=64, dead={0, 1, 2, 40}, ranks=24, groups=5)
def test_no_server_has_two_groups_more_than_another_whatever_ranks_and_deaths(servers, dead, ranks, groups):
    alive = [f"http://node-{number}:1" for number in range(servers) if number not in dead] or ["http://last:1"]
    loads = place(alive, ranks=ranks, groups=groups).values()
    assert max(loads) - min(loads) <= 1 and sum(loads) == ranks * groups


@given(calls=st.lists(st.integers(0, 3), min_size=1, max_size=9), rank=st.integers(0, 4), avoided=st.integers(0, 8))
def test_it_is_one_of_the_fewest_requests_and_the_avoided_one_only_alone(calls, rank, avoided):
    serving = [SimpleNamespace(url=f"http://{n}:1", calls=set(range(count))) for n, count in enumerate(calls)]
    avoid = serving[avoided] if avoided < len(serving) else None
    chosen = least_busy(serving, rank=rank, ranks=5, avoid=avoid)
    others = [server for server in serving if server is not avoid] or serving
    assert chosen in others and len(chosen.calls) == min(len(server.calls) for server in others)


@pytest.mark.slow
def test_the_ring_beats_the_first_of_the_fewest_and_two_choices_with_old_news(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import bench_spread

    args = argparse.Namespace(ranks=32, servers=32, groups=8, samples=8, seconds=300.0, death_s=30.0)
    clusters = {name: bench_spread.Cluster(args, rule) for name, rule in bench_spread.RULES.items()}
    for cluster in clusters.values():
        cluster.run()
    p99 = {name: sorted(cluster.waits)[int(0.99 * len(cluster.waits))] for name, cluster in clusters.items()}
    most, idle = ({name: getattr(c, key) / c.now for name, c in clusters.items()} for key in ("most_s", "idle_s"))
    assert idle["fewest"] > 0.6 and idle["ring"] < 0.01
    assert p99["ring"] < 0.7 * p99["fewest"] and p99["ring"] < 1.1 * p99["known"], p99
    assert most["ring"] < most["two choices"] < 0.6 * most["fewest"]
    assert len(clusters["ring"].waits) > 0.97 * len(clusters["known"].waits)


def test_groups_of_a_simulation_are_the_same_for_all_rules_and_none_is_lost(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import bench_spread

    args = argparse.Namespace(ranks=3, servers=4, groups=2, samples=2, seconds=200.0, death_s=10.0)
    cluster = bench_spread.Cluster(args, bench_spread.ring)
    cluster.run()
    # Deaths or not, each rank has its groups under way, and the servers have what of them is left.
    assert [sum(left > 0 for (of, _), left in cluster.left.items() if of == rank) for rank in range(3)] == [2, 2, 2]
    assert sum(cluster.loads()) == sum(cluster.left.values()) == len(cluster.replies)
    assert cluster.lengths(0, 0) == bench_spread.Cluster(args, bench_spread.fewest).lengths(0, 0)
