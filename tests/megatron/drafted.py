"""Engines that train a draft head of either kind, and the head's loss by plain autograd."""

from dataclasses import replace

import torch
from gathered import relative_error

from megatron_rl.algo.loss import supervised
from megatron_rl.api import LogprobLoss
from megatron_rl.config import DraftConfig
from megatron_rl.engine.mtp_head import MTPHead
from tests.kit.models import LAYOUTS, make_batch, make_engine, share_of

SFT = LogprobLoss(supervised)
UPDATES = 3
EAGLE, MTP = (DraftConfig(kind=kind, lr=3e-3) for kind in ("eagle", "mtp"))


DEEP_EAGLE, DEEP_MTP = (replace(draft, depths=3) for draft in (EAGLE, MTP))


def copied(stream):
    return {name: tensor.clone() for name, tensor in stream}


def head_of(engine):
    """The head's tensors; of a layer that is divided, on rank 0 only."""
    if engine.draft is None:
        return {}
    return copied(engine.draft.hf_tensors() if isinstance(engine.draft, MTPHead) else engine.draft.tensors())


def train(folder, layout="1", draft=EAGLE, make=make_batch, updates=UPDATES, **options):
    """Some updates; what rank 0 has of policy and head."""
    engine = make_engine(folder, LAYOUTS[layout][1], draft=draft, **options)
    found = {"stats": [], "metrics": [], "first": head_of(engine)}
    batch = share_of(make(), engine)
    for _ in range(updates):
        stats = engine.train().train_batch(batch, SFT)
        found["stats"].append((stats.loss, stats.grad_norm))
        found["metrics"].append({} if engine.draft is None else engine.draft.metrics())
    found["policy"] = copied(engine.hf_tensors())
    own = {} if engine.draft is None else copied(engine.draft.weights.items())
    place = engine.groups.tensor.rank, engine.groups.expert.rank, engine.groups.expert_tensor.rank
    return found | {"draft": head_of(engine), "own": own, "place": place}


def assert_alike(found, expected):
    for step, other in zip(found["metrics"], expected["metrics"], strict=True):
        assert step.keys() == other.keys()
        for name, value in other.items():
            assert abs(step[name] - value) <= 1e-4 * abs(value), name
    for name, tensor in expected["draft"].items():
        before = expected["first"][name]
        assert relative_error(found["draft"][name] - before, tensor - before) < 2e-3, name


def assert_same_policy(found, expected):
    assert found["stats"] == expected["stats"] and found["policy"].keys() == expected["policy"].keys()
    for name, tensor in expected["policy"].items():
        assert torch.equal(found["policy"][name], tensor), name


def by_autograd(policy, states_of, modules, batch, depths=1, knows_first=True):
    """Metrics of a head's first update: its losses, acceptances and gradient norm.

    policy: transformers' model. states_of: from states and embeddings `[R, H]` to the head's states. modules: those
    with the head's weights. knows_first: whether the head reads an embedding at position 0.
    """
    losses, overlaps, counts = [0.0] * depths, [0.0] * depths, [0] * depths
    for ids, mask in zip(
        *(batch[name].split(batch.lengths.tolist()) for name in ("input_ids", "loss_mask")), strict=True
    ):
        with torch.no_grad():
            states = policy.model(ids[None].long()).last_hidden_state[0]
            taught = policy.lm_head(states).softmax(-1)
            embedded = policy.model.embed_tokens(ids.long())
        for depth in range(depths):
            if len(ids) < depth + 3:
                break
            # Row r has read tokens up to r + depth, and now reads the next one.
            read = embedded[1 + depth :]
            if depth == 0 and not knows_first:
                read = read.index_fill(0, torch.tensor([0]), 0.0)
            states = states_of(states[: len(ids) - 1 - depth], read)
            log_q = torch.nn.functional.linear(states, policy.lm_head.weight.detach()).log_softmax(-1)
            for row in range(len(ids) - 2 - depth):
                if mask[row + 2 + depth]:
                    p = taught[row + 1 + depth]
                    losses[depth] = losses[depth] - (p * log_q[row]).sum()
                    overlaps[depth] += torch.minimum(p, log_q[row].exp()).sum().item()
                    counts[depth] += 1
    (sum(losses) / sum(counts)).backward()
    parts = [p.grad for module in modules for p in module.parameters() if p.grad is not None]
    found = {"draft/grad_norm": torch.cat([part.flatten() for part in parts]).norm().item()}
    for depth, (loss, overlap, count) in enumerate(zip(losses, overlaps, counts, strict=True), 1):
        behind = "" if depth == 1 else f"_{depth}"
        found |= {f"draft/loss{behind}": loss.item() / count, f"draft/acceptance{behind}": overlap / count}
    return found
