"""SGLang's speculative decoding with the run's draft head, as far as it goes without a GPU.

On a CPU SGLang decodes with a head only where AMX is, and then greedily. So its own parts are driven here: the parser
of its arguments, and its models of policy and head. Scripted servers get the requests of whole publications.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file

from megatron_rl.api import SGLANG_DELTA_LOADER, SGLANG_FOLDER_LOADER, SGLANG_ROUND_LOADER, ChecksumForm
from megatron_rl.config import DraftConfig, RolloutConfig
from megatron_rl.engine.draft_head import DraftHead
from megatron_rl.servers import server_process
from megatron_rl.servers.server_process import SGLANG_CPU, SGLANG_CPU_PACKAGES, ServerLauncher
from megatron_rl.weights.architecture import read_architecture
from megatron_rl.weights.delta_code import Run, bits_of, encode, pack
from megatron_rl.weights.draft_files import PREFIX, name_in_sglang, shapes_for, write_draft, write_draft_config
from megatron_rl.weights.publish import plan_buckets
from megatron_rl.weights.sglang_checksums import SGLangChecksums
from megatron_rl.weights.sglang_loaders import pickled_parts
from megatron_rl.weights.update_group import TensorSpec
from tests.kit.client_calls import finish
from tests.kit.served_models import save_tiny_qwen
from tests.kit.tokenizers import make_tokenizer
from tests.kit.waiting import LATE_S, LIMIT_S

EAGLE = DraftConfig(kind="eagle", tokens=3)
SPECULATING = {"speculative_algorithm": "EAGLE", "device": "cuda", "dtype": "float32"}
LOADERS = [SGLANG_DELTA_LOADER, SGLANG_ROUND_LOADER, SGLANG_FOLDER_LOADER]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A model with a random head in its subfolder."""
    folder = save_tiny_qwen(tmp_path_factory.mktemp("model"), make_tokenizer(), vocab_size=512, tied=False)
    arch, generator = read_architecture(folder), torch.Generator().manual_seed(0)
    shapes = shapes_for(arch).items()
    write_draft(folder, {name: torch.randn(shape, generator=generator) * 0.1 for name, shape in shapes}, arch)
    return folder


def launcher_of(folder, tmp_path, **options):
    return ServerLauncher(
        config=RolloutConfig(backend="sglang", server_args=["--speculative-eagle-topk", "4"]),
        model_path=folder,
        folder=tmp_path,
        draft=EAGLE,
        draft_folder=write_draft_config(tmp_path, read_architecture(folder), "float32"),
        **options,
    )


def test_sglang_on_a_cpu_is_refused_a_head(folder, tmp_path):
    with pytest.raises(ValueError, match="draft.kind = .eagle.: .* on a GPU. .*set draft.kind=none, or rollout"):
        launcher_of(folder, tmp_path)


def test_servers_are_told_the_head_and_the_number_of_guesses(folder, tmp_path, monkeypatch):
    monkeypatch.setattr(server_process, "has_cuda", lambda: True)
    command = launcher_of(folder, tmp_path, dummy_weights=True).sglang_command(1)
    told = dict(zip(command, command[1:], strict=False))
    assert told["--speculative-algorithm"] == "EAGLE"
    assert told["--speculative-draft-model-path"] == str(tmp_path / "draft")
    assert told["--speculative-draft-load-format"] == told["--load-format"] == "dummy"
    assert (told["--speculative-num-steps"], told["--speculative-num-draft-tokens"]) == ("3", "4")
    assert json.loads((tmp_path / "draft" / "config.json").read_text())["architectures"] == ["MiMoMTP"]
    loaded = launcher_of(folder, tmp_path).sglang_command(1)
    assert "--speculative-draft-load-format" not in loaded, "the head's own weights are loaded"


# Publications, to scripted servers


def send(engine, names, version=2, more=()):
    """Publish buckets of tensors of one number each."""
    engine.pause()
    engine.begin_weight_update(version)
    buckets = [
        {"names": own, "dtypes": ["float32"] * len(own), "shapes": [[1]] * len(own), "group": "g", "flattened": True}
        for own in (names, *more)
    ]
    for answer in engine.load_round(buckets, version, "a round").values():
        answer.result(LIMIT_S)
    finish(engine, version)


def bodies_of(server, endpoint):
    keys = ("names", "selector", "load_format", "serialized_named_tensors")
    return [{key: body[key] for key in keys if key in body} for called, body in server.calls if called == endpoint]


GROUP, TENSOR, DISK = (f"/update_weights_from_{how}" for how in ("distributed", "tensor", "disk"))


def test_each_bucket_goes_to_the_policy_or_to_the_head(scripted, connect):
    speculating, plain = scripted(version="0.5.23", info=SPECULATING), scripted(version="0.5.23")
    engine = connect([speculating.url, plain.url])
    send(engine, ["model.norm.weight"])
    send(engine, ["draft.model.mtp_layers.0.input_proj.weight"], 3)
    flat = {"load_format": "flattened_bucket"}
    head = {"names": ["model.mtp_layers.0.input_proj.weight"], "selector": "draft"} | flat
    policy = {"names": ["model.norm.weight"]} | flat
    assert bodies_of(speculating, GROUP) == [policy | {"selector": "target"}, head]
    assert bodies_of(plain, GROUP) == [policy, head], "without a head of its own it drops what it received"


def test_a_round_of_several_senders_is_received_once(scripted, connect):
    info = SPECULATING | {"custom_weight_loader": LOADERS}
    server = scripted(version="0.5.23", info=info)
    engine = connect([server.url])
    send(engine, ["a"], more=[["b"]])
    told = {"load_format": SGLANG_ROUND_LOADER, "selector": "target", "serialized_named_tensors": ["a round"]}
    assert bodies_of(server, TENSOR) == [told]
    send(engine, ["draft.a"], 3, more=[["b"]])
    told = [(body["names"], body["selector"]) for body in bodies_of(server, GROUP)]
    assert told == [(["a"], "draft"), (["b"], "target")]


def test_shared_memory_is_read_by_one_of_the_models(scripted, connect):
    server = scripted(version="0.5.23", info=SPECULATING)
    engine = connect([server.url])
    for names in (["a"], ["draft.a"]):
        how = {"names": names, "dtypes": ["float32"], "shapes": [[1]], "buckets": {server.url: ["a pickle"]}}
        for answer in engine.load_shared(**how, version=2).values():
            answer.result(LIMIT_S)
    pickled = {"load_format": "flattened_bucket", "serialized_named_tensors": ["a pickle"]}
    assert bodies_of(server, TENSOR) == [pickled | {"selector": selector} for selector in ("target", "draft")]


def test_a_folder_is_loaded_into_the_policy_and_its_subfolder_into_the_head(scripted, connect, folder):
    server = scripted(version="0.5.23", info=SPECULATING | {"custom_weight_loader": LOADERS})
    connect([server.url]).update_weights(folder, 7)
    updates = [(called, body.get("selector")) for called, body in server.calls if "_weight" in called]
    begin, end = ("/begin_weight_update", "draft"), ("/end_weight_update", None)
    assert updates == [(DISK, None), begin, (TENSOR, "draft"), end]
    assert server.body_of(TENSOR)["load_format"] == SGLANG_FOLDER_LOADER
    assert server.body_of(TENSOR)["weight_version"] == server.body_of(DISK)["weight_version"] == "7"


def test_a_server_without_the_loader_of_a_heads_folder_is_told_so(scripted, connect, folder):
    server = scripted(version="0.5.23", info=SPECULATING)
    with pytest.raises(Exception, match="--custom-weight-loader .*load_folder; start it so, or set"):
        connect([server.url]).update_weights(folder, 7)


def test_a_head_is_not_sent_to_sglang_that_would_load_it_into_the_policy(scripted, connect):
    older = scripted(version="0.5.20")
    engine = connect([older.url])
    engine.pause()
    (answer,) = engine.load_bucket(names=["draft.a"], dtypes=["float32"], shapes=[[1]], group="g", version=2).values()
    with pytest.raises(Exception, match="no draft head before SGLang 0.5.21; set draft.kind=none"):
        answer.result(LIMIT_S)
    assert GROUP not in older.controls()


def test_a_bucket_has_no_tensors_of_both():
    names = ["a", "b", "draft.a", "draft.b", "c"]
    specs = [TensorSpec(name, torch.float32, (1,)) for name in names]
    assert [[spec.name for spec in bucket] for bucket in plan_buckets(specs, 1 << 20)] == [
        ["a", "b"],
        ["draft.a", "draft.b"],
        ["c"],
    ]


# SGLang's own parts

PROGRAM = """
import json, os, sys
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from types import SimpleNamespace

case = json.load(sys.stdin)
from sglang.srt.server_args import prepare_server_args

args = prepare_server_args(case["arguments"])
args.resolve_once()
resolved = {key: value for key, value in args.resolved_dict().items() if key.startswith("speculative_")}

from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.distributed.parallel_state import init_distributed_environment, initialize_model_parallel
from sglang.srt.model_executor.forward_batch_info import ForwardBatch, ForwardMode
from sglang.srt.model_executor.forward_context import ForwardContext, forward_context
from sglang.srt.models.registry import ModelRegistry
from sglang.srt.runtime_context import SpawnRanks, publish
from sglang.srt.utils.weight_checker import WeightChecker

publish(args, role="scheduler", ranks=SpawnRanks(world_rank=0))
where = {"world_size": 1, "rank": 0, "local_rank": 0, "backend": "gloo"}
init_distributed_environment(**where, distributed_init_method=f"file://{case['folder']}/rendezvous")
initialize_model_parallel(backend="gloo")

def model_of(**options):
    config = ModelConfig.from_server_args(args, **options)
    (made_by, _) = ModelRegistry.resolve_model_cls(config.hf_config.architectures)
    model = made_by(config.hf_config)
    for parameter in model.parameters():
        parameter.data.fill_(float("nan"))
    return model

target = model_of()
draft = model_of(model_path=case["head"], is_draft_model=True)
draft.set_embed_and_head(*target.get_embed_and_head())

# A publication by disk: SGLang loads the policy's folder into both, and then our loader the head's into the head.
for model in (target, draft):
    model.load_weights(load_file(case["model"] + "/model.safetensors").items())
from megatron_rl.weights import sglang_loaders

sglang_loaders.load_folder(draft, [(case["head"], torch.empty(0))])

def whole(model):
    return [name for name, parameter in model.named_parameters() if parameter.isnan().any()]

missing = {"target": whole(target), "draft": whole(draft)}

class Attention:
    def forward(self, q, k, v, layer, batch, save_kv_cache=True, **_):
        q, k, v = (x.view(len(x), -1, layer.head_dim).transpose(0, 1)[None] for x in (q, k, v))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True, scale=layer.scaling)
        return out[0].transpose(0, 1).flatten(1)

inputs = load_file(case["inputs"])
count = len(inputs["tokens"])
batch = ForwardBatch(
    forward_mode=ForwardMode.EXTEND, batch_size=1, input_ids=inputs["tokens"], seq_lens=torch.tensor([count]),
    req_pool_indices=torch.zeros(1, dtype=torch.int64), out_cache_loc=torch.arange(count), seq_lens_sum=count,
    spec_info=SimpleNamespace(hidden_states=inputs["hidden"]),
)
with torch.no_grad(), forward_context(ForwardContext(attn_backend=Attention())):
    states = draft.model(inputs["tokens"], torch.arange(count), batch)
save_file({"states": states}, case["outputs"])

# A publication of changes: what the two hold, before and after.
from megatron_rl.weights.sglang_loaders import load_changes, pickled_parts
from base64 import b64decode
from pickle import loads

for model in (target, draft):
    load_changes(model, loads(b64decode(case["changes"])))
sums = {}
for role, model in (("target", target), ("draft", draft)):
    own = WeightChecker(get_model=lambda: model).handle("checksum", role=role)["checksums"]
    sums |= own if role == "target" else {f"{role}.{name}": value for name, value in own.items()}
print("FOUND " + json.dumps({"resolved": resolved, "missing": missing, "sums": sums}))
"""


@pytest.fixture(scope="module")
def found(folder, tmp_path_factory, needs_sglang):
    """What SGLang's own parser and models make of the run's arguments, folder and changes."""
    inside, tmp_path = tmp_path_factory.mktemp("inside"), tmp_path_factory.mktemp("inputs")
    generator = torch.Generator().manual_seed(1)
    inputs = {
        "tokens": torch.randint(8, 500, (9,), generator=generator),
        "hidden": torch.randn(9, 64, generator=generator),
    }
    save_file(inputs, tmp_path / "inputs.safetensors")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(server_process, "has_cuda", lambda: True)
        launcher = launcher_of(folder, inside, dtype="float32", dummy_weights=True)
        command = launcher.sglang_command(1)[5:]
    body = pack(changes_of(folder), 2)
    case = {
        "arguments": [*command, *server_process.SGLANG_CPU_ARGS],
        "folder": str(inside),
        "model": str(folder),
        "head": str(folder / "draft"),
        "inputs": str(tmp_path / "inputs.safetensors"),
        "outputs": str(tmp_path / "outputs.safetensors"),
        "changes": pickled_parts(body, 1)[0],
    }
    root = Path(server_process.__file__).parents[2]
    path = os.pathsep.join(map(str, (SGLANG_CPU, SGLANG_CPU_PACKAGES, root)))
    env = os.environ | {"PYTHONPATH": path, "SGLANG_USE_CPU_ENGINE": "1", "HF_HUB_OFFLINE": "1"}
    env |= {"SGLANG_NCCL_SO_PATH": os.devnull, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], input=json.dumps(case), env=env, capture_output=True, text=True, timeout=LATE_S
    )
    assert done.returncode == 0, done.stderr[-3000:]
    (line,) = (line for line in done.stdout.splitlines() if line.startswith("FOUND "))
    told = json.loads(line.removeprefix("FOUND "))
    return SimpleNamespace(**told, inputs=inputs, states=load_file(case["outputs"])["states"])


def published(folder):
    """The stream of a publication, of policy and head."""
    head = load_file(folder / "draft" / "model.safetensors")
    return load_file(folder / "model.safetensors") | {f"{PREFIX}{name}": tensor for name, tensor in head.items()}


def changed(name, tensor):
    return tensor + 0.5 if name in CHANGED else tensor


CHANGED = ("model.norm.weight", "draft.model.mtp_layers.0.self_attn.k_proj.weight")


def changes_of(folder):
    runs = []
    for name in CHANGED:
        old = published(folder)[name]
        new, old = (bits_of(tensor.contiguous()) for tensor in (changed(name, old), old))
        runs.append(Run(name, "float32", published(folder)[name].shape, 0, encode(new, old)))
    return runs


@pytest.mark.thorough  # it imports SGLang for ten seconds
def test_sglangs_parser_takes_the_arguments(found):
    assert found.resolved["speculative_algorithm"] == "EAGLE"
    assert found.resolved["speculative_num_steps"] == 3
    assert found.resolved["speculative_num_draft_tokens"] == 4
    assert found.resolved["speculative_draft_load_format"] == "dummy"


@pytest.mark.thorough  # it imports SGLang for ten seconds
def test_sglangs_models_take_every_tensor_of_the_folder(found):
    assert found.missing == {"target": [], "draft": []}


@pytest.mark.thorough  # it imports SGLang for ten seconds
def test_sglangs_head_computes_what_the_trainers_does(found, folder):
    arch, weights = read_architecture(folder), load_file(folder / "draft" / "model.safetensors")
    head = DraftHead(arch, EAGLE, None, weights, device=torch.device("cpu"), dtype=torch.float32)
    embedded = load_file(folder / "model.safetensors")["model.embed_tokens.weight"][found.inputs["tokens"]]
    with torch.no_grad():
        states = head.states(found.inputs["hidden"], embedded, torch.arange(9), [9])
    torch.testing.assert_close(found.states, states, rtol=1e-5, atol=1e-6)


@pytest.mark.thorough  # it imports SGLang for ten seconds
def test_sglangs_checksums_are_those_of_what_was_sent_to_both_models(found, folder):
    expected = SGLangChecksums(ChecksumForm("sglang_cpu", "float32"))
    expected.add([(name, changed(name, tensor)) for name, tensor in published(folder).items()])
    expected = expected.of()
    assert {name: found.sums[name] for name in expected} == expected
    head = {name for name in expected if name.startswith(PREFIX)}
    shared = {"draft.model.embed_tokens.weight", "draft.lm_head.weight"}
    assert {name for name in found.sums if name.startswith(PREFIX) and "cos_sin" not in name} == head | shared


def test_a_tensor_of_the_head_has_another_name_in_sglang():
    names = {f"{PREFIX}model.mtp_layers.0.{name}.weight" for name in ("input_proj", "mlp.down_proj", "input_layernorm")}
    inside = {"draft.model.input_proj.weight", "draft.model.mtp_block.mlp.down_proj.weight"}
    assert set(map(name_in_sglang, names)) == inside | {"draft.model.mtp_block.input_layernorm.weight"}
    assert name_in_sglang("model.norm.weight") == "model.norm.weight"
