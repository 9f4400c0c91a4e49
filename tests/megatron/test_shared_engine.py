"""The engine that clients' models share: losses, log-probs and steps are those of the engine alone, in every layout."""

import pytest
import torch

from megatron_rl.config import EngineConfig, LoraConfig, ModelConfig, OptimizerConfig, ParallelConfig
from megatron_rl.tools.plan.memory import Model, states_of_stage
from megatron_rl.training_server.losses import LOSSES, make_loss
from megatron_rl.training_server.shared_engine import AdamStep, Adapted, Pass, SharedEngine, batch_of
from megatron_rl.training_server.wire import Datum
from tests.kit import models
from tests.kit.models import VOCAB, make_engine, make_model, start
from tests.kit.ranks import run_ranks

STEP = AdamStep(lr=1e-2, betas=(0.0, 0.0), eps=1e3, weight_decay=0.0, clip=0.0)
"""With eps far above the gradients, Adam's step is SGD's, lr / eps of the gradient."""
LENGTHS = (5, 12, 7, 3)
EXPERTS = "tp2_dp2_ep2"
LAYOUTS = models.LAYOUTS | {EXPERTS: (4, ParallelConfig(tensor=2, expert=2))}


def shared(folder, layout="1", rank=4, megatron=None, **optimizer):
    config = EngineConfig(
        model=ModelConfig(path=str(folder)),
        parallel=LAYOUTS[layout][1],
        optimizer=OptimizerConfig(**optimizer),
        lora=LoraConfig(rank=rank, alpha=8.0),
        tokens_per_microbatch=16,
    )
    return start(SharedEngine(config, megatron=megatron))


def some_data(seed=0):
    generator = torch.Generator().manual_seed(seed)
    data = []
    for length in LENGTHS:
        tokens = torch.randint(0, VOCAB, (length + 1,), generator=generator)
        draw = lambda: torch.randn(length, generator=generator)  # noqa: B023, E731
        inputs = {"target_tokens": tokens[1:], "weights": draw(), "advantages": draw(), "logprobs": -4.5 + 0.1 * draw()}
        inputs["sequence_ratio_mask"] = (torch.arange(length) >= 2).float()
        data.append(Datum(tokens[:-1], inputs))
    return data


def computed(engine, model, data, loss, *, with_gradients=True):
    (found,) = engine.compute([Pass(model, data, loss)], with_gradients=with_gradients)
    return found


def of_one_step(folder, layout, names, **options):
    """Results by loss: both losses, log-probs, and what one step after two passes changed, on rank 0."""
    engine, found = shared(folder, layout, **options), {}
    stream = engine.adapter_tensors if engine.adapters else engine.hf_tensors
    for name in names:
        model, loss = engine.new_model(Adapted(engine.config.lora.rank, seed=1)), make_loss(name, {})
        before = {key: tensor.clone() for key, tensor in stream()}
        first, second = (computed(engine, model, some_data(seed), loss) for seed in (0, 1))
        again = computed(engine, model, some_data(1), loss, with_gradients=False)
        assert again[0] == pytest.approx(second[0], rel=1e-6)
        applied, norm = engine.optimizer_step(model, STEP)
        assert applied
        changes = {key: tensor - before[key] for key, tensor in stream()}
        found[name] = (first[0], second[0], norm), torch.cat([*first[1], *second[1]]), changes
    return found


def by_the_engine_alone(folder, names):
    """The same from MegatronEngine.train_batch, one batch of all data."""
    found = {}
    for name in names:
        options = {"lr": STEP.lr, "beta1": 0.0, "beta2": 0.0, "eps": STEP.eps, "clip_grad": 0.0}
        engine = make_engine(folder, LAYOUTS["1"][1], lora=LoraConfig(rank=4, alpha=8.0), **options)
        engine.load(folder / "adapter")
        before = {key: tensor.clone() for key, tensor in engine.adapter_tensors()}
        data = some_data() + some_data(1)
        stats = engine.train_batch(batch_of(data), make_loss(name, {}), lambda rows: torch.tensor(0))
        changes = {key: tensor - before[key] for key, tensor in engine.adapter_tensors()}
        logprobs = torch.cat([part[1:] for part in stats.logprobs.split([len(d.tokens) + 1 for d in data])])
        found[name] = (stats.loss, stats.grad_norm), logprobs, changes
    return found


def whole_step(folder, layout, distributed):
    return of_one_step(folder, layout, ["ppo"], rank=0, distributed=distributed)


def check_changes(found, expected):
    for key, change in expected.items():
        assert (found[key] - change).norm() <= 1e-4 * change.norm() + 1e-12, key


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models") / "qwen3"
    make_model("qwen3", folder, 2)
    return folder


@pytest.fixture(scope="module")
def by_one(folder):
    return run_ranks(1, of_one_step, folder, "1", list(LOSSES))[0]


def written(folder):
    """The adapters that a client's model of seed 1 starts with, in PEFT's format."""
    engine = shared(folder)
    engine.export_model(engine.new_model(Adapted(4, seed=1)), folder / "adapter")


def test_losses_gradients_and_a_step_are_those_of_the_engine_alone(folder, by_one):
    run_ranks(1, written, folder)
    for name, (numbers, logprobs, changes) in run_ranks(1, by_the_engine_alone, folder, list(LOSSES))[0].items():
        (first, second, norm), found, own = by_one[name]
        assert first + second == pytest.approx(numbers[0], rel=1e-6), name
        assert norm == pytest.approx(numbers[1], rel=1e-5), name
        torch.testing.assert_close(found, logprobs, rtol=1e-6, atol=1e-6)
        check_changes(own, changes)


@pytest.mark.parametrize("layout", ["tp2", "pp2", "dp2", pytest.param("tp2_dp2", marks=pytest.mark.thorough)])
def test_each_layout_has_the_results_of_one_process(layout, folder, by_one):
    found = run_ranks(LAYOUTS[layout][0], of_one_step, folder, layout, ["cross_entropy", "gspo"])[0]
    for name, (numbers, logprobs, changes) in found.items():
        assert numbers == pytest.approx(by_one[name][0], rel=1e-5), name
        torch.testing.assert_close(logprobs, by_one[name][1], rtol=1e-5, atol=1e-5)
        check_changes(changes, by_one[name][2])


@pytest.mark.parametrize("layout", ["dp2", pytest.param("tp2", marks=pytest.mark.thorough)])
def test_a_whole_model_takes_the_same_step_in_each_layout(layout, folder):
    (alone,) = run_ranks(1, whole_step, folder, "1", False)
    found, *_ = run_ranks(LAYOUTS[layout][0], whole_step, folder, layout, layout == "dp2")
    assert found["ppo"][0] == pytest.approx(alone["ppo"][0], rel=1e-5)
    check_changes(found["ppo"][2], alone["ppo"][2])


@pytest.mark.thorough
def test_adapters_of_experts_have_the_results_of_one_process(tmp_path):
    make_model("qwen3_moe", tmp_path, 2)
    (alone,) = run_ranks(1, of_one_step, tmp_path, "1", ["cross_entropy"])
    found = run_ranks(LAYOUTS[EXPERTS][0], of_one_step, tmp_path, EXPERTS, ["cross_entropy"])[0]
    numbers, logprobs, changes = found["cross_entropy"]
    assert numbers == pytest.approx(alone["cross_entropy"][0], rel=1e-5)
    torch.testing.assert_close(logprobs, alone["cross_entropy"][1], rtol=1e-5, atol=1e-5)
    check_changes(changes, alone["cross_entropy"][2])


RECOMPUTE = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
MODELS = 3


def steps_of_models(folder, layout, together, options):
    """Two steps of MODELS models of different ranks, whose passes run together or one by one, on rank 0.

    By model: losses, log-probs, norms, and its adapters in the end. The middle model has another loss.
    """
    engine, found = shared(folder, layout, **options), []
    engine.kept_on_device = MODELS
    models = [engine.new_model(Adapted(rank=2 + number % 2, seed=number)) for number in range(MODELS)]
    losses = [make_loss(("cross_entropy", "gspo", "ppo")[number], {}) for number in range(MODELS)]
    kept = [[] for _ in models]
    for step in range(2):
        for turn in range(2):  # two passes before each step
            data = [some_data(10 * step + turn + 3 * number)[: 4 - number] for number in range(MODELS)]
            passes = [Pass(*one) for one in zip(models, data, losses, strict=True)]
            groups = [passes] if together else [[one] for one in passes]
            results = [result for group in groups for result in engine.compute(group, with_gradients=True)]
            alone = [result for group in groups for result in engine.compute(group, with_gradients=False)]
            for own, (loss, logprobs), (again, _) in zip(kept, results, alone, strict=True):
                own += [torch.tensor([loss, again], dtype=torch.float64), *logprobs]
        for own, model in zip(kept, models, strict=True):
            applied, norm = engine.optimizer_step(model, AdamStep(1e-2, (0.9, 0.95), 1e-8, 0.1, 1.0))
            assert applied
            own.append(torch.tensor(norm))
    for own, model in zip(kept, models, strict=True):
        engine.occupy(model)
        found.append(own + [tensor.clone() for _, tensor in engine.adapter_tensors()])
    return found


@pytest.mark.parametrize(
    ("layout", "options"),
    [
        ("1", {}),
        ("pp2", {}),
        ("dp2", {"distributed": True}),
        pytest.param("1", {"megatron": RECOMPUTE}, marks=pytest.mark.thorough),
        pytest.param("tp2", {}, marks=pytest.mark.thorough),
        pytest.param("pp2", {"megatron": RECOMPUTE}, marks=pytest.mark.thorough),
        pytest.param("tp2_dp2", {"distributed": True}, marks=pytest.mark.thorough),
    ],
)
def test_models_whose_passes_run_together_have_the_results_of_each_alone_to_the_bit(layout, options, folder):
    count = LAYOUTS[layout][0]
    together, alone = (run_ranks(count, steps_of_models, folder, layout, way, options)[0] for way in (True, False))
    assert any(not torch.equal(one, other) for one, other in zip(together[0], together[2], strict=False))
    for found, expected in zip(together, alone, strict=True):
        assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


def with_several_targets(folder, layout, columns):
    """Loss, log-probs and norm of data with two targets of each token, or of each column of it as data of its own."""
    engine = shared(folder, layout)
    model, loss = engine.new_model(Adapted(4, seed=1)), make_loss("cross_entropy", {})
    data = some_data()
    for datum in data:
        datum.inputs = {
            "target_tokens": torch.stack([datum.inputs["target_tokens"], datum.tokens], dim=1),
            "weights": torch.stack([datum.inputs["weights"], 2 * datum.inputs["weights"]], dim=1),
        }
    if columns:
        alone = [
            [Datum(datum.tokens, {key: value[:, n] for key, value in datum.inputs.items()}) for datum in data]
            for n in range(2)
        ]
        found = [computed(engine, model, part, loss) for part in alone]
        total, logprobs = sum(part[0] for part in found), torch.stack([torch.cat(part[1]) for part in found], dim=1)
    else:
        total, parts = computed(engine, model, data, loss)
        again, _ = computed(engine, model, data, loss, with_gradients=False)
        assert again == pytest.approx(total, rel=1e-6)
        logprobs = torch.cat(parts)
    return total, logprobs, engine.optimizer_step(model, STEP)[1]


@pytest.mark.parametrize("layout", ["1", "pp2", pytest.param("tp2_dp2", marks=pytest.mark.thorough)])
def test_several_targets_of_a_token_have_the_loss_and_gradient_of_one_after_the_other(layout, folder):
    (alone,) = run_ranks(1, with_several_targets, folder, "1", True)
    total, logprobs, norm = run_ranks(LAYOUTS[layout][0], with_several_targets, folder, layout, False)[0]
    assert total == pytest.approx(alone[0], rel=1e-5) and norm == pytest.approx(alone[2], rel=1e-5)
    torch.testing.assert_close(logprobs, alone[1], rtol=1e-5, atol=1e-5)


def kept_bytes(folder):
    """What a model that waits takes, and what the plan says."""
    engine = shared(folder)
    first, second = (engine.new_model(Adapted(4, seed=seed)) for seed in (0, 1))
    computed(engine, first, some_data(), make_loss("cross_entropy", {}))
    engine.occupy(second)
    policy = Model("policy", engine.arch, engine.config)
    states = states_of_stage(policy, 0, 1)
    planned = policy.trained_of_stage(0).total * policy.itemsize + states["optimizer"] + states["gradients"]
    return sum(part.nbytes for part in [*first.kept, *first.gradients]), planned


def test_a_model_that_waits_takes_the_memory_that_the_plan_says(folder):
    ((found, planned),) = run_ranks(1, kept_bytes, folder)
    assert found == pytest.approx(planned, rel=0.05)


def of_a_full_device(folder):
    """Losses of models of which one fits on the device beside the occupant, and which of them are at hand."""
    engine = shared(folder)
    engine.kept_on_device = 1
    models = [engine.new_model(Adapted(4, seed=seed)) for seed in range(3)]
    at_hand = [engine.is_at_hand(model) for model in models]
    engine.drop(models[0])
    engine.occupy(models[1])
    loss = make_loss("cross_entropy", {})
    return at_hand, engine.is_at_hand(models[2]), computed(engine, models[2], some_data(), loss)[0]


def test_models_beyond_the_devices_room_are_kept_in_host_memory(folder):
    ((at_hand, later, loss),) = run_ranks(1, of_a_full_device, folder)
    assert at_hand == [True, False, True] and later and loss
