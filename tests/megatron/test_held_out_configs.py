"""Models that nobody has tried: random changes to families' configs either work, or are refused by a field's name."""

import copy
import json
import random

import pytest
import torch
from test_models import by_sequence, full_logits, hf_logprobs
from transformers import AutoModelForCausalLM
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from megatron_rl.weights.architecture import FAMILY_OF, read_architecture
from tests.kit.models import FAMILIES, LAYOUTS, VARIANTS, make_batch, make_engine, make_model
from tests.kit.ranks import run_ranks

FIELDS = {
    "attention_bias": [False, True],
    "mlp_bias": [False, True],
    "hidden_act": ["silu", "gelu"],
    "hidden_activation": ["gelu_pytorch_tanh", "gelu"],
    "head_dim": [16, 32],
    "num_key_value_heads": [1, 4],
    "tie_word_embeddings": [False, True],
    "rms_norm_eps": [1e-5, 1e-3],
    "vocab_size": [61, 128],
    "sliding_window": [3, None],
    "use_sliding_window": [False, True],
    "layer_types": [["full_attention"] * 4, ["full_attention", "sliding_attention"] * 2, ["chunked_attention"] * 4],
    "rope_parameters": [
        {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4},
        {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4},
        {"rope_type": "default", "rope_theta": 500.0, "partial_rotary_factor": 0.5},
    ],
    "attention_out_bias": [True],
    "residual_dropout": [0.0],
    "final_logit_softcapping": [5.0],
    "attn_logit_softcapping": [5.0],
    "query_pre_attn_scalar": [7],
    "num_experts_per_tok": [1, 3],
    "norm_topk_prob": [False, True],
    "routed_scaling_factor": [0.5],
    "n_shared_experts": [1],
    "first_k_dense_replace": [0, 2],
    "mlp_only_layers": [[0]],
    "decoder_sparse_step": [2],
    "use_qk_norm": [False, True],
    "shared_expert_intermediate_size": [24],
    "linear_num_value_heads": [2, 8],
    "linear_conv_kernel_dim": [2],
    "q_lora_rank": [None, 12],
}
DRAWS = [1, pytest.param(3, marks=pytest.mark.thorough)]
"""Of changes to each family."""


def drawn(family, chance):
    """One to three changes of fields that the family's config has."""
    has = FAMILIES[family].to_dict()
    fields = chance.sample([field for field in FIELDS if field in has], k=chance.randint(1, 3))
    return {field: chance.choice(FIELDS[field]) for field in fields}


def logits_of(folders, batch):
    found, groups = {}, None
    for case, folder in folders.items():
        collected = {}

        def keep(logits, rows, collected=collected):
            collected.update(by_sequence(rows["input_ids"], full_logits(logits, rows), rows["cu_seqlens"].tolist()))
            return torch.zeros(len(logits))

        engine = make_engine(folder, LAYOUTS["1"][1], groups=groups)
        groups, found[case] = engine.groups, collected
        engine.eval().forward(batch, keep)
    return found


@pytest.fixture(scope="module", params=DRAWS)
def cases(request, tmp_path_factory):
    """By family and number: the changes, and what is refused or both log-probabilities."""
    chance, batch = random.Random(5), make_batch()
    batch["input_ids"].clamp_(max=60)  # within the smallest vocabulary
    changes, models, folders, found = {}, {}, {}, {}
    for family in sorted(FAMILIES.keys() - VARIANTS):
        for number in range(request.param):
            case, folder = (family, number), tmp_path_factory.mktemp(f"{family}-{number}")
            changes[case] = drawn(family, chance)
            try:
                make_model(family, folder, **copy.deepcopy(changes[case]))
                # As the folder says: a config drops a window that its other fields forbid only where it is read.
                loaded = AutoModelForCausalLM.from_pretrained(folder, experts_implementation="eager")
                models[case] = loaded.float().eval()
                hf_logprobs(models[case], batch)
            except (ValueError, KeyError, RuntimeError, TypeError, AttributeError, IndexError):
                continue  # transformers makes no model of it
            try:
                read_architecture(folder)
            except ValueError as error:
                found[case] = str(error)
            else:
                folders[case] = folder
    ours = run_ranks(1, logits_of, folders, batch)[0]
    return changes, found, {case: (ours[case], hf_logprobs(models[case], batch)) for case in folders}


@pytest.mark.slow
def test_what_is_read_has_transformers_logits(cases):
    changes, _, logits = cases
    for case, (ours, theirs) in logits.items():
        for sequence, logprobs in theirs.items():
            wrong = f"{case} with {changes[case]}"
            assert (ours[sequence] - logprobs).abs().max() <= 1e-5, wrong


@pytest.mark.slow
def test_what_is_refused_has_the_name_of_a_field_that_differs(cases):
    changes, refused, _ = cases
    for case, message in refused.items():
        words = [field.removesuffix("_parameters") for field in changes[case]]
        assert any(word in message for word in words), f"{case} with {changes[case]}: {message}"


def test_most_cases_are_of_one_kind_or_the_other(cases):
    changes, refused, logits = cases
    assert len(refused) >= len(changes) / 20 and len(logits) >= len(changes) / 3
    assert len(refused) + len(logits) >= 0.8 * len(changes)


@pytest.mark.parametrize("name", sorted(set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()) - FAMILY_OF.keys()))
def test_a_class_of_transformers_that_is_no_familys_is_refused_by_name(name, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"architectures": [name], "hidden_size": 64}))
    with pytest.raises(ValueError, match=rf"architectures = \['{name}'\]: (supported are|reads images too)"):
        read_architecture(tmp_path)
