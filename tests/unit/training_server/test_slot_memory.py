"""How many models a server takes, and that it refuses more by name."""

import pytest

from megatron_rl.config import load_config
from megatron_rl.tools.plan.devices import FRAGMENTATION, GIB
from megatron_rl.training_server import slot_memory
from megatron_rl.training_server.slot_memory import MOST_BY_DEFAULT, Room, free_host_bytes, room_of, slots_of
from megatron_rl.weights.architecture import read_architecture
from tests.kit.runs import COUNT_MODEL, ROOT

RANK = 4


def config(rank=RANK):
    return load_config(ROOT / "configs" / "demo.yaml", [f"lora.rank={rank}", f"model.path={COUNT_MODEL}"])


def trained(arch):
    """Parameters of the adapters of rank 1, from the sizes of the adapted matrices: rows + columns of each."""
    heads, kv_heads = arch.heads * arch.head_dim, arch.kv_heads * arch.head_dim
    attention = (arch.hidden + heads) * 2 + (arch.hidden + kv_heads) * 2
    return arch.layers * (attention + 3 * (arch.hidden + arch.ffn))


@pytest.fixture
def arch():
    return read_architecture(COUNT_MODEL)


def test_a_model_is_its_adapters_two_moments_and_gradients_in_float32(arch):
    room = room_of(config(), arch, world_size=1, local_ranks=1, device_bytes=80.0 * GIB)
    assert room.model_bytes == pytest.approx(4 * 4 * RANK * trained(arch), rel=0.01)


def test_what_the_base_leaves_of_a_device_is_divided_among_models(arch):
    one, two = (room_of(config(), arch, world_size=1, local_ranks=1, device_bytes=n * 10.0 * GIB) for n in (1, 2))
    # Another 10 GiB hold models, of which a pass gathers gradients once more: a quarter of a model in float32.
    each = (1 + FRAGMENTATION) * 1.25 * one.model_bytes
    assert two.on_device - one.on_device == pytest.approx(10 * GIB / each, rel=0.01)
    assert two.in_host == pytest.approx(one.in_host, rel=0.5) and two.in_host > 0


def test_without_a_gpu_the_models_share_the_hosts_memory(arch, monkeypatch):
    monkeypatch.setattr(slot_memory, "free_host_bytes", lambda: 4.0 * GIB)
    alone, shared = (room_of(config(), arch, world_size=n, local_ranks=n, device_bytes=None) for n in (1, 2))
    assert alone.in_host == shared.in_host == 0 and alone.on_device > shared.on_device > alone.on_device // 3
    monkeypatch.setattr(slot_memory, "free_host_bytes", lambda: 0.0)
    assert room_of(config(), arch, world_size=1, local_ranks=1, device_bytes=None).slots == 1


def test_the_limit_of_a_container_counts(tmp_path, monkeypatch):
    monkeypatch.setattr(slot_memory, "CGROUP", tmp_path)
    assert free_host_bytes() > 0
    (tmp_path / "memory.max").write_text("1000\n")
    (tmp_path / "memory.current").write_text("400\n")
    assert free_host_bytes() == 600
    (tmp_path / "memory.max").write_text("max\n")
    assert free_host_bytes() > 600


def test_the_default_is_what_fits_and_more_is_refused():
    room = Room(on_device=3, in_host=4, model_bytes=2.0**20)
    assert slots_of(None, room, config()) == slots_of(8, room, config()) == 8
    assert slots_of(None, Room(1000, 0, 1.0), config()) == MOST_BY_DEFAULT
    with pytest.raises(ValueError, match="--slots 9: a rank has room for 8 models of 1.0 MiB, one in the engine, 3 on"):
        slots_of(9, room, config())
    whole = config(rank=0)
    assert slots_of(None, room, whole) == 1
    with pytest.raises(ValueError, match="or lora.rank for adapters"):
        slots_of(9, room, whole)
