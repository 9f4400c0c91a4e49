"""A resumed engine continues as if it had never stopped, and a broken folder is named."""

import contextlib
import json
import os
import pickle
import pickletools
import random
import re
import resource
import shutil
import sys
import time
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch
from fused_adam import fused_adam
from safetensors.torch import load_file, save_file
from test_gradients import user_loss, user_weight

from megatron_rl.config import EngineConfig, ModelConfig, OptimizerConfig
from megatron_rl.engine import checkpoint as checkpoints
from megatron_rl.engine import manifest
from megatron_rl.engine.fsdp_engine import FSDPEngine
from megatron_rl.engine.manifest import CheckpointError
from megatron_rl.engine.megatron_engine import MegatronEngine
from megatron_rl.platform import upstream
from megatron_rl.types import FinetuneSpec
from tests.kit.models import LAYOUTS, make_batch, make_engine, make_model, share_of, start
from tests.kit.ranks import run_each, run_ranks
from tests.kit.waiting import LATE_S, LIMIT_S, wait_until

GENTLE = {"eps": 1e-4, "schedule": "linear", "weight_decay": 0.1}
"""Options under which Adam does not blow rounding up, and every update has a learning rate of its own."""
DISTRIBUTED = GENTLE | {"distributed": True}


def train(engine, updates=1):
    batch = share_of(make_batch(), engine)
    for _ in range(updates):
        engine.train().train_batch(batch, user_loss, user_weight)
        engine.step_lr_scheduler()


def weights_of(engine):
    return {name: tensor.clone() for name, tensor in engine.hf_tensors()}


def uninterrupted(folder, updates):
    engine = make_engine(folder, LAYOUTS["1"][1], **GENTLE)
    weights = []
    for _ in range(updates):
        train(engine)
        weights.append(weights_of(engine))
    return weights


def resume_and_save(folder, layout, source, target, options, in_background):
    """Load, train once, save; return the weights as loaded and as saved."""
    engine = make_engine(folder, LAYOUTS[layout][1], **options)
    if source is not None:
        engine.load(source, with_optimizer=True)
    loaded = weights_of(engine)
    train(engine)
    saved = weights_of(engine)
    if in_background:
        engine.save_async(target)
        train(engine, updates=2)  # the checkpoint is of the moment of the call
        engine.finish_saves()
    else:
        engine.save(target, with_optimizer=True)
    return loaded, saved


# From one process to tensor, pipeline and context ranks, chunks and replicas, and back; from one kind of optimizer to
# the other, which some links of each chain change.
@pytest.mark.slow
@pytest.mark.proves("layouts", "{links}", "checkpoint")
@pytest.mark.parametrize(
    "family,links",
    [
        ("llama_tied", ["1", "tp2_pp2", "pp2_vpp2"]),
        *(
            pytest.param(*chain, marks=pytest.mark.thorough)
            for chain in (
                ("qwen3", ["cp2", "dp2_distributed"]),
                ("llama_tied", ["1", "tp2_pp2", "pp2", "pp2_vpp2", "dp2_distributed"]),
                ("qwen3", ["dp2_distributed", "tp2_pp2_distributed", "cp2", "tp2_sp", "dp2"]),
            )
        ),
    ],
)
def test_a_run_continues_in_any_layout(family, links, tmp_path):
    follow([family], links, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize(
    "links", [["1", "ep2_distributed"], pytest.param(["1", "tp2_pp2", "ep2_distributed"], marks=pytest.mark.thorough)]
)
def test_a_mixture_of_experts_continues_in_any_layout(links, tmp_path):
    follow(["qwen3_moe"], links, tmp_path, layers=2)


def follow(families, links, tmp_path, layers=None):
    """Train one update in each link's layout; every link resumes what the one before it saved, all families there."""
    folders = {family: tmp_path / f"{family}-model" for family in families}
    for family, folder in folders.items():
        make_model(family, folder, layers)
    expected = run_each(1, uninterrupted, {family: (folder, len(links)) for family, folder in folders.items()})
    sources, last = dict.fromkeys(families), {}
    for number, link in enumerate(links):
        layout, options = link.removesuffix("_distributed"), DISTRIBUTED if link.endswith("_distributed") else GENTLE
        targets, in_background = {family: tmp_path / f"{family}-{number}" for family in families}, number % 2 == 1
        cases = {f: (folders[f], layout, sources[f], targets[f], options, in_background) for f in families}
        for family, ranks in run_each(LAYOUTS[layout][0], resume_and_save, cases).items():
            loaded, saved = ranks[0]
            for name, tensor in expected[family][0][number].items():
                assert family not in last or torch.equal(loaded[name], last[family][name]), (family, name)
                torch.testing.assert_close(saved[name], tensor, rtol=0, atol=1e-6, msg=f"{family} {name}")
            last[family] = saved
        sources = targets


def resume_in_bfloat16(folder, target, kinds):
    """Train on for two updates: the engine that saved, and one that resumed with the other kind of optimizer."""

    def engine_of(is_distributed):
        model = ModelConfig(path=str(folder), dtype="bfloat16")
        # The two kinds add up the gradient norm in another order; without clipping it changes nothing.
        optimizer = OptimizerConfig(lr=3e-3, eps=1e-6, weight_decay=0.1, clip_grad=0.0, distributed=is_distributed)
        return start(MegatronEngine(EngineConfig(model=model, optimizer=optimizer)))

    first, second = (engine_of(is_distributed) for is_distributed in kinds)
    train(first, updates=2)
    first.save_async(target)
    train(first, updates=2)
    first.finish_saves()
    second.load(target, with_optimizer=True)
    train(second, updates=2)
    return weights_of(first), weights_of(second)


@pytest.mark.slow
def test_bfloat16_resumes_bit_by_bit_with_either_kind_of_optimizer(tmp_path):
    make_model("llama", tmp_path / "model", layers=2)
    kinds = [(True, True), (True, False), (False, True)]
    cases = {kind: (tmp_path / "model", tmp_path / f"checkpoint{number}", kind) for number, kind in enumerate(kinds)}
    for kind, ranks in run_each(2, resume_in_bfloat16, cases).items():
        weights, resumed = ranks[0]
        assert all(torch.equal(resumed[name], tensor) for name, tensor in weights.items()), kind


def by_turns(folder, targets, links):
    """Train one update in each link, which resumes what the one before it saved; return the weights after each."""
    weights, source = [], None
    for (adam, options), target in zip(links, targets, strict=False):
        with fused_adam() if adam == "fused" else contextlib.nullcontext():
            engine = make_engine(folder, LAYOUTS["1"][1], **options)
            if source is None:
                engine.save(target, with_optimizer=True)  # before its first update, to be loaded by itself
            engine.load(source or target, with_optimizer=True)
            train(engine)
            weights.append(weights_of(engine))
            engine.save(target, with_optimizer=True)
            source = target
    return weights


@pytest.mark.thorough
def test_resume_with_an_adam_that_counts_in_its_groups_raises_no_key_error_and_goes_on_counting(tmp_path):
    make_model("llama", tmp_path / "model", layers=2)
    links = {
        "plain": [("fused", GENTLE), ("fused", GENTLE), ("torch", GENTLE), ("fused", GENTLE)],
        "distributed": [("fused", DISTRIBUTED), ("torch", DISTRIBUTED), ("fused", DISTRIBUTED)],
        "both": [("fused", GENTLE), ("torch", DISTRIBUTED), ("fused", GENTLE)],
    }
    targets = [tmp_path / str(number) for number in range(4)]
    cases = {name: (tmp_path / "model", [it / name for it in targets], chain) for name, chain in links.items()}
    expected = run_ranks(1, uninterrupted, tmp_path / "model", 4)[0]
    for name, (found, *_) in run_each(1, by_turns, cases).items():
        for number, weights in enumerate(found):
            for tensor, value in weights.items():
                torch.testing.assert_close(value, expected[number][tensor], rtol=0, atol=1e-6, msg=f"{name} {number}")


OTHER_MOMENTS = {"beta1": 0.5, "beta2": 0.75, "eps": 1e-2}


def moments_after_resume(folder, scratch):
    """Return betas and eps of each group after a resume with other ones, by the kinds that saved and that resumed."""
    found, kinds = {}, {"plain": GENTLE, "distributed": DISTRIBUTED}
    for before, options in kinds.items():
        engine = make_engine(folder, LAYOUTS["1"][1], **options)
        train(engine)
        engine.save(scratch / before, with_optimizer=True)
        for after, wanted in kinds.items():
            engine = make_engine(folder, LAYOUTS["1"][1], **wanted | OTHER_MOMENTS)
            engine.load(scratch / before, with_optimizer=True)
            groups = [group for part in engine.optimizer.chained_optimizers for group in part.optimizer.param_groups]
            train(engine)
            found[before, after] = {(*group["betas"], group["eps"]) for group in groups}
    with pytest.raises(ValueError, match="model.dtype = 'bfloat16': the checkpoint '.*plain' has 'float32', and its"):
        make_engine(folder, LAYOUTS["1"][1], dtype="bfloat16").load(scratch / "plain", with_optimizer=True)
    return found


@pytest.mark.slow
def test_betas_and_eps_are_the_configs_after_a_resume_and_another_dtype_is_refused_by_name(tmp_path):
    make_model("llama", tmp_path / "model", layers=2)
    (found,) = run_ranks(1, moments_after_resume, tmp_path / "model", tmp_path)
    assert len(found) == 4 and set.union(*found.values()) == {(0.5, 0.75, 1e-2)}


@pytest.mark.thorough
def test_an_engine_that_never_trained_can_be_saved_and_resumed(tmp_path):
    make_model("llama", tmp_path / "model", layers=2)
    expected = run_ranks(1, uninterrupted, tmp_path / "model", 1)[0][0]
    kinds = {"plain": GENTLE, "distributed": DISTRIBUTED}
    fresh = {kind: (tmp_path / "model", tmp_path / f"{kind}0", options) for kind, options in kinds.items()}
    saved = run_each(1, save_untrained, fresh)
    ways = {kind: (tmp_path / f"{kind}0", tmp_path / f"{kind}1", options) for kind, options in kinds.items()}
    resumed = run_each(1, resume_and_save, {kind: (tmp_path / "model", "1", *way, False) for kind, way in ways.items()})
    for kind in kinds:
        loaded, trained = resumed[kind][0]
        for name, tensor in expected.items():
            assert torch.equal(loaded[name], saved[kind][0][name])
            torch.testing.assert_close(trained[name], tensor, rtol=0, atol=1e-6, msg=name)


def save_untrained(folder, target, options):
    engine = make_engine(folder, LAYOUTS["1"][1], **options)
    engine.save(target, with_optimizer=True)
    return weights_of(engine)


def draw():
    return random.random(), float(np.random.rand()), float(torch.rand(()))


def draw_before_and_after(folder, target):
    engine = make_engine(folder, LAYOUTS["dp2"][1])
    for generator in (random.seed, np.random.seed, torch.manual_seed):
        generator(engine.groups.rank)
    engine.save(target, with_optimizer=True)
    expected = draw()
    draw()
    engine.load(target, with_optimizer=True)
    return expected, draw()


def draw_resumed(folder, target):
    make_engine(folder, LAYOUTS["1"][1]).load(target, with_optimizer=True)
    return draw()


@pytest.mark.slow
def test_each_rank_resumes_its_own_random_numbers_and_another_layout_the_first_ranks(tmp_path):
    make_model("llama", tmp_path / "model", layers=2)
    target = tmp_path / "checkpoint"
    (first, first_again), (second, second_again) = run_ranks(2, draw_before_and_after, tmp_path / "model", target)
    assert first_again == first != second == second_again
    assert run_ranks(1, draw_resumed, tmp_path / "model", target) == [first]


def lose_the_writer(folder, target):
    from megatron.core.dist_checkpointing.strategies import filesystem_async

    engine = make_engine(folder, LAYOUTS["dp2"][1])
    engine.save(target, with_optimizer=True)
    first = weights_of(engine)
    train(engine)
    write_item = filesystem_async._write_item
    filesystem_async._write_item = lambda *_, **__: time.sleep(LATE_S)
    engine.save_async(target)
    assert not engine.finish_saves(wait=False)
    for writer in psutil.Process().children(recursive=True):
        writer.kill()
    with pytest.raises(RuntimeError, match=r"checkpoint .*: a writer failed \(rank .*save again"):
        engine.finish_saves()
    filesystem_async._write_item = write_item
    second = weights_of(engine)
    engine.load(target, with_optimizer=True)  # the earlier one is whole
    third = weights_of(engine)
    train(engine)
    engine.save(target, with_optimizer=True)  # and the next save succeeds
    assert not psutil.Process().children(recursive=True)
    return first, second, third


@pytest.mark.slow
def test_a_killed_writer_is_reported_and_leaves_the_earlier_checkpoint(tmp_path):
    make_model("llama", tmp_path / "model", layers=2)
    first, second, third = run_ranks(2, lose_the_writer, tmp_path / "model", tmp_path / "checkpoint")[0]
    assert any(not torch.equal(first[name], second[name]) for name in first)
    assert all(torch.equal(first[name], third[name]) for name in first)
    assert os.listdir(tmp_path / "checkpoint" / "hf") == ["config.json", "generation_config.json"]


def sockets_of(process):
    links = []
    for path in Path(f"/proc/{process.pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # it opens and closes others meanwhile
            links += [os.readlink(path)] if int(path.name) > 2 else []
    return [link for link in links if link.startswith("socket:")]


def lose_one_of_the_writers(folder, target):
    """Rank 1 loses what its writer has forked, then rank 0 its writer; whether it forks, and what each save raised."""
    from megatron.core.dist_checkpointing.strategies import filesystem_async

    engine = make_engine(folder, LAYOUTS["dp2"][1])
    # From 0.17 on a writer has threads instead, and rank 1 loses it as a whole.
    forks = hasattr(filesystem_async.FileSystemWriterAsync, "write_preloaded_data_multiproc")
    write_item, raised, is_writing = filesystem_async._write_item, [], target.with_name(f"{engine.groups.rank} writes")

    def write_and_write(*_, **__):
        is_writing.touch()
        time.sleep(LATE_S)

    for loser, child_is_lost in ((1, True), (0, False)):
        filesystem_async._write_item = write_and_write
        is_writing.unlink(missing_ok=True)  # now, as several of a writer's processes make it
        engine.save_async(target)
        wait_until(is_writing.exists, "a writer has begun")
        (writer,) = psutil.Process().children()
        children = writer.children()
        assert bool(children) == forks
        assert not any(map(sockets_of, (writer, *children)))
        if engine.groups.rank == loser:
            (children[0] if child_is_lost and forks else writer).kill()
        else:
            writer.kill()  # it would write and write
        with pytest.raises(CheckpointError) as error:
            engine.finish_saves()
        raised.append(str(error.value))
        assert not psutil.wait_procs([writer, *children], timeout=LIMIT_S)[1], "nothing outlives it"
        filesystem_async._write_item = write_item
        engine.save(target, with_optimizer=True)
    filesystem_async._write_item = write_and_write
    engine.save_async(target)
    left = psutil.Process().children(recursive=True)
    engine.drop_saves()  # as where a run fails
    assert left and not psutil.wait_procs(left, timeout=LIMIT_S)[1] and engine.finish_saves()
    return forks, raised


@pytest.mark.thorough
def test_a_lost_process_of_a_writer_fails_that_checkpoint_on_all_ranks_at_once_and_leaves_no_orphan(tmp_path):
    make_model("llama", tmp_path / "model", layers=2)
    ranks = run_ranks(2, lose_one_of_the_writers, tmp_path / "model", tmp_path / "checkpoint")
    (forks, (first, second)), (_, other) = ranks
    lost = r"Worker failure: process \d+, which wrote a file of it, was killed by SIGKILL"
    assert all("a writer failed (rank 0 says which)" in raised for raised in other)
    assert re.search(f"rank 1: {lost if forks else 'its process was killed'}", first)
    assert "rank 0: its process was killed" in second


def save_weights_to_a_full_disk(folder, target, kind):
    if kind is FSDPEngine:
        engine = FSDPEngine(EngineConfig(model=ModelConfig(path=str(folder))))
        engine.initialize(None, FinetuneSpec(total_updates=10))
    else:
        engine = make_engine(folder, LAYOUTS["tp2"][1])
    engine.save(target)
    before = (target / "model.safetensors").read_bytes()
    train(engine)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, limits[1]))
    with pytest.raises(CheckpointError, match=f"weights {target}: .*see that the disk has space"):
        engine.save(target)
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert (target / "model.safetensors").read_bytes() == before
    engine.save(target)  # all ranks are still where the others are
    assert (target / "model.safetensors").read_bytes() != before


@pytest.mark.slow
@pytest.mark.parametrize("kind", [MegatronEngine, FSDPEngine])
def test_weights_that_a_full_disk_does_not_take_are_named_on_all_ranks_which_go_on(kind, tmp_path):
    make_model("llama", tmp_path / "model", layers=2)
    run_ranks(2, save_weights_to_a_full_disk, tmp_path / "model", tmp_path / "weights", kind)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    folder = tmp_path_factory.mktemp("checkpoint")
    make_model("llama", folder / "model", layers=2)
    run_ranks(1, save_untrained, folder / "model", folder / "whole", {})
    return folder


def resumed_error(folder, layout, target):
    engine = make_engine(folder, LAYOUTS[layout][1])
    with pytest.raises((RuntimeError, ValueError)) as error:
        engine.load(target, with_optimizer=True)
    return f"{type(error.value).__name__}: {error.value}"


def flip_a_bit(path):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


DAMAGE = {
    "bit": (lambda c: flip_a_bit(c / "__0_0.distcp"), ["RuntimeError", "content of __0_0.distcp", "CRC-32"]),
    "length": (lambda c: os.truncate(c / "__0_0.distcp", 100), ["RuntimeError", "__0_0.distcp has 100 bytes"]),
    "file": (
        lambda c: (c / "metadata.json").unlink(),
        ["RuntimeError", "metadata.json is missing", "earlier checkpoint"],
    ),
    "manifest": (lambda c: (c / "manifest.json").write_text("{"), ["RuntimeError", "manifest.json is not readable"]),
    "none": (lambda c: (c / "manifest.json").unlink(), ["ValueError", "no manifest.json", "megatron-rl convert"]),
}


@pytest.mark.slow
def test_a_damaged_checkpoint_is_refused_by_every_rank_with_the_file(checkpoint, tmp_path):
    for kind, (damage, _) in DAMAGE.items():
        shutil.copytree(checkpoint / "whole", tmp_path / kind)
        damage(tmp_path / kind)
    cases = {kind: (checkpoint / "model", "dp2", tmp_path / kind) for kind in DAMAGE}
    for kind, messages in run_each(2, resumed_error, cases).items():
        for message in messages:
            assert all(part in message for part in DAMAGE[kind][1]), message


class Evil:
    """What a pickle of others can be: loading it makes a folder, and could do anything else."""

    def __init__(self, folder):
        self.folder = str(folder)

    def __reduce__(self):
        return os.mkdir, (self.folder,)


def save_as_others_do(folder, target, marker):
    engine = make_engine(folder, LAYOUTS["1"][1])
    random_state = checkpoints._random_state

    def with_more(*args):
        state = random_state(*args)
        state.data["more"] = Evil(marker)
        return state

    checkpoints._random_state = with_more
    engine.save(target, with_optimizer=True)


def plant_in_metadata(target, marker):
    (target / ".metadata").write_bytes(pickle.dumps(Evil(marker)))


def plant_in_common(target, marker):
    path = target / "common.pt"  # megatron.core 0.19 writes none, and reads one
    common = torch.load(path, weights_only=True) if path.exists() else {}
    torch.save(common | {"more": Evil(marker)}, path)


@pytest.mark.parametrize("plant", [plant_in_metadata, plant_in_common, None], ids=["metadata", "common", "object"])
def test_a_checkpoint_of_others_runs_no_code(plant, checkpoint, tmp_path):
    target, marker = tmp_path / "checkpoint", tmp_path / "marker"
    if plant is None:
        run_ranks(1, save_as_others_do, checkpoint / "model", target, marker)
    else:
        shutil.copytree(checkpoint / "whole", target)
        plant(target, marker)
        (target / "manifest.json").unlink()
        manifest.write(target)  # which others can do as well
    (message,) = run_ranks(1, resumed_error, checkpoint / "model", "1", target)
    assert not marker.exists()
    assert f"RuntimeError: checkpoint '{target}': " in message and "mkdir" in message, message
    assert "code" in message and "\n" not in message


def load_weights(folder, layout, target):
    engine = make_engine(folder, LAYOUTS[layout][1], distributed=True)
    with torch.no_grad():
        for parameter in engine.parameters():
            parameter.zero_()
    engine.load(target)
    return weights_of(engine), engine.get_version()


def test_the_weights_of_a_checkpoint_load_without_its_optimizer(checkpoint):
    weights, version = run_ranks(2, load_weights, checkpoint / "model", "pp2", checkpoint / "whole")[0]
    expected = load_file(checkpoint / "model" / "model.safetensors")
    assert version == 0 and all(torch.equal(weights[name], tensor) for name, tensor in expected.items())


def train_and_save(folder, layout, target, options):
    engine = make_engine(folder, LAYOUTS[layout][1], **options)
    train(engine, updates=3)
    engine.save(target, with_optimizer=True)


def without_fix(folder, target):
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer as Fixed

    Fixed._set_main_param_and_optimizer_states = Fixed._set_main_param_and_optimizer_states.__closure__[0].cell_contents
    make_engine(folder, LAYOUTS["dp2"][1], distributed=True).load(target, with_optimizer=True)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A model's folder, and a checkpoint of it by two replicas with the distributed optimizer."""
    folder = tmp_path_factory.mktemp("trained")
    make_model("llama_tied", folder / "model", layers=2)
    run_ranks(2, train_and_save, folder / "model", "dp2", folder / "checkpoint", {"distributed": True})
    return folder / "model", folder / "checkpoint"


@pytest.mark.thorough
def test_upstream_distributed_adam_still_needs_its_fix(trained):
    with pytest.raises(AssertionError, match="KeyError: 'step'"):
        run_ranks(2, without_fix, *trained)


def shared_step(folder, target):
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer as Fixed

    Fixed.load_state_dict = next(
        c.cell_contents for c in Fixed.load_state_dict.__closure__ if c.cell_contents.__name__ == "load_state_dict"
    )
    engine = make_engine(folder, LAYOUTS["dp2"][1], distributed=True)
    with torch.no_grad():
        engine.load(target, with_optimizer=True)
    optimizer = getattr(engine.optimizer, "chained_optimizers", [engine.optimizer])[0].optimizer
    steps = [state["step"] for state in optimizer.state.values()]
    return len({step.data_ptr() for step in steps}), len(steps)


def test_upstream_adam_steps_are_shared_after_a_load_without_the_fix(trained):
    distinct, parameters = run_ranks(2, shared_step, *trained)[0]
    assert distinct == 1 < parameters


def router(with_fix):
    from megatron.core.transformer.moe import moe_utils

    if not with_fix:
        del moe_utils.te_general_gemm
    tokens, weight = torch.ones(3, 4), torch.ones(2, 4)
    gating = moe_utils.router_gating_linear
    return (
        gating(tokens, weight, None, torch.float32)
        if "bias" in gating.__code__.co_varnames
        else gating(tokens, weight, torch.float32)
    )


def test_moe_router_runs_without_transformer_engine_only_with_the_fix():
    assert run_ranks(1, router, True)[0].tolist() == [[4.0, 4.0]] * 3
    with pytest.raises(AssertionError, match="te_general_gemm"):
        run_ranks(1, router, False)


def test_a_pickled_tensor_names_nothing_that_servers_have_not():
    assert "megatron.core" in sys.modules
    words = [word for _, word, _ in pickletools.genops(pickle.dumps(torch.ones(2))) if isinstance(word, str)]
    assert "_load_from_bytes" in words and not [word for word in words if "megatron" in word]


def test_every_fix_has_its_module():
    assert set(upstream.FIXES) == {
        "megatron.core.jit",
        "megatron.core.safe_globals",
        "megatron.core.transformer.moe.moe_utils",
        "megatron.core.optimizer.distrib_optimizer",
        "megatron.core.optimizer.cpu_offloading.hybrid_optimizer",
        "megatron.core.tensor_parallel.layers",
        "megatron.core.tensor_parallel.mappings",
        "megatron.core.transformer.multi_latent_attention",
        "megatron.core.dist_checkpointing.strategies.filesystem_async",
        "megatron.core.dist_checkpointing.strategies.torch",
    }


def test_fix_is_not_applied_from_the_version_that_does_without_it():
    assert upstream.fixes_of("0.16.1").keys() == upstream.FIXES.keys()
    unneeded = upstream.FIXES.keys() - upstream.fixes_of("0.17.0").keys()
    assert {name.rpartition(".")[2] for name in unneeded} == {"multi_latent_attention", "moe_utils"}


@pytest.fixture
def folder(tmp_path):
    make_model("llama", tmp_path)
    return tmp_path


def refused(folder, *parts):
    with pytest.raises(ValueError) as error:
        make_engine(folder, LAYOUTS["1"][1])
    for part in parts:
        assert part in str(error.value)


def test_folder_without_config_is_refused(folder):
    (folder / "config.json").unlink()
    refused(folder, "model.path", "no config.json", "megatron-rl convert")


def test_unsupported_architecture_is_refused_with_the_supported_ones(folder):
    config = json.loads((folder / "config.json").read_text()) | {"architectures": ["GPT2LMHeadModel"]}
    (folder / "config.json").write_text(json.dumps(config))
    refused(folder, "GPT2LMHeadModel", "LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")


def test_missing_tensor_is_named(folder):
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, folder / "model.safetensors")
    refused(folder, "model.layers.1.mlp.up_proj.weight", "missing", "(96, 64)")


def test_misshapen_tensor_is_named_with_its_file_and_both_shapes(folder):
    tensors = load_file(folder / "model.safetensors")
    tensors["model.norm.weight"] = torch.ones(63)
    save_file(tensors, folder / "model.safetensors")
    refused(folder, "model.norm.weight", "model.safetensors", "(63,)", "(64,)")


def test_folder_without_weights_is_refused(folder):
    (folder / "model.safetensors").unlink()
    refused(folder, "no *.safetensors", "model.init=random")


def test_truncated_safetensors_file_is_refused(folder):
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:100])
    refused(folder, "model.safetensors", "unreadable safetensors file")


def world_of_three(folder):
    with pytest.raises(ValueError, match=r"tensor\(2\) x pipeline\(1\) x context\(1\) = 2 ranks.*world size 3"):
        make_engine(folder, LAYOUTS["tp2"][1])


def test_world_size_that_the_layout_does_not_divide_is_refused(folder):
    run_ranks(3, world_of_three, folder)
