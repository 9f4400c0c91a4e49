"""Several clients on scripted servers: shared evenly, a group and an episode on one each, also past a death."""

import asyncio
from collections import Counter

from megatron_rl.config import GenerationConfig, RolloutConfig
from megatron_rl.servers.generate import SamplingClient
from megatron_rl.servers.pool import ClientOptions
from megatron_rl.types import LLMRequest
from tests.kit.scripted_server import counting
from tests.kit.waiting import LATE_S, until

RANKS, GROUPS, SAMPLES = 4, 2, 3


def groups_by_server(servers):
    """Count each server's requests by group."""
    return [Counter(body["rid"].split("-")[0] for body in server.generations()) for server in servers]


async def spread(servers):
    clients = [
        SamplingClient(RolloutConfig(request_timeout_s=LATE_S), ClientOptions(rank=rank, ranks=RANKS))
        for rank in range(RANKS)
    ]
    # Each knows them in an order of its own, as they come and go.
    for rank, client in enumerate(clients):
        await client.connect([server.url for server in servers[rank:] + servers[:rank]])
    may_answer = asyncio.Event()
    loop = asyncio.get_running_loop()

    async def held(body):
        await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(may_answer.wait(), loop))
        return counting(body)

    for server in servers:
        server.script.extend([held] * 50)

    def ask(rank, group, ids=(1,)):
        gconfig = GenerationConfig(max_new_tokens=2)
        return clients[rank].agenerate(LLMRequest(rid=f"r{rank}g{group}", input_ids=list(ids), gconfig=gconfig))

    try:
        asked = [(rank, group) for rank in range(RANKS) for group in range(GROUPS) for _ in range(SAMPLES)]
        turns = [asyncio.create_task(ask(*whose)) for whose in asked]
        await until(lambda: sum(len(server.generations()) for server in servers) == len(asked))
        at_first = groups_by_server(servers)
        servers[0].hang_up_on.add("/generate")
        servers[0].restart(weight_version="none")  # it dies, and what comes back lacks the weights
        await until(lambda: sum(len(server.generations()) for server in servers[1:]) == len(asked))
        after = groups_by_server(servers)
        may_answer.set()
        replies = await asyncio.gather(*turns)
        before = [len(server.generations()) for server in servers]
        for rank, group in dict.fromkeys(asked):
            await ask(rank, group, ids=(1, 2, 3, 4))  # an episode's second turn
        second = [
            Counter(body["rid"].split("-")[0] for body in server.generations()[count:])
            for server, count in zip(servers, before, strict=True)
        ]
    finally:
        for client in clients:
            await client.close()
    return at_first, after, second, replies


def test_ranks_fill_all_servers_and_groups_stay_together_past_a_death(scripted):
    servers = [scripted() for _ in range(RANKS * GROUPS)]
    at_first, after, second, replies = asyncio.run(spread(servers))
    # None idle: each server has the samples of one group, all of them.
    assert [list(groups.values()) for groups in at_first] == [[SAMPLES]] * len(servers)
    # The dead server's group went to one other server, all of it; the rest stayed.
    (lost,) = at_first[0]
    assert [groups[lost] for groups in after[1:]].count(SAMPLES) == 1
    assert sum(groups[lost] for groups in after[1:]) == SAMPLES
    assert [groups - Counter({lost: SAMPLES}) for groups in after[1:]] == at_first[1:]
    assert all(reply.output_tokens == [2, 3] for reply in replies)
    # The second turn of an episode is where its first one was answered.
    assert not second[0]
    assert [set(groups) for groups in second[1:]] == [set(groups) for groups in after[1:]]
