"""Data sets of the hub, as the real clients download them from a small server that speaks its API."""

import hashlib
import io
import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

import pytest
from huggingface_hub import constants

from megatron_rl.data import data_files
from megatron_rl.data.prompts import load_prompts
from tests.kit.http import Answer, answered_by
from tests.kit.optional import later
from tests.kit.waiting import LATE_S

pytestmark = pytest.mark.slow

NEEDED = "{0} is not installed: pip install 'megatron-rl[data]'".format
datasets = later("datasets", reason=NEEDED("datasets"))
pyarrow = later("pyarrow", reason=NEEDED("pyarrow"))
pyarrow_parquet = later("pyarrow.parquet", reason=NEEDED("pyarrow"))

ROOT = Path(__file__).parents[3]
NAME = "someone/numbers"
CARD = """---
configs:
- config_name: easy
  default: true
  data_files: [{split: train, path: train.parquet}, {split: test, path: test.parquet}]
- config_name: hard
  data_files: [{split: train, path: hard.parquet}]
- config_name: mixed
  data_files: [{split: train, path: [test.parquet, mixed.parquet]}]
---
"""
TRAIN = [{"prompt": f"{number}+1=", "answer": str(number + 1)} for number in range(7)]
HARD = [{"prompt": f"{number}*77=", "answer": str(77 * number)} for number in range(3)]
LOAD = """
import json, sys
from megatron_rl.data import data_files
from megatron_rl.data.prompts import PromptIterator, load_prompts

data_files.ANSWER_S = float(sys.argv[2])
for source, split, state in json.loads(sys.argv[1]):
    try:
        iterator = PromptIterator(load_prompts(source, {"split": split}, key="data.train"), seed=3)
    except ValueError as error:
        print(json.dumps({"error": str(error)}))
        continue
    if state:
        iterator.load_state_dict(state)
    taken, state = iterator.next_batch(5), iterator.state_dict()
    print(json.dumps({"prompts": iterator.prompts, "taken": taken, "state": state, "next": iterator.next_batch(5)}))
"""


class Hub:
    """The part of the hub's API that a download asks, with one data set of one commit."""

    COMMIT = "0123456789abcdef0123456789abcdef01234567"

    def __init__(self, files: dict[str, bytes]) -> None:
        self.files, self.asked, self.url = files, [], ""

    def answer(self, method: str, path: str, body: bytes) -> Answer:
        path, api = urlsplit(path).path, f"/api/datasets/{NAME}"
        self.asked.append(f"{method} {path}")
        if path in (api, f"{api}/revision/main", f"{api}/revision/{self.COMMIT}"):
            siblings = [{"rfilename": file} for file in self.files]
            return Answer({"id": NAME, "sha": self.COMMIT, "siblings": siblings, "private": False, "tags": []})
        if path.startswith(f"{api}/tree/{self.COMMIT}"):
            folder = path.removeprefix(f"{api}/tree/{self.COMMIT}").removeprefix("/")
            found = [self.about(file) for file in self.files if file.startswith(folder)]
            return Answer(found) if found else not_found("EntryNotFound")
        if path == f"{api}/paths-info/{self.COMMIT}":
            sent = json.loads(body) if body.startswith(b"{") else parse_qs(body.decode())
            return Answer([self.about(file) for file in sent["paths"] if file in self.files])
        if path.startswith(f"/datasets/{NAME}/resolve/"):
            file = path.split("/", 6)[-1]
            if file not in self.files:
                return not_found("EntryNotFound")
            headers = {"ETag": f'"{self.about(file)["oid"]}"', "X-Repo-Commit": self.COMMIT}
            return Answer(self.files[file], headers=headers)
        return not_found("RepoNotFound")

    def about(self, file: str) -> dict[str, object]:
        content = self.files[file]
        return {"type": "file", "path": file, "size": len(content), "oid": hashlib.sha1(content).hexdigest()}


def not_found(code: str) -> Answer:
    return Answer({"error": "not found"}, status=404, headers={"X-Error-Code": code})


def parquet(rows):
    file = io.BytesIO()
    pyarrow_parquet.write_table(pyarrow.Table.from_pylist(rows), file)
    return file.getvalue()


@pytest.fixture(scope="module")
def hub():
    files = {"README.md": CARD.encode(), "mixed.parquet": parquet([{"question": "1?"}])}
    files |= {"train.parquet": parquet(TRAIN), "test.parquet": parquet(TRAIN[:1]), "hard.parquet": parquet(HARD)}
    hub = Hub(files)
    with answered_by(hub.answer) as hub.url:
        yield hub


def load(url, folder, *wanted, offline=False):
    """Load `(source, split, state)` in one process, as clients read their settings when they are imported."""
    environment = os.environ | {"HF_ENDPOINT": url, "HF_HOME": str(folder), "HF_HUB_OFFLINE": str(int(offline))}
    environment |= {"PYTHONPATH": str(ROOT), "NO_PROXY": "127.0.0.1"}
    done = subprocess.run(
        [sys.executable, "-c", LOAD, json.dumps(wanted), str(LATE_S)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=LATE_S,
    )
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


NOT_THERE = {
    "hf:someone/other": "Dataset 'someone/other' doesn't exist",
    f"hf:{NAME}:harder": "BuilderConfig 'harder' not found",
    f"hf:{NAME}:mixed": "because column names don't match",
    f"hf:{NAME}": "no split 'dev'; its splits are train, test",
}


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="module")
def loaded(hub, cache):
    """Answers of one process that loads the data set, its other config, and four things that the hub does not have."""
    there = [(f"hf:{NAME}", "train", None), (f"hf:{NAME}:hard", "train", None)]
    return load(hub.url, cache, *there, *((source, "dev", None) for source in NOT_THERE))


@pytest.mark.thorough
def test_data_set_of_the_hub_is_downloaded_once_and_a_resumed_run_goes_on_in_it(hub, cache, loaded):
    first, hard, *_ = loaded
    assert (first["prompts"], hard["prompts"]) == (TRAIN, HARD)
    downloads = [asked.rpartition("/")[2] for asked in hub.asked if asked.startswith("GET /datasets/")]
    assert sorted(downloads) == sorted(hub.files), "the card and the files, each once"
    asked = len(hub.asked)
    (resumed,) = load(hub.url, cache, (f"hf:{NAME}:easy", "train", first["state"]), offline=True)
    assert len(hub.asked) == asked, "what is in the cache needs no hub"
    assert resumed["taken"] == first["next"] != first["taken"] and resumed["prompts"] == TRAIN


def test_data_set_that_the_hub_does_not_have_is_named_with_its_key(loaded):
    for (source, message), answer in zip(NOT_THERE.items(), loaded[2:], strict=True):
        assert answer["error"].startswith(f"data.train = {source!r}: ") and message in answer["error"]


def test_hub_that_does_not_answer_is_given_up_and_not_asked_again(monkeypatch):
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(data_files, "ANSWER_S", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as silent, socket.create_server(("127.0.0.1", 0)) as closed:
        ports = silent.getsockname()[1], closed.getsockname()[1]
        closed.close()
        for port in ports:
            monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{port}")
            with pytest.raises(ValueError, match="does not answer, HF_HUB_OFFLINE=1") as raised:
                load_prompts(f"hf:{NAME}", {"split": "train"}, key="data.train")
            reason = f"data.train = 'hf:{NAME}': cannot be read (the hub at http://127.0.0.1:{port}"
            assert str(raised.value).startswith(reason)
        # `datasets` itself would go on for minutes.
        silent.setblocking(False)
        silent.accept()[0].close()
        with pytest.raises(BlockingIOError):
            silent.accept()
