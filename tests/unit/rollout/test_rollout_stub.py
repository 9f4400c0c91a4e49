"""Calls to a rollout elsewhere have the signatures of the methods that answer them, so that mypy sees both sides."""

import inspect

import pytest

from megatron_rl.api import WeightReceiver
from megatron_rl.rollout.process import RolloutProcess
from megatron_rl.rollout.rollout_rank import RolloutRank
from megatron_rl.rollout.rollout_service import RolloutService
from megatron_rl.rollout.rollout_stub import RolloutStub

OWN = {"begin", "connect", "close", "fail", "hang_report", "silent"}
"""Methods of RolloutProcess that do more than call."""


def parameters(method):
    return [(it.name, it.kind, it.default) for it in inspect.signature(method).parameters.values()]


@pytest.mark.parametrize(("stub", "service"), [(RolloutStub, RolloutService), (RolloutProcess, RolloutRank)])
def test_stub_and_service_have_the_same_signatures(stub, service):
    members = {name: member for name, member in vars(stub).items() if not name.startswith("_") and name not in OWN}
    assert members
    for name, member in members.items():
        answers = getattr(service, name)
        if isinstance(member, property):
            assert isinstance(answers, property), name
        else:
            assert parameters(member) == parameters(answers), name


def test_stub_has_every_method_of_a_weight_receiver():
    wanted = {name for name in vars(WeightReceiver) if not name.startswith("_")}
    assert wanted <= set(dir(RolloutStub))


def test_every_call_goes_to_the_method_of_its_own_name():
    """`_call(RolloutService.resume)` in `pause` would be typed rightly, and wrong."""
    for stub in (RolloutStub, RolloutProcess):
        for name, member in vars(stub).items():
            code = getattr(getattr(member, "fget", member), "__code__", None)
            if code is None or name.startswith("_") or name in OWN:
                continue
            assert name in (*code.co_names, *code.co_consts), name
