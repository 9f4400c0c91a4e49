"""Servers as teachers: the log-probabilities of transformers behind the teacher's own prompt, or no trajectory."""

import asyncio

import pytest
import torch

from megatron_rl.api import RolloutWorkflow
from megatron_rl.config.teacher_section import Teacher
from megatron_rl.rewards.reward_servers import RemoteFailure
from megatron_rl.types import Trajectory
from megatron_rl.workflows.attempt import RunBroken
from megatron_rl.workflows.taught import TaughtWorkflow
from tests.kit.reference import reference_logprobs
from tests.kit.run_tokens import TOKEN_FILE
from tests.kit.tokenizers import make_tokenizer
from tests.kit.waiting import LATE_S

TOKENIZER = make_tokenizer()
PROMPT, REPLY = TOKENIZER("12 + 30 =")["input_ids"], TOKENIZER("42 or so")["input_ids"]
EVENT = {"prompt": "12 + 30 =", "answer": "42", "source": "sums"}


class Given(RolloutWorkflow):
    """One reply, of which the first token is too old to be trained, and one of two turns."""

    async def arun_episode(self, engine, data):
        asked, own = len(PROMPT), len(REPLY)
        old = torch.arange(asked + own)
        second = torch.arange(asked + 2 * own + 3)
        is_own = (second >= asked) & ~((second >= asked + own) & (second < asked + own + 3))
        return [
            made(PROMPT + REPLY, old > asked, old >= asked),
            made(PROMPT + REPLY + [7, 8, 9] + REPLY, is_own, is_own),
        ]


def made(ids, mask, written):
    versions = torch.where(written, 3, -1)
    return Trajectory(
        input_ids=torch.tensor(ids), loss_mask=mask, logprobs=torch.zeros(len(ids)), versions=versions, reward=0.0
    )


def taught(teachers, workflow=None, **options):
    async def episode():
        taught = TaughtWorkflow(workflow or Given(), teachers, TOKENIZER, timeout_s=LATE_S, **options)
        try:
            return await taught.arun_episode(None, EVENT)
        finally:
            await taught.close()

    return asyncio.run(episode())


@pytest.mark.parametrize("hint", ["", "The answer is {answer}. "])
def test_servers_score_as_transformers_does_behind_the_teachers_prompt(hint, embedded_servers, tiny_model):
    teacher = Teacher(servers=tuple(embedded_servers), hint=hint)
    prompt = TOKENIZER(hint.format(**EVENT) + "12 + 30 =")["input_ids"]
    for trajectory in taught({"sums": teacher}, token_file=TOKEN_FILE):
        rest = trajectory.input_ids.tolist()[len(PROMPT) :]
        wanted = torch.tensor([0.0] * len(PROMPT) + reference_logprobs(tiny_model, prompt, rest))
        found = trajectory.tokens["teacher_logprobs"]
        torch.testing.assert_close(found, wanted, rtol=0, atol=1e-4)
        assert float(wanted[-len(REPLY) :].abs().min()) > 1e-2


def test_a_prompt_of_an_engines_teacher_is_asked_nobody(scripted):
    server = scripted()
    teachers = {"sums": Teacher(path="a/folder"), "others": Teacher(servers=(server.url,))}
    for trajectory in taught(teachers):
        assert torch.equal(trajectory.tokens["teacher_logprobs"], torch.zeros(len(trajectory.input_ids)))
    assert not [endpoint for endpoint, _ in server.calls if endpoint == "/generate"]


def entries(body, change=lambda entry: entry):
    ids, start = body["input_ids"], body["logprob_start_len"]
    rows = [[None if i == start else -0.5, ids[i], TOKENIZER.decode([ids[i]])] for i in range(start, len(ids))]
    return {"meta_info": {"input_token_logprobs": [rows[0], *map(change, rows[1:])]}}


@pytest.mark.parametrize(
    ("change", "error", "said"),
    [
        (lambda entry: [0.5, *entry[1:]], RemoteFailure, "a log-probability above 0, or that is not finite"),
        (lambda entry: [-1e999, *entry[1:]], RemoteFailure, "gave no answer that can be read"),
        (lambda entry: [None, *entry[1:]], RemoteFailure, "gave no answer that can be read"),
        (lambda entry: [entry[0], entry[1] + 1, entry[2]], RemoteFailure, "the log-probabilities of other tokens"),
        (lambda entry: [*entry[:2], "Ġ?"], RunBroken, "their token .* is 'Ġ\\?', and the policy's .* same tokenizer"),
    ],
)
def test_what_no_teacher_of_these_tokens_says_is_no_signal(change, error, said, scripted, monkeypatch):
    monkeypatch.setattr("megatron_rl.rewards.reward_servers.FIRST_RETRY_S", 0.001)
    monkeypatch.setattr("megatron_rl.rewards.reward_servers.FIRST_REST_S", 0.001)
    server = scripted()
    server.script.extend([lambda body: entries(body, change)] * 40)
    with pytest.raises(error, match=said):
        taught({"": Teacher(servers=(server.url,))})


def test_a_server_that_fails_is_left_for_another(scripted):
    failing, well = scripted(), scripted()
    failing.refusals["/generate"] = 500, {}
    well.script.extend([entries] * 40)
    first, _ = taught({"": Teacher(servers=(failing.url, well.url))})
    assert first.tokens["teacher_logprobs"].tolist() == [0.0] * len(PROMPT) + [-0.5] * len(REPLY)


def test_a_workflow_of_padded_tensors_is_refused_by_name():
    class Padded(RolloutWorkflow):
        async def arun_episode(self, engine, data):
            return {}

    with pytest.raises(RunBroken, match="Padded returned dict, and teacher.servers score lists of Trajectory"):
        taught({"": Teacher(servers=("http://127.0.0.1:1",))}, Padded())
