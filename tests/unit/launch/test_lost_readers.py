"""A process whose output nobody reads any more works on."""

import os
import subprocess
import sys

from megatron_rl.launch import rank
from megatron_rl.telemetry.run_log import RunLog

PROGRAM = """
import os, sys, time
from megatron_rl.launch.rank import outlive_readers
outlive_readers()
print("the first line ä")
sys.stdout.flush()
sys.stdin.readline()  # until the reader has gone
for line in range(2000):
    print("x" * 1000, flush=True)
    print("y" * 1000, file=sys.stderr)
os.system("echo of a child")
open(sys.argv[1], "w").write("done")
"""


def test_a_program_goes_on_when_its_reader_has_read_enough(tmp_path):
    command = [sys.executable, "-c", PROGRAM, str(tmp_path / "end")]
    streams = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    process = subprocess.Popen(command, text=True, env=os.environ | {"PYTHONIOENCODING": "utf-8"}, **streams)
    assert process.stdout.readline() == "the first line ä\n"
    process.stdout.close()
    process.stderr.close()
    process.stdin.write("\n")
    process.stdin.close()
    assert process.wait() == 0 and (tmp_path / "end").read_text() == "done"


def test_a_run_goes_on_when_nobody_reads_its_lines(tmp_path, monkeypatch):
    read, write = os.pipe()
    os.close(read)
    with os.fdopen(write, "w", buffering=1) as nobody:
        monkeypatch.setattr(sys, "stdout", nobody)
        with RunLog(tmp_path, 3) as log:
            for step in range(3):
                log.log_step(step, {"reward/mean": 0.5})
                log.say("a line")
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 3


def test_output_that_is_no_file_is_left_alone(monkeypatch):
    stream = type("Notebook", (), {"write": lambda self, text: None, "flush": lambda self: None})()
    monkeypatch.setattr(sys, "stdout", stream)
    monkeypatch.setattr(sys, "stderr", stream)
    rank.outlive_readers()
    assert sys.stdout is stream
