"""Real SGLang with a mixture of experts in bfloat16: experts are compared, several send to it, and changes alone."""

from functools import partial

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from megatron_rl.api import NoServerLeft
from megatron_rl.config import RolloutConfig
from megatron_rl.servers.supervisor import Supervisor
from megatron_rl.weights.checksums import ExpectedChecksums, differences
from megatron_rl.weights.delta import DeltaPublisher
from megatron_rl.weights.ipc import IPCPublisher
from megatron_rl.weights.sglang_loaders import pickled_round
from megatron_rl.weights.update_group import unpack_bucket
from tests.kit import client_calls
from tests.kit.in_process import specs_of
from tests.kit.reference import pack_bucket, wait_for, weight_group
from tests.kit.run_tokens import TOKEN_FILE
from tests.kit.servers import NEVER_LATE, SGLANG_ARGUMENTS
from tests.kit.tokenizers import VOCAB_SIZE, make_tokenizer
from tests.kit.waiting import LATE_S, LIMIT_S

# Beside the one that a session has: publication, checksums and agreement are in test_publication.py and
# test_agreement.py with that one, and the comparison of experts by name in tests/unit/weights.
pytestmark = [pytest.mark.slow, pytest.mark.thorough]
EXPERTS, LAYERS = 8, 2


def make_mixture(folder, seed):
    """Write a random Qwen3-MoE whose layers are all mixtures; experts' matrices are no whole tiles of a hash."""
    tokenizer = make_tokenizer()
    config = Qwen3MoeConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=64,
        intermediate_size=128,
        moe_intermediate_size=32,
        num_experts=EXPERTS,
        num_experts_per_tok=2,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=512,
        tie_word_embeddings=False,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        initializer_range=0.1,
    )
    torch.manual_seed(seed)
    Qwen3MoeForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    return [make_mixture(tmp_path_factory.mktemp("mixture"), seed) for seed in (0, 1)]


@pytest.fixture(scope="module")
def server(needs_sglang, folders, tmp_path_factory):
    config = RolloutConfig(
        backend="sglang", publication="delta", server_args=SGLANG_ARGUMENTS, token_file=TOKEN_FILE, **NEVER_LATE
    )
    with Supervisor(config, folders[0], tmp_path_factory.mktemp("server"), dtype="bfloat16") as supervisor:
        yield supervisor.urls[0]


@pytest.fixture
def weights(folders):
    """Other weights than the server's, as the trainer's stream has them: an expert at a time."""
    return load_file(folders[1] / "model.safetensors")


greedy = partial(client_calls.greedy, count=8)


ALL = 3 + LAYERS * 9
"""Its tensors: embedding, head and norm; of a layer q, k and v as one, o, four norms, the router, two of experts."""


def test_experts_are_compared_under_the_servers_own_names(server, connect, weights):
    engine = connect(server)
    publisher = IPCPublisher(engine, bucket_bytes=100_000, timeout_s=LATE_S)
    publisher.publish(specs_of(weights), weights.items(), 3)
    assert publisher.last.verified == ALL
    assert greedy(engine).output_versions == [3] * 8


@pytest.mark.parametrize("part, whole", [("up_proj", "w13_weight"), ("down_proj", "w2_weight")])
def test_one_wrong_number_of_an_expert_is_found(server, connect, weights, part, whole):
    class Careless(IPCPublisher):
        def _show(self, specs, bucket, forms):
            tensors = unpack_bucket(bucket.flat[: sum(spec.nbytes for spec in specs)], specs)
            for spec, tensor in zip(specs, tensors, strict=True):
                if spec.name == f"model.layers.1.mlp.experts.5.{part}.weight":
                    tensor[-1, -1] += 1.0
            return super()._show(specs, bucket, forms)

    wrong = f"holds other weights than were sent: model.layers.1.mlp.experts.{whole}$"
    with pytest.raises(NoServerLeft, match=wrong):
        Careless(connect(server), bucket_bytes=100_000, timeout_s=LATE_S).publish(specs_of(weights), weights.items(), 4)


def test_buckets_of_several_senders_are_received_together(server, connect, weights):
    engine = connect(server)
    (form,) = engine.checksum_forms().values()
    names = sorted(weights)
    shares = [{name: weights[name] for name in part} for part in (names[::2], names[1::2])]
    with weight_group(engine) as first, weight_group(engine) as second:
        engine.pause()
        engine.begin_weight_update(8)
        buckets = [
            {
                "names": list(share),
                "dtypes": ["bfloat16"] * len(share),
                "shapes": [list(tensor.shape) for tensor in share.values()],
                "group": name,
                "flattened": is_flat,
            }
            for share, (name, _), is_flat in zip(shares, (first, second), (True, False), strict=True)
        ]
        loads = engine.load_round(buckets, 8, pickled_round(buckets))
        # The second one's first: a server that took them in turn would wait for the other.
        for tensor in shares[1].values():
            dist.broadcast(tensor, group=second[1], group_src=0)
        dist.broadcast(pack_bucket(list(shares[0].values())), group=first[1], group_src=0)
        wait_for(loads)
        engine.end_weight_update(8)
    expected = ExpectedChecksums([form])
    expected.add(list(weights.items()))
    (held,) = engine.held_weights().values()
    held = held.result(LIMIT_S)
    assert (held.version, differences(expected.of(form), held.checksums, complete=False)) == ("8", [])
    assert len(expected.of(form).keys() & held.checksums.keys()) == ALL
    engine.finish_update(8)
    engine.resume()


def test_changes_alone_are_sent_and_the_weights_are_those_of_a_whole_publication(server, connect, weights):
    engine = connect(server)
    publisher = DeltaPublisher(engine, parcel_bytes=100_000, timeout_s=LATE_S)
    publisher.publish(specs_of(weights), weights.items(), 5)
    assert publisher.last.sent_bytes > publisher.last.nbytes, "it held something else"
    # What AdamW does at a rate of 1e-6: numbers of bfloat16 change where that is half of their last place or more.
    torch.manual_seed(2)
    changed = {n: (t.float() + 1e-6 * torch.randn(t.shape).sign()).bfloat16() for n, t in weights.items()}
    expert = "model.layers.0.mlp.experts.3.gate_proj.weight"
    changed[expert][0] = torch.where(changed[expert][0] > 0, -0.0, 3.0)  # coded as what they are, not as what is added
    publisher.publish(specs_of(weights), changed.items(), 6)
    assert publisher.last.verified == ALL and engine.serving == [server]
    assert 0 < publisher.last.sent_bytes < 0.03 * publisher.last.nbytes + 200 * len(weights), "the names of runs apart"
    by_changes = greedy(engine)
    assert by_changes.output_versions == [6] * 8
    whole = IPCPublisher(engine, bucket_bytes=100_000, timeout_s=LATE_S)
    whole.publish(specs_of(changed), changed.items(), 7)
    again = greedy(engine)
    assert (again.output_tokens, again.output_logprobs) == (by_changes.output_tokens, by_changes.output_logprobs)
