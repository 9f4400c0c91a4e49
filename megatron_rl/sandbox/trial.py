"""Runs Python tests of a model-written program, out of the program's reach.

A test runs in the judge, a locked fork of this process. The program runs in another locked process. In the judge, each
name from the program is a stand-in (`Thing`). Calling a stand-in sends a question through a pipe, and the answer is
plain data of built-in types (called.py). The program sees the arguments of calls. It sees neither the test's text nor
the values that the test compares with. A stand-in is equal to nothing but itself.
"""

from __future__ import annotations

import ast
import builtins
import functools
import importlib
import json
import os
import sys
import types
import unittest
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NoReturn

from megatron_rl.sandbox import called
from megatron_rl.sandbox.called import MOST_LINE_BYTES, READY, decode, encode
from megatron_rl.sandbox.locked import (
    NoResult,
    TextFailed,
    evaluate,
    host_errors,
    memory_file,
    refuse_killed,
    started_program,
)


def holds(source: str, test: str, *, time_s: float, memory_bytes: int, folders: Sequence[str] = ()) -> bool:
    """Return True if `test` passes with the functions and other names that the program `source` defines.

    ValueError if the test is not valid Python. folders: folders of packages that the program may import.
    """
    names, modules = parsed_names(test)
    with host_errors():
        asked, questions = os.pipe()
        answers, answered = os.pipe()
        text = memory_file(source)
    given, bounds = (text, asked, answered), {"time_s": time_s, "memory_bytes": memory_bytes}
    try:
        with started_program(script(), (*map(str, given), *folders), pass_fds=given, **bounds) as (process, threads):
            # Close these ends at once: as long as this process holds them, neither side notices the other's exit.
            for end in given:
                os.close(end)
            given = ()
            ends = (questions, answers)
            try:
                bounds |= {"threads": threads, "waits_for": [process.pid]}
                return evaluate(run_test, test, names, modules, keep=ends, **bounds) is True
            except NoResult:
                refuse_killed(process.pid, time_s)  # the judge exits without a result when the program is gone
                return False
    except TextFailed:
        return False
    finally:
        for end in (*given, questions, answers):
            os.close(end)


@functools.cache
def script() -> str:
    return Path(called.__file__).read_text(encoding="utf-8")


def parsed_names(test: str) -> tuple[list[str], list[str]]:
    """Return `names_of_program(test)`. ValueError with advice if the test is not valid Python."""
    try:
        return names_of_program(test)
    except (SyntaxError, ValueError) as error:
        raise ValueError(f"tests: {test[:200]!r} is no Python ({error}); give every prompt tests that are.") from error


def names_of_program(test: str) -> tuple[list[str], list[str]]:
    """Return the names that a test takes from the program, and the standard modules that it uses without an import.

    The test takes all names that it does not define itself. A built-in name means Python's built-in, even if the
    program redefines it. The exception is a test that takes no other names, such as `assert sum([1, 2]) == 3`. Then
    the first built-in that it calls is taken from the program. A call whose arguments contain calls does not count.
    """
    tree = ast.parse(test)
    loaded, bound, called_names, holders = set(), set(), [], set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Name):
            (loaded if isinstance(node.ctx, ast.Load) else bound).add(node.id)
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            bound.add(node.name)
        elif isinstance(node, ast.arg):
            bound.add(node.arg)
        elif isinstance(node, ast.alias):
            bound.add((node.asname or node.name).partition(".")[0])
        elif isinstance(node, ast.ExceptHandler | ast.MatchAs | ast.MatchStar) and node.name:
            bound.add(node.name)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            inner = [below for argument in node.args for below in ast.walk(argument) if isinstance(below, ast.Call)]
            called_names.append((bool(inner), node.func.id))
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            holders.add(node.value.id)
    free = loaded - bound
    names = {name for _, name in called_names}
    modules = sorted((free & holders & sys.stdlib_module_names) - names)
    of_program = sorted(free - set(vars(builtins)) - set(modules) - {"__name__"})
    # `assert sum([1, 2]) == 3` tests the program's own `sum`.
    if not of_program:
        of_program = [name for has_calls, name in called_names if not has_calls and name in free][:1]
    return of_program, modules


def run_test(test: str, names: list[str], modules: list[str], questions: int, answers: int) -> bool:
    """Run a test to its end and return True. This runs in the judge; any exception means that the test has failed.

    names, modules: result of `names_of_program`. questions, answers: file descriptors of the pipes to the program.
    """
    program = Program(questions, answers)
    scope: dict[str, Any] = {"__name__": "test", "__builtins__": builtins}
    scope |= {name: importlib.import_module(name) for name in modules}
    for name in names:
        try:
            scope[name] = program.ask("name", name)
        except NameError:
            continue  # the test then raises NameError if it uses the name
    # optimize=0 keeps assertions, whichever flags this process was started with.
    exec(compile(test, "test", "exec", dont_inherit=True, optimize=0), scope)
    run_defined(test, scope)
    return True


def run_defined(test: str, scope: dict[str, Any]) -> None:
    """Run what a test defines but does not run itself: functions that pytest would collect, and unittest cases.

    scope: the global names of the test after it has run.
    """
    used = {node.id for node in ast.walk(ast.parse(test)) if isinstance(node, ast.Name)}
    for name, found in list(scope.items()):
        if name in used:
            continue
        if isinstance(found, types.FunctionType) and name.startswith("test") and not found.__code__.co_argcount:
            found()
        elif isinstance(found, type) and issubclass(found, unittest.TestCase):
            result = unittest.TestResult()
            unittest.defaultTestLoader.loadTestsFromTestCase(found).run(result)
            assert result.wasSuccessful(), result


class Program:
    """The judge's connection to a program in another process."""

    def __init__(self, questions: int, answers: int) -> None:
        self._questions, self._answers = questions, open(answers, "rb")
        if self._hear() != [READY]:
            give_up()

    def ask(self, verb: str, *given: Any) -> Any:
        """Ask the program a question. Return its answer, as plain data and Things, or raise the exception it reports.

        verb, given: the question, see `Host`.
        """
        line = json.dumps([verb, *(encode(entry, handle_of) for entry in given)]).encode() + b"\n"
        while line:
            line = line[self._write(line) :]
        try:
            what, *told = self._hear()
            if what == "value":
                value = decode(told[0], self._thing)
                if value is None and len(told) > 1:
                    for ours, theirs in zip(given[1], told[1], strict=False):
                        take_over(ours, decode(theirs, self._thing))
                return value
            name, words = map(str, told)
        except (ValueError, TypeError, KeyError, IndexError, ArithmeticError, RecursionError):
            give_up()  # the program itself has written an invalid answer
        raise raised(name, words)

    def _thing(self, handle: int) -> Thing:
        return Thing(self, handle)

    def _write(self, line: bytes) -> int:
        try:
            return os.write(self._questions, line)
        except BrokenPipeError:
            give_up()

    def _hear(self) -> Any:
        line = self._answers.readline(MOST_LINE_BYTES)
        if not line.endswith(b"\n"):
            give_up()
        try:
            return json.loads(line)
        except (ValueError, RecursionError):
            give_up()


def give_up() -> NoReturn:
    """Exit without a result, because the program is gone or sent an invalid answer. The test counts as failed.

    This is not an exception, so that the test cannot catch it.
    """
    os._exit(0)


def raised(name: str, words: str) -> Exception:
    """Return the built-in exception of that name; RuntimeError if no built-in subclass of Exception has the name.

    Other exceptions, such as SystemExit, are therefore never returned.
    """
    kind = vars(builtins).get(name)
    if isinstance(kind, type) and issubclass(kind, Exception):
        try:
            return kind(words)
        except TypeError:  # some exceptions need other arguments
            pass
    return RuntimeError(f"{name}: {words}")


def take_over(ours: Any, theirs: Any) -> None:
    """Apply to the judge's argument `ours` the changes that the program's function made to its copy `theirs`."""
    if type(ours) is list and type(theirs) is list:
        ours[:] = theirs
    elif (type(ours) is dict and type(theirs) is dict) or (type(ours) is set and type(theirs) is set):
        ours.clear()
        ours.update(theirs)


def handle_of(value: Any) -> int:
    if isinstance(value, Thing):
        return int(vars(value)["_handle"])
    raise TypeError(f"a {type(value).__name__} cannot be given to the program: it takes plain data")


class Thing:
    """Stand-in for an object in the program's process, such as a function.

    Comparisons with a stand-in never use comparison methods that the program defines.
    """

    def __init__(self, program: Program, handle: int) -> None:
        vars(self).update(_program=program, _handle=handle)

    def _ask(self, verb: str, *given: Any) -> Any:
        return vars(self)["_program"].ask(verb, self, *given)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._ask("call", list(args), kwargs)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self._ask("get", name)

    def __setattr__(self, name: str, value: Any) -> None:
        self._ask("set", name, value)

    def __getitem__(self, index: Any) -> Any:
        return self._ask("item", index)

    def __bool__(self) -> bool:
        return True

    def __len__(self) -> int:
        return int(self._ask("length"))

    def __iter__(self) -> Iterator[Any]:
        return iter(self._ask("items"))
