"""The referee: FSDP2 over plain transformers and Megatron-Core agree on log-probs, updates and schedules in float32.

Their gradients are compared with those of float64 in test_theorems.py, test_aggregation.py and test_preferences.py.
"""

import functools
import os
import pickle
from concurrent.futures import Future

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from test_critic import VALUE_LOSS, critic_batch
from test_gradients import assert_same_updates, user_loss, user_weight
from transformers import AutoConfig, AutoModelForCausalLM

from megatron_rl.algo.actor import PolicyActor
from megatron_rl.algo.loss import PolicyLoss, supervised
from megatron_rl.api import HeldWeights, LogprobLoss
from megatron_rl.config import AlgorithmConfig, EngineConfig, ModelConfig, OptimizerConfig, ParallelConfig
from megatron_rl.engine.fsdp_engine import FSDPEngine
from megatron_rl.ops import gather_logprobs
from megatron_rl.types import FinetuneSpec
from megatron_rl.weights.update_group import TensorSpec, join_update_group, unpack_bucket
from tests.kit.in_process import done
from tests.kit.models import LAYOUTS, make_batch, make_engine, make_model, share_of
from tests.kit.ranks import run_ranks

# Adam divides by |gradient| + eps: with eps near the gradients' rounding error (1e-8 here), the few gradients that are
# as small would turn rounding into steps. 1e-5 is 1e-2 of a typical gradient and leaves the other steps as they are.
FAMILIES = [
    "llama_tied",
    *(pytest.param(name, marks=pytest.mark.thorough) for name in ("qwen2_half_windowed", "qwen3", "mistral_windowed")),
]
OPTIONS = {"lr": 1e-3, "eps": 1e-5, "weight_decay": 0.1}


def make_fsdp(folder, *, groups=None, dtype="float32", trainable=True, head="policy", **options) -> FSDPEngine:
    engine = FSDPEngine(
        EngineConfig(
            model=ModelConfig(path=str(folder), dtype=dtype),
            optimizer=OptimizerConfig(**OPTIONS | options),
            tokens_per_microbatch=24,  # several microbatches, where Megatron's 64 are one
        ),
        groups=groups,
        trainable=trainable,
        head=head,
    )
    engine.initialize(None, FinetuneSpec(total_updates=10))
    return engine


def make_any(backend, folder, head="policy"):
    if backend == "fsdp":
        return make_fsdp(folder, head=head)
    return make_engine(folder, LAYOUTS[backend][1], head=head, **OPTIONS)


def sequence_loss(logits, data):
    """The mean over sequences of each one's mean over its trained tokens."""
    logprobs, mask = gather_logprobs(logits, data["labels"]), data["loss_mask"].bool()
    lengths = data["cu_seqlens"].diff()
    sequence = torch.repeat_interleave(torch.arange(len(lengths)), lengths)
    zeros = torch.zeros(len(lengths))
    sums = zeros.index_add(0, sequence, torch.where(mask, -logprobs * data["advantages"], 0.0))
    return (sums / zeros.index_add(0, sequence, mask.float())).mean()


def sequence_weight(data):
    return (data["cu_seqlens"].diff() > 1).sum()  # the one-token sequence of an idle microbatch counts nothing


KINDS = {
    "token count": (user_loss, user_weight),
    "sequence count": (sequence_loss, sequence_weight),
    "log-probs": (LogprobLoss(PolicyLoss(AlgorithmConfig(entropy_coefficient=0.01)), temperature=0.7), None),
}


def log_probs_and_updates(backend, folder, batch):
    """Return each trained token's log-prob and, per kind of loss, two updates from the folder's weights."""
    engine = make_any(backend, folder)
    share, results = share_of(batch, engine), {}
    logprobs = engine.eval().forward(share, temperature=0.7)
    engine.train()
    for kind, (loss, weight) in KINDS.items():
        engine.load(folder)
        engine.reset_optimizer(10)
        before = engine.eval_batch(share, loss, weight)
        stats = [engine.train_batch(share, loss, weight) for _ in range(2)]
        assert (before.loss, before.sums) == (stats[0].loss, stats[0].sums)
        results[kind] = stats, {name: tensor.clone() for name, tensor in engine.hf_tensors()}
    return logprobs, results


@pytest.fixture(scope="module", params=FAMILIES)
def folder(request, tmp_path_factory):
    path = tmp_path_factory.mktemp(request.param)
    make_model(request.param, path, None if request.param == "qwen2_half_windowed" else 2)
    config = AutoConfig.from_pretrained(path)
    config.pad_token_id = int(make_batch()["input_ids"][1])  # transformers would take no gradient of its embedding
    config.save_pretrained(path)
    return path


@functools.cache
def ranks_of(backend, world, folder):
    return run_ranks(world, log_probs_and_updates, backend, folder, make_batch())


# World 1 and 2, whose odd number of vocabulary rows FSDP2 cuts unevenly, against the plainest and a split Megatron.
@pytest.mark.slow
@pytest.mark.parametrize(
    "world,layout",
    [
        (2, "1"),
        (2, "tp2_sp"),
        *(pytest.param(*case, marks=pytest.mark.thorough) for case in [(1, "1"), (2, "tp2_pp2")]),
    ],
)
def test_fsdp_and_megatron_agree(world, layout, folder):
    megatron_logprobs, megatron = ranks_of(layout, LAYOUTS[layout][0], folder)[0]
    ranks, batch = ranks_of("fsdp", world, folder), make_batch()
    tokens = [torch.arange(a, b) for a, b in zip(batch.cu_seqlens[:-1], batch.cu_seqlens[1:], strict=True)]
    for rank, (logprobs, results) in enumerate(ranks):
        expected = megatron_logprobs[torch.cat(tokens[rank::world])]
        torch.testing.assert_close(logprobs, expected, rtol=0, atol=1e-5)
        for kind in KINDS:
            assert results[kind][0] == ranks[0][1][kind][0], "every rank reports the same step"
    for kind in KINDS:
        assert_same_updates(ranks[0][1][kind], megatron[kind])


def critic_of_a_policy(backend, folder, target):
    """Two updates of a critic that starts at zero, and the values and scores after them."""
    engine = make_any(backend, folder, head="value")
    share = share_of(critic_batch(), engine)
    assert not engine.forward(share).any() and not engine.score(share).any()
    engine.train()
    before = engine.eval_batch(share, VALUE_LOSS)
    stats = [engine.train_batch(share, VALUE_LOSS) for _ in range(2)]
    assert (before.loss, before.sums) == (stats[0].loss, stats[0].sums)
    engine.save(target)
    return (stats, {name: tensor.clone() for name, tensor in engine.hf_tensors()}), values_and_scores(engine)


def values_and_scores(engine):
    engine.eval()
    return torch.cat([engine.forward(make_batch()), engine.score(make_batch())])


def values_of_the_other(backend, folder):
    return values_and_scores(make_any(backend, folder, head="value"))


@pytest.mark.thorough
@pytest.mark.parametrize("layout", ["tp2_sp", "tp2_pp2"])
def test_critics_agree_and_load_each_other(layout, tied, tmp_path):
    updates, values = {}, {}
    for backend in ("fsdp", layout):  # all of FSDP2's ranks but one hold nothing of the head
        ranks = run_ranks(LAYOUTS[layout][0], critic_of_a_policy, backend, tied, tmp_path / backend)
        updates[backend], values[backend] = ranks[0]
        assert all(stats == ranks[0][0][0] for (stats, _), _ in ranks), "every rank reports the same step"
        saved = load_file(tmp_path / backend / "model.safetensors")
        assert saved.keys() == updates[backend][1].keys() and "score.weight" in saved
        assert all(torch.equal(saved[name], tensor) for name, tensor in updates[backend][1].items())
    assert_same_updates(updates["fsdp"], updates[layout])
    assert values["fsdp"].abs().max() > 1e-3
    for reader, writer in (("1", "fsdp"), ("fsdp", layout)):
        (found,) = run_ranks(1, values_of_the_other, reader, tmp_path / writer)
        torch.testing.assert_close(found, values[writer], rtol=0, atol=1e-5)


@pytest.fixture(scope="module")
def tied(tmp_path_factory):
    path = tmp_path_factory.mktemp("tied")
    make_model("llama_tied", path, layers=2)
    return path


def two_updates_of_one_sequence(folder):
    engine = make_fsdp(folder).train()
    share = share_of(make_batch(lengths=(9,)), engine)
    stats = [engine.train_batch(share, user_loss, user_weight) for _ in range(2)]
    return stats, {name: tensor.clone() for name, tensor in engine.hf_tensors()}


@pytest.mark.slow
def test_a_rank_without_trajectories_keeps_step(tied):
    alone, both = (run_ranks(world, two_updates_of_one_sequence, tied)[0] for world in (1, 2))
    assert_same_updates(both, alone)


def rates(engine, batch):
    result = []
    for _ in range(13):  # past the last of 10 updates
        result.append(engine.train_batch(batch, LogprobLoss(supervised)).lr)
        engine.step_lr_scheduler()
    return result


def rates_of_both(folder, schedules):
    results, batch = [], make_batch(lengths=(4,))
    for schedule in schedules:
        megatron = make_engine(folder, LAYOUTS["1"][1], **schedule)
        results.append((rates(make_fsdp(folder, groups=megatron.groups, **schedule), batch), rates(megatron, batch)))
    return results


SCHEDULES = [
    {"schedule": "linear", "min_lr": 1e-4, "warmup_updates": 2},
    {"schedule": "linear", "warmup_updates": 12},  # longer than the run
    {"schedule": "cosine", "min_lr": 1e-4},
    {"schedule": "constant", "warmup_updates": 3},
]


@pytest.mark.thorough
@pytest.mark.parametrize("schedules", [SCHEDULES[:2], SCHEDULES[2:]])
def test_learning_rates_are_megatrons(schedules, tied):
    for ours, megatrons in run_ranks(1, rates_of_both, tied, schedules)[0]:
        assert ours == pytest.approx(megatrons, rel=1e-12, abs=0) and len(set(ours)) > 3


def act(backend, folder):
    engine = make_any(backend, folder)
    config = EngineConfig(model=ModelConfig(path=str(folder)))
    reference = type(engine)(config, groups=engine.groups, trainable=False)
    reference.initialize()
    actor = PolicyActor(engine, AlgorithmConfig(kl_coefficient=0.1), temperature=0.7, reference=reference)
    batch = make_batch()
    actor.compute_advantages(batch)
    share = share_of(batch, engine)
    halves = [share.select(range(i, len(share), 2)) for i in range(2)]  # an update each
    actor.compute_logprobs(halves)
    return actor.update(halves), engine.get_version()


@pytest.mark.slow
def test_policy_actor_runs_unchanged_on_it(tied):
    ours, version = run_ranks(2, act, "fsdp", tied)[0]
    megatrons, _ = run_ranks(2, act, "dp2", tied)[0]
    assert version == 1 and ours[1].sums["reference_kl"] > 0
    for one, other in zip(ours, megatrons, strict=True):
        assert one.loss == pytest.approx(other.loss, abs=1e-5) and one.weight == other.weight
        assert one.grad_norm == pytest.approx(other.grad_norm, rel=1e-5)
        assert one.sums == pytest.approx(other.sums, rel=1e-4, abs=1e-3)


def update_and_save(folder, target, dtype):
    engine, batch = make_fsdp(folder, dtype=dtype).train(), make_batch()
    before = engine.forward(batch)
    exact = make_fsdp(folder, groups=engine.groups).forward(batch)
    assert (before - exact).abs().max() <= (0.05 if dtype == "bfloat16" else 0.0)
    stats = [engine.train_batch(share_of(batch, engine), LogprobLoss(supervised)) for _ in range(4)]
    engine.save(target)
    streamed = {name: tensor.clone() for name, tensor in engine.hf_tensors()}
    after = engine.forward(batch, lambda logits, rows: gather_logprobs(logits, rows["labels"]))
    engine.load(folder)  # and back
    assert torch.equal(engine.forward(batch), before)
    engine.load(target)
    return stats, streamed, after, engine.forward(batch)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [pytest.param("float32", marks=pytest.mark.thorough), "bfloat16"])
def test_transformers_loads_what_was_saved(dtype, tied, tmp_path):
    first, other = run_ranks(2, update_and_save, tied, tmp_path / "saved", dtype)
    stats, streamed, after, loaded = first
    assert other[1] == {}, "only rank 0 is given tensors"
    assert stats[-1].loss < stats[0].loss - 0.1
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "saved")
    assert model.dtype is getattr(torch, dtype)
    named = dict(model.named_parameters())
    assert named.keys() == streamed.keys()
    assert all(torch.equal(named[name], tensor) for name, tensor in streamed.items())
    # What trains in bfloat16 has float32 main parameters; the folder holds them rounded, and computing rounds alike.
    torch.testing.assert_close(loaded, after, rtol=0, atol=1e-5)


class OneServer:
    """A rollout server's end of the publisher's calls; `serve` on another rank receives the buckets."""

    server_ranks = {"server": 1}
    membership = 1

    def __init__(self, store):
        self.store, self.sent, self.calls, self.version = store, 0, [], None

    def trainer_address(self):
        return "127.0.0.1"

    def tell(self, message) -> dict[str, Future]:
        self.store.set(f"message {self.sent}", pickle.dumps(message))
        self.sent += 1
        return {"server": done()}

    def join_weight_group(self, **where):
        return self.tell(where)

    def load_bucket(self, *, names, dtypes, shapes, group, version, flattened):
        self.calls.append(version)
        dtypes = [getattr(torch, name) for name in dtypes]
        specs = [TensorSpec(*spec) for spec in zip(names, dtypes, map(tuple, shapes), strict=True)]
        return self.tell((specs, flattened))

    def end_weight_update(self, version):
        self.tell(None)

    def begin_weight_update(self, version):
        self.calls.append("begin")

    def pause(self):
        self.calls.append("pause")

    def resume(self):
        self.calls.append("resume")

    def leave_weight_group(self, *, name):
        self.calls.append("leave")
        return {}

    def checksum_forms(self):
        return {"server": None}

    def held_weights(self):
        return {"server": done(HeldWeights("7", {}))}

    def unreachable(self):
        return {}

    def finish_update(self, version):
        self.version = version


def serve(store):
    def messages():
        count = 0
        while (message := pickle.loads(store.get(f"message {count}"))) is not None:
            yield message
            count += 1

    told = messages()
    group, received = join_update_group(**next(told), rank=1, world_size=2), {}
    for specs, flattened in told:
        flat = torch.empty(sum(spec.nbytes for spec in specs), dtype=torch.uint8)
        tensors = unpack_bucket(flat, specs)
        for piece in [flat] if flattened else tensors:
            dist.broadcast(piece, group=group, group_src=0)
        received |= zip((spec.name for spec in specs), tensors, strict=True)
    return received


def publish(folder, file):
    store = dist.FileStore(str(file), 2)
    if os.environ["RANK"] == "2":
        return serve(store)
    os.environ["WORLD_SIZE"] = "2"  # the third rank is the server
    engine = make_fsdp(folder)
    engine.config.bucket_bytes = 100_000
    server = OneServer(store) if engine.groups.is_main else None
    engine.update_weights(server, 7)
    streamed = {name: tensor.clone() for name, tensor in engine.hf_tensors()}
    engine.destroy()
    return streamed, server and server.calls


def test_server_receives_the_weights(tied, tmp_path):
    (streamed, calls), _, received = run_ranks(3, publish, tied, tmp_path / "store")
    assert calls[:2] == ["pause", "begin"] and calls[-2:] == ["resume", "leave"] and set(calls[2:-2]) == {7}
    assert received.keys() == streamed.keys() and all(torch.equal(received[name], streamed[name]) for name in streamed)


@pytest.mark.parametrize("key", ["tensor", "pipeline"])
def test_other_axes_are_refused(key, tied):
    with pytest.raises(ValueError, match=f"parallel.{key} = 2: must be 1 for FSDPEngine.*use MegatronEngine"):
        FSDPEngine(EngineConfig(model=ModelConfig(path=str(tied)), parallel=ParallelConfig(**{key: 2})))


def test_mixture_of_experts_is_refused(tmp_path):
    make_model("mixtral", tmp_path)
    with pytest.raises(ValueError, match="FSDPEngine has no mixtures of experts, and mixtral is one; use Megatron"):
        FSDPEngine(EngineConfig(model=ModelConfig(path=str(tmp_path))))


def test_delta_nets_are_refused(tmp_path):
    make_model("qwen3_5", tmp_path)
    with pytest.raises(ValueError, match="FSDPEngine has no delta nets, and qwen3_5 has; use MegatronEngine"):
        FSDPEngine(EngineConfig(model=ModelConfig(path=str(tmp_path))))


def refusals(folder):
    engine, batch = make_fsdp(folder), make_batch()
    with pytest.raises(ValueError, match="loss_weight_fn returned 0.5: weights are integer counts"):
        engine.train_batch(batch, user_loss, lambda data: torch.tensor(0.5))
    for method in (engine.save, engine.load):
        with pytest.raises(ValueError, match="with_optimizer = True: must be False for FSDPEngine"):
            method(folder, with_optimizer=True)
    with pytest.raises(ValueError, match="score: needs an engine with head='value', and this one has 'policy'"):
        engine.score(batch)
    with pytest.raises(ValueError, match="loss_fn: needs an engine with head='value', and this one has 'policy'"):
        engine.train_batch(batch, VALUE_LOSS)
    critic = make_fsdp(folder, groups=engine.groups, head="value")
    with pytest.raises(ValueError, match="loss_fn: needs an engine with head='policy', and this one has 'value'"):
        critic.eval_batch(batch, LogprobLoss(supervised))
    with pytest.raises(ValueError, match="post_hook: needs an engine with head='policy'"):
        critic.forward(batch, lambda logits, rows: logits[:, 0])
    frozen = make_fsdp(folder, groups=engine.groups, trainable=False)
    with pytest.raises(RuntimeError, match="trainable=False: a reference model is frozen"):
        frozen.train_batch(batch, user_loss, user_weight)


def test_wrong_use_is_refused(tied):
    run_ranks(1, refusals, tied)
