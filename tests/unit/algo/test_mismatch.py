"""Mismatch metrics against their definitions over one list of tokens, and cut into ranks."""

import pytest
import torch

from megatron_rl.algo import mismatch


def tokens():
    generator = torch.Generator().manual_seed(0)
    lengths = torch.tensor([40, 0, 3, 300])
    count = int(lengths.sum())
    behavior = -torch.rand(count, generator=generator)
    logprobs = behavior + 0.2 * torch.randn(count, generator=generator)
    mask = torch.rand(count, generator=generator) < 0.8
    versions = torch.randint(2, 13, (count,), generator=generator)
    return logprobs, behavior, mask, versions, lengths


def test_metrics_equal_their_definitions():
    logprobs, behavior, mask, versions, lengths = tokens()
    found = mismatch.metrics(*mismatch.tally(logprobs, behavior, mask, versions, lengths, version=12))
    d, age = (logprobs - behavior)[mask].double(), (12 - versions)[mask]
    starts = [0, 40, 40, 43]
    position = torch.cat([mask[a : a + n].cumsum(0) - 1 for a, n in zip(starts, lengths.tolist(), strict=True)])[mask]
    w = d.exp()
    expected = {
        "mismatch/mean": d.abs().mean(),
        "mismatch/max": d.abs().max(),
        "mismatch/k1": -d.mean(),
        "mismatch/k3": (w - 1 - d).mean(),
        "mismatch/ess": w.sum() ** 2 / (len(w) * w.square().sum()),
        "mismatch/chi2": w.square().mean() - 1,
        "mismatch/mean_age_0": d[age == 0].abs().mean(),
        "mismatch/k3_age_3_to_4": (w - 1 - d)[(age == 3) | (age == 4)].mean(),
        "mismatch/max_age_9_on": d[age >= 9].abs().max(),
        "mismatch/mean_position_0_on": d[position < 16].abs().mean(),
        "mismatch/max_position_128_on": d[position >= 128].abs().max(),
    }
    for name, value in expected.items():
        assert found[name] == pytest.approx(float(value), rel=1e-9), name
    assert "mismatch/mean_position_1024_on" not in found  # no token, no number


def test_shares_of_equal_and_near_tokens():
    behavior = torch.tensor([-1.0, -0.5, -2.0, -3.0, -0.25, -0.125])
    # One step of float32 at 0.5 is 6e-8 and at 1 is 1.2e-7. The last token is not trained.
    logprobs = behavior + torch.tensor([0.0, 6e-8, -9e-7, 2e-6, 0.0, 1.0])
    mask, versions = torch.tensor([1, 1, 1, 1, 1, 0]), torch.tensor([7, 7, 7, 7, 6, 7])
    found = mismatch.metrics(*mismatch.tally(logprobs, behavior, mask, versions, torch.tensor([6]), version=7))
    shares = {name: found[f"mismatch/{name}"] for name in ("equal", "near", "beyond", "equal_age_0", "equal_age_1")}
    assert shares == {"equal": 0.4, "near": 0.4, "beyond": 0.2, "equal_age_0": 0.25, "equal_age_1": 1.0}


def test_ranks_together_give_what_one_gives():
    logprobs, behavior, mask, versions, lengths = tokens()
    whole = mismatch.tally(logprobs, behavior, mask, versions, lengths, version=12)
    rows = (slice(0, 43), slice(43, None))
    cut = (lengths[:3], lengths[3:])
    parts = [
        mismatch.tally(logprobs[r], behavior[r], mask[r], versions[r], n, version=12)
        for r, n in zip(rows, cut, strict=True)
    ]
    torch.testing.assert_close(parts[0][0] + parts[1][0], whole[0])
    torch.testing.assert_close(torch.maximum(parts[0][1], parts[1][1]), whole[1])


def test_no_tokens_and_differences_that_are_no_number_give_no_metric():
    none = torch.zeros(0)
    assert mismatch.metrics(*mismatch.tally(none, none, none.bool(), none.long(), torch.zeros(0).long(), 0)) == {}
    minus = torch.tensor([float("-inf"), -1.0])
    found = mismatch.metrics(
        *mismatch.tally(minus, torch.tensor([-1.0, -1.5]), torch.ones(2), torch.zeros(2).long(), torch.tensor([2]), 0)
    )
    assert found["mismatch/mean"] == 0.5 and found["mismatch/not_finite"] == 1


NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize(
    ("trainer", "server"),
    [
        ([NAN, -1.0], [-1.0, -1.0]),
        ([-1.0, -1.0], [NAN, -1.0]),
        ([-1.0, -1.0], [-INF, -1.0]),
        ([-INF, 0.0], [-INF, -1.0]),
    ],
)
def test_difference_that_is_no_finite_number_is_an_alarm_by_default(trainer, server):
    columns = (torch.tensor(trainer), torch.tensor(server), torch.ones(2), torch.zeros(2).long(), torch.tensor([2]))
    found = mismatch.metrics(*mismatch.tally(*columns, 0))
    assert found["mismatch/not_finite"] == 1
    with pytest.raises(RuntimeError, match="mismatch/not_finite = 1 tokens"):
        mismatch.check_alarm(found, 0.0)
    mismatch.check_alarm(found, 0.0, is_skipped=True)
    # Of tokens that are not trained it is none.
    masked = (*columns[:2], torch.tensor([0.0, 1.0]), *columns[3:])
    mismatch.check_alarm(mismatch.metrics(*mismatch.tally(*masked, 0)), 0.0)


def test_mean_that_is_no_number_is_an_alarm_by_default():
    for value in (NAN, INF):
        with pytest.raises(RuntimeError, match="mismatch/mean = "):
            mismatch.check_alarm({"mismatch/mean": value}, 0.0)


def test_the_alarm_speaks_of_fresh_tokens_first():
    found = {"mismatch/mean": 0.5, "mismatch/mean_age_0": 0.01}
    mismatch.check_alarm(found, 0.1)
    mismatch.check_alarm({"mismatch/mean": 0.5}, 0.0)
    with pytest.raises(RuntimeError, match=r"mean_age_0 = 0.01 nats: .* correction.alarm = 0.001"):
        mismatch.check_alarm(found, 0.001)
    with pytest.raises(RuntimeError, match="mismatch/mean = 0.5"):
        mismatch.check_alarm({"mismatch/mean": 0.5}, 0.1)
