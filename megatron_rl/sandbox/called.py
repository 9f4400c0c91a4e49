"""Lets another process call a program's functions, and defines how the two processes exchange values.

The program's interpreter runs this file as its script. The file only imports the standard library, since nothing else
is available in that interpreter. The judge (trial.py) imports `encode` and `decode` from here.

Values are sent as tagged plain data of built-in types. Any other object stays in its process and is referred to by a
handle. The program runs in the same interpreter as `serve`, so it can forge any answer. That gains it nothing: its
functions could have returned the same values.
"""

import builtins
import importlib
import itertools
import json
import numbers
import sys
import types
from collections.abc import Callable, Iterator
from decimal import Decimal
from fractions import Fraction
from typing import Any, BinaryIO

MOST_LINE_BYTES = 16 << 20
MOST_ITEMS = 100_000
"""Maximum number of items that are taken from an iterator."""
READY = "ready"
NAME = "program"
"""The program's `__name__`. It is not `__main__`, so code that a program guards by `__main__` does not run."""
TYPING = ("Any", "Callable", "Deque", "DefaultDict", "Dict", "FrozenSet", "Iterable", "Iterator", "List", "Optional")
TYPING += ("Sequence", "Set", "Tuple", "Union")
"""Names from `typing` that need no import, because the signatures in task descriptions often use them."""

TEXTS: dict[str, tuple[type, Callable[[Any], str], Callable[[str], Any]]] = {
    "bool": (bool, str, lambda text: text == "True"),  # before int, of which bool is a subclass
    "int": (int, hex, lambda text: int(text, 16)),
    "float": (float, float.hex, float.fromhex),
    "str": (str, str.__str__, str),
    "bytes": (bytes, bytes.hex, bytes.fromhex),
    "complex": (complex, lambda value: f"{value.real.hex()} {value.imag.hex()}", lambda text: complex_of(text)),
    "Decimal": (Decimal, str, Decimal),
    "Fraction": (Fraction, str, Fraction),
}
"""For each tag: the type, a function that writes a value as text, and a function that reads the text.

An instance of a subclass is sent as a value of the base type, because a subclass could define itself equal to anything.
"""
GROUPS: dict[str, type] = {"list": list, "tuple": tuple, "set": set, "frozenset": frozenset}


def complex_of(text: str) -> complex:
    real, imaginary = map(float.fromhex, text.split(" "))
    return complex(real, imaginary)


def encode(value: Any, handle_of: Callable[[Any], int]) -> list[Any]:
    """Convert a value to JSON data.

    handle_of(object): returns the handle of an object that is not plain data, or raises.
    """
    if value is None:
        return ["None"]
    for tag, (kind, write, _) in TEXTS.items():
        if isinstance(value, kind):
            return [tag, write(value)]
    for tag, group in GROUPS.items():
        if isinstance(value, group):
            return [tag, [encode(entry, handle_of) for entry in value]]
    if isinstance(value, dict):
        return ["dict", [[encode(key, handle_of), encode(entry, handle_of)] for key, entry in value.items()]]
    if isinstance(value, range):
        return ["range", [hex(value.start), hex(value.stop), hex(value.step)]]
    if isinstance(value, Iterator):
        return ["iterator", [encode(entry, handle_of) for entry in itertools.islice(value, MOST_ITEMS)]]
    # Numbers and arrays of packages such as numpy are sent as the equivalent plain values.
    if isinstance(value, numbers.Integral):
        return ["int", hex(int(value))]
    if isinstance(value, numbers.Real):
        return ["float", float(value).hex()]
    if type(value).__module__ == "numpy" and hasattr(value, "tolist"):
        plain = encode(value.tolist(), handle_of)
        return ["array", plain] if type(value).__name__ == "ndarray" else plain
    return ["handle", handle_of(value)]


def decode(sent: Any, thing_of: Callable[[int], Any]) -> Any:
    """Convert JSON data to a value of exactly the built-in types. ValueError for an unknown tag.

    thing_of(handle): returns the object that a handle refers to.
    """
    tag = sent[0]
    if tag == "None":
        return None
    content = sent[1]
    if tag in TEXTS:
        return TEXTS[tag][2](content)
    if tag in GROUPS:
        return GROUPS[tag]([decode(entry, thing_of) for entry in content])
    if tag == "dict":
        return {decode(key, thing_of): decode(entry, thing_of) for key, entry in content}
    if tag == "range":
        return range(*(int(number, 16) for number in content))
    if tag == "iterator":
        return iter([decode(entry, thing_of) for entry in content])
    if tag == "array":
        return importlib.import_module("numpy").array(decode(content, thing_of))
    if tag == "handle" and type(content) is int:
        return thing_of(content)
    raise ValueError(f"{tag!r} is no tag of a value")


def builtin_name(error: Exception) -> str:
    return next(kind.__name__ for kind in type(error).__mro__ if kind.__module__ == "builtins")


class Host:
    """Answers questions about a program that has run. A question is a line `[verb, handle or name, arguments ..]`."""

    def __init__(self, scope: dict[str, Any]) -> None:
        self._scope = scope
        self._things: list[Any] = []

    def _handle_of(self, thing: Any) -> int:
        self._things.append(thing)
        return len(self._things) - 1

    def answer(self, line: bytes) -> list[Any]:
        verb, *sent = json.loads(line)
        given = [decode(entry, self._things.__getitem__) for entry in sent]
        try:
            value = self._do(verb, *given)
            answer = ["value", encode(value, self._handle_of)]
            if verb == "call" and value is None:  # it may have modified its arguments: send them back
                answer.append([encode(entry, self._handle_of) for entry in given[1]])
            return answer
        except Exception as error:
            return ["raised", builtin_name(error), str(error)[:1000]]

    def _do(self, verb: str, thing: Any, *given: Any) -> Any:
        if verb == "name":
            if thing not in self._scope:
                raise NameError(f"the program has no {thing!r}")
            return self._scope[thing]
        if verb == "call":
            return thing(*given[0], **given[1])
        if verb == "get":
            return getattr(thing, given[0])
        if verb == "set":
            return setattr(thing, *given)
        if verb == "item":
            return thing[given[0]]
        return len(thing) if verb == "length" else iter(thing)


def serve(source: str, questions: BinaryIO, answers: BinaryIO) -> None:
    """Run a program, and answer questions about it until the other side closes."""
    # Dataclasses and others look the module up, by its name or as `__main__`.
    program = types.ModuleType(NAME)
    sys.modules[NAME] = sys.modules["__main__"] = program
    builtins.exit = builtins.quit = sys.exit  # defined by `site`, which a locked interpreter does not import
    scope = vars(program)
    scope["__builtins__"] = builtins
    if any(name in source for name in TYPING):
        typing = importlib.import_module("typing")
        scope.update({name: getattr(typing, name) for name in TYPING})
    try:
        exec(compile(source, NAME, "exec", dont_inherit=True), scope)
    except (SystemExit, EOFError):
        pass  # a demo that exits or asks for input: names defined by then can be called
    host = Host(scope)
    answers.write(json.dumps([READY]).encode() + b"\n")
    while line := questions.readline():
        answers.write(json.dumps(host.answer(line)).encode() + b"\n")


def main() -> None:
    """Serve a program.

    Arguments: file descriptors of the program's text, the questions and the answers; then folders of packages.
    """
    text, questions, answers = map(int, sys.argv[1:4])
    sys.path[len(sys.path) :], sys.argv[1:] = sys.argv[4:], []
    with open(text, encoding="utf-8", errors="replace") as file:
        source = file.read()
    serve(source, open(questions, "rb"), open(answers, "wb", buffering=0))


if __name__ == "__main__":
    main()
