"""megatron-rl doctor with a server of its own: a sound config, and keys that a server keeps over a publication."""

import os

import pytest

from megatron_rl import cli
from megatron_rl.tools.embedded_server.kv_rows import KVRows
from tests.kit.ranks import fork
from tests.kit.runs import COUNT, ROOT

pytestmark = pytest.mark.slow


def told(folder, *overrides):
    """The doctor's exit code and words."""
    output = folder / "output.txt"
    words = [f"run.folder={folder / 'run'}", "rollout.reward_workers=1", *overrides]
    os.chdir(ROOT)
    status = os.waitpid(fork(cli.main, ["doctor", COUNT, *words], output), 0)[1]
    return os.waitstatus_to_exitcode(status), output.read_text()


def test_nothing_is_said_of_a_sound_config(tmp_path):
    code, said = told(tmp_path)
    assert code == 0 and [line for line in said.splitlines() if line.startswith(("ok", "FAULT"))] == [
        "ok: machine",
        "ok: hosts",
        "ok: data",
        "ok: model",
    ], said


@pytest.mark.thorough  # tests/megatron/test_doctor.py compares the trainer in more layouts
def test_the_trainer_is_compared_in_a_layout_too(tmp_path):
    code, said = told(tmp_path, "--layout", "tensor=2")
    assert code == 0 and "ok: trainer on 2 ranks" in said, said


def test_keys_that_a_server_keeps_over_a_publication_are_found(tmp_path, monkeypatch):
    # in the server, which is forked: neither a publication nor a flush makes it forget what it has
    monkeypatch.setattr(KVRows, "forget_prefixes", lambda self: None)
    monkeypatch.setattr(KVRows, "epoch", property(lambda self: 0, lambda self, count: None), raising=False)
    code, said = told(tmp_path)
    assert code == 1 and "keys of earlier weights are in the KV cache: it was not flushed" in said, said
