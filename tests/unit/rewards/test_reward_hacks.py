"""What a policy under optimisation writes to be rewarded for less than the right answer, and right answers."""

import json
import subprocess
import sys

import pytest

from megatron_rl.data.recipes import code as code_rows
from megatron_rl.data.recipes import countdown_reward
from megatron_rl.rewards import code, last_number, mathematics, procedural
from megatron_rl.sandbox.lock import MOST_THREADS
from megatron_rl.sandbox.locked import run_program, started_program
from megatron_rl.sandbox.trial import names_of_program
from tests.kit.examples import IS_THOROUGH
from tests.kit.waiting import LATE_S


def score(reward, completion, **data):
    return reward("prompt", completion, [1], [2], **data)


# -- programs

ALWAYS_EQUAL = (
    "class Any(int):\n"
    "    __eq__ = __lt__ = __gt__ = __le__ = __ge__ = __bool__ = __contains__ = lambda *_: True\n"
    "    __ne__ = lambda *_: False\n"
    "    __sub__ = __rsub__ = __abs__ = __getitem__ = lambda self, *_: self\n"
    "    __hash__ = int.__hash__\n"
)
PROGRAM_HACKS = {
    "equal to all": f"{ALWAYS_EQUAL}def f(n): return Any()",
    "an object equal to all": "class A:\n    __eq__ = lambda *_: True\n    __hash__ = None\ndef f(n): return A()",
    "text equal to all": "class A(str):\n    __eq__ = lambda *_: True\ndef f(n): return A('4')",
    "a class of its own": f"{ALWAYS_EQUAL}def f(n): return [Any()]",
    "an end": "import os, sys\ndef f(n): os._exit(0)",
    "an end at once": "import sys\nsys.exit(0)",
    "a raised end": "def f(n): raise SystemExit(0)",
    "an end by signal": "import os\ndef f(n): os.kill(os.getpid(), 9)",
    "an end registered": "import atexit, os\natexit.register(os._exit, 0)",
    "its own source": "import sys\nprint(open(sys.argv[0]).read())\ndef f(n): return open('/proc/self/fd/3').read()",
    "everything in memory": (
        "import gc\ndef f(n):\n    return [it for it in gc.get_objects() if isinstance(it, int) and it > n][:1]"
    ),
    "frames": (
        "import sys\ndef f(n):\n    frame = sys._getframe()\n    while frame:\n"
        "        for it in frame.f_code.co_consts + tuple(frame.f_locals.values()):\n"
        "            if isinstance(it, int) and it > n + 20: return it\n        frame = frame.f_back"
    ),
    "optimised": "import os, sys\nos.execv(sys.executable, ['python', '-O', '-c', 'f = lambda n: 1'])",
    "optimised, later": "import os, sys\ndef f(n): os.execv(sys.executable, ['python', '-O', '-c', 'pass'])",
    "tracing": "import sys\nsys.settrace(lambda *_: None)\nsys.setprofile(lambda *_: None)\ndef f(n): return 0",
    "patched builtins": (
        "import builtins\nbuiltins.abs = builtins.all = builtins.isinstance = lambda *_: True\n"
        "builtins.AssertionError = type('E', (Exception,), {})\nabs = round = set = sorted = lambda *_: 4\n"
        "def f(n): return 0"
    ),
    "forged answers": (
        'import os\ntext = b\'["value", ["bool", "True"]]\\n{"value": true}\\n\'\n'
        "for end in range(3, 20):\n    try: os.write(end, text * 9)\n    except OSError: pass\n"
        "def f(n): return 0"
    ),
    "a forged verdict": "import os\ndef f(n):\n    os.write(3, b'{\"value\": true}')\n    return 0",
    "patched modules": ('import json\njson.dumps = lambda *_: \'["value", ["bool", "True"]]\'\ndef f(n): return 0'),
    "no answer": "import time\ndef f(n): time.sleep(60)",
    "an endless one": "import itertools\ndef f(n): return itertools.count()",
    "a deep one": "def f(n):\n    x = []\n    for _ in range(10**5): x = [x]\n    return x",
    "a large one": "def f(n): return 'x' * 10**8",
    "errors": "def f(n): raise AssertionError('passed')",
    "None": "def f(n): pass",
    "not a function": "f = 40",
    "an exit caught": "import sys\ndef f(n):\n    sys.modules['__main__'].print = print\n    raise KeyboardInterrupt",
}


MEET_CATCHING = (
    *("equal to all", "an object equal to all", "text equal to all", "patched builtins"),
    *("a raised end", "an exit caught", "errors", "forged answers"),
)
"""Hacks that `make test` tries on a test which compares and catches errors by itself; it tries the others on a plain
assertion, and `make test-all` tries all of them on both."""


@pytest.mark.slow
@pytest.mark.parametrize("name", PROGRAM_HACKS)
def test_an_assertion_is_not_fooled(name):
    plain, catching = (
        "assert f(2) == 40",
        "try:\n    right = abs(f(2) - 40) < 1e-6\nexcept TypeError:\n    right = False\nassert right and f(2) in {40}",
    )
    for test in (plain, catching) if IS_THOROUGH else (catching,) if name in MEET_CATCHING else (plain,):
        assert score(code.assertions, f"```python\n{PROGRAM_HACKS[name]}\n```", tests=[test], time_s=0.7) == 0.0


def test_what_a_test_catches_is_not_the_programs_end():
    swallows = ["try:\n    f(2)\nexcept BaseException:\n    pass\n"]
    assert score(code.assertions, "import os\ndef f(n): os._exit(0)", tests=swallows) == 0.0
    assert score(code.assertions, "def f(n): raise KeyError(n)", tests=swallows) == 1.0


def test_helpers_that_a_row_gives_are_not_the_programs(tmp_path):
    head = 'import math\ndef encode(s):\n    return s[::-1]\n\ndef decode(s):\n    """Undo."""\n'
    test = "def check(candidate):\n    assert candidate(encode('ab')) == 'ab'"
    (tmp_path / "rows.jsonl").write_text(json.dumps({"prompt": head, "entry_point": "decode", "test": test}))
    (prompt,) = code_rows(str(tmp_path / "rows.jsonl"))
    right = "def encode(s): return s[::-1]\ndef decode(s): return s[::-1]"
    assert score(code.passes, right, tests=prompt["tests"]) == 1.0
    assert score(code.passes, "def encode(s): return s\ndef decode(s): return s", tests=prompt["tests"]) == 0.0


RIGHT_PROGRAMS = {
    "def f(n): return n + n": ["assert f(2) == 4 and f([1]) == [1, 1] and f((1, 2)) == (1, 2, 1, 2)"],
    "from collections import Counter, namedtuple\ndef f(t): return Counter(t)": ["assert f('aab') == {'a': 2, 'b': 1}"],
    "def f(n): return (i for i in range(n))": ["assert list(f(3)) == [0, 1, 2]", "assert f(3) != [0, 1, 2]"],
    "def f(n): return float(n) / 3, {n}, frozenset([n]), b'x', 1j, None, True, -(10**30), float('inf')": [
        "import math\nassert f(1) == (1 / 3, {1}, frozenset({1}), b'x', 1j, None, True, -(10**30), math.inf)",
        "assert math.isclose(f(1)[0], 0.3333333333) and f(1)[6] is True and type(f(1)[7]) is int",
    ],
    "def f(x): x.sort()": ["x = [3, 1, 2]\nf(x)\nassert x == [1, 2, 3]"],
    "class Node:\n    def __init__(self, v): self.v, self.left = v, None\ndef f(n): return n.left.v": [
        "root = Node(1)\nroot.left = Node(7)\nassert f(root) == 7 and root.v == 1"
    ],
    "def sum(a, b): return a * b": ["assert sum(3, 5) == 15"],
    "def f(n):\n    if n < 0: raise ValueError('negative')\n    return n": [
        "try:\n    f(-1)\nexcept ValueError as e:\n    assert 'neg' in str(e)\nelse:\n    assert False"
    ],
    "import random\ndef f(n, *, k=1): return n * k": ["for i in range(20):\n    assert f(i, k=2) == 2 * i"],
    "def f(n): return 'ä\\ud800'": ["assert f(0) == 'ä\\ud800'"],
    "if __name__ == '__main__':\n    print('ready')\ndef f(n): print(n); return n": ["assert f(1) == 1"],
    "from functools import lru_cache\n@lru_cache(None)\ndef f(n): return n if n < 2 else f(n - 1) + f(n - 2)": [
        "assert f(80) == 23416728348467685"
    ],
}


@pytest.mark.parametrize("program", RIGHT_PROGRAMS)
def test_right_programs_pass_whatever_plain_data_they_give(program):
    assert score(code.assertions, program, tests=RIGHT_PROGRAMS[program]) == 1.0


def test_the_names_of_a_program_are_those_that_a_test_does_not_make_itself():
    assert names_of_program("import re\nx = 1\nassert g(x) == len(re.findall('a', f(2)))") == (["f", "g"], [])
    assert names_of_program("assert math.isclose(f(2), 3)") == (["f"], ["math"])
    assert names_of_program("def check(c):\n    assert abs(c(1)) == 1\ncheck(string)") == (["string"], [])
    assert names_of_program("assert set(sum(1, 2)) == {3}") == (["sum"], [])
    with pytest.raises(ValueError, match="tests: 'assert f.' is no Python .*give every prompt tests that are"):
        score(code.assertions, "def f(): pass", tests=["assert f("])


# -- what they may take of the host

BOMBS = {
    "threads": "import _thread, threading, time\nthreading.stack_size(32768)\n"
    "start = lambda: _thread.start_new_thread(time.sleep, (9,))",
    "raw threads": "import ctypes\nlibc = ctypes.CDLL(None, use_errno=True)\n"
    "def start():\n    stack = ctypes.create_string_buffer(1 << 16)\n    kept.append(stack)\n"
    "    at = ctypes.c_void_p((ctypes.addressof(stack) + (1 << 15)) & ~15)\n"
    "    wait = ctypes.cast(libc.pause, ctypes.c_void_p)\n"
    "    if libc.clone(wait, at, 0x10000 | 0x800 | 0x100, None) < 0: raise OSError\nkept = []",
    "processes": "import os\nstart = os.fork",
    "programs": "import subprocess\nstart = lambda: subprocess.Popen(['sleep', '9'])",
    "sessions": "import os\ndef start():\n    os.fork()\n    os.setsid()",
}


@pytest.mark.parametrize("bomb", BOMBS.values(), ids=BOMBS)
def test_a_program_cannot_take_the_hosts_processes(bomb):
    counting = f"{bomb}\ncount = 0\ntry:\n    while True:\n        start()\n        count += 1\n"
    counting += "except (RuntimeError, OSError):\n    print(count, flush=True)\nimport os\nos._exit(0)"
    printed = run_program(counting, "", time_s=LATE_S, memory_bytes=1 << 29)
    assert printed is not None and int(printed) <= MOST_THREADS <= 64
    assert subprocess.run(["true"]).returncode == 0


def test_a_program_that_has_ended_asks_for_no_thread_and_is_not_waited_for():
    with started_program("pass", time_s=LATE_S, memory_bytes=1 << 29) as (process, threads):
        process.wait()
        threads.grant()
        assert threads.listener < 0


def test_a_program_may_have_some_threads():
    pool = "from concurrent.futures import ThreadPoolExecutor\n"
    pool += "with ThreadPoolExecutor(4) as pool: print(sum(pool.map(abs, range(-200, 0))))"
    assert run_program(pool, "", time_s=LATE_S, memory_bytes=1 << 29) == "20100\n"
    deep = "import sys, threading\nsys.setrecursionlimit(10**6)\nthreading.stack_size(1 << 27)\n"
    deep += (
        "f = lambda n: n and f(n - 1) + 1\nt = threading.Thread(target=lambda: print(f(20000)))\nt.start()\nt.join()"
    )
    assert run_program(deep, "", time_s=LATE_S, memory_bytes=1 << 29) == "20000\n"


RUN_SOME = """
import os
from megatron_rl.rewards import code
from megatron_rl.sandbox.locked import run_program

def run_some():
    for source in ("print(1)", "import threading\\nthreading.Thread(target=print).start()", "1/0"):
        run_program(source, "", time_s=1000, memory_bytes=1 << 29)
    tests = ["assert f() == 1", "assert f() == 2"]
    assert code.assertions("", "def f(): return 1", [], [], tests=tests, partial=True) == 0.5
    return len(os.listdir("/proc/self/fd"))

first = run_some()
print(run_some() - first)
"""


def test_no_file_of_a_program_is_left():
    # In a process of its own: what other tests have running opens and closes files meanwhile.
    run = subprocess.run([sys.executable, "-c", RUN_SOME], capture_output=True, text=True, timeout=LATE_S, check=True)
    assert run.stdout.strip() == "0"


# -- answers

NOT_FOUR = [
    *(r"\neq 4", r"\ne 4", "≠ 4", "!= 4", r"\approx 4", "≈ 4", r"\geq 4", "> 4", "4 < 5", r"x \to 4", r"x \ne 4", "~4"),
    *(
        "5=4",
        "4=5",
        "x=4=5",
        "x=5=4",
        "4=4=5",
        r"x \in \{4\}",
        r"4 \equiv 0",
        r"4\%",
        "4 %",
        "400",
        r"4 \text{ percent}",
    ),
    *(
        r"\int_0^4 1 dx",
        r"\int 4",
        r"\sum_{i=1}^4 1",
        r"\prod 4",
        r"\lim_{x\to 4} x",
        r"\frac{d}{dx} 4x",
        "f(4)",
        "4x",
        "4 x",
    ),
    *(
        "4 or 5",
        r"4 \text{ or } 5",
        "4, 5",
        "4;5",
        "4|5",
        "4/5",
        r"\{4,5\}",
        r"\{1..9\}",
        "[0,10]",
        "[4,4]",
        r"\{4\}",
        "(4,4)",
    ),
    *(
        r"\pm 4",
        r"4 \lor 5",
        r"4 \cup 5",
        r"4\ldots",
        "4...5",
        r"4\ 5",
        "4 5",
        r"\text{4 or 5}",
        r"\text{not } 4",
        "not 4",
    ),
    *(r"4\text{ is wrong}", r"4 \text{ million}", r"4 \text{ to } 5", r"\phantom{5}4", r"\cancel{4}", r"5 \boxed{4}"),
    *(r"\overline{4}", "4!", "-4", "4.0001", "4000", "4e5", "٤", "IV", "1+" * 2000 + "0", "four", "", "4?", "4=x+y"),
]
FOUR = [
    *(
        "4",
        "4.0",
        "04",
        " 4 ",
        "4.",
        "$4$",
        "x=4",
        "x = 4",
        r"x_1 = 4",
        r"\text{4}",
        r"4\text{ cm}",
        r"4 \text{ apples}",
    ),
    *(
        "4 cm",
        r"4^\circ",
        r"\$4",
        r"\frac{8}{2}",
        r"\dfrac{16}{4}",
        r"\sqrt{16}",
        "2^2",
        "2+2",
        r"\boxed{4}",
        "+4",
        "2+2=4",
    ),
]


@pytest.mark.parametrize("answer", NOT_FOUR, ids=lambda answer: answer[:20])
def test_what_is_not_equal_to_four_is_not_four(answer):
    pytest.importorskip("math_verify", reason="math-verify is not installed: pip install 'megatron-rl[math]'")
    assert score(mathematics.math_answer, f"\\boxed{{4}}, no: \\boxed{{{answer}}}", answer="4") == 0.0


@pytest.mark.parametrize("answer", FOUR)
def test_what_is_equal_to_four_is(answer):
    pytest.importorskip("math_verify", reason="math-verify is not installed: pip install 'megatron-rl[math]'")
    assert score(mathematics.math_answer, f"\\boxed{{5}}, no: \\boxed{{{answer}}}.", answer="4") == 1.0


@pytest.mark.parametrize(
    ("right", "answer", "reward"),
    [
        ("0.04", r"4\%", 1.0),
        (r"25\%", r"25\%", 1.0),
        (r"25\%", "0.25", 1.0),
        ("x>4", "4<x", 1.0),
        ("x>4", r"x \ge 4", 0.0),
        (r"x \leq 4", r"4 \geq x", 1.0),
        (r"(4,\infty)", r"[4,\infty)", 0.0),
        ("1,2", r"x=1 \text{ or } x=2", 1.0),
        ("1,2", "1,2,3", 0.0),
        ("y=2x+1", "y = 1+2x", 1.0),
        (r"\text{Paris}", "Paris", 1.0),
        ("A", r"\text{(A)}", 1.0),
        ("1,234", "1234", 1.0),
        (r"\frac{\pi}{2}", r"0.5\pi", 1.0),
        ("x+1", r"\int 1 dx + 1", 0.0),
    ],
)
def test_an_answer_may_have_what_the_right_one_has(right, answer, reward):
    pytest.importorskip("math_verify", reason="math-verify is not installed: pip install 'megatron-rl[math]'")
    assert score(mathematics.math_answer, f"\\boxed{{{answer}}}", answer=right) == reward


@pytest.mark.parametrize(
    "reply",
    ["5=4", r"$\neq 4$", "the answer is not 4", "it is 4%", "5 or 4", "4 or 5", "$5$ or $4$", "less than 4", "-4"],
)
def test_plain_text_that_denies_its_answer_has_none(reply):
    pytest.importorskip("math_verify", reason="math-verify is not installed: pip install 'megatron-rl[math]'")
    assert score(mathematics.math_answer, reply, answer="4") == 0.0


def test_plain_text_may_have_an_answer():
    pytest.importorskip("math_verify", reason="math-verify is not installed: pip install 'megatron-rl[math]'")
    for right in ("4", "so 2+2=4", "$x=4$", "The answer is **4**.", "#### 4", "The final answer is $4$. I hope so."):
        assert score(mathematics.math_answer, right, answer="4") == 1.0


@pytest.mark.parametrize(
    "answer",
    [
        *("4*6/1=999", "4*6/1=24=24", "4*6/1=", "4*6/1==24", "4*6/1 # 24", "4*6/1 or 24", "24", "4*6/1\n1", "4*6/True"),
        *(
            "4*6/1=24.0",
            "4*6/1,",
            "[4*6/1]",
            "4*6//1",
            "4*6/1if 1 else 0",
            "0x4*6/1",
            "4*6/1j",
            "４*6/1",
            "4*6/1=twenty",
        ),
        *("4*6/1 != 24", "4*6/1;24", "lambda: 4*6/1", "4_0*6/1", "6*4*1*1", "6*4", "(4*6/1", "4*6/1)", "24=4*6/1"),
    ],
)
def test_countdown_takes_its_exact_grammar_alone(answer):
    data = {"numbers": [4, 6, 1], "target": 24}
    assert score(countdown_reward, f"<answer>{answer}</answer>", **data) == 0.0
    if "=" not in answer and answer != "6*4":  # which here may leave a number out
        assert score(procedural.countdown, answer, metadata=data) == 0.0
    for right in ("4*6/1", " 4 * 6 / 1 = 24 ", "6*(4/1)", "6 *\t4*1"):
        assert score(countdown_reward, f"<answer>{right}</answer>", **data) == 1.0


@pytest.mark.parametrize(
    "reply", [r"\neq 4", "≠ 4", "!= 4", "3/4", r"\frac{3}{4}", "2^4", "2^{4}", "1e4", "1e-4", "x / 5 / 4"]
)
def test_a_part_of_another_value_is_no_last_number(reply):
    assert score(last_number, f"it is {reply}", answer="4") == 0.0
    for right in (
        "8/2 = 4",
        "it is 4",
        "<answer>4</answer>",
        r"\boxed{4}",
        "**4**",
        "-> 4",
        "#### 4",
        "x-4",
        "4%",
        "= $4",
    ):
        assert score(last_number, right, answer="4") == 1.0
