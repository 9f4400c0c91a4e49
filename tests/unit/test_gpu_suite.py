"""The GPU suite without a GPU: its tables on small CPU tensors, its answers, and its whole command on stand-ins."""

import json
import math
import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import torch

from csrc.emulation import emulated
from tests.device_stand_ins import stand_in
from tests.kit.waiting import SLOWNESS

ROOT = Path(__file__).parents[2]
BENCHMARKS = ROOT / "benchmarks"


@pytest.fixture
def suite(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import bench_ops_cuda

    yield bench_ops_cuda
    for name in [
        name for name, module in sys.modules.items() if str(BENCHMARKS) in str(getattr(module, "__file__", ""))
    ]:
        del sys.modules[name]


@pytest.fixture
def clock(suite, monkeypatch):
    """The clock of the suite, with the host's time where the device's events would be."""
    stand_in(monkeypatch.setattr)
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


@pytest.mark.slow
def test_every_table_runs_and_agrees_with_float64(suite, clock, report, capsys, monkeypatch):
    import checksum_table
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
    suite.checksum_table(clock, report, budget, [checksum_table.Bucket(1 << 16, 3)])
    suite.print_facts(report)
    rows = [row for table in tables.values() for row in table["rows"]]
    assert not [row["error"] for row in rows if "error" in row]
    assert all(row.get("repeats alike", True) for row in rows)
    for row in tables[logits_tables.LOGPROBS]["rows"]:
        limit = 1e-5 if row["logits"] == "float32" else 2e-2
        assert all(row[name] is None or row[name] < limit for name in ("err logp", "err entropy", "err grad"))
    assert {row["what"] for row in tables[logits_tables.LOGPROBS]["rows"]} == set(operator_peers.MODES)
    for name in (token_tables.LOSSES, token_tables.GAE):
        assert all(row["err"] < 1e-5 for row in tables[name]["rows"])
    assert all(row["equal"] for row in tables[checksum_table.CHECKSUMS]["rows"])
    assert "| someone | absent | not here |" in capsys.readouterr().out


# ---- the answers


def test_a_bar_counts_the_worst_row_and_one_without_rows_is_not_measured(suite, tmp_path):
    import suite_bars

    def answers():
        return [line.split(" | ")[-1].rstrip(" |") for line in suite_bars.lines_of(suite_bars.Found.read(tmp_path))][2:]

    elsewhere = [f"not of a GPU: `{command}`" for command in suite_bars.ELSEWHERE.values()]
    assert answers() == ["not measured"] * len(suite_bars.BARS) + elsewhere
    names = {"peer": "ours", "logits": "bfloat16", "masked": 0.0}
    rows = [{"T": 4096, "what": suite_bars.ENTROPY, **names, "of copy": share} for share in (0.95, 0.92)]
    not_asked = [rows[0] | {"T": 512, "of copy": 0.1}, rows[0] | {"logits": "float32", "of copy": 0.1}]
    loss = {"T": 32768, "sequences": 1, "what": suite_bars.OUR_LOSS, "loss": "by sequence", "replayed us": 20.1}
    loss["launches"] = 1
    sums = [{"peer": peer, "GB/s": rate} for peer, rate in (("ours", 2000.0), ("ours", 1100.0), ("torch eager", 90.0))]
    tables = {suite_bars.LOGPROBS: rows + not_asked, suite_bars.LOSSES: [loss], suite_bars.CHECKSUMS: sums}
    found = {"tables": {name: {"rows": of_table} for name, of_table in tables.items()}}
    (tmp_path / suite_bars.OPERATORS).write_text(json.dumps(found))
    (tmp_path / suite_bars.STEP).write_text(json.dumps({"own waits": 4, "copies a microbatch": 2.0}))
    said = dict(zip([bar.what.partition(",")[0].partition(":")[0] for bar in suite_bars.BARS], answers(), strict=False))
    assert said["bf16 log-prob and entropy"] == "yes" and said["policy loss by sequence"] == "NO"
    assert said["checksums of a publication at 400 Gb/s"] == "yes" and said["GAE of 32k tokens"] == "not measured"
    assert [line for line in answers() if line in ("yes", "NO")] == ["yes", "NO", "yes", "yes", "NO", "yes"]
    rows[0]["of copy"] = 0.919
    (tmp_path / suite_bars.OPERATORS).write_text(json.dumps(found))
    assert answers()[0] == "NO"


def test_the_commands_for_what_a_gpu_does_not_tell_are_there(suite):
    import suite_bars

    for command in suite_bars.ELSEWHERE.values():
        if command.startswith("python "):
            assert (ROOT / command.split()[1]).is_file(), command


# ---- the whole command


def write_program(path, text):
    path.write_text(f"#!/usr/bin/env bash\n{text}\n")
    path.chmod(0o755)


@pytest.fixture
def run_suite(tmp_path):
    """Run gpu_suite.sh on a machine whose tools are stand-ins; return (status, what it printed, its folder)."""
    tools, results, wheels = (tmp_path / name for name in ("tools", "results", "wheels"))
    for folder in (tools, wheels):
        folder.mkdir()
    write_program(tools / "nvidia-smi", "echo 'a stand-in, 580.1, 1980 MHz, 2619 MHz, 30'")
    sanitizer = '[ "$1 $3 $4" = "--tool --error-exitcode 1" ] && { [ "$2" = memcheck ] || exit 0; shift 4; exec "$@"; }'
    write_program(tools / "compute-sanitizer", sanitizer)  # the two differ in nothing else: one is enough
    write_program(tools / "python", f'exec {sys.executable} {ROOT}/tests/gpu_suite_python.py "$@"')
    (wheels / "one_more_module.py").write_text("")
    with zipfile.ZipFile(wheels / "a_peer-1.0-py3-none-any.whl", "w") as wheel:
        wheel.writestr("a_peer.py", "")
        wheel.writestr("a_peer-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: a-peer\nVersion: 1.0\n")
        wheel.writestr("a_peer-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        wheel.writestr("a_peer-1.0.dist-info/RECORD", "")

    def run(*, python=tools / "python", **variables):
        environment = os.environ | {"PATH": f"{tools}:{os.environ['PATH']}", "PYTHON": str(python)}
        environment |= {"SUITE_SLOWNESS": str(math.ceil(SLOWNESS))} | variables
        environment |= {"OMP_NUM_THREADS": "1"}  # small tensors, on a machine that tests share
        command = ["bash", str(BENCHMARKS / "gpu_suite.sh"), str(results), str(wheels)]
        done = subprocess.run(command, env=environment, capture_output=True, text=True)
        assert (results / "gpu_suite.md").read_text() == done.stdout, done.stderr
        return done.returncode, done.stdout, results

    return run


@pytest.mark.thorough  # fifteen interpreters; `make test` has the tables, the answers, and the command without them
@pytest.mark.slow
def test_the_whole_suite_runs_through_on_stand_ins_and_begins_with_its_answers(run_suite, suite):
    import suite_bars

    status, said, results = run_suite()
    logs = "".join(path.read_text() for path in results.glob("*.txt"))
    assert status == 0 and said.endswith("Parts that failed: none.\n"), said[-2000:] + logs[-4000:]
    lines = said.splitlines()
    assert lines[0] == "# GPU suite" and re.fullmatch(r"\d{4}-\d\d-\d\d, commit \w+", lines[2])
    assert lines[3].startswith("a stand-in, 580.1")
    answers = lines[7 : 7 + len(suite_bars.BARS)]
    assert lines[5].startswith("| bar |") and all(re.search(r"\| (yes|NO) \|$", line) for line in answers), answers
    parts = ("build", "tests", "runs", "memcheck", "racecheck", "Operators", "Training step", "sglang")
    for name in (*parts, "Operators beside those of others"):
        assert f"\n## {name}\n" in said
    assert "a stand-in for yes and ('90a',)" in said and said.count("tests/gpu/test_operators_cuda.py: ") == 2
    assert "| torch eager |" in said and "| 1b |" not in said and "1b, bfloat16, a stand-in" in said
    assert emulated.missing() or "\na stand-in, torch" in said, "the tables ran on the emulated device"
    assert "A step of megatron_rl: 0 waits, 0 own waits" in said
    for name in (suite_bars.OPERATORS, suite_bars.PEERS):
        tables = json.loads((results / name).read_text())["tables"]
        assert len(tables) == 6 and all(table["rows"] and not table["skipped"] for table in tables.values())
        assert not [row["error"] for table in tables.values() for row in table["rows"] if "error" in row]
    assert not (results / "install.txt").exists()


def test_a_part_that_fails_does_not_stop_the_others_and_its_bars_are_not_measured(run_suite, tmp_path):
    # Fails at once in whatever it is asked for, but for the answers.
    write_program(tmp_path / "broken", f'[[ $1 == *suite_bars.py ]] && exec {sys.executable} "$@"; echo no >&2; exit 3')
    status, said, results = run_suite(python=tmp_path / "broken")
    assert status == 1 and "**A part failed" in said.splitlines()[4]
    assert said.endswith("Parts that failed: install build memcheck tests runs operators rates step peers.\n")
    assert said.count("| not measured |") > 10 and "failed with status 3" in said and "## sglang\n\nNot run" in said
    assert (results / "operators.txt").read_text() == "no\n"


def test_what_is_left_when_the_time_is_used_up_is_said(run_suite, tmp_path):
    write_program(tmp_path / "broken", f'[[ $1 == *suite_bars.py ]] && exec {sys.executable} "$@"; exit 0')
    status, said, _ = run_suite(python=tmp_path / "broken", SUITE_SECONDS="3", SUITE_SLOWNESS="1")
    assert status == 1 and "not begun: the suite's time is used up" in said
