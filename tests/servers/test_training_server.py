"""The training server, driven by the package `tinker`: the service's own client, with nothing of it replaced."""

import functools
import json
import subprocess
import time
from types import SimpleNamespace

import pytest
import torch

from megatron_rl.config import LoraConfig
from megatron_rl.training_server.losses import make_loss
from megatron_rl.training_server.shared_engine import batch_of
from tests.kit.models import LAYOUTS, VOCAB, make_engine, make_model
from tests.kit.ranks import run_ranks
from tests.kit.runs import ROOT, family
from tests.kit.servers import NEVER_LATE, SGLANG_ARGUMENTS
from tests.kit.tinker_clients import (
    INPUTS,
    LENGTHS,
    adapters_in,
    client_of,
    logprobs_in,
    quiet_clients,
    saved,
    some_data,
    tinker,
    types,
)
from tests.kit.training_servers import ALPHA, RANK, serving
from tests.kit.waiting import SLOWNESS, wait_until

STEP = dict(learning_rate=1e-2, beta1=0.0, beta2=0.0, eps=1e3)
"""With eps far above the gradients, Adam's step is SGD's, lr / eps of the gradient."""
IDLE_S, MOST_IDLE = 60.0, 0.05
"""How long a client is idle, and which share of a core the server may take in that time."""


def quickstart():
    """The program of docs/training_server.md."""
    page = (ROOT / "docs" / "training_server.md").read_text(encoding="utf-8")
    return page.partition("```python\n")[2].partition("```")[0]


@pytest.fixture(scope="module", autouse=True)
def clients():
    with quiet_clients():
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


def test_the_quickstart_runs_as_it_is_on_the_page(folder, url, capsys):
    said = {"http://127.0.0.1:8000": url, "runs/served/api_key": str(folder / "a.key")}
    program = functools.reduce(lambda text, pair: text.replace(*pair), said.items(), quickstart())
    program = program.replace('"models/smollm2-135m-instruct", rank=16', f'"tiny", rank={RANK}')
    # The tiny model knows few ids, and its name is no folder with a tokenizer.
    tokenizer = SimpleNamespace(encode=lambda text: list(range(1, 20)), decode=lambda ids: f"decoded {len(ids)}")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tinker.TrainingClient, "get_tokenizer", lambda self: tokenizer)
        exec(compile(program, "quickstart", "exec"), {})
    *losses, reply = capsys.readouterr().out.splitlines()
    assert len(losses) == 10 and float(losses[-1]) < float(losses[0]) and reply == "decoded 8"


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


def trained(client, steps=3, seed=1, rank=2, begin=0):
    """Train a model of a client for some steps, with a request in flight while the next is sent."""
    model = client.create_lora_training_client("tiny", rank=rank, seed=seed).result()
    return model, [one.result() for one in sent(model, range(begin, steps))]


def sent(model, steps):
    futures = []
    for step in steps:
        futures.append(model.forward_backward(some_data("cross_entropy", seed=step)[0], "cross_entropy"))
        model.optim_step(types.AdamParams(learning_rate=1e-2))
    return futures


def losses_in(outputs):
    return [output.metrics["loss:sum"] for output in outputs]


@pytest.mark.thorough
def test_more_models_than_fit_are_refused_by_name(tmp_path, model):
    with pytest.raises(AssertionError, match="--slots 1000000000: a rank has room for [0-9]+ models of"):
        with serving(tmp_path, model, "--slots", "1000000000"):
            pass


def test_models_of_two_tenants_at_once_have_the_results_of_each_alone_to_the_bit(service, other):
    models = [client.create_lora_training_client("tiny", rank=2, seed=1).result() for client in (service, other)]
    both = [sent(model, range(3)) for model in models]
    together = [[logprobs_in(future.result()) for future in futures] for futures in both]
    _, outputs = trained(service)
    for found in together:
        assert all(torch.equal(one, logprobs_in(alone)) for one, alone in zip(found, outputs, strict=True))


def test_a_tenant_sees_nothing_of_another(service, other, url):
    model, _ = trained(service, steps=1)
    path = model.save_state("mine").result().path
    with pytest.raises(tinker.NotFoundError, match="there are no such weights"):
        other.create_training_client_from_state(path).result()
    with pytest.raises(tinker.NotFoundError, match="there is no such model"):
        other.holder.run_coroutine_threadsafe(info_of(other, model.model_id)).result()
    with pytest.raises(tinker.AuthenticationError, match="API key"):
        tinker.ServiceClient(base_url=url, api_key="tml-somebody-elses-key").create_lora_training_client(
            "tiny"
        ).result()


async def info_of(client, model_id):
    from tinker.lib.client_connection_pool_type import ClientConnectionPoolType

    with client.holder.aclient(ClientConnectionPoolType.TRAIN) as connection:
        return await connection.models.get_info(request=types.GetInfoRequest(model_id=model_id))


def test_state_is_saved_and_loaded_with_and_without_the_optimizer(service):
    model, _ = trained(service)
    path = model.save_state("a.1").result().path
    with pytest.raises(tinker.RequestFailedError, match="there are weights of this name"):
        model.save_state("a.1").result()
    with pytest.raises(tinker.RequestFailedError, match="name = '../a'"):
        model.save_state("../a").result()
    resumed = service.create_training_client_from_state_with_optimizer(path).result()
    fresh = service.create_training_client_from_state(path).result()
    assert resumed.get_info().lora_rank == 2
    here, there, anew = (losses_in([f.result() for f in sent(one, range(3, 6))]) for one in (model, resumed, fresh))
    assert here == there
    assert anew[0] == here[0] and anew[2] != here[2]  # Adam's moments matter from the first step on


def test_a_custom_loss_has_the_gradient_of_the_built_in_one(service):
    data, _ = some_data("cross_entropy")
    weights = [datum.loss_fn_inputs["weights"].to_torch() for datum in data]

    def negative_log_likelihood(data, logprobs):
        loss = -sum((weight * row).sum() for weight, row in zip(weights, logprobs, strict=True))
        return loss, {"rows": float(len(data))}

    norms = []
    for is_custom in (False, True):
        model = service.create_lora_training_client("tiny", rank=2, seed=9).result()
        if is_custom:
            output = model.forward_backward_custom(data, negative_log_likelihood)
        else:
            output = model.forward_backward(data, "cross_entropy")
        norms.append(
            (output.result().metrics["loss:sum"], model.optim_step(types.AdamParams()).result().metrics["grad_norm"])
        )
    assert norms[0] == pytest.approx(norms[1], rel=1e-6)


def test_several_targets_of_a_token_come_back_with_a_log_probability_each(service, refused):
    data, _ = some_data("cross_entropy")
    single = logprobs_in(refused.forward(data, "cross_entropy").result())
    several = []
    for datum in data:
        targets, weights = (datum.loss_fn_inputs[name].to_torch() for name in ("target_tokens", "weights"))
        columns = {
            "target_tokens": torch.stack([(targets + 1) % VOCAB, targets], dim=1),
            "weights": torch.stack([torch.zeros_like(weights), weights], dim=1),  # sent as a sparse matrix
        }
        several.append(types.Datum(datum.model_input, columns))
    output = refused.forward(several, "cross_entropy").result()
    found = logprobs_in(output)
    assert found.shape == (sum(LENGTHS), 2)
    torch.testing.assert_close(found[:, 1], single, rtol=1e-6, atol=1e-6)
    weights = torch.cat([datum.loss_fn_inputs["weights"].to_torch() for datum in data])
    assert output.metrics["loss:sum"] == pytest.approx(float(-(weights * single).sum()), rel=1e-5)
    with pytest.raises(tinker.RequestFailedError, match="has 2 targets of each token, and ppo takes one"):
        refused.forward(several, "ppo").result()


def test_saved_weights_sample_with_the_log_probabilities_of_the_engine(service):
    model, _ = trained(service)
    (datum, *_), _ = some_data("cross_entropy")
    tokens = datum.model_input.to_ints()
    output = model.forward([datum], "cross_entropy").result()
    own = logprobs_in(output)[:-1]  # the last target is not in the prompt
    base = service.create_sampling_client(base_model="tiny").result()
    sampler = model.save_weights_and_get_sampling_client().result()
    futures = [one.compute_logprobs(datum.model_input) for one in (sampler, base, sampler, base)]  # in turn
    found = [torch.tensor(future.result()[1:]) for future in futures]
    torch.testing.assert_close(found[0], own, rtol=0, atol=1e-4)
    assert torch.equal(found[0], found[2]) and torch.equal(found[1], found[3])
    assert (found[0] - found[1]).abs().max() > 1e-3
    params = types.SamplingParams(max_tokens=4, temperature=0.0, stop=[])
    replies = sampler.sample(datum.model_input, 2, params, include_prompt_logprobs=True).result()
    assert [reply.tokens for reply in replies.sequences] == [replies.sequences[0].tokens] * 2
    assert replies.sequences[0].stop_reason == "length" and len(replies.sequences[0].logprobs) == 4
    assert replies.prompt_logprobs[0] is None and len(replies.prompt_logprobs) == len(tokens)


def test_a_rollout_server_lets_go_of_the_snapshot_of_a_session_that_is_over(service, folder, url):
    base, prompt = service.create_sampling_client(base_model="tiny").result(), types.ModelInput.from_ints([1, 2, 3])
    before = base.compute_logprobs(prompt).result()
    client = client_of(url, folder / "a.key")
    model, _ = trained(client, steps=1)
    sampler = model.save_weights_and_get_sampling_client().result()
    assert sampler.compute_logprobs(prompt).result() != before
    snapshots = saved(folder, f"tinker://{model.model_id}/sampler_weights/any").parent
    assert list(snapshots.iterdir())
    client.close("success").result()
    wait_until(lambda: not list(snapshots.iterdir()), "the snapshot is kept")
    assert base.compute_logprobs(prompt).result() == before


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"loss": "stable_reinforce"}, "loss_fn = 'stable_reinforce': needs what the official service records"),
        ({"loss": "nll"}, "loss_fn = 'nll': this server has cross_entropy"),
        ({"loss": "ppo"}, "data[0].loss_fn_inputs['logprobs']: is missing"),
        ({"options": {"clip": 1.0}}, "loss_fn_config['clip']: cross_entropy has no options"),
        ({"tokens": [VOCAB] * 5}, f"data[0].model_input: has the id {VOCAB}"),
        ({"tokens": [1] * 4}, "data[0].loss_fn_inputs['target_tokens']: has shape [5], and model_input has 4"),
    ],
)
def test_wrong_data_is_refused_by_name_and_the_model_goes_on(change, message, service, refused):
    (datum, *_), _ = some_data("cross_entropy")
    if "tokens" in change:
        datum = types.Datum(types.ModelInput.from_ints(change["tokens"]), datum.loss_fn_inputs)
    future = refused.forward_backward([datum], change.get("loss", "cross_entropy"), change.get("options"))
    with pytest.raises(tinker.RequestFailedError) as error:
        future.result()
    assert message in str(error.value)
    assert refused.forward(some_data("cross_entropy")[0], "cross_entropy").result().metrics["loss:sum"]


@pytest.fixture(scope="module")
def refused(service):
    return service.create_lora_training_client("tiny", rank=2).result()


def test_after_a_kill_each_request_has_its_result_and_no_step_counts_twice(tmp_path, model):
    arguments = ("--checkpoint-every", "2", "--slots", "2")
    with serving(tmp_path, model, *arguments) as (url, process):
        client = client_of(url, tmp_path / "run" / "api_key")
        killed, outputs = trained(client)
        futures = sent(killed, range(3, 5))
        futures[0].future().add_done_callback(lambda _: process.kill())  # while the second runs, or waits
        outputs.append(futures[0].result())
        process.wait()
    with serving(tmp_path, model, *arguments, port=int(url.rpartition(":")[2])):
        outputs += [future.result() for future in [*futures[1:], *sent(killed, range(5, 6))]]
        _, expected = trained(client, steps=6)
    assert losses_in(outputs) == losses_in(expected)


@pytest.mark.thorough
def test_a_whole_model_is_trained_and_sampled_over_https_by_one_client_after_another(tmp_path, model, monkeypatch):
    certificate, key = tmp_path / "certificate.pem", tmp_path / "key.pem"
    options = "req -x509 -newkey rsa:2048 -nodes -days 2 -subj /CN=tests -addext subjectAltName=IP:127.0.0.1"
    command = ["openssl", *options.split(), "-keyout", str(key), "-out", str(certificate)]
    subprocess.run(command, check=True, capture_output=True)
    monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
    with serving(tmp_path, model, "lora.rank=0", "--tls", str(certificate), str(key)) as (url, _):
        assert url.startswith("https://")
        client = client_of(url, tmp_path / "run" / "api_key")
        whole, outputs = trained(client)
        assert not whole.get_info().is_lora
        (datum, *_), _ = some_data("cross_entropy")
        own = logprobs_in(whole.forward([datum], "cross_entropy").result())[:-1]
        sampler = whole.save_weights_and_get_sampling_client().result()
        found = torch.tensor(sampler.compute_logprobs(datum.model_input).result()[1:])
        torch.testing.assert_close(found, own, rtol=0, atol=1e-4)
        base = client.create_sampling_client(base_model="tiny").result()
        before = torch.tensor(base.compute_logprobs(datum.model_input).result()[1:])
        assert (before - own).abs().max() > 1e-2
        second = client_of(url, tmp_path / "run" / "api_key")
        waits = second.create_lora_training_client("tiny")  # there is one slot for whole models
        client.close("success").result()
        anew = [future.result() for future in sent(waits.result(), range(3))]
        assert losses_in(anew) == losses_in(outputs)


@pytest.mark.thorough
@pytest.mark.parametrize("layout", ["parallel.tensor=2", "parallel.pipeline=2", "parallel.tensor=1"])
def test_several_ranks_serve_what_one_does(layout, tmp_path, model, service):
    with serving(tmp_path, model, layout, "--checkpoint-every", "2", ranks=2) as (url, _):
        _, found = trained(client_of(url, tmp_path / "run" / "api_key"))
    _, expected = trained(service)
    assert losses_in(found) == pytest.approx(losses_in(expected), rel=1e-4)


@pytest.mark.thorough
@pytest.mark.parametrize("ranks", [1, 2])
def test_an_idle_client_costs_nothing(ranks, tmp_path, model):
    with serving(tmp_path, model, f"parallel.tensor={ranks}", ranks=ranks) as (url, process):
        client = client_of(url, tmp_path / "run" / "api_key")
        own, _ = trained(client, steps=1)  # and from now on signs of life alone
        before, begun = cpu_seconds(process.pid), time.monotonic()
        time.sleep(IDLE_S)
        share = (cpu_seconds(process.pid) - before) / (time.monotonic() - begun)
        assert losses_in([one.result() for one in sent(own, range(1, 2))])
    print(f"{ranks} ranks, idle: {share:.2%} of a core")
    assert share < MOST_IDLE


def cpu_seconds(pid):
    """The processor time of a process and all that descend from it."""
    return sum(sum(process.cpu_times()[:2]) for process in family(pid))


@pytest.mark.thorough
@pytest.mark.timeout(1500 * SLOWNESS)
def test_real_sglang_samples_with_saved_adapters(needs_sglang, tmp_path, model):
    arguments = ["rollout.backend=sglang", f"rollout.server_args=[{','.join(SGLANG_ARGUMENTS)}]"]
    arguments += [f"rollout.{key}={value}" for key, value in NEVER_LATE.items()]
    with serving(tmp_path, model, *arguments) as (url, _):
        client = client_of(url, tmp_path / "run" / "api_key")
        (datum, *_), _ = some_data("cross_entropy")
        models = [trained(client, seed=seed)[0] for seed in range(3)]  # one more than SGLang holds at a time
        samplers = [one.save_weights_and_get_sampling_client().result() for one in models]
        samplers.append(client.create_sampling_client(base_model="tiny").result())
        futures = [sampler.compute_logprobs(datum.model_input) for sampler in samplers * 2]
        found = [torch.tensor(future.result()[1:]) for future in futures]
        for own, sampled in zip(models, found, strict=False):
            expected = logprobs_in(own.forward([datum], "cross_entropy").result())[:-1]
            torch.testing.assert_close(sampled, expected, rtol=0, atol=1e-3)
        for one, other in zip(found[:4], found[4:], strict=True):
            torch.testing.assert_close(one, other, rtol=0, atol=1e-4)
        assert all((found[3] - one).abs().max() > 1e-3 for one in found[:3])
        params = types.SamplingParams(max_tokens=4, temperature=0.0, stop=[])
        options = {"include_prompt_logprobs": True, "topk_prompt_logprobs": 2}
        reply = samplers[0].sample(datum.model_input, 2, params, **options).result()
        assert [len(one.tokens) for one in reply.sequences] == [4, 4] and len(reply.topk_prompt_logprobs[1]) == 2


@pytest.mark.thorough
def test_samples_come_from_a_rollout_server_that_was_restarted(tmp_path, model):
    with serving(tmp_path, model) as (url, process):
        client = client_of(url, tmp_path / "run" / "api_key")
        own, _ = trained(client, steps=1)
        sampler = own.save_weights_and_get_sampling_client().result()
        prompt = types.ModelInput.from_ints([1, 2, 3])
        before = sampler.compute_logprobs(prompt).result()
        for child in family(process.pid)[1:]:
            if "embedded_server" in " ".join(child.cmdline()):
                child.kill()
        assert sampler.compute_logprobs(prompt).result() == before
