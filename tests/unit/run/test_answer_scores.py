"""pass@k and majority votes against counting all subsets, and by hand."""

from itertools import combinations

import pytest

from megatron_rl.run.evaluation import as_samples, final_answer, majority, pass_at_k, summarize


@pytest.mark.parametrize(("replies", "right"), [(1, 0), (1, 1), (5, 0), (5, 2), (6, 5), (8, 8)])
def test_pass_at_k_is_the_share_of_subsets_with_a_right_reply(replies, right):
    solved = [True] * right + [False] * (replies - right)
    for k in range(1, replies + 1):
        subsets = list(combinations(solved, k))
        assert pass_at_k(replies, right, k) == pytest.approx(sum(map(any, subsets)) / len(subsets))


def test_pass_at_1_is_the_accuracy():
    assert pass_at_k(8, 3, 1) == pytest.approx(3 / 8)
    with pytest.raises(ValueError, match="pass@3: needs 1 <= k <= 2"):
        pass_at_k(2, 1, 3)


def test_majority_rewards_the_most_frequent_answer():
    assert majority(["4", "4", "5"], [0, 0, 1]) == 0
    assert majority(["4", "5", "5"], [0, 1, 1]) == 1
    assert majority(["4", "5"], [0, 1]) == 0.5, "a tie is broken by a coin"
    assert majority(["", "", "5"], [0, 0, 1]) == 1, "who gives no answer does not vote"
    assert majority(["", ""], [0, 0]) == 0


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("<answer>3</answer> no, <answer> 4 </answer> 7", "4"),
        (r"so \boxed{\frac{1}{2}} 9", r"\frac{1}{2}"),
        ("1,000 or 1000.0", str(int("1000"))),
        (" fox ", "fox"),
    ],
)
def test_final_answer_is_what_the_reply_settles_on(text, answer):
    found = final_answer(text)
    assert found == answer or float(found) == float(answer)


def test_long_numbers_are_votes_of_their_own():
    assert len({final_answer(text) for text in ("9" * 40, "9" * 39 + "8", "1" + "0" * 1_100_000)}) == 3


def test_summary_of_two_prompts():
    rewards, answers = [[1, 0, 0, 0], [1, 1, 0, 1]], [["4", "5", "5", "6"], ["7", "7", "8", "7"]]
    metrics = summarize(rewards, answers)
    assert metrics == {
        "accuracy": 0.5,
        "pass@2": pytest.approx((0.5 + 1.0) / 2),
        "pass@4": 1.0,
        "maj@4": 0.5,
    }
    assert list(summarize([[1, 0, 1]], [["a", "b", "a"]])) == ["accuracy", "pass@2", "pass@3", "maj@3"]
    assert summarize([[0.5], [0.25]], [["a"], ["b"]]) == {"reward/mean": 0.375}


def test_trajectories_of_one_sample_are_one_reply():
    """Two debates of three agents, in which all but one, and one, are right: neither is right as a whole."""
    samples, rewards, answers = [1, 0, 0, 1, 0, 1], [0.0, 1.0, 1.0, 1.0, 0.0, 0.0], ["5", "4", "4", "4", "6", "7"]
    assert as_samples(samples, rewards, answers) == ([pytest.approx(2 / 3), pytest.approx(1 / 3)], ["4", "5"])
    one = as_samples([0, 1, 2], [0.0, 1.0, 0.0], ["a", "b", "c"])
    assert one == ([0.0, 1.0, 0.0], ["a", "b", "c"]), "one trajectory each changes nothing"
