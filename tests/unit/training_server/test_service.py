"""The order of requests, who has a slot, and what a restarted service knows, with an engine that only takes notes."""

import threading
from types import SimpleNamespace

import orjson
import pytest
import torch

from megatron_rl.config import LoraConfig
from megatron_rl.training_server import service as room
from megatron_rl.training_server.client_sessions import Refused
from megatron_rl.training_server.service import MOST_IN_TURN, MOST_TRIES, Service
from tests.kit.waiting import LIMIT_S
from tests.unit.training_server.test_wire import request

PASS = request(loss="cross_entropy")
STEP = {"adam_params": {"learning_rate": 0.5}}


class NotedRanks:
    """Ranks without an engine: it notes each call, and a model's "weight" is the number of its steps.

    refused: a model whose passes raise ValueError.
    """

    refused = None

    def __init__(self):
        config = SimpleNamespace(lora=LoraConfig(rank=4), allow_longer_sequences=True, tokens_per_microbatch=64)
        self.engine = SimpleNamespace(config=config, arch=SimpleNamespace(vocab=97, max_positions=128))
        self.models, self.calls = {}, []

    def is_at_hand(self, model):
        return True

    def call(self, name, *arguments):
        if name == "compute":
            models = [asked.model_id for asked in arguments[0]]
            self.calls.append((name, *models))
            if self.refused in models:
                raise ValueError("refused")
            return [(float(len(models)), [torch.zeros(3)]) for _ in models]
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
    session = session or service.sessions.create(tenant)
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


def passes(calls):
    return [sorted(models) for name, *models in calls if name == "compute"]


def created(service, thread, count):
    """Start the service and return models that have been created."""
    names = [new_model(service)[0] for _ in range(count)]
    thread.start()
    for name in names:
        result(service, name, 0)
    return sorted(names)


def test_passes_that_wait_run_together_and_steps_one_by_one(made):
    service, ranks, thread = made(slots=3)
    names = created(service, thread, 3)
    with service._changed:  # so that all of them wait
        for name in names:
            service.submit("a", name, 1, "forward_backward", {}, PASS)
            service.submit("a", name, 2, "optim_step", STEP)
            service.submit("a", name, 3, "forward_backward", {}, PASS)
    for name in names:
        service.future("a", f"{name}:3")[0].result(LIMIT_S)
    assert passes(ranks.calls) == [names, names]
    assert [name for name, *_ in ranks.calls].count("optim_step") == 3


@pytest.mark.parametrize("kinds", [("forward", "forward"), ("forward", "forward_backward")])
def test_only_passes_of_one_kind_run_together(kinds, made):
    service, ranks, thread = made()
    names = created(service, thread, 2)
    with service._changed:
        for name, kind in zip(names, kinds, strict=True):
            service.submit("a", name, 1, kind, {}, PASS)
    for name in names:
        service.future("a", f"{name}:1")[0].result(LIMIT_S)
    assert len(passes(ranks.calls)) == len(set(kinds))


def test_a_pass_that_fails_with_others_fails_alone(made):
    service, ranks, thread = made()
    one, other = created(service, thread, 2)
    ranks.refused = one
    with service._changed:
        for name in (one, other):
            service.submit("a", name, 1, "forward", {}, PASS)
    assert result(service, one, 1) == {"error": "refused", "category": "user"}
    assert service.future("a", f"{other}:1")[0].result(LIMIT_S).is_proto
    assert sorted(passes(ranks.calls)) == sorted([[one, other], [one], [other]])


def test_wrong_data_does_not_keep_others_from_running(made):
    service, ranks, thread = made()
    one, other = created(service, thread, 2)
    with service._changed:
        service.submit("a", one, 1, "forward", {}, b"")
        service.submit("a", other, 1, "forward", {}, PASS)
    assert "this server has cross_entropy" in result(service, one, 1)["error"]
    assert service.future("a", f"{other}:1")[0].result(LIMIT_S).is_proto
    assert passes(ranks.calls) == [[other]]


def test_a_request_that_may_have_ended_the_server_runs_without_others(made):
    service, ranks, thread = made()
    one, other = created(service, thread, 2)
    with service._changed:
        for name in (one, other):
            service.submit("a", name, 1, "forward", {}, PASS)
        service.models[one].tries[1] = 1
    for name in (one, other):
        service.future("a", f"{name}:1")[0].result(LIMIT_S)
    assert sorted(passes(ranks.calls)) == sorted([[one], [other]])


def test_a_model_that_never_takes_a_step_does_not_keep_others_waiting(made):
    service, ranks, thread = made()
    one, other = created(service, thread, 2)
    ranks.calls.clear()
    with service._changed:
        for seq in range(1, 3 * MOST_IN_TURN):
            service.submit("a", one, seq, "forward", {}, PASS)
        service.submit("a", other, 1, "optim_step", STEP)
    result(service, other, 1)
    service.future("a", f"{one}:{3 * MOST_IN_TURN - 1}")[0].result(LIMIT_S)
    assert [name for name, *_ in ranks.calls].index("optim_step") <= 2 * MOST_IN_TURN


def test_a_long_journal_is_cut_by_a_checkpoint_without_any_step(made, monkeypatch):
    monkeypatch.setattr(room, "MOST_JOURNAL_BYTES", 2000)
    service, ranks, thread = made()
    (name,) = created(service, thread, 1)
    for seq in range(1, 31):
        service.submit("a", name, seq, "forward", {}, PASS)
        service.future("a", f"{name}:{seq}")[0].result(LIMIT_S)  # one by one, or one checkpoint could cover them all
    saves = [call for call in ranks.calls if call[0] == "save"]
    assert 2 <= len(saves) < 30


def test_a_model_waits_for_a_slot_until_a_session_is_finished(made):
    service, ranks, thread = made(slots=1)
    first, session = new_model(service)
    second, _ = new_model(service)
    thread.start()
    result(service, first, 0)
    assert not service.future("a", f"{second}:0")[0].done()
    service.sessions.finish("a", session)
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
        service.submit("a", name, 1, "forward", {}, b"more than ten bytes")
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
    session = service.sessions.create("a")
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
