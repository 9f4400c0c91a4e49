"""How SGLang is told the token of a file, by a stand-in that reads its arguments as SGLang does."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

STAND_IN = """
import argparse, logging
parser = argparse.ArgumentParser()
parser.add_argument("--model-path")
parser.add_argument("--api-key")
args = parser.parse_args()
logging.basicConfig(format="%(message)s")
logging.warning("arguments: %s", vars(args))
print(args.model_path, args.api_key)
"""


@pytest.mark.parametrize("token", ["-dashes-may-begin-a-token", "--api-key", "0123456789abcdef"])
def test_a_token_that_begins_with_a_dash_is_no_option(tmp_path, token):
    token = token.ljust(16, "x")
    (tmp_path / "sglang").mkdir()
    (tmp_path / "sglang" / "launch_server.py").write_text(STAND_IN)
    (tmp_path / "token").touch(mode=0o600)
    (tmp_path / "token").write_text(token)
    command = [sys.executable, "-m", "megatron_rl.servers.sglang_launch", "--token-file", str(tmp_path / "token")]
    path = os.pathsep.join([str(tmp_path), str(Path(__file__).parents[3])])
    done = subprocess.run(
        [*command, "--model-path", "model"], env=os.environ | {"PYTHONPATH": path}, capture_output=True, text=True
    )
    assert done.stdout.split() == ["model", token], done.stderr
    assert "'api_key': '***'" in done.stderr and token not in done.stderr
