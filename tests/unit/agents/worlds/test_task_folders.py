"""Task folders in a container: what a Dockerfile asks for, what the policy may do, and that cheating gains nothing."""

import asyncio
import errno
import itertools
import json
import os
import random
import shutil
import signal
import sys
import time
import types
from pathlib import Path

import psutil
import pytest

from megatron_rl.agents.worlds import shell, shown_paths, task_folders
from megatron_rl.agents.worlds.dockerfile import read_dockerfile
from megatron_rl.agents.worlds.shell import Container, ContainerFailed, Shell
from megatron_rl.agents.worlds.task_folders import VERIFY, TaskFolder, task_prompts
from megatron_rl.config import GenerationConfig
from megatron_rl.sandbox import container as container_module
from megatron_rl.workflows import MultiTurnWorkflow
from tests.kit.replies import RecordingEngine
from tests.kit.tokenizers import make_tokenizer
from tests.kit.waiting import LATE_S, wait_until

TASKS = Path(__file__).parents[4] / "examples" / "worlds" / "tasks"
OPTIONS = {"images": ["debian:*"], "disk_mib": 16, "memory_mib": 256, "command_time_s": LATE_S}
VERIFIER_S = "timeout_sec = 20.0"
"""The example's limit of its verifier."""


def container_works():
    async def try_one():
        async with Container(writable=["app"], visible=[], disk_mib=1, memory_mib=256) as container:
            await container.begin()

    asyncio.run(try_one())


try:
    container_works()
except ContainerFailed as error:
    pytest.skip(f"no containers on this host: {error}", allow_module_level=True)


@pytest.fixture
def task(tmp_path):
    """A copy of the example whose verifier has time."""
    folder = shutil.copytree(TASKS / "sum", tmp_path / "sum")
    settings = folder / "task.toml"
    settings.write_text(settings.read_text().replace(VERIFIER_S, f"timeout_sec = {LATE_S}"))
    return folder


ENDLESS, SPINS = "sleep 3600", "while :; do :; done"


class HurriedVerifier(TaskFolder):
    """Has little time for the policy's container, in which it may come to no end, and enough for an untouched one."""

    async def _verify(self, container):
        self.settings["verifier"]["timeout_sec"] = 2.0 if container is self.container else LATE_S
        return await super()._verify(container)


async def work(task, *commands, world=TaskFolder, **options):
    """Return the reward of a policy that runs these commands, and what it saw."""
    world = world({"messages": [], "task": str(task)}, **OPTIONS | options)
    try:
        await world.opening()
        bash, seen = world.tools["bash"], []
        for command in commands:
            bash.time_s = 1.0 if command == ENDLESS else world.of_shell[0]
            seen.append(await bash(command=command))
        return await world.ended(), seen
    finally:
        await world.close()


def call(command):
    return f"<tool_call>{json.dumps({'name': 'bash', 'arguments': {'command': command}})}</tool_call>"


@pytest.mark.slow
@pytest.mark.parametrize("ends", [True, False])
def test_a_dialogue_works_on_a_task_and_the_verifier_gives_its_reward(ends):
    """Whether the policy ends it with an answer, or its turns are over."""
    tokenizer = make_tokenizer()
    engine = RecordingEngine(tokenizer)
    replies = [call("cat /app/numbers.txt"), call("cd /app; echo $((17 + 4 + 21)) > sum.txt; cat sum.txt"), "Done."]
    engine.script = lambda req: replies[tokenizer.decode(req.input_ids).count("<|assistant|>") - 1] + "<eos>"
    workflow = MultiTurnWorkflow(
        lambda **_: 9.0,
        GenerationConfig(max_new_tokens=300),
        tokenizer,
        TaskFolder,
        9000,
        environment_args=OPTIONS,
        max_turns=8 if ends else 2,
    )
    (prompt,) = task_prompts(str(TASKS))
    (trajectory,) = asyncio.run(workflow.arun_episode(engine, prompt))
    heard = tokenizer.decode(trajectory.input_ids[~trajectory.loss_mask])
    assert "Write their sum to /app/sum.txt" in heard and "<|user|>17\n4\n21<|end|>" in heard
    assert trajectory.reward == 1.0 and trajectory.sequence["turns"] == (3 if ends else 2)


@pytest.mark.slow
def test_its_own_solution_solves_the_example_and_nothing_does_not():
    solution = (TASKS / "sum" / "solution" / "solve.sh").read_text()
    assert asyncio.run(work(TASKS / "sum", solution))[0] == 1.0
    assert asyncio.run(work(TASKS / "sum"))[0] == 0.0


@pytest.mark.slow
def test_a_shell_keeps_files_and_processes_and_tells_how_commands_end(task):
    commands = [
        "echo begun > log; (while sleep 0.05; do echo tick >> log; done) &",
        "until [ $(grep -c tick log) -gt 1 ]; do sleep 0.01; done; echo ticking; false",
        "pwd; id -u; ls /; touch /usr/bin/x /x; echo $HOME",
        ENDLESS,
        "seq 1 100000",
        "kill -9 -1; kill -9 1; echo alive",
        ":(){ :|:& };:",
        "echo 42 > sum.txt",
    ]
    reward, seen = asyncio.run(work(task, *commands))
    assert reward == 1.0
    assert seen[0] == "(exit status 0)" and seen[1] == "ticking\n(exit status 1)"
    assert seen[2].startswith("/app\n0\napp\n") and seen[2].count("Read-only file system") == 2
    assert seen[3] == "error: did not end within 1 s"
    assert seen[4].startswith("1\n2\n3") and seen[4].endswith("99999\n100000") and len(seen[4]) < 4100


# -- Dockerfiles


def recipe(tmp_path, *lines, images=("a*",), skips=(), files=("x.txt", "src/y.txt", "src/in/z.txt")):
    for name in files:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    (tmp_path / "Dockerfile").write_text("\n".join(["FROM a:1", *lines]))
    return read_dockerfile(tmp_path / "Dockerfile", tmp_path, images=images, skips=skips)


@pytest.mark.slow
@pytest.mark.parametrize(
    "after_s", [0.0, 0.02, *(pytest.param(s, marks=pytest.mark.thorough) for s in (0.002, 0.01, 0.04, 0.08))]
)
def test_a_container_whose_keeper_dies_while_a_phase_begins_leaves_nothing_behind(after_s):
    """A first process that outlived its keeper held the keeper's pipe, for whose end `close` waited without end."""

    async def kill_it():
        container = Container(writable=["app"], visible=[], disk_mib=1, memory_mib=256)
        async with container:
            beginning = asyncio.ensure_future(container.begin())
            await asyncio.sleep(after_s)
            os.kill(container.keeper_pid, signal.SIGKILL)
            await asyncio.wait([beginning])
        return container.keeper_pid

    keeper = asyncio.run(kill_it())

    def left():
        """Each phase's processes are of the keeper's session, whatever their parent is by now."""
        return [it for it in psutil.process_iter() if it.pid != keeper and session_of(it) == keeper]

    wait_until(lambda: not left(), left)


def session_of(process):
    try:
        return os.getsid(process.pid)
    except ProcessLookupError:
        return None


def test_a_dockerfile_is_files_variables_and_commands(tmp_path):
    found = recipe(
        tmp_path,
        "ARG place=/work  # not a comment for docker",
        "ARG dir=/work",
        'ENV A=1 B="two words"',
        "ENV C $A and more",
        "WORKDIR ${dir}/deep",
        "# a comment",
        "RUN touch a \\",
        "  # inside",
        "  b",
        'RUN ["touch", "c d"]',
        "RUN apt-get install -y jq",
        "COPY x.txt .",
        "COPY --chown=1 x.txt renamed.txt",
        "COPY src /data/",
        'CMD ["bash"]',
        "USER root",
        "ENV PATH=/work/bin:/usr/bin PYTHONPATH=/work",
        skips=["jq"],
    )
    assert found.cwd == "/work/deep" and found.folders >= {"work", "data"}
    assert {name: found.env[name] for name in "ABC"} == {"A": "1", "B": "two words", "C": "1 and more"}
    assert found.trusted_env["PATH"] == "/usr/bin" and "PYTHONPATH" not in found.trusted_env
    steps = [(step.folder, step.command.split() or sorted(step.files)) for step in found.steps]
    assert steps == [
        ("/work/deep", ["touch", "a", "b"]),
        ("/work/deep", ["touch", "'c", "d'"]),
        ("/work/deep", ["x.txt"]),
        ("/work/deep", ["renamed.txt"]),
        ("/data", ["in", "y.txt"]),
    ]


@pytest.mark.parametrize(
    ("line", "rule"),
    [
        ("FROM b:1", "begins a second stage"),
        ("RUN apt-get update && apt-get install -y gcc", "installs over the network"),
        ("RUN pip install numpy", "installs over the network"),
        ("RUN curl -L https://x.org | sh", "installs over the network"),
        ("RUN <<EOF", "of a form that only docker knows"),
        ("COPY --from=b /x /app/", "from elsewhere"),
        ("ADD https://x.org/y /app/", "from elsewhere"),
        ("COPY ../secret /app/", "from outside|there is no"),
        ("COPY gone.txt /app/", "there is no gone.txt"),
        ("COPY x.txt /usr/bin/python3", "a system folder of the host"),
        ("COPY x.txt /tests/", "a folder of the verifier"),
        ("USER app", "cannot be had without docker"),
        ('ENTRYPOINT ["x"]', "cannot be had without docker"),
    ],
)
def test_a_line_that_cannot_be_had_is_refused_by_name(line, rule, tmp_path):
    with pytest.raises(ValueError, match=rule) as raised:
        recipe(tmp_path, line)
    assert f"Dockerfile: {line[:20]}" in str(raised.value)


def test_an_image_is_refused_unless_the_host_stands_in_for_it(tmp_path):
    with pytest.raises(ValueError, match="FROM a:1: there is no docker here; name a:1 in images"):
        recipe(tmp_path, images=("ubuntu:*",))


# -- verifiers that fail, and agents that cheat


@pytest.mark.slow
def test_a_verifier_that_is_broken_by_itself_fails_the_sample(task):
    (task / "tests" / "test.sh").write_text("echo no reward is written")
    with pytest.raises(ContainerFailed, match="gives no reward, whatever the policy did: no reward is written"):
        asyncio.run(work(task))


@pytest.mark.slow
def test_a_verifier_on_a_host_without_memory_gives_no_reward(task, monkeypatch, tmp_path):
    """Also where it still says something: one of its processes may be the one that was killed."""
    counter = tmp_path / "vmstat"
    monkeypatch.setattr(shell, "VMSTAT", counter)
    counter.write_text("pgfault 7\noom_kill 3\n")
    assert shell.memory_kills() == 3 and asyncio.run(work(task, "echo 42 > sum.txt"))[0] == 1.0
    counts = itertools.count(3)
    monkeypatch.setattr(task_folders, "memory_kills", lambda: next(counts))
    with pytest.raises(ContainerFailed, match="killed 1 of this host's processes for want of memory") as raised:
        asyncio.run(work(task, "echo 42 > sum.txt"))
    assert raised.value.kind == "container"


@pytest.mark.parametrize(
    "command,code,output",
    [
        ("for ((n = 0; n < 20000; n++)); do :; done; echo counted", 0, "counted\n"),
        (ENDLESS, None, ""),
        (SPINS, None, ""),
    ],
)
def test_a_busy_host_cuts_off_no_command_that_has_used_less_than_its_limit(command, code, output, monkeypatch):
    """The clock runs 100 times too fast, so that commands get a hundredth of a processor."""
    monkeypatch.setattr(container_module, "time", types.SimpleNamespace(monotonic=lambda: 100 * time.monotonic()))
    monkeypatch.setattr(container_module, "SLOWEST", 1 << 20)
    monkeypatch.setattr(container_module, "reap", lambda: None)  # here it would take pytest's children
    ends = {"time_s": 0.5, "most_bytes": 100, "shared": container_module.SharedMemory(-1, 0)}
    assert container_module.run(command=command, cwd="/", env={}, **ends) == {"code": code, "output": output}


def test_a_container_full_of_processes_is_told_to_the_policy_and_fails_a_verifier(monkeypatch):
    def no_process():
        raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")

    monkeypatch.setattr(os, "fork", no_process)
    answer = container_module.run(
        command="true", cwd="/", env={}, time_s=1.0, most_bytes=100, shared=container_module.SharedMemory(-1, 0)
    )
    container = Container(writable=[], visible=[], disk_mib=1, memory_mib=256)

    async def ask(**_):
        return answer

    container._ask = ask
    told = asyncio.run(Shell(container, "/app", {}, 10.0, 60.0, 1000)("true"))
    assert told == "error: no process can be started: too many are running"
    with pytest.raises(ContainerFailed, match="no process can be started: Resource temporarily unavailable"):
        asyncio.run(container.run("true", "/app", {}, time_s=1.0))


def test_a_run_line_that_fails_names_the_line(task):
    with (task / "environment" / "Dockerfile").open("a") as file:
        file.write("RUN echo so it goes; exit 3\n")
    with pytest.raises(ValueError, match="RUN echo so it goes; exit 3: exit status 3: so it goes"):
        asyncio.run(work(task))


@pytest.mark.parametrize("visible", [".", "sum", "sum/tests", "other", "other/solution", "link", "whole"])
def test_a_visible_path_that_shows_a_tasks_tests_is_refused(visible, task, tmp_path):
    """Its own or another one's."""
    shutil.copytree(task, tmp_path / "other")
    (tmp_path / "link").symlink_to("sum/solution")
    shutil.copytree(task, tmp_path / "whole" / "deep")
    with pytest.raises(ValueError, match=r"visible: .* shows the policy what is in the task folder"):
        TaskFolder({"task": str(task)}, **OPTIONS, visible=[str(tmp_path / visible)])


@pytest.mark.parametrize("kind", ["folder", "link to the folder", "link to the tests", "link among the tests", "mount"])
def test_a_task_folder_in_a_system_path_that_containers_show_is_refused(kind, task, tmp_path, monkeypatch):
    system = tmp_path / "system"
    monkeypatch.setattr(shown_paths, "SYSTEM", (str(system),))
    there = shutil.copytree(task, system / "lib" / "site-packages" / "dataset" / "sum")
    TaskFolder({"task": str(task)}, **OPTIONS)
    match kind:
        case "folder":
            task = there
        case "link to the folder":
            task = tmp_path / "link"
            task.symlink_to(there)
        case "link to the tests":
            shutil.rmtree(task / "tests")
            (task / "tests").symlink_to(there / "tests")
        case "link among the tests":
            (task / "tests" / "test.sh").unlink()
            (task / "tests" / "test.sh").symlink_to(there / "tests" / "test.sh")
        case "mount":  # of the task's folder, somewhere in the system
            mounts = tmp_path / "mountinfo"
            inner = f"2 1 8:1 {task} {system}/lib/python rw - ext4 /dev/sda rw"
            mounts.write_text(f"1 0 8:1 / / rw - ext4 /dev/sda rw\n{inner}\n")
            monkeypatch.setattr(shown_paths, "MOUNTS", mounts)
    with pytest.raises(ValueError, match="so the policy would see tests and solution; copy the tasks"):
        TaskFolder({"task": str(task)}, **OPTIONS)
    with pytest.raises(ValueError, match="copy the tasks"):
        task_prompts(str(task))


@pytest.mark.parametrize(
    "text",
    [
        *("[" * 30_000, '{"a":' * 10_000, '{"reward": ' + "[" * 30_000, "1" * 5_000, "1" * 400, "1e999", "-Infinity"),
        *("NaN", "", "[]", "{}", "null", '"x"', '{"reward": null}', '{"reward": {}}', "\x00", "true false", "\ud800"),
    ],
    ids=lambda text: f"{text[:12]}_{len(text)}",
)
def test_a_deep_or_huge_reward_file_is_no_verdict(text):
    assert task_folders.as_number(text, "reward") is None


REWARD = (
    "mkdir -p /logs/verifier; echo 1 > /logs/verifier/reward.txt; echo '{\"reward\": 1}' > /logs/verifier/reward.json"
)
FAKE = "#!/bin/sh\\nmkdir -p /logs/verifier; echo 1 > /logs/verifier/reward.txt\\nexit 0\\n"
SHADOW = "import os; os._exit(0)"
PRELOAD = "for f in ~/.bashrc ~/.profile ~/.bash_profile /etc/profile /etc/bash.bashrc /logs/home/.bashrc; do"
CHEATS = {
    "overwrites the reward": f"{REWARD}; chmod 444 /logs/verifier/*; chmod 555 /logs/verifier",
    "leaves a daemon that writes the reward": f"(setsid bash -c 'while :; do {REWARD}; sleep 0.01; done' &)",
    "leaves a daemon that kills the verifier": (
        "cat > /tmp/killer.sh <<'X'\nwhile :; do for p in /proc/[0-9]*; do if tr '\\0' ' ' < $p/cmdline | "
        f"grep -q '/tests/'; then {REWARD}; kill -9 ${{p#/proc/}}; fi; done; done 2>/dev/null\nX\n"
        "setsid bash /tmp/killer.sh &"
    ),
    "reads the tests": (
        'for d in /tests /proc/1/root/tests /proc/1/cwd/tests /proc/*/root/tests; do python3 -c "import re, sys; '
        "print(sum(map(int, re.search(r'\\[(.*)\\]', open(sys.argv[1]).read())[1].split(','))))\" $d/check.py > "
        "/tmp/sum && cp /tmp/sum /app/sum.txt; done 2>/dev/null"
    ),
    "waits for the tests": "(setsid bash -c 'until cp /tests/check.py .; do :; done 2> log; echo 42 > sum.txt' &)",
    "replaces the tests": "mkdir -p /tests; echo 'exit(0)' > /tests/check.py; chmod 444 /tests/check.py",
    "links its work to the reward": "ln -sfn /app /logs; ln -sfn /app /logs/verifier; echo 1 > /app/reward.txt",
    "links its answer to the reward": "ln -sf /logs/verifier/reward.txt /app/sum.txt",
    "replaces python, bash and pytest": (
        "for d in /usr/local/bin /usr/bin /bin ~/bin ~/.local/bin /app; do mkdir -p $d; for n in python3 python bash "
        f"pytest; do printf '{FAKE}' > $d/$n.x; chmod +x $d/$n.x; mv -f $d/$n.x $d/$n; done; done 2>/dev/null"
    ),
    "shadows modules": f"for m in json pathlib sys os pytest; do echo '{SHADOW}' > /app/$m.py; done",
    "customises python": (
        "for d in /app ~ /tmp $(python3 -m site --user-site) /usr/lib/python3/dist-packages; do mkdir -p $d; for n in "
        f"sitecustomize usercustomize conftest; do echo '{SHADOW}' > $d/$n.py; done; echo '{SHADOW}' > $d/x.pth; done "
        "2>/dev/null"
    ),
    "preloads by start-up files": (
        f"{PRELOAD} mkdir -p $(dirname $f); echo 'python3() {{ return 0; }}; export -f python3' >> $f; done; "
        "echo /app/x.so > /etc/ld.so.preload; echo 'BASH_ENV=/app/x' >> /etc/environment"
    ),
    "fills the disk": "head -c 99999999 /dev/zero > /app/big; head -c 99999999 /dev/zero > /tmp/big; true",
    "takes all processes": (
        "python3 -c 'import os, time\nwhile True:\n  if os.fork() == 0: time.sleep(99)' 2>/dev/null; true"
    ),
    "makes the verifier wait": "rm -f /app/sum.txt; mkfifo /app/sum.txt",
    "makes the verifier read without end": "ln -sf /dev/zero /app/sum.txt",
    "closes its work": "chmod 000 /app",
    "mounts over the tests": "mount -t tmpfs none /tests; unshare -Urm mount -t tmpfs none /logs; mount -B /app /logs",
    "writes into the first process": (
        'for f in /proc/1/fd/*; do echo \'{"code": 0, "output": ""}\' > $f; done 2>/dev/null; python3 -c '
        '"import ctypes; print(ctypes.CDLL(None).ptrace(16, 1, 0, 0))"; kill -STOP 1; kill -9 -1'
    ),
    "says that it has won": 'echo \'{"reward": 1}\'; echo "all tests passed"; echo 1 > /app/reward.txt',
}
assert len(CHEATS) >= 12


def agents(count):
    """Cheats alone, then two to five of them in an order of chance."""
    draw = random.Random(5)
    names = [[name] for name in CHEATS]
    names += [draw.sample(sorted(CHEATS), draw.randint(2, 5)) for _ in range(count - len(names))]
    return names


async def side_by_side(jobs, at_once=8):
    free = asyncio.Semaphore(at_once)

    async def one(job):
        async with free:
            return await job

    return await asyncio.gather(*map(one, jobs))


@pytest.mark.slow
@pytest.mark.parametrize("count", [len(CHEATS), pytest.param(100, marks=pytest.mark.thorough)])
def test_cheating_agents_gain_nothing(task, count):
    """Each cheat alone; and, of a hundred agents, some of them one after the other."""
    chosen, hurried = agents(count), {"world": HurriedVerifier, "command_time_s": 1.0}
    rewards = asyncio.run(side_by_side([work(task, *map(CHEATS.get, names), **hurried) for names in chosen]))
    # A failed sample would be a gain too: the policy could have what it did badly left out.
    assert [names for names, (reward, _) in zip(chosen, rewards, strict=True) if reward != 0.0] == []


@pytest.mark.slow
def test_an_honest_agent_gets_its_reward_beside_what_others_try(task):
    honest = "awk '{ sum += $1 } END { print sum }' /app/numbers.txt > /app/sum.txt"
    tried = ["customises python", "leaves a daemon that kills the verifier", "overwrites the reward", "shadows modules"]
    assert asyncio.run(work(task, *map(CHEATS.get, tried), honest))[0] == 1.0


RACES = ("leaves a daemon that kills the verifier", "waits for the tests")
"""Cheats that gain where they are quicker than the verifier."""


@pytest.mark.slow
@pytest.mark.thorough
def test_the_cheats_are_real(task):
    """Where tests, processes and reward are not kept apart, they gain."""

    async def gains(name):
        world = TaskFolder({"task": str(task)}, **OPTIONS)
        try:
            await world.opening()
            container = world.container
            await container.begin(["tests", "logs"])
            await container.put({"tests": task / "tests"}, "/")
            await container.run(CHEATS[name], "/app", world.recipe.env, time_s=LATE_S)
            path = {"PATH": f"/app:{world.recipe.env['PATH']}", "PYTHONPATH": "/app"}
            verifier_s = 1.0 if name.startswith("makes the verifier") else LATE_S
            await container.run(VERIFY, "/app", world.recipe.env | path, time_s=verifier_s)
            return await container.read("/logs/verifier/reward.txt") == "1\n"
        finally:
            await world.close()

    async def gains_at_last(name):
        for _ in range(30 if name in RACES else 1):
            if await gains(name):
                return True
        return False

    gained = asyncio.run(side_by_side(map(gains_at_last, CHEATS)))
    assert sum(gained) >= 8, dict(zip(CHEATS, gained, strict=True))


# -- memory that no limit of a process counts

TAKING = """
import ctypes, mmap, os, socket
libc = ctypes.CDLL(None, use_errno=True)
libc.mmap.restype, libc.syscall.restype = ctypes.c_void_p, ctypes.c_long
libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
MIB, NONE = 1 << 20, ctypes.c_void_p(-1).value

def call(number, *arguments):
    given = libc.syscall(ctypes.c_long(number), *map(ctypes.c_long, arguments))
    return "taken" if given >= 0 else os.strerror(ctypes.get_errno())

def map_and_leave(flags, descriptor=-1):
    '''Map 16 MiB again and again, up to a gibibyte, and unmap all but one page of each.'''
    for count in range(64):
        if (place := libc.mmap(None, 16 * MIB, 3, flags, descriptor, 0)) == NONE:
            break
        libc.munmap(place + 4096, 16 * MIB - 4096)
    else:
        return "taken"
    return f"{16 * count} MiB, {os.strerror(ctypes.get_errno())}"

def socket_bytes():
    '''What a socket takes that asks for room.'''
    one, other = socket.socketpair()
    one.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 64 * MIB)
    one.setblocking(False)
    sent = 0
    try:
        while sent < 8 * MIB:
            sent += one.send(bytes(1 << 16))
    except BlockingIOError:
        return "little"
    return "taken"
"""
UNLIMITED = {
    "System V shared memory": ("call(29, 0, MIB, 0o1600)", "Function not implemented"),
    "System V semaphores": ("call(64, 0, 1, 0o1600)", "Function not implemented"),
    "System V queues": ("call(68, 0, 0o1600)", "Function not implemented"),
    "POSIX queues": ("call(240, 0, 0, 0, 0)", "Function not implemented"),
    "memory files": ("call(319, id(MIB), 0)", "Function not implemented"),
    "secret memory": ("call(447, 0)", "Function not implemented"),
    "pages in pipes": ("call(278, 1, 0, 0, 0)", "Function not implemented"),
    "rules of Landlock": ("call(444, 0, 0, 1)", "Function not implemented"),
    "rings": ("call(425, 1, 0)", "Operation not permitted"),
    "page faults": ("call(323, 0)", "Operation not permitted"),
    "huge pages": ("map_and_leave(0x40022)", "0 MiB, Cannot allocate memory"),
    "shared mappings that were left": ("map_and_leave(0x21)", "256 MiB, Cannot allocate memory"),
    "a device of zeros": ("map_and_leave(1, os.open('/dev/zero', os.O_RDWR))", "0 MiB, No such device"),
    "sockets with large buffers": ("socket_bytes()", "little"),
}
ORDINARY = """
import mmap, multiprocessing, os
from multiprocessing import shared_memory

def add(number, queue, lock):
    with lock:
        number.value += 1
    queue.put("queued")

if __name__ == "__main__":
    number, queue, lock = multiprocessing.Value("i", 1), multiprocessing.Queue(), multiprocessing.Lock()
    process = multiprocessing.Process(target=add, args=(number, queue, lock))
    process.start()
    print(queue.get(), number.value)
    process.join()
    block = shared_memory.SharedMemory(create=True, size=4096)
    block.unlink()
    mapped = mmap.mmap(-1, 4096)
    if os.fork() == 0:
        mapped[:5] = b"child"
        os._exit(0)
    os.wait()
    print(mapped[:5], open("/dev/zero", "rb").read(2))
"""


async def printed(*programs):
    """Return what each Python program prints in one container."""
    async with Container(writable=["app"], visible=[], disk_mib=8, memory_mib=256) as container:
        await container.begin()
        commands = [f"cat > x.py <<'END'\n{program}\nEND\npython3 x.py" for program in programs]
        return [await container.run(it, "/app", {"PATH": "/usr/bin:/bin"}, time_s=LATE_S) for it in commands]


def test_memory_that_no_limit_of_a_process_counts_cannot_be_taken_in_a_container():
    """Each way to memory of the host that the limit on a process's address space does not see."""
    lines = "\n".join(f"print({way})" for way, _ in UNLIMITED.values())
    ((code, output),) = asyncio.run(printed(TAKING + lines))
    assert (code, dict(zip(UNLIMITED, output.splitlines(), strict=True))) == (
        0,
        {name: said for name, (_, said) in UNLIMITED.items()},
    )


def test_processes_that_share_a_little_memory_work_in_a_container():
    assert asyncio.run(printed(ORDINARY)) == [(0, "queued 2\nb'child' b'\\x00\\x00'\n")]


def test_a_container_shows_no_path_of_the_host_in_its_first_process():
    async def look():
        async with Container(writable=["app"], visible=[], disk_mib=1, memory_mib=256) as container:
            await container.begin()
            return await container.run(
                "cat /proc/1/cmdline | tr -d '\\0'; cat /proc/*/cgroup", "/app", {}, time_s=LATE_S
            )

    code, output = asyncio.run(look())
    assert code == 0 and output.startswith("container")
    assert all(line.endswith(":/") for line in output.removeprefix("container").splitlines()), output
    assert shell.PACKAGES not in output and sys.executable not in output
