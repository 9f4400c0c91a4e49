"""`megatron-rl eval` on a real server, and an agent whose generation new weights interrupt."""

import asyncio
import json
import threading
from concurrent.futures import Future
from types import SimpleNamespace

import pytest
import torch

from megatron_rl import platform
from megatron_rl.agents import AgentWorkflow
from megatron_rl.config import GenerationConfig
from megatron_rl.types import LLMResponse, Trajectory, TrajectoryBatch
from tests.kit.pace import held_at
from tests.kit.reference import reference_logprobs, used_tokens
from tests.kit.served_models import make_tiny_model
from tests.kit.tokenizers import make_tokenizer
from tests.kit.waiting import LIMIT_S, wait_until
from tests.unit.agent_relay import here

platform.prepare()
from megatron_rl.cli import main  # noqa: E402
from megatron_rl.run import rollouts  # noqa: E402
from megatron_rl.run.evaluation import score_sets  # noqa: E402

CONFIG = """
model: {path: MODEL}
data: {train: "megatron_rl.data.tasks:count_ones", evaluation: "megatron_rl.data.tasks:count_ones",
       evaluation_args: {count: 3}}
eval: {sets: {sort: {source: "megatron_rl.data.tasks:sort_digits", args: {count: 2}}},
       samples_per_prompt: 4, temperature: 1.0}
generation: {n_samples: 2, max_new_tokens: 4}
rollout: {reward: "megatron_rl.rewards:last_number"}
run: {folder: RUN, threads_per_rank: 1}
"""


def test_eval_of_a_runs_folder_asks_all_sets_of_the_newest_weights(tmp_path, capsys):
    run = tmp_path / "run"
    for name in ("step-9", "step-10", "step-10-critic"):
        (run / name).mkdir(parents=True)
    make_tiny_model(run / "step-10")
    (run / "config.yaml").write_text(CONFIG.replace("RUN", str(run)).replace("MODEL", "gone"))
    main(["eval", str(run), "data.evaluation_args.count=2"])
    lines = [json.loads(line) for line in (run / "eval.jsonl").read_text().splitlines()]
    assert [(line["set"], line["prompt_index"]) for line in lines] == [("held_out", 0), ("held_out", 1)] + [
        ("sort", 0),
        ("sort", 1),
    ]
    assert all(len(line["rewards"]) == len(line["answers"]) == 4 for line in lines)
    said = capsys.readouterr().out
    for name in ("held_out", "sort"):
        (shown,) = [line for line in said.splitlines() if line.startswith(f"{name}: 2 of 2 prompts")]
        rewards = [line["rewards"] for line in lines if line["set"] == name]
        assert f"accuracy {sum(map(sum, rewards)) / 8:.4f}" in shown
        assert f"pass@4 {sum(any(r) for r in rewards) / 2:.4f}" in shown and "maj@4" in shown
    with pytest.raises(SystemExit, match="holds no weights"):
        main(["eval", str(tmp_path)])


def test_scores_of_each_set_leave_out_prompts_that_failed():
    tokenizer = make_tokenizer()
    prompts = {"one": [{"answer": "1"}] * 2, "gone": [{}], "two": [{}] * 2}
    groups = {0: [1.0, 0.0], 1: [0.0, 0.0], 4: [1.0, 1.0]}  # 2 and 3 failed
    trajectories = []
    for prompt, rewards in groups.items():
        for reward in rewards:
            ids = tokenizer(f"ask {prompt} got {int(reward)}")["input_ids"]
            reply = LLMResponse(
                input_tokens=ids[:-1],
                output_tokens=ids[-1:],
                output_logprobs=[-1.0],
                output_versions=[0],
                stop_reason="",
            )
            trajectories.append(Trajectory.from_reply(reply, reward, prompt=prompt))
    batch = TrajectoryBatch.from_trajectories([trajectories])
    batch.sequences["prompt"] = batch["prompt"].long()
    scored = score_sets(tokenizer, batch, prompts)
    assert {name: one.places for name, one in scored.items()} == {"one": [0, 1], "two": [1]}
    assert scored["one"].rewards == [[1.0, 0.0], [0.0, 0.0]] and scored["one"].metrics["accuracy"] == 0.25
    assert scored["one"].metrics["pass@2"] == 0.5 and scored["two"].answers == [["1", "1"]]
    assert [sample.answer for sample in scored["one"].samples] == ["1", "1"]


def test_agents_of_one_debate_are_one_try():
    """Two debates of two agents to a prompt: with all four right answers in one debate, pass@1 is a half and not 1."""
    tokenizer, trajectories = make_tokenizer(), []
    for sample, agent, reward in ((0, 0, 1.0), (0, 1, 1.0), (1, 0, 0.0), (1, 1, 0.0)):
        ids = tokenizer(f"agent {agent} says {int(reward)}")["input_ids"]
        given = {"input_tokens": ids[:-1], "output_tokens": ids[-1:], "output_logprobs": [-1.0], "output_versions": [0]}
        reply = LLMResponse(**given, stop_reason="")
        trajectories.append(Trajectory.from_reply(reply, reward, prompt=0, sample=sample, agent=agent))
    batch = TrajectoryBatch.from_trajectories([trajectories])
    batch.sequences["prompt"] = batch["prompt"].long()
    scored = score_sets(tokenizer, batch, {"one": [{}]})["one"]
    assert scored.rewards == [[1.0, 0.0]] and scored.answers == [["1", "0"]]
    assert scored.metrics == {"accuracy": 0.5, "pass@2": 1.0, "maj@2": 0.5}


def test_greedy_reply_that_is_kept_for_a_reward_model_is_no_answer_of_an_evaluation():
    tokenizer, trajectories = make_tokenizer(), []
    for is_greedy, reward in ((0.0, 0.0), (0.0, 1.0), (1.0, 1.0)):
        ids = tokenizer(f"says {int(reward)}")["input_ids"]
        given = {"input_tokens": ids[:-1], "output_tokens": ids[-1:], "output_logprobs": [-1.0], "output_versions": [0]}
        reply = LLMResponse(**given, stop_reason="")
        trajectories.append(Trajectory.from_reply(reply, reward, prompt=0, is_greedy=is_greedy))
    batch = TrajectoryBatch.from_trajectories([trajectories])
    batch.sequences["prompt"] = batch["prompt"].long()
    assert score_sets(tokenizer, batch, {"one": [{}]})["one"].rewards == [[0.0, 1.0]]


def test_a_warm_start_stops_at_the_reward_of_replies_also_where_tokens_have_them(monkeypatch):
    tokens = {"rewards": torch.tensor([0.0, 0.5, 0.5, 0.0, 0.0, 0.5]), "loss_mask": torch.ones(6, dtype=torch.bool)}
    replies = Future()
    replies.set_result(TrajectoryBatch(tokens, {}, torch.tensor([0, 3, 6])))
    monkeypatch.setattr(rollouts.dist, "broadcast_object_list", lambda *_, **__: None)
    for name, answer in {"publish": None, "evaluate": [replies], "wait_for": None}.items():
        monkeypatch.setattr(rollouts.Rollouts, name, lambda *_, answer=answer: answer)
    groups, processes = SimpleNamespace(control=None), SimpleNamespace(supervisor=None, process=None, nodes=None)
    run = rollouts.Rollouts(None, groups, processes, None, None, is_ending=lambda: False)
    assert run.mean_reward(GenerationConfig()) == (1.0 + 0.5) / 2


def test_agents_generation_goes_on_after_an_interruption_token_by_token(
    embedded_servers, connect, tiny_model, other_tiny_model
):
    """Two weights in one reply of an OpenAI client: versions and log-probs of each token are those that sampled it."""
    openai = pytest.importorskip("openai", reason="the openai client is not installed: pip install openai")
    engine = connect(embedded_servers[0], interruption="abort")
    engine.update_weights(tiny_model, 20)
    began = threading.Event()

    def agent(base_url, api_key, data):
        client = openai.OpenAI(base_url=base_url, api_key=api_key, max_retries=0)
        began.wait(LIMIT_S)
        messages = list(data["messages"])
        for _ in range(2):
            answer = client.chat.completions.create(model="policy", messages=messages)
            messages += [answer.choices[0].message, {"role": "user", "content": "go on"}]
        return 1.0

    def interrupt():
        with held_at(100):
            began.set()
            wait_until(lambda: used_tokens(embedded_servers[0]) >= 60, "no reply begins", poll_s=0.0)
            engine.update_weights(other_tiny_model, 21)

    gconfig = GenerationConfig(max_new_tokens=200, ignore_eos=True)
    workflow = AgentWorkflow(lambda **_: 0.0, gconfig, make_tokenizer(), max_tokens=480, **here(agent))
    meanwhile = threading.Thread(target=interrupt)
    meanwhile.start()
    data = {"messages": [{"role": "user", "content": "What is 12 + 30?"}]}
    (trajectory,) = asyncio.run(workflow.arun_episode(engine, data))
    meanwhile.join()
    connect(embedded_servers[0]).update_weights(tiny_model, 22)
    versions = trajectory.versions[trajectory.loss_mask].tolist()
    assert len(versions) == 400 and versions == sorted(versions) and set(versions) == {20, 21}
    ids = trajectory.input_ids.tolist()
    expected = {
        20: reference_logprobs(tiny_model, ids[:1], ids[1:]),
        21: reference_logprobs(other_tiny_model, ids[:1], ids[1:]),
    }
    trained = [t for t in range(len(ids)) if trajectory.loss_mask[t]]
    wanted = [expected[int(trajectory.versions[t])][t - 1] for t in trained]
    assert trajectory.logprobs[trained].tolist() == pytest.approx(wanted, abs=2e-3)
