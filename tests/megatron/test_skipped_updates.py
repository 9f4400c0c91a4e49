"""An update whose loss or gradient is no number changes nothing, on any rank of any layout, and says why."""

import math
from functools import cache
from itertools import count
from pathlib import Path

import pytest
import torch
from test_critic import VALUE_LOSS, critic_batch
from test_fsdp_referee import make_fsdp
from test_gradients import user_loss, user_weight

from megatron_rl.algo.loss import PolicyLoss
from megatron_rl.api import LogprobLoss
from megatron_rl.config import AlgorithmConfig, load_config
from megatron_rl.engine.fsdp_engine import FSDPEngine
from megatron_rl.run.row_training import RowTraining
from megatron_rl.telemetry.run_log import read_run
from megatron_rl.train import train as train_run
from megatron_rl.weights.architecture import read_architecture
from tests.kit.models import LAYOUTS, make_batch, make_engine, make_model, make_value_model, share_of
from tests.kit.ranks import run_each, run_ranks

pytestmark = pytest.mark.usefixtures("programs_are_forked")

POLICY_LOSS = LogprobLoss(PolicyLoss(AlgorithmConfig()), temperature=0.7, by_row=True)
SCHEDULE = {"schedule": "linear", "warmup_updates": 1, "lr": 1e-3}
WORLDS = {
    "one": (1, "1", {}),
    "tp2": (2, "tp2_sp", {}),
    "pp2": (2, "pp2", {}),
    "pp2_vpp2": (2, "pp2_vpp2", {}),
    "ep2": (2, "ep2", {}),
    "dp2": (2, "dp2", {}),
    "dp2 distributed": (2, "dp2", {"distributed": True, "overlap": True}),
    "fsdp": (2, "fsdp", {}),
}
THOROUGH = ("one", "tp2", "pp2_vpp2", "ep2", "dp2")
"""In "one" and "tp2" all ranks see the same numbers. "ep2" and "dp2" divide the batch as "dp2 distributed" does, which
`make test` runs."""


def engine_of(folder, world, groups=None, head="policy"):
    _, layout, options = WORLDS[world]
    if layout == "fsdp":
        return make_fsdp(folder, groups=groups, head=head, **SCHEDULE)
    return make_engine(folder, LAYOUTS[layout][1], groups=groups, head=head, **SCHEDULE, **options)


def is_wrong_here(engine):
    """Only the first replica sees a number that is none; the others' losses and gradients are finite."""
    return engine.groups.data.rank == 0


def with_number(batch, column, number):
    """A copy in which a trained token of the second sequence has this number."""
    copy = batch.select(range(len(batch)))
    start = int(copy.cu_seqlens[1])
    copy.tokens[column][start + int(copy["loss_mask"][start:].nonzero()[1, 0])] = number
    return copy


def advantage(engine, batch, number=math.nan):
    wrong = with_number(batch, "advantages", number) if is_wrong_here(engine) else batch
    return engine.train_batch(wrong, POLICY_LOSS)


def infinite_advantage(engine, batch):
    return advantage(engine, batch, -math.inf)


def overflow(engine, batch):
    """Every number is finite; the loss is not."""
    copy = batch.select(range(len(batch)))
    copy.tokens["advantages"] = torch.full_like(batch["advantages"], -3e38 if is_wrong_here(engine) else 1.0)
    return engine.train_batch(copy, POLICY_LOSS)


def sums_that_are_none(engine, batch):
    def fn(logprobs, entropy, rows):
        return logprobs.sum() * (math.nan if is_wrong_here(engine) else 1.0), {}

    return engine.train_batch(batch, LogprobLoss(fn))


def loss_without_gradient(engine, batch):
    """The gradient is finite on all ranks."""

    def fn(logprobs, entropy, rows):
        return logprobs.sum() + (math.inf if is_wrong_here(engine) else 0.0), {}

    return engine.train_batch(batch, LogprobLoss(fn))


def logits(engine, batch):
    def loss(logits, rows):
        return user_loss(logits, rows) * (math.nan if is_wrong_here(engine) else 1.0)

    return engine.train_batch(batch, loss, user_weight)


def planted_gradient(engine, batch):
    """On the last rank only, behind the gradients' reduction: what a defective device does."""
    if isinstance(engine, FSDPEngine):
        return sums_that_are_none(engine, batch)
    finalize = engine.tf_config.finalize_model_grads_func

    def plant(*args, **kwargs):
        finalize(*args, **kwargs)
        if engine.groups.rank == engine.groups.world_size - 1:
            for chunk in engine.wrapped:
                for buffer in chunk.buffers + chunk.expert_parallel_buffers:
                    buffer.grad_data.fill_(math.inf)

    engine.tf_config.finalize_model_grads_func = plant
    stats = engine.train_batch(batch, POLICY_LOSS)
    engine.tf_config.finalize_model_grads_func = finalize
    return stats


WRONG = (
    [advantage, planted_gradient],  # before the optimizer has any state
    [infinite_advantage, overflow, sums_that_are_none, loss_without_gradient, logits],
)


def state_of(engine):
    """Weights, optimizer state, learning rate and version of this rank."""
    optimizers = [engine.optimizer]
    if not isinstance(engine, FSDPEngine):
        optimizers = [part.optimizer for part in engine.optimizer.chained_optimizers]
    found = {f"weight {name}": tensor.clone() for name, tensor in engine.hf_tensors()}
    for number, optimizer in enumerate(optimizers):
        for place, state in enumerate(optimizer.state.values() if optimizer else []):
            for key, value in state.items():
                value = value.to_local() if hasattr(value, "to_local") else value
                found[f"{key} {number}.{place}"] = torch.as_tensor(value).clone()
        rates = [(group["lr"], group.get("step", 0)) for group in optimizer.param_groups] if optimizer else []
        found[f"rates {number}"] = torch.tensor(rates, dtype=torch.float64)
    return found | {"version": torch.tensor(engine.get_version())}


def life(engine, batch, loss, wrong):
    """Two updates, before each of which others are skipped."""
    losses, skipped = [], []
    for number in range(2):
        for train in wrong[number] if wrong else []:
            stats = train(engine, batch)
            engine.step_lr_scheduler()
            assert not stats.applied, train.__name__
            skipped.append(stats.fault)
        stats = engine.train_batch(batch, loss)
        engine.step_lr_scheduler()
        assert stats.applied and not stats.fault
        losses.append((stats.loss, stats.grad_norm, stats.lr))
    return losses, state_of(engine), skipped


def lives(folder, world):
    engine = engine_of(folder, world)
    batch = share_of(make_batch(), engine)
    undisturbed = life(engine.train(), batch, POLICY_LOSS, None)
    other = engine_of(folder, world, engine.groups)
    return undisturbed, life(other.train(), batch, POLICY_LOSS, WRONG)


def assert_same_lives(ranks):
    for (losses, state, _), (losses_2, state_2, skipped) in ranks:
        assert losses == losses_2 and state.keys() == state_2.keys()
        for name, tensor in state.items():
            assert torch.equal(tensor, state_2[name]), name
        assert skipped == ranks[0][1][2], "every rank says the same"


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    found = {name: tmp_path_factory.mktemp(name) for name in ("dense", "chunks", "mixture", "value")}
    make_model("qwen3_tied_one_kv_head", found["dense"], layers=2)
    make_model("qwen3_tied_one_kv_head", found["chunks"])
    make_model("qwen3_moe", found["mixture"], layers=2)
    make_value_model("qwen3_tied_one_kv_head", found["value"], layers=2)
    return found


@pytest.fixture(scope="module")
def lives_of(folders):
    """A function: world -> both lives of each rank."""

    @cache
    def of_size(size, is_thorough):
        own = [world for world in WORLDS if (WORLDS[world][0], world in THOROUGH) == (size, is_thorough)]
        of = {"ep2": "mixture", "pp2_vpp2": "chunks"}
        cases = {world: (folders[of.get(world, "dense")], world) for world in own}
        return run_each(size, lives, cases)

    return lambda world: of_size(WORLDS[world][0], world in THOROUGH)[world]


@pytest.mark.slow
@pytest.mark.parametrize(
    "world", [pytest.param(world, marks=pytest.mark.thorough if world in THOROUGH else ()) for world in WORLDS]
)
def test_a_run_with_skipped_updates_has_the_bits_of_one_without_their_batches(world, lives_of):
    ranks = lives_of(world)
    assert_same_lives(ranks)
    said = ranks[0][1][2]
    assert said[0].startswith("loss = nan, gradient norm = nan; not finite: rank 0, sequence 1 of group ")
    assert "advantages = nan" in said[0] and "own log p = -" in said[0]
    if world == "dp2":  # the replicas' gradients are the same, but for what broke one
        assert said[1].startswith("loss = ") and "gradient norm = inf on rank 1 alone, though" in said[1]
    assert "loss = inf" in said[2] and "advantages = -inf" in said[2]
    assert "are finite: the loss makes it so" in said[3] and "advantages = -3e+38" in said[3]


def critic_lives(folder, world):
    def returns(engine, batch):
        return engine.train_batch(
            with_number(batch, "returns", math.inf) if is_wrong_here(engine) else batch, VALUE_LOSS
        )

    engine = engine_of(folder, world, head="value")
    batch = share_of(critic_batch(), engine)
    undisturbed = life(engine.train(), batch, VALUE_LOSS, None)
    other = engine_of(folder, world, engine.groups, head="value")
    return undisturbed, life(other.train(), batch, VALUE_LOSS, [[returns]] * 2)


@pytest.mark.slow
def test_the_same_of_a_critic(folders):
    ranks = run_ranks(2, critic_lives, folders["value"], "dp2 distributed")
    assert_same_lives(ranks)
    assert "returns = inf" in ranks[0][1][2][0] and "own value = " in ranks[0][1][2][0]


ROOT = Path(__file__).parents[2]


def answers_run(folder, bad_steps, *settings):
    """Train on answers, with a loss that is no number in some steps; return what was logged."""
    update, steps = RowTraining.update, count()

    def sometimes_bad(self, batch):
        plain = self.loss
        if next(steps) in bad_steps:
            self.loss = LogprobLoss(lambda logprobs, entropy, rows: (logprobs.sum() * math.nan, {}))
        stats = update(self, batch)
        self.loss = plain
        return stats

    RowTraining.update = sometimes_bad
    model = (f"model.path={ROOT}/configs/models/count_tiny", "model.init=random")
    small = ("batch.prompts_per_step=6", "run.evaluate_every_steps=0", "run.steps=5", f"run.folder={folder}")
    train_run(load_config(ROOT / "configs" / "count_sft.yaml", [*model, *small, "run.save_at_end=false", *settings]))
    return read_run(folder)


def refusal_of_a_token(folder, world):
    engine = engine_of(folder, world)
    batch = share_of(make_batch(), engine)
    said = []
    for wrong in (engine.arch.vocab, -1):  # on the tensor axis a row of padding may have the first id
        batch.tokens["input_ids"][3] = wrong
        with pytest.raises(ValueError) as error:
            engine.forward(batch)
        said.append(str(error.value))
    return said


@pytest.mark.parametrize("world", ["one", "tp2"])
def test_a_token_that_the_model_has_no_embedding_of_was_trained_silently(world, folders):
    vocab = read_architecture(folders["dense"]).vocab
    for said in run_ranks(WORLDS[world][0], refusal_of_a_token, folders["dense"], world):
        for wrong, words in zip((vocab, -1), said, strict=True):
            assert f"input_ids: token 3 of the batch is {wrong}, and the vocabulary of " in words


@pytest.mark.slow
def test_a_run_goes_on_behind_skipped_updates_and_counts_them(tmp_path):
    (run,) = run_ranks(1, answers_run, tmp_path, (1, 2), "run.most_skipped_updates=2")
    assert [step["supervised/skipped_updates"] for step in run.steps] == [0, 1, 1, 0, 0]
    assert run.steps[1]["supervised/loss"] is None and run.steps[4]["supervised/loss"] < run.steps[0]["supervised/loss"]


def test_a_run_ends_behind_too_many_skipped_updates_and_names_tokens_and_rows(tmp_path):
    message = (
        r"RuntimeError: run.most_skipped_updates = 1: 2 updates of the model in a row had a NaN or infinite loss or "
        r"gradient, and were skipped. The last one, whose groups are the rows \d+(, \d+){5} of data.train: loss = "
        r"nan, .* rank 0, sequence \d+ of group \d+, token \d+: own log p = -"
    )
    with pytest.raises(AssertionError, match=message):
        run_ranks(1, answers_run, tmp_path, (0, 2, 3, 4), "run.most_skipped_updates=1")
    assert len(read_run(tmp_path).steps) == 4, "what came of the last step is logged"


def wild_ratio(folder):
    """One token whose log-ratio is 100, with A < 0, under PPO as it is by default."""
    engine = engine_of(folder, "one")
    batch = make_batch()
    place = int(batch["loss_mask"].nonzero()[3, 0])
    batch.tokens["proximal_logprobs"] = engine.forward(batch, temperature=0.7)
    batch.tokens["proximal_logprobs"][place] -= 100.0
    batch.tokens["advantages"][place] = -1.0
    return engine.train().train_batch(batch, POLICY_LOSS), [p.isfinite().all() for p in engine.parameters()]


def test_one_wild_token_is_bounded_and_the_update_applied(folders):
    stats, finite = run_ranks(1, wild_ratio, folders["dense"])[0]
    assert stats.applied and all(finite) and math.isfinite(stats.loss) and math.isfinite(stats.grad_norm)
    assert stats.sums["bounded_tokens"] == 1 and stats.sums["not_finite"] == 0
