"""Teachers' log-probabilities are those of transformers in every layout, whatever prompt a teacher reads."""

import pytest
import torch
from ranks import run_ranks
from tiny import LAYOUTS, VOCAB, make_engine, make_model, share_of

from megatron_rl.config import DataConfig, ModelConfig, TeacherConfig, TrainConfig
from megatron_rl.config.rollout_section import GenerationConfig
from megatron_rl.run.teachers import Teachers
from megatron_rl.types import TrajectoryBatch

TEMPERATURE = 0.7
PROMPTS = [
    {"prompt": "ab", "answer": "xyz", "source": "right"},
    {"prompt": "hello", "answer": "q", "source": "self"},
    {"prompt": "t", "answer": "w", "source": "plain"},
]


class Letters:
    """A tokenizer whose tokens are letters."""

    def __call__(self, text):
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


def scored(policy, teacher, layout):
    engine = make_engine(policy, LAYOUTS[layout][1])
    by_source = {
        "right": {"path": str(teacher), "hint": "{answer}! "},
        "self": {"path": "policy", "hint": "so "},
        "plain": {"path": str(teacher)},
    }
    config = TrainConfig(
        model=ModelConfig(path=str(policy)),
        parallel=LAYOUTS[layout][1],
        data=DataConfig(train="given"),
        teacher=TeacherConfig(by_source=by_source),
        generation=GenerationConfig(temperature=TEMPERATURE, n_samples=3),
    )
    batch = batch_of_replies()
    batch.tokens["place"] = torch.arange(len(batch["input_ids"]))
    own = share_of(batch, engine)
    teachers = Teachers(config, engine.groups, engine, PROMPTS, Letters())
    assert list(teachers.own_engines) == [str(teacher)], "a folder is loaded once"
    return own["place"], teachers.logprobs(own)


@pytest.mark.parametrize("layout", ["1", "tp2_pp2", "dp2", "cp2"])
def test_each_source_has_its_teacher_behind_its_own_prompt(layout, tmp_path):
    folders = {name: tmp_path / name for name in ("policy", "teacher")}
    models = {name: make_model("llama", folder) for name, folder in folders.items()}
    torch.manual_seed(3)
    models["teacher"] = make_model("qwen3", folders["teacher"])
    batch = batch_of_replies()
    wanted, seen = expected(models, batch), torch.zeros(len(batch["input_ids"]), dtype=torch.bool)
    for places, found in run_ranks(LAYOUTS[layout][0], scored, folders["policy"], folders["teacher"], layout):
        torch.testing.assert_close(found, wanted[places], rtol=0, atol=2e-5)
        seen[places] = True
    assert seen.all() and wanted[batch["loss_mask"]].abs().min() > 0.1
