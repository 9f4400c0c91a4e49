"""The policy losses as loops over trajectories and tokens, one number at a time: what the fast ones are held to."""

import math

import torch

from tests.unit.ragged import parts_of


def one_token(name, u, a, lp, p, options, args, *, sequence=None, marked=False):
    """The losses' definitions for one token: u ratio, a advantage, lp log p, p the proximal log-prob."""
    low, high = 1 - options.clip_low, 1 + options.clip_high
    if name in ("ppo_clip", "gspo", "clip_cov"):
        u = sequence if name == "gspo" else u
        found = -min(u * a, u.clamp(low, high) * a)
        return min(found, -options.dual_clip * a) if options.dual_clip and a < 0 else found
    if name == "cispo":
        return -u.clamp(low, high).detach() * a * lp
    if name == "sapo":
        s = args.get("positive", 1.0) if a > 0 else args.get("negative", 1.05)
        return -a * 4 / s / (1 + (-s * (u - 1)).exp())
    if name == "reinforce":
        return -a * lp
    if name == "m2po":
        return -a * u
    if name == "kl_cov":
        return -a * u + (args.get("weight", 1.0) * u.log().abs() if marked else 0)
    if name == "dppo":
        moved = float(lp.detach().exp() - p.exp())
        outside = moved > args.get("bound", 0.2) if a > 0 else moved < -args.get("bound", 0.2)
        return 0 * lp if outside else -a * u.detach().clamp_max(args.get("most", 20.0)) * lp
    if name == "gmpo":
        bound = args.get("width", 0.4)
        return -a * sequence.detach() * (1 if (u.log() > bound if a > 0 else u.log() < -bound) else u / u.detach())
    if name == "topr":
        return -a * (1 if a > 0 else min(float(sequence.detach()), 1.0)) * lp
    assert name == "cpgd"
    gain = min(u.log() * a, u.log().clamp(math.log(low), math.log(high)) * a)
    cap, edge = args.get("drift_cap", 0.2), 1 + args.get("drift_cap", 0.2)
    drift = u - 1 - u.log() if u < edge else edge - 1 - math.log(edge) + cap * (u.log() - math.log(edge))
    return -gain + args.get("drift", 0.01) * drift


def of_sequence(name, moved, advantages, since_behavior, args):
    """What a loss takes from a whole sequence; moved: log u of its tokens, since_behavior: log p / p(behaviour)."""
    if name == "topr":
        return since_behavior.sum().exp()
    if name == "gmpo":
        bound = args.get("width", 0.4)
        bounded = [m.clamp(max=bound) if a > 0 else m.clamp(min=-bound) for m, a in zip(moved, advantages, strict=True)]
        return torch.stack(bounded).mean().exp()
    return moved.mean().exp()


def is_rejected(correction, log_weights):
    """For each token of a trajectory whether it is left out; log_weights: log p(proximal) / p(behaviour)."""
    if correction.reject == "off":
        return [False] * len(log_weights)
    estimate = {"k1": lambda d: -d, "k2": lambda d: d * d / 2, "k3": lambda d: math.exp(d) - 1 - d}[correction.reject]
    each = list(map(estimate, log_weights))
    if correction.reject_level == "token":
        return [abs(one) > correction.reject_bound for one in each]
    of_all = {"mean": sum(each) / len(each), "sum": sum(each), "max": max(map(abs, each))}[correction.reject_level]
    return [abs(of_all) > correction.reject_bound] * len(each)


def defined_loss(options, correction, batch, own, h):
    """The mean of the batch as configured; own, h: `[N]` log-probs and entropies by token, of any dtype."""
    args, dtype = options.loss_args, own.dtype
    names = ("proximal_logprobs", "logprobs", "ref_logprobs", "advantages")
    proximal, behavior, ref, advantages = (batch[name].to(dtype) for name in names)
    if correction.proximal == "behavior":
        proximal = behavior
    totals, tokens = [], 0
    for part in parts_of(batch):
        places = [t for t in range(part.start, part.stop) if batch["loss_mask"][t]]
        if not places:
            continue
        tokens += len(places)
        fallen = float((behavior[places] - own[places]).mean().detach())
        is_far = 0 < correction.negative_bound < fallen
        rejected = is_rejected(correction, (proximal[places] - behavior[places]).tolist())
        is_masked = is_far and float(advantages[places].sum()) < 0
        is_out = [is_masked or no for no in rejected]
        left = advantages[places].masked_fill(torch.tensor(is_out), 0.0)
        distances = (own[places] - proximal[places], left, own[places] - behavior[places])
        sequence = of_sequence(options.loss, *(column.detach() for column in distances), args)
        losses = []
        for t, own_advantage in zip(places, left, strict=True):
            u = (own[t] - proximal[t]).exp()
            more = {"sequence": sequence * u / u.detach(), "marked": "marked" in batch and bool(batch["marked"][t])}
            loss = one_token(options.loss, u, own_advantage, own[t], proximal[t], options, args, **more)
            if correction.weight != "off":
                distance = proximal[places] - behavior[places]
                of_level = {"sequence": distance.mean(), "product": distance.sum()}
                w = of_level.get(correction.level, proximal[t] - behavior[t]).exp()
                if correction.weight == "mask":
                    w = w if correction.low <= w <= correction.high else 0.0
                else:
                    w = w.clamp(correction.low, correction.high)
                loss = w * loss
            d = own[t] - ref[t]
            kl = {"k1": d, "k2": d * d / 2, "k3": (-d).exp() - 1 + d}
            kl["unbiased"] = u * kl["k3"]
            loss = loss + options.kl_coefficient * kl[options.kl_estimator] - options.entropy_coefficient * h[t]
            losses.append(loss)
        totals.append(torch.stack(losses))
    return {
        "token_mean": sum(t.sum() for t in totals) / tokens,
        "sequence_mean": sum(t.mean() for t in totals) / len(totals),
        "sequence_sum": sum(t.sum() for t in totals) / len(totals),
        "constant": sum(t.sum() for t in totals) / len(totals) / max(options.aggregation_length, 1),
    }[options.aggregation]
