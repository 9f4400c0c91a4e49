"""The order of requests, who has a slot, and what a restarted service knows, with an engine that only takes notes."""

import threading
from types import SimpleNamespace

import orjson
import pytest

from megatron_rl.config import LoraConfig
from megatron_rl.training_server import service as room
from megatron_rl.training_server.service import MOST_TRIES, Refused, Service
from tests.kit.waiting import LIMIT_S

STEP = {"adam_params": {"learning_rate": 0.5}}


class NotedRanks:
    """Ranks without an engine: it notes each call, and a model's "weight" is the number of its steps."""

    def __init__(self):
        config = SimpleNamespace(lora=LoraConfig(rank=4), allow_longer_sequences=True, tokens_per_microbatch=64)
        self.engine = SimpleNamespace(config=config, arch=SimpleNamespace(vocab=97, max_positions=128))
        self.models, self.calls = {}, []

    def call(self, name, *arguments):
        if name not in ("rest", "stop"):
            self.calls.append((name, *arguments[:1]))
        if name == "create":
            self.models[arguments[0]] = SimpleNamespace(gradients=None, steps=0)
        elif name == "optim_step":
            self.models[arguments[0]].steps += 1
            return True, float(self.models[arguments[0]].steps)
        elif name == "drop":
            del self.models[arguments[0]]
        elif name == "save":
            arguments[1].mkdir(parents=True)
            (arguments[1] / "steps").write_text(str(self.models[arguments[0]].steps))
        elif name == "load":
            self.models[arguments[0]].steps = int((arguments[1] / "steps").read_text())
        return None


@pytest.fixture
def made(tmp_path):
    """Makes services of one folder, each as a process that begins anew, and stops them."""
    running = []

    def make(**options):
        ranks = NotedRanks()
        service = Service(tmp_path, ranks, base_model="tiny", **{"slots": 2, "checkpoint_every": 100} | options)
        thread = threading.Thread(target=service.run)
        running.append((service, thread))
        return service, ranks, thread

    yield make
    for service, thread in running:
        service.stop()
        if thread.ident:
            thread.join(LIMIT_S)


def new_model(service, tenant="a", number=0, session=None):
    session = session or service.create_session(tenant)
    name = service.create_model(tenant, {"session_id": session, "model_seq_id": number, "base_model": "tiny"})
    return name.removesuffix(":0"), session


def result(service, name, seq, tenant="a"):
    future, _ = service.future(tenant, f"{name}:{seq}")
    return orjson.loads(future.result(LIMIT_S).body)


def norms(service, name, seqs):
    return [result(service, name, seq)["metrics"]["grad_norm"] for seq in seqs]


def test_requests_run_in_the_order_of_their_numbers_and_each_once(made):
    service, _, thread = made()
    name, _ = new_model(service)
    for seq in (3, 2, 1, 2, 3):  # as they come, some again
        assert service.submit("a", name, seq, "optim_step", STEP) == f"{name}:{seq}"
    thread.start()
    assert norms(service, name, (1, 2, 3)) == [1.0, 2.0, 3.0]


def test_models_take_turns_that_end_with_an_optimizer_step(made):
    service, ranks, thread = made()
    names = [new_model(service)[0] for _ in range(2)]
    for name in names:
        for seq in (1, 2):
            service.submit("a", name, seq, "optim_step", STEP)
    thread.start()
    for name in names:
        result(service, name, 2)
    one, other = names
    assert ranks.calls == [
        *(("create", one), ("optim_step", one), ("create", other), ("optim_step", other)),
        *(("optim_step", one), ("optim_step", other)),
    ]


def test_a_model_waits_for_a_slot_until_a_session_is_finished(made):
    service, ranks, thread = made(slots=1)
    first, session = new_model(service)
    second, _ = new_model(service)
    thread.start()
    result(service, first, 0)
    assert not service.future("a", f"{second}:0")[0].done()
    service.finish_session("a", session)
    assert result(service, second, 0)["model_id"] == second
    assert ("drop", first) in ranks.calls
    with pytest.raises(Refused, match="there is no such model"):
        service.model("a", first)


def test_a_session_without_a_sign_of_life_loses_its_slot_to_one_that_waits(made):
    service, ranks, thread = made(slots=1, quiet_s=0.0)
    first, _ = new_model(service)
    thread.start()
    result(service, first, 0)
    second, _ = new_model(service)
    assert result(service, second, 0)["model_id"] == second and ("drop", first) in ranks.calls


@pytest.mark.parametrize("checkpoint_every", [1, 2, 100])
def test_a_restarted_service_has_all_results_and_counts_no_step_twice(checkpoint_every, made):
    service, _, thread = made(checkpoint_every=checkpoint_every)
    name, _ = new_model(service)
    for seq in (1, 2, 3):
        service.submit("a", name, seq, "optim_step", STEP)
    thread.start()
    assert norms(service, name, (1, 2, 3)) == [1.0, 2.0, 3.0]
    service.stop()
    thread.join(LIMIT_S)
    service.submit("a", name, 4, "optim_step", STEP)  # accepted, and never run
    again, ranks, thread = made(checkpoint_every=checkpoint_every)
    thread.start()
    again.submit("a", name, 5, "optim_step", STEP)
    assert norms(again, name, range(1, 6)) == [1.0, 2.0, 3.0, 4.0, 5.0]
    assert ranks.calls.count(("optim_step", name)) == 5 - (3 - 3 % checkpoint_every if checkpoint_every < 100 else 0)


def test_a_request_that_ends_the_server_again_and_again_is_given_up(made):
    service, _, _ = made()
    name, _ = new_model(service)
    service.submit("a", name, 1, "optim_step", STEP)
    for _ in range(MOST_TRIES):  # each time the process ends at once
        service.models[name].journal.add({"kind": "begun", "seq": 1})
    again, _, thread = made()
    thread.start()
    assert "has ended 8 times while it ran this request" in result(again, name, 1)["error"]
    again.submit("a", name, 2, "optim_step", STEP)
    assert norms(again, name, [2]) == [1.0]


def test_too_many_waiting_requests_are_refused_for_now(made, monkeypatch):
    monkeypatch.setattr(room, "MOST_QUEUED_BYTES", 10)
    service, _, _ = made()
    name, _ = new_model(service)
    with pytest.raises(Refused, match="wait; send this one again later") as error:
        service.submit("a", name, 1, "pass", {}, b"more than ten bytes")
    assert error.value.status == 429


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"base_model": "other"}, "base_model = 'other': this server has 'tiny' alone"),
        ({"model_seq_id": "x"}, "model_seq_id = 'x': must be an integer"),
        ({"optimizer_config": {"type": "dimuon"}}, "optimizer_config: this server has adamw alone"),
        ({"lora_config": {"rank": 5}}, "lora_config.rank = 5: this server has room for adapters of rank 1 to 4"),
        ({"lora_config": {"rank": 2, "seed": -1}}, "lora_config.seed = -1: must be an integer in"),
    ],
)
def test_a_model_that_cannot_be_is_refused(body, message, made):
    service, _, _ = made()
    session = service.create_session("a")
    with pytest.raises((Refused, ValueError), match=message):
        service.create_model("a", {"session_id": session, "model_seq_id": 0, "base_model": "tiny"} | body)


@pytest.mark.parametrize("params", [None, [1], {"learning_rate": "x"}, {"beta1": 1.0}, {"eps": -1.0}, {"beta2": True}])
def test_wrong_options_of_adam_fail_the_request_alone(params, made):
    service, _, thread = made()
    name, _ = new_model(service)
    thread.start()
    service.submit("a", name, 1, "optim_step", {"adam_params": params})
    service.submit("a", name, 2, "optim_step", STEP)
    assert "adam_params" in result(service, name, 1)["error"]
    assert norms(service, name, [2]) == [1.0]
