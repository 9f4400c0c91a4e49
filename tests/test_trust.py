"""What the package never does with bytes that others may have written: make objects or run code of them.

Names are looked for, not meanings: a call under another name would pass. ruff's own rules do not know which files may.
"""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "megatron_rl"
FILES = sorted(PACKAGE.rglob("*.py"))

UNPICKLING = {
    "rollout/rpc.py": "what the trainer and its own child send each other over a pair of sockets",
    "rewards/worker.py": "what the rollout process sends its reward and agent workers; they answer in JSON",
    "platform/upstream.py": "what forked writers put into a nameless file of their parent",
    "tools/rehearsal/rehearsed_rank.py": "what ranks forked from one process leave for each other in a folder it made",
    "run/given_in_python.py": "what a program gives its own run; other commands find it on PYTHONPATH alone",
    "platform/plain_checkpoints.py": "the unpickler that lets nothing but data through",
}
"""The files that may unpickle, and what."""
LOCKED = {
    "sandbox/called.py": "what a model wrote, in a process that is locked in",
    "sandbox/trial.py": "the data set's tests of it, in a locked fork",
    "rewards/program_text.py": "what a model wrote, which is compiled to see whether it is a program, and not run",
}
"""The files that may run code, and what."""
MODULES = {"cloudpickle", "dill", "joblib", "marshal", "shelve"}
UNPICKLERS = {"pickle.load", "pickle.loads", "pickle.Unpickler", "_pickle.load", "_pickle.loads"}
RUNNERS = {"eval", "exec", "compile", "os.system", "os.popen", "yaml.load", "yaml.unsafe_load", "yaml.full_load"}
OBJECTS_OF_RANKS = ("broadcast_object_list", "all_gather_object", "gather_object", "scatter_object_list")
"""Pickles between ranks of one job; no server is a rank of it."""
OUTSIDE_THE_JOB = (
    "data",
    "launch",
    "rewards",
    "rollout",
    "servers",
    "telemetry",
    "tools/embedded_server",
    "tools/report",
    "training_server/client_models.py",
    "training_server/client_sessions.py",
    "training_server/http_api.py",
    "training_server/request_checks.py",
    "training_server/request_journal.py",
    "training_server/sampler.py",
    "training_server/saved_weights.py",
    "training_server/service.py",
    "training_server/wire.py",
    "weights/delta_code.py",
    "weights/shared_bucket.py",
    "weights/update_group.py",
    "workflows",
)


def faults(code: str, path: str) -> list[str]:
    """Describe what a file of the package, by its path in it, does that it may not."""
    found = []
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.Import):
            names = [] if path in UNPICKLING else node.names
            found += [f"imports {alias.name}" for alias in names if alias.name.split(".")[0] in MODULES]
        elif isinstance(node, ast.ImportFrom):
            is_pickle = (node.module or "").split(".")[0] in {*MODULES, "pickle", "_pickle"}
            found += [f"imports from {node.module}"] if is_pickle else []
        elif isinstance(node, ast.Attribute | ast.Name):
            name = ast.unparse(node)
            if name in UNPICKLERS and path not in UNPICKLING:
                found.append(name)
            if name.endswith(OBJECTS_OF_RANKS) and path.startswith(OUTSIDE_THE_JOB):
                found.append(name)
        elif isinstance(node, ast.Call):
            name = ast.unparse(node.func)
            given = {keyword.arg: ast.unparse(keyword.value) for keyword in node.keywords}
            if name in RUNNERS and path not in LOCKED:
                found.append(f"{name}()")
            if name == "torch.load" and given.get("weights_only") != "True":
                found.append("torch.load() without weights_only=True")
            for option in ("allow_pickle", "trust_remote_code", "shell"):
                found += [f"{name}({option}=...)"] if given.get(option, "False") != "False" else []
    return found


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_nothing_that_others_wrote_is_run(path):
    assert not faults(path.read_text(encoding="utf-8"), str(path.relative_to(PACKAGE)))


@pytest.mark.parametrize(
    "code",
    [
        "import pickle; pickle.loads(body)",
        "import pickle\nclass Reader(pickle.Unpickler): pass",
        "from pickle import loads",
        "import dill",
        "torch.load(path)",
        "torch.load(path, weights_only=False)",
        "load = lambda path: torch.load(path, weights_only=ours)",
        "numpy.load(path, allow_pickle=True)",
        "AutoModel.from_pretrained(path, trust_remote_code=True)",
        "yaml.load(text)",
        "eval(text)",
        "exec(text, {})",
        "subprocess.run(command, shell=True)",
        "dist.all_gather_object(states, state)",
    ],
)
def test_what_is_looked_for_is_found(code):
    assert faults(code, "tools/embedded_server/server.py")


def test_what_is_harmless_is_let_through():
    code = "import pickle; pickle.dumps(x); torch.load(p, weights_only=True); model.eval(); yaml.safe_load(t)"
    assert not faults(code, "tools/embedded_server/server.py")
    assert not faults("dist.all_gather_object(states, state)", "engine/manifest.py")


def test_every_file_that_may_unpickle_still_does():
    for path in UNPICKLING:
        assert "pickle" in (PACKAGE / path).read_text(), f"{path} unpickles nothing any more; take it out"
