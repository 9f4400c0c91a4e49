"""Teachers' log-probabilities, and the gradient of the divergence from them, are those of transformers in every layout,
whatever prompt a teacher reads."""

import functools

import pytest
import torch
from gathered import as_hf_tensors, record_gradients, relative_error
from safetensors.torch import load_file

from megatron_rl.algo.actor import PolicyActor
from megatron_rl.config import AlgorithmConfig, DataConfig, ModelConfig, TeacherConfig, TrainConfig
from megatron_rl.config.rollout_section import GenerationConfig
from megatron_rl.run.teachers import Teachers
from megatron_rl.types import TrajectoryBatch
from tests.kit.models import LAYOUTS, VOCAB, make_engine, make_model, share_of
from tests.kit.ranks import run_ranks

TEMPERATURE = 0.7
PROMPTS = [
    {"prompt": "ab", "answer": "xyz", "source": "right"},
    {"prompt": "hello", "answer": "q", "source": "self"},
    {"prompt": "t", "answer": "w", "source": "plain"},
]


class Letters:
    """A tokenizer whose tokens are letters."""

    name_or_path = "letters"

    def __call__(self, text, **_):
        return {"input_ids": [ord(letter) % VOCAB for letter in text]}


def hinted(row):
    texts = {"right": "{answer}! {prompt}", "self": "so {prompt}", "plain": "{prompt}"}
    return Letters()(texts[row["source"]].format(**row))["input_ids"]


def batch_of_replies():
    """Three replies to each prompt, of which one has an untrained beginning, as where it was too old."""
    generator, parts, masks, index, written = torch.Generator().manual_seed(1), [], [], [], []
    for number, row in enumerate(PROMPTS):
        prompt = torch.tensor(Letters()(row["prompt"])["input_ids"])
        for reply in range(3):
            own = torch.randint(0, VOCAB, (4 + 3 * reply,), generator=generator)
            parts.append(torch.cat([prompt, own]))
            written.append(torch.arange(len(parts[-1])) >= len(prompt))
            masks.append(torch.arange(len(parts[-1])) >= len(prompt) + 2 * (reply == 1))
            index.append(number)
    mask, sampled = torch.cat(masks), torch.cat(written)
    tokens = {"input_ids": torch.cat(parts), "loss_mask": mask, "versions": torch.where(sampled, 0, -1)}
    sequences = {"group": torch.tensor(index), "prompt_index": torch.tensor(index)}
    return TrajectoryBatch(tokens, sequences, torch.tensor([0, *map(len, parts)]).cumsum(0))


def expected(models, batch):
    found = torch.zeros(len(batch["input_ids"]))
    bounds = batch.cu_seqlens.tolist()
    for number, (a, b) in enumerate(zip(bounds, bounds[1:], strict=False)):
        row = PROMPTS[int(batch["prompt_index"][number])]
        own = len(Letters()(row["prompt"])["input_ids"])
        prompt = hinted(row)
        ids = torch.tensor([*prompt, *batch["input_ids"][a + own : b].tolist()])
        model = models["policy" if row["source"] == "self" else "teacher"]
        with torch.no_grad():
            logprobs = (model(ids[None]).logits[0] / TEMPERATURE).log_softmax(-1)
        for place in range(len(prompt), len(ids)):
            found[a + own + place - len(prompt)] = logprobs[place - 1, ids[place]]
    return found * batch["loss_mask"]


BY_SOURCE = {"right": {"hint": "{answer}! "}, "self": {"path": "policy", "hint": "so "}, "plain": {}}


def start(policy, teacher, layout, **options):
    """Return the policy's engine and its teachers."""
    engine = make_engine(policy, LAYOUTS[layout][1], tokens_per_microbatch=options.pop("tokens_per_microbatch", 64))
    by_source = {source: {"path": str(teacher)} | it for source, it in BY_SOURCE.items()}
    config = TrainConfig(
        model=ModelConfig(path=str(policy)),
        parallel=LAYOUTS[layout][1],
        data=DataConfig(train="given"),
        teacher=TeacherConfig(by_source=by_source, **options),
        generation=GenerationConfig(temperature=TEMPERATURE, n_samples=3),
    )
    return engine, Teachers(config, engine.groups, engine, PROMPTS, Letters())


def scored(policy, teacher, layout):
    engine, teachers = start(policy, teacher, layout)
    batch = batch_of_replies()
    batch.tokens["place"] = torch.arange(len(batch["input_ids"]))
    own = share_of(batch, engine)
    assert list(teachers.own_engines) == [str(teacher)], "a folder is loaded once"
    return own["place"], teachers.logprobs(own)


def models_of(folders):
    models = {"policy": make_model("llama", folders["policy"], layers=2)}
    torch.manual_seed(3)
    # Wider than the policy, as a teacher is.
    models["teacher"] = make_model("qwen3", folders["teacher"], layers=2, hidden_size=96, head_dim=24)
    for name, model in models.items():  # surer of their tokens than random ones, which are all nearly alike
        with torch.no_grad():
            model.lm_head.weight *= 8
        model.save_pretrained(folders[name])
    return models


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["1", "tp2_pp2", "dp2", "cp2"])
def test_each_source_has_its_teacher_behind_its_own_prompt(layout, tmp_path):
    folders = {name: tmp_path / name for name in ("policy", "teacher")}
    models, batch = models_of(folders), batch_of_replies()
    wanted, seen = expected(models, batch), torch.zeros(len(batch["input_ids"]), dtype=torch.bool)
    for places, found in run_ranks(LAYOUTS[layout][0], scored, folders["policy"], folders["teacher"], layout):
        torch.testing.assert_close(found, wanted[places], rtol=0, atol=2e-5)
        seen[places] = True
    assert seen.all() and wanted[batch["loss_mask"]].abs().min() > 0.1


# -- the divergence as a loss -----------------------------------------------------------------------------------------

COEFFICIENT = 0.4
CASES = {
    "whole": {},
    "top": {"top_k": 5},
    "by_sequence": {},
    "by_trajectory": {"top_k": 90},
}
"""The teacher's options of each case; the third's policy loss is by sequence, the fourth's weights are."""
OPTIONS = {
    "by_sequence": AlgorithmConfig(advantage="none", loss="gspo"),
    "by_trajectory": AlgorithmConfig(advantage="none", aggregation="sequence_mean"),
}
NO_POLICY_TERM = AlgorithmConfig(advantage="none")


def distilled(policy, teacher, layout, tokens_per_microbatch):
    """Return of each case (loss, divergence, weight) of its updates, and the first one's gradient."""
    found = {}
    for case, options in CASES.items():
        more = {"tokens_per_microbatch": tokens_per_microbatch, "kl_in": "loss", "coefficient": COEFFICIENT}
        engine, teachers = start(policy, teacher, layout, **options, **more)
        gradients = record_gradients(engine)
        actor = PolicyActor(engine, OPTIONS.get(case, NO_POLICY_TERM), temperature=TEMPERATURE)
        batch = batch_of_replies()
        batch.tokens["advantages"] = torch.zeros(len(batch["input_ids"]))
        batch.tokens["logprobs"] = torch.zeros(len(batch["input_ids"]))
        shares = [share_of(batch, engine) for _ in range(2)]
        # Asked before the first update: the second one's teacher of "self" is the policy as it was.
        targets = [teachers.targets(share) for share in shares]
        stats = actor.update(shares, targets)
        assert all(it.applied for it in stats)
        numbers = [(it.loss, it.sums["teacher_kl"], it.weight) for it in stats]
        found[case] = numbers, as_hf_tensors(engine, gradients[0])
    return found


def in_float64(folders, case, scratch):
    """Return loss, divergence, weight and gradient by HF name of autograd over transformers' models, reply by reply."""
    models = {name: make_again(folder).double() for name, folder in folders.items()}
    batch, top, total, loss, weight = batch_of_replies(), CASES[case].get("top_k", 0), 0.0, 0.0, 0
    bounds = batch.cu_seqlens.tolist()
    for number, (a, b) in enumerate(zip(bounds, bounds[1:], strict=False)):
        row = PROMPTS[int(batch["prompt_index"][number])]
        own, prompt = len(Letters()(row["prompt"])["input_ids"]), hinted(row)
        ids, mask = batch["input_ids"][a:b], batch["loss_mask"][a:b]
        read = torch.tensor([*prompt, *ids[own:].tolist()])
        p = (models["policy"](ids[None]).logits[0] / TEMPERATURE).log_softmax(-1)[:-1][mask[1:]]
        with torch.no_grad():
            model = models["policy" if row["source"] == "self" else "teacher"]
            q = (model(read[None]).logits[0] / TEMPERATURE).log_softmax(-1)
            q = q[len(prompt) - own :][:-1][mask[1:]]
        kl = divergence(p, q, top)
        total = total + float(kl.detach().sum())
        is_mean = case == "by_trajectory"
        loss = loss + (kl.mean() if is_mean else kl.sum())
        weight += 1 if is_mean else len(kl)
    loss = COEFFICIENT * loss / weight
    loss.backward()
    loss = loss.detach()
    policy = models["policy"]
    for parameter in policy.parameters():
        parameter.data = parameter.grad
    policy.save_pretrained(scratch)
    return float(loss), total, weight, load_file(scratch / "model.safetensors")


def divergence(p, q, top):
    """Sum of p (log p - log q), `[n]`, of log-probabilities; with `top`, all but q's most likely tokens are one."""
    if top:
        chosen = q.topk(top).indices
        others = torch.ones_like(q, dtype=torch.bool).scatter(1, chosen, False)
        p, q = (
            torch.cat([it.gather(1, chosen), it.masked_fill(~others, -torch.inf).logsumexp(1)[:, None]], 1)
            for it in (p, q)
        )
    return (p.exp() * (p - q)).sum(1)


def make_again(folder):
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    made = {name: tmp_path_factory.mktemp(name) for name in ("policy", "teacher")}
    models_of(made)
    return made


@pytest.fixture(scope="module")
def one_process(folders):
    return functools.cache(lambda: run_ranks(1, distilled, folders["policy"], folders["teacher"], "1", 512)[0])


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_the_gradient_of_the_divergence_is_that_of_float64_autograd(case, folders, one_process, tmp_path):
    numbers, gradients = one_process()[case]
    *right, expected = in_float64(folders, case, tmp_path)
    assert numbers[0] == pytest.approx(tuple(right), rel=1e-5)
    assert gradients.keys() == expected.keys()
    errors = {name: relative_error(gradients[name], expected[name]) for name in expected}
    assert max(errors.values()) < 1e-5, errors


@pytest.mark.slow
@pytest.mark.parametrize(
    "layout",
    [
        "1",
        pytest.param("tp2_sp", marks=pytest.mark.slow),  # where the vocabulary is divided, and where a sequence is
        *(pytest.param(it, marks=pytest.mark.thorough) for it in ("cp2", "pp2", "dp2", "tp2_pp2", "cp2_tp2_pp2")),
    ],
)
def test_the_divergence_does_not_depend_on_layout_and_microbatches(layout, folders, one_process):
    """97 columns: the tensor ranks' shares of the vocabulary differ, and the second one's is padded."""
    ranks = run_ranks(LAYOUTS[layout][0], distilled, folders["policy"], folders["teacher"], layout, 40)
    for case, (numbers, gradients) in one_process().items():
        for found in ranks:
            for mine, right in zip(found[case][0], numbers, strict=True):
                assert mine == pytest.approx(right, rel=1e-5), case
        errors = {name: relative_error(ranks[0][case][1][name], gradients[name]) for name in gradients}
        assert max(errors.values()) < 1e-5, (case, errors)
