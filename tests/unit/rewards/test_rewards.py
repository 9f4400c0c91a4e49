import builtins
import importlib
import inspect
import json
import os
import pkgutil
import sys
from decimal import Decimal

import pytest

from megatron_rl import rewards, workflows
from megatron_rl.config.import_path import OFFERED, offered, resolve
from megatron_rl.data import recipes, tasks
from megatron_rl.rewards import (
    code,
    exact_match,
    find_last_number,
    last_number,
    length,
    matches,
    mathematics,
    procedural,
    right_positions,
    tagged_answer,
)
from megatron_rl.sandbox import lock
from megatron_rl.sandbox.locked import TextFailed, evaluate, run_program
from tests.kit.waiting import LATE_S


def score(reward, completion, answer, **data):
    return reward("prompt", completion, [1], [2], answer=answer, **data)


@pytest.mark.parametrize(
    ("completion", "answer", "reward"),
    [
        ("12", "12", 1.0),
        ("  12 \n", "12", 1.0),
        ("\n12\n3+4=7", "12", 1.0),  # a model without a stop token goes on after the answer
        ("120", "12", 0.0),
        ("1", "12", 0.0),
        ("", "12", 0.0),
        ("a\nb\nc", "a\nb", 1.0),
        ("a\nc", "a\nb", 0.0),
        ("a", "a\nb", 0.0),
    ],
)
def test_exact_match_compares_the_first_line(completion, answer, reward):
    assert score(exact_match, completion, answer) == reward


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("so it is 42.", "42"),
        ("1,234,567 in all", "1234567"),
        ("costs $12.50", "12.50"),
        ("#### -7", "-7"),
        ("the result is -3", "-3"),
        ("8 - 5", "5"),
        ("8-5", "5"),
        ("f(x)-5", "5"),
        ("x-5", "5"),
        ("from 5 to -3", "-3"),
        ("= \u22124", "-4"),
        ("first 3, then 4, 5", "5"),
        ("12,34", "34"),
    ],
)
def test_last_number_of_a_text(text, number):
    assert find_last_number(text) == Decimal(number)


def test_last_number_compares_values_not_spellings():
    assert score(last_number, "it is 1000.0", "1,000") == 1.0
    assert score(last_number, "no idea", "1") == 0.0
    assert score(last_number, "70", "18 + 54 = #### 72") == 0.0


def test_tagged_answer_takes_the_last_tags():
    assert score(tagged_answer, "<answer>3</answer> no: <answer> 4\n</answer>", "4") == 1.0
    assert score(tagged_answer, "4", "4") == 0.0
    assert score(tagged_answer, "</answer>4<answer>", "4") == 0.0
    assert score(tagged_answer, "<answer>4 <answer>5</answer>", "5") == 1.0


def test_format_and_length():
    tagged = {"pattern": "<think>.*</think>\\s*<answer>.+</answer>"}
    assert score(matches, " <think>a\nb</think>\n<answer>4</answer>\n", "", **tagged) == 1.0
    assert score(matches, "well: <think></think><answer>4</answer>", "", **tagged) == 0.0
    assert [length("", "", [], [1] * tokens, most=4) for tokens in (0, 3, 4, 9)] == [0.0, 0.75, 1.0, 1.0]


@pytest.mark.parametrize(
    ("completion", "share"), [("bdh", 1.0), ("bdhb", 3 / 4), ("bda", 2 / 3), ("xdh", 2 / 3), ("dhb", 0.0), ("b", 1 / 3)]
)
def test_right_positions_is_the_share_of_letters_in_their_place(completion, share):
    assert score(right_positions, completion, "bdh") == share


def test_prompt_without_a_usable_answer_is_an_error_not_a_reward():
    with pytest.raises(ValueError, match="has no 'answer'"):
        exact_match("p", "1", [], [], task="sums")
    with pytest.raises(ValueError, match="is blank"):
        score(exact_match, "", " ")
    with pytest.raises(ValueError, match="holds no number"):
        score(last_number, "1", "one")


def test_import_path_errors_name_key_value_and_cause():
    ours = "megatron_rl.rewards:exact_match"
    assert resolve(ours, key="rollout.reward", kind="reward") is exact_match
    for path, cause in [
        ("exact_match", "package.module:name"),
        ("megatron_rl.no_such:f", "is no reward that megatron_rl offers to configs; they are .*:exact_match"),
        ("megatron_rl.rewards:exact", "did you mean megatron_rl.rewards:exact_match"),
        ("megatron_rl.algo:program_output", "did you mean megatron_rl.rewards.code:program_output"),
    ]:
        with pytest.raises(ValueError, match=f"rollout.reward = '{path}'.*{cause}"):
            resolve(path, key="rollout.reward", kind="reward")


@pytest.fixture
def own_module(tmp_path, monkeypatch):
    """A user's file beside the config, which says so when it is run."""
    (tmp_path / "my_rewards.py").write_text(
        "import builtins\nbuiltins.my_rewards_ran = True\nfrom shutil import rmtree\n"
        "from megatron_rl.rewards import last_number\n"
        "def length(completions, **_): return float(len(completions))\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(builtins, "my_rewards_ran", False, raising=False)
    yield
    sys.modules.pop("my_rewards", None)


def test_module_that_nobody_declared_is_not_even_imported(own_module):
    with pytest.raises(ValueError) as refused:
        resolve("my_rewards:length", key="rollout.reward", kind="reward", import_from=["my_project"])
    for part in (
        "rollout.reward = 'my_rewards:length': module my_rewards is not in megatron_rl or run.import_from",
        "= ['my_project']",
        "set run.import_from=[my_project,my_rewards].",
    ):
        assert part in str(refused.value)
    assert not builtins.my_rewards_ran


def test_declared_module_is_imported_and_so_are_those_below_it(own_module):
    assert resolve("my_rewards:length", key="k", kind="reward", import_from=["my_rewards"])(completions="abc") == 3.0
    assert resolve("my_rewards:last_number", key="k", kind="reward", import_from=["my_rewards"]) is last_number
    assert resolve("os.path:join", key="k", kind="data", import_from=["os", "posixpath"]) is os.path.join
    for near in ("my", "my_rewards.sub", "my_rewards_too"):
        with pytest.raises(ValueError, match="is not in megatron_rl or run.import_from"):
            resolve("my_rewards:length", key="k", kind="reward", import_from=[near])
    assert resolve("json:dumps", key="k", kind="", import_from=None) is json.dumps, "code may name what it likes"


def test_what_a_declared_module_has_only_imported_is_refused(own_module):
    with pytest.raises(ValueError, match="is defined in shutil, which is not in .*run.import_from=.my_rewards,shutil."):
        resolve("my_rewards:rmtree", key="data.train", kind="data", import_from=["my_rewards"])


@pytest.mark.parametrize(
    ("kind", "path"),
    [
        ("data", "megatron_rl.config.import_path:resolve"),  # which would import anything
        ("data", "megatron_rl.data.data_files:read_rows"),
        ("data", "megatron_rl.rollout.journal:os"),
        ("data", "megatron_rl.data.tasks:choose"),
        ("data", "megatron_rl.rewards:exact_match"),
        ("workflow", "megatron_rl.weights.hf_files:write_hf_folder"),
        ("workflow", "megatron_rl.workflows:RLVRWorkflow.evaluating"),
        ("reward", "megatron_rl.sandbox.locked:evaluate"),
        ("reward", "megatron_rl.rewards:__builtins__"),
        ("reward", "megatron_rl.workflows:RLVRWorkflow"),
        ("environment", "megatron_rl.workflows.python_tool:Python"),
        ("tool", "megatron_rl.workflows.environments:SelfCorrection"),
        ("agent", "megatron_rl.life.process_exit:stop"),
        ("estimator", "megatron_rl.life.process_exit:stop"),
        ("loss", "megatron_rl.algo.loss:find_loss"),
        ("", "megatron_rl.run.run_checkpoints:AUTO"),
    ],
)
def test_key_names_no_other_function_of_the_package_than_those_of_its_kind(kind, path):
    with pytest.raises(ValueError, match=f"k = '{path}': .* megatron_rl offers to configs"):
        resolve(path, key="k", kind=kind)


def test_declared_module_is_no_way_around_to_the_rest_of_the_package(tmp_path, monkeypatch):
    lines = ["import os", "from functools import partial", "from megatron_rl.config.import_path import resolve"]
    lines += ["from megatron_rl.rewards import exact_match", "delete = partial(os.rmdir)"]
    (tmp_path / "way_around.py").write_text("\n".join([*lines, "strict = partial(lambda x, **_: x)"]))
    monkeypatch.syspath_prepend(tmp_path)
    options = {"key": "k", "import_from": ["way_around"]}
    for name, fault in (
        ("resolve", "megatron_rl.config.import_path:resolve is no data that megatron_rl offers"),
        ("exact_match", "is no data that megatron_rl offers"),
        ("os", "is no object of way_around's own"),
        ("__loader__", "is no object of way_around's own"),
        ("delete", "is defined in posix, which is not in megatron_rl or run.import_from"),
    ):
        with pytest.raises(ValueError, match=fault):
            resolve(f"way_around:{name}", kind="data", **options)
    assert resolve("way_around:exact_match", kind="", **options) is exact_match
    assert resolve("way_around:strict", kind="data", **options)(3) == 3
    sys.modules.pop("way_around")


def test_everything_that_is_offered_is_there_and_every_reward_is_offered():
    for kind in OFFERED:
        assert all(callable(resolve(path, key="k", kind=kind)) for path in offered(kind))
    modules = [
        importlib.import_module(f"{rewards.__name__}.{it.name}") for it in pkgutil.iter_modules(rewards.__path__)
    ]
    for module in (rewards, tasks, recipes, *(it for it in modules if not it.__name__.endswith("__main__"))):
        for name, found in vars(module).items():
            if inspect.isfunction(found) and found.__module__ == module.__name__:
                names = inspect.signature(found).parameters
                if {"completions", "completion_ids"} <= set(names) and "data" in names:
                    assert f"{module.__name__}:{name}" in offered("reward")
    built_in = [f"{workflows.__name__}:{name}" for name in workflows.__all__]
    assert offered("workflow")[: len(built_in)] == built_in
    # Those of worlds need packages of others, so a room's import does not bring them.
    others = ["AgentWorkflow", "TextGames", "VerifiersWorkflow"]
    assert [path.split(":")[1] for path in offered("workflow")[len(built_in) :]] == others


SUM = [{"input": "1 2\n", "output": "3\n"}, {"input": "10 20", "output": "30"}]


@pytest.mark.parametrize(
    ("reply", "share"),
    [
        ("Here:\n```python\nprint(sum(map(int, input().split())))\n```\nDone.", 1.0),
        ("```\nprint(0)\n```\nbetter:\n```py\na, b = map(int, input().split())\nprint(a + b, '')\n```", 1.0),
        ("print(sum(map(int, input().split())))", 1.0),
        ("print(3)", 0.5),
        ("print(sum(map(int, input().split())))\nraise SystemExit(1)", 0.0),
        (
            "import threading\nt = threading.Thread(target=lambda: print(sum(map(int, input().split()))))\nt.start()",
            1.0,
        ),
        ("```\nprint(sum(map(int, input().split())))\n```\nor, cut off:\n```python\nprint(", 1.0),
        ("no program", 0.0),
        ("```python\n```", 0.0),
    ],
)
def test_a_program_is_run_against_its_tests(reply, share):
    assert score(code.program_output, reply, "", tests=SUM, partial=True) == share
    assert score(code.program_output, reply, "", tests=SUM) == float(share == 1.0)


@pytest.mark.slow
def test_a_program_has_its_time_for_all_tests_together():
    slow = "import time\ntime.sleep(0.3)\nprint('a')"
    tests = [{"input": "", "output": "a"}] * 3
    assert score(code.program_output, slow, "", tests=tests, time_s=0.8, partial=True) < 1.0, "each takes less"
    assert score(code.program_output, slow, "", tests=tests, time_s=LATE_S) == 1.0


@pytest.mark.slow
def test_assertions_run_after_the_program():
    tests = ["assert twice(2) == 4", "assert twice('a') == 'aa'", "assert twice(0) == 0"]
    assert score(code.assertions, "def twice(x): return x + x", "", tests=tests) == 1.0
    assert score(code.assertions, "def twice(x): return x ** 2", "", tests=tests, partial=True) == 2 / 3  # 2 ** 2 == 4
    assert score(code.assertions, "import os\nos._exit(0)", "", tests=tests, partial=True) == 0.0
    with pytest.raises(ValueError, match="tests = .*give every prompt some"):
        score(code.assertions, "", "", tests=[])


def test_a_programs_tests_say_how_it_is_run():
    assert score(code.passes, "print(sum(map(int, input().split())))", "", tests=SUM) == 1.0
    assert (
        score(code.passes, "def f(x): return x", "", tests=["assert f(1) == 1", "assert f(1) == 2"], partial=True)
        == 0.5
    )
    with pytest.raises(ValueError, match="tests = .*give every prompt some"):
        score(code.passes, "", "", tests=[])


@pytest.mark.parametrize(
    ("reply", "reward"),
    [
        ("(100 - 4) / 8", 1.0),
        ("I think <answer>(100-4)/8</answer>", 1.0),
        ("100 / 8 - 4 / 8", 0.0),  # 8 is given once
        ("12", 0.0),
        ("8 + 4", 1.0),
        ("8 / (4 - 4)", 0.0),
        ("__import__('os').mkdir('x') or 12", 0.0),
        ("8 ** 4", 0.0),
        ("-(-8 - 4)", 1.0),
        ("True + 8", 0.0),
    ],
)
def test_countdown_computes_four_operations_and_nothing_else(reply, reward, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert score(procedural.countdown, reply, "", metadata={"numbers": [100, 4, 8], "target": 12}) == reward
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_reasoning_gyms_scorers_run_locked_in(tmp_path):
    pytest.importorskip("reasoning_gym")
    item = tasks.reasoning_gym("countdown", count=1, seed=3)[0]
    known = {key: item[key] for key in ("task", "question", "metadata")}
    begin = f"<answer>{item['answer']}</answer>"
    assert score(procedural.reasoning_gym, begin, item["answer"], **known) == 1.0
    wrong = score(procedural.reasoning_gym, "<answer>1 + 1</answer>", item["answer"], partial=True, **known)
    assert 0.0 < wrong < 1.0 and score(procedural.reasoning_gym, "1 + 1", item["answer"], **known) == 0.0
    attack = f"__import__('os').mkdir('{tmp_path}/new')"
    assert score(procedural.reasoning_gym, attack, item["answer"], **known) == 0.0
    assert score(procedural.reasoning_gym, "9**9**9", item["answer"], time_s=0.5, **known) == 0.0
    assert list(tmp_path.iterdir()) == []
    primes = tasks.reasoning_gym("prime_factorization", count=1)[0]
    known = {key: primes[key] for key in ("task", "question", "metadata")}
    assert score(procedural.reasoning_gym, "zzz", primes["answer"], **known) == 0.0, "its scorer raises"


@pytest.mark.parametrize(
    ("reply", "answer", "reward"),
    [
        ("so \\boxed{\\frac{1}{2}}", "0.5", 1.0),
        ("$x^2+2x+1$", "$(x+1)^2$", 1.0),
        ("\\boxed{3}", "4", 0.0),
        ("", "4", 0.0),
        ("\\boxed{1 + x}", "x + 1", 1.0),
        ("\\boxed{1}", "x + 1", 0.0),  # the last number of an answer is not the answer
        ("\\boxed{\\{1, 2\\}}", "\\{2, 1\\}", 1.0),
        ("\\boxed{3\\sqrt{2}}", "\\boxed{\\sqrt{18}}", 1.0),
        ("\\boxed{\\begin{pmatrix}1\\\\2\\end{pmatrix}}", "\\begin{pmatrix} 1 \\\\ 2 \\end{pmatrix}", 1.0),
        ("first \\boxed{17}. But no,\n\nthe answer is \\boxed{42}.", "42", 1.0),
        ("first \\boxed{42}. But no,\n\nthe answer is \\boxed{17}.", "42", 0.0),
        ("\\boxed{1} or \\boxed{2}", "1,2", 0.0),
        ("it is 1,234.50", "1234.5", 1.0),
        ("4" + " " * 60_000, "4", 0.0),  # past the end that is read
    ],
)
def test_math_answers_are_compared_as_mathematics(reply, answer, reward):
    pytest.importorskip("math_verify", reason="math-verify is not installed: pip install 'megatron-rl[math]'")
    assert score(mathematics.math_answer, reply, answer) == reward


@pytest.mark.slow
def test_hostile_mathematics_ends_in_time_and_does_nothing(tmp_path):
    pytest.importorskip("math_verify", reason="math-verify is not installed: pip install 'megatron-rl[math]'")
    texts = ["9^{9^{9^{9}}}", "(x+1)^{100000}", "(" * 3000, f"__import__('os').mkdir('{tmp_path}/new')"]
    for text in [
        *(f"\\boxed{{{text}}}" for text in texts),
        "$" * 10**6,
        "\\frac{" * 10**5,
        "9" * 10**7,
        "\0",
        "\ud800",
    ]:
        assert score(mathematics.math_answer, text, "4", time_s=0.5) == 0.0
    assert list(tmp_path.iterdir()) == []


def test_math_without_its_package_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "math_verify", None)
    mathematics.warm_up.cache_clear()
    with pytest.raises(RuntimeError, match=r"pip install 'megatron-rl\[math\]'"):
        score(mathematics.math_answer, "1", "1")


@pytest.mark.slow
def test_what_is_evaluated_gives_json_or_fails():
    assert evaluate(lambda x: [x, "a"], 1, time_s=LATE_S, memory_bytes=1 << 28) == [1, "a"]
    for function, words in [
        (lambda: 1 / 0, "ZeroDivisionError"),
        (lambda: os._exit(0), "ended without a result"),
        (lambda: [0] * 10**9, "MemoryError"),
        (lambda: "a" * 10**6, "did not end|without a result"),
        (lambda: os.fork(), "PermissionError|BlockingIOError"),
    ]:
        with pytest.raises(TextFailed, match=words):
            evaluate(function, time_s=LATE_S, memory_bytes=1 << 28)
    with pytest.raises(TextFailed, match="did not end within 0.2 s"):
        evaluate(lambda: [0 for _ in iter(int, 1)], time_s=0.2, memory_bytes=1 << 28)


def test_a_kernel_that_hides_no_files_is_warned_of(monkeypatch):
    monkeypatch.setattr(lock, "hides_files", lambda: False)
    lock.check_lockable.cache_clear()
    with pytest.warns(RuntimeWarning, match="no Landlock .*can read the files that this user may read"):
        assert run_program("print(1)", "", time_s=LATE_S, memory_bytes=1 << 29) == "1\n"
    lock.check_lockable.cache_clear()


@pytest.mark.slow
@pytest.mark.skipif(not lock.hides_files(), reason="this kernel has no Landlock")
def test_locked_text_reads_no_file_but_what_is_installed(tmp_path):
    secret = tmp_path / "token"
    secret.write_text("hunter2")
    given = os.open(secret, os.O_RDONLY)  # one that the process has open is not handed on
    try:
        for path in (
            secret,
            tmp_path,
            "/etc/passwd",
            "/proc/self/environ",
            "/proc/self/maps",
            f"/proc/self/fd/{given}",
        ):
            opened = f"import os\nos.open({str(path)!r}, os.O_RDONLY)\nprint('owned')"
            assert run_program(opened, "", time_s=LATE_S, memory_bytes=1 << 29) is None, path
        with pytest.raises(TextFailed, match="PermissionError"):
            evaluate(secret.read_text, time_s=LATE_S, memory_bytes=1 << 28)
    finally:
        os.close(given)
    usual = (
        "import decimal, json, zoneinfo\nprint(json.dumps(str(decimal.Decimal(1) / 4)), len(open('/dev/null').read()))"
    )
    assert run_program(usual, "", time_s=LATE_S, memory_bytes=1 << 29) == '"0.25" 0\n'


@pytest.mark.parametrize("reward", [exact_match, last_number, tagged_answer])
def test_an_answer_behind_a_thought_is_scored_and_one_in_a_thought_is_not(reward):
    right, wrong = ("<answer>4</answer>", "<answer>5</answer>") if reward is tagged_answer else ("4", "5")
    assert score(reward, f"<think>\n{wrong}\n</think>\n{right}", "4") == 1.0
    assert score(reward, f"{wrong}</think>{right}", "4") == 1.0
    for none in (f"<think>\n{right}\n</think>\n{wrong}", f"<think>\n{right}", f"{right}\n<think>", f"{right}</think>"):
        assert score(reward, none, "4") == 0.0
    assert reward("2 + 2 = ?\n<think>\n", right, [1], [2], answer="4") == 0.0, "the prompt opened a thought"
