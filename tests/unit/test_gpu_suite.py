"""The GPU suite's tables without a GPU: their rows, budget and JSON, and every line of them on small CPU tensors."""

import contextlib
import json
import sys
import time
from pathlib import Path

import pytest
import torch

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def suite(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import bench_ops_cuda

    yield bench_ops_cuda
    for name in [
        name for name, module in sys.modules.items() if str(BENCHMARKS) in str(getattr(module, "__file__", ""))
    ]:
        del sys.modules[name]


class HostEvent:
    def __init__(self, enable_timing):
        assert enable_timing

    def record(self):
        self.at = time.perf_counter()

    def elapsed_time(self, end):
        return (end.at - self.at) * 1e3


class HostGraph:
    def replay(self):
        pass


class HostStream:
    def wait_stream(self, other):
        pass


@pytest.fixture
def clock(suite, monkeypatch):
    """The clock of the suite, with the host's time where the device's events would be."""
    nothing = {"synchronize": None, "reset_peak_memory_stats": None, "memory_allocated": 0, "max_memory_allocated": 64}
    for name, value in nothing.items():
        monkeypatch.setattr(torch.cuda, name, lambda value=value: value)
    for name, value in {"Event": HostEvent, "CUDAGraph": HostGraph, "Stream": HostStream}.items():
        monkeypatch.setattr(torch.cuda, name, value)
    monkeypatch.setattr(torch.cuda, "current_stream", HostStream)
    for name in ("stream", "graph"):
        monkeypatch.setattr(torch.cuda, name, lambda _: contextlib.nullcontext())
    return suite.DeviceClock("cpu", seconds=0.0)


@pytest.fixture
def report(suite, tmp_path):
    facts = {"device": "cpu", "torch": "2", "commit": "c", "ceilings": {"copy": 1.0, "read": 1.0}, "peers": {}}
    return suite.Report(tmp_path / "gpu_suite.json", facts | {"absent": {"someone": "not here"}})


def test_rows_are_those_of_the_contract_and_the_important_ones_come_first(suite):
    cases = suite.logits_cases()
    sizes = {(case.rows, case.vocab, case.dtype) for case in cases if case.masked == 0}
    wanted = {(t, v) for t in (4096, 16384, 32768, 65536) for v in (32000, 128256, 151936)}
    assert {(t, v, d) for t, v in wanted for d in (torch.bfloat16, torch.float32)} < sizes
    assert {(t, v, torch.bfloat16) for t in (1, 64, 512) for v in (32000, 128256, 151936)} < sizes
    assert {case.vocab for case in cases if case.masked == 0.5} == {32000, 128256, 151936}
    assert len(cases) == len(set(cases)) and (cases[0].rows, cases[0].dtype) == (16384, torch.bfloat16)
    assert {case.ranks for case in suite.shard_cases()} == {1, 2, 4, 8}
    assert {case.sequences for case in suite.token_cases()} == {1, 64, 512} and suite.token_cases()[0].rows == 32768
    assert sum(suite.SHARES.values()) == pytest.approx(1.0)


def test_what_the_budget_leaves_out_and_what_fails_is_named_in_the_json(suite, report):
    seconds = iter([0.0, 1.0, 5.0, 9.0])
    budget = suite.Budget(5.0, now=lambda: next(seconds))
    from suite_report import each_case, guarded

    def measure(case):
        report.row(case=case, **guarded(lambda: {"us": 1 / 0}))

    report.table("a table", "legend", ("case", "us", "error"))
    each_case(report, budget, ["first", "second"], measure)
    table = json.loads(report.path.read_text())["tables"]["a table"]
    assert table["skipped"] == ["second"] and table["seconds"] == 9.0
    assert table["rows"] == [{"case": "first", "us": None, "error": "ZeroDivisionError: division by zero"}]


def test_a_peer_that_cannot_be_imported_is_absent_with_its_reason(suite):
    def missing():
        import a_package_that_nobody_has  # noqa: F401

    from operator_peers import find_peers, torch_eager

    peers = find_peers((torch_eager, missing))
    assert [peer.name for peer in peers.present] == ["torch eager"]
    assert "a_package_that_nobody_has" in peers.absent["missing"]


def test_a_cost_has_every_column(clock):
    prepared = []
    cost = clock.cost(lambda: torch.ones(8).sum(), lambda: prepared.append(1))
    assert cost["repeats"] == 10 and cost["p20"] <= cost["us"] <= cost["p80"]
    assert (cost["launches"], cost["waits"]) == (0, 0) and len(prepared) == 2 + 3 + 1 + 1 + 10
    assert set(clock.ceilings(1 << 10)) == {"copy", "read"}


def test_every_table_runs_and_agrees_with_float64(suite, clock, report, capsys, monkeypatch):
    import logits_tables
    import operator_peers
    import token_tables

    budget, tables = suite.Budget(1000.0), report.tables
    monkeypatch.setattr(clock, "launches_and_waits", lambda *_: (0, 0))  # half a second each
    monkeypatch.setattr("gc.collect", lambda: 0)  # as long
    peers = operator_peers.find_peers((operator_peers.ours, operator_peers.torch_eager)).present
    f32 = torch.float32
    blocks = [logits_tables.Logits(512, 50, f32, 0.5, True), logits_tables.Logits(1, 300, torch.bfloat16)]
    suite.logprob_table(clock, report, budget, peers, blocks)
    suite.head_table(clock, report, budget, peers, [logits_tables.Head(40, 100, 16)])
    suite.shard_table(clock, report, budget, [logits_tables.Shard(16, 64, 4), logits_tables.Shard(16, 64, 1)])
    tokens = [token_tables.Tokens(256, 64), token_tables.Tokens(256, 1)]
    monkeypatch.setattr(torch, "compile", lambda function, dynamic: function)  # seconds, and not what is tested
    suite.loss_table(clock, report, budget, tokens)
    suite.gae_table(clock, report, budget, tokens)
    suite.print_facts(report)
    suite.print_bars(report)
    rows = [row for table in tables.values() for row in table["rows"]]
    assert not [row["error"] for row in rows if "error" in row]
    assert all(row.get("repeats alike", True) for row in rows)
    for row in tables[logits_tables.LOGPROBS]["rows"]:
        limit = 1e-5 if row["logits"] == "float32" else 2e-2
        assert all(row[name] is None or row[name] < limit for name in ("err logp", "err entropy", "err grad"))
    assert {row["what"] for row in tables[logits_tables.LOGPROBS]["rows"]} == set(operator_peers.MODES)
    for name in (token_tables.LOSSES, token_tables.GAE):
        assert all(row["err"] < 1e-5 for row in tables[name]["rows"])
    assert "| someone | absent | not here |" in capsys.readouterr().out
