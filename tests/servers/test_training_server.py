"""The training server, driven by the package `tinker`: the service's own client, with nothing of it replaced."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import warnings

import pytest
import torch
import yaml
from safetensors.torch import load_file

from megatron_rl.config import LoraConfig
from megatron_rl.training_server.losses import make_loss
from megatron_rl.training_server.shared_engine import batch_of
from megatron_rl.training_server.wire import Datum
from tests.kit.models import LAYOUTS, VOCAB, make_engine, make_model
from tests.kit.optional import later
from tests.kit.ranks import run_ranks
from tests.kit.runs import ROOT, environment, family
from tests.kit.waiting import wait_until

tinker = later("tinker", reason="needs the package tinker; make installs it")
types = later("tinker.types", reason="needs the package tinker; make installs it")
RANK, ALPHA = 4, 8.0
STEP = dict(learning_rate=1e-2, beta1=0.0, beta2=0.0, eps=1e3)
"""With eps far above the gradients, Adam's step is SGD's, lr / eps of the gradient."""
POLICY = ("logprobs", "advantages")
INPUTS = {
    "cross_entropy": ("weights",),
    "importance_sampling": POLICY,
    "ppo": POLICY,
    "cispo": POLICY,
    "dro": POLICY,
    "gspo": (*POLICY, "sequence_ratio_mask"),
}
LENGTHS = (5, 12, 7)


@contextlib.contextmanager
def serving(folder, model, *arguments, port=0, ranks=1):
    """A training server in processes of its own; yields its URL and the process that started it."""
    ready, log = folder / "url", folder / "log"
    ready.unlink(missing_ok=True)
    config = folder / "config.yaml"
    sections = {
        "model": {"path": str(model)},
        "lora": {"rank": RANK, "alpha": ALPHA},
        "rollout": {"backend": "embedded"},
        "batch": {"tokens_per_microbatch": 64},
        "run": {"folder": str(folder / "run"), "threads_per_rank": 1},
    }
    config.write_text(yaml.safe_dump(sections))
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)] if ranks > 1 else []
    command = [sys.executable, *launcher, "-m", "megatron_rl.training_server", str(config), "--port", str(port)]
    command += ["--model-name", "tiny", "--ready-file", str(ready), *arguments]
    with log.open("ab") as output:
        started = subprocess.Popen(command, cwd=ROOT, env=environment(), stdout=output, stderr=output)
    try:
        wait_until(lambda: ready.exists() or started.poll() is not None, log.read_text)
        assert ready.exists(), log.read_text()
        yield ready.read_text(), started
    finally:
        for process in family(started.pid):
            with contextlib.suppress(ProcessLookupError):
                os.kill(process.pid, signal.SIGKILL)
        started.wait()


def client_of(url, key_file):
    return tinker.ServiceClient(base_url=url, api_key=key_file.read_text().strip())


@pytest.fixture(scope="module", autouse=True)
def nothing_is_reported():
    """The client reports its errors to its server; here nobody reads them."""
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        patch.setenv("TINKER_TELEMETRY", "0")
        yield


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models") / "qwen3"
    make_model("qwen3", folder, 2)
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("server")


@pytest.fixture(scope="module")
def url(folder, model):
    """A server with two tenants, `a` and `b`."""
    tenants = {name: str(folder / f"{name}.key") for name in "ab"}
    (folder / "tenants.json").write_text(json.dumps(tenants))
    with serving(folder, model, "--tenants", str(folder / "tenants.json"), "--slots", "32") as (url, _):
        yield url


@pytest.fixture(scope="module")
def service(folder, url):
    return client_of(url, folder / "a.key")


@pytest.fixture(scope="module")
def other(folder, url):
    return client_of(url, folder / "b.key")


def some_data(loss, seed=0):
    """The same data twice: as the client's, and as the engine's."""
    generator, own, data = torch.Generator().manual_seed(seed), [], []
    for length in LENGTHS:
        ids = torch.randint(0, VOCAB, (length + 1,), generator=generator)
        every = {name: torch.randn(length, generator=generator) for name in ("weights", "advantages", "logprobs")}
        every["logprobs"] = every["logprobs"] * 0.1 - 4.5
        every["sequence_ratio_mask"] = (torch.arange(length) >= 2).float()
        inputs = {"target_tokens": ids[1:]} | {name: every[name] for name in INPUTS[loss]}
        own.append(Datum(ids[:-1], inputs))
        data.append(types.Datum(model_input=types.ModelInput.from_ints(ids[:-1].tolist()), loss_fn_inputs=inputs))
    return data, own


def logprobs_in(output):
    return torch.cat([datum["logprobs"].to_torch() for datum in output.loss_fn_outputs])


def by_the_engine_alone(model, adapters, losses):
    """For each loss from the same adapters: its sum, log-probs, and the adapters after a step of MegatronEngine."""
    found = {}
    options = {"lr": STEP["learning_rate"], "beta1": 0.0, "beta2": 0.0, "eps": STEP["eps"], "clip_grad": 0.0}
    for loss, data in losses.items():
        engine = make_engine(model, LAYOUTS["1"][1], lora=LoraConfig(rank=RANK, alpha=ALPHA), **options)
        engine.load(adapters)
        stats = engine.train_batch(batch_of(data), make_loss(loss, {}), lambda rows: torch.tensor(0))
        logprobs = torch.cat([part[1:] for part in stats.logprobs.split([len(d.tokens) + 1 for d in data])])
        found[loss] = stats.loss, logprobs, {key: tensor.clone() for key, tensor in engine.adapter_tensors()}
    return found


def saved(folder, path):
    """The folder of saved weights on the server's disk."""
    name, kind, own = path.removeprefix("tinker://").split("/")
    return folder / "run" / "training_server" / "models" / name.replace(":", "-") / kind / own


def adapters_in(folder):
    prefix = "base_model.model."
    return {name.removeprefix(prefix): part for name, part in load_file(folder / "adapter_model.safetensors").items()}


def test_losses_and_a_step_are_those_of_the_engine_alone(service, folder, model):
    sent, own = zip(*(some_data(loss) for loss in INPUTS), strict=True)
    found = {}
    for loss, data in zip(INPUTS, sent, strict=True):
        trained = service.create_lora_training_client("tiny", rank=RANK, seed=5).result()
        before = trained.save_weights_for_sampler("before").result().path
        output = trained.forward_backward(data, loss)
        step = trained.optim_step(types.AdamParams(**STEP))
        assert step.result().metrics["grad_norm"] > 0
        after = trained.save_weights_for_sampler("after").result().path
        found[loss] = output.result(), adapters_in(saved(folder, after))
    start = saved(folder, before)
    expected = run_ranks(1, by_the_engine_alone, model, start, dict(zip(INPUTS, own, strict=True)))[0]
    first = adapters_in(start)
    for loss, (total, logprobs, adapters) in expected.items():
        output, mine = found[loss]
        assert output.metrics["loss:sum"] == pytest.approx(total, rel=1e-6), loss
        torch.testing.assert_close(logprobs_in(output), logprobs, rtol=1e-6, atol=1e-6)
        for name, tensor in adapters.items():
            torch.testing.assert_close(mine[name], tensor, rtol=0, atol=1e-6)
            change = tensor - first[name]
            assert (mine[name] - first[name] - change).norm() <= 1e-4 * change.norm(), (loss, name)
