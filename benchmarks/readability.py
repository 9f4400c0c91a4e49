"""Count what a stranger meets: the way from the loop to the HTTP request, comments, docstrings, names, rooms, README.

python benchmarks/readability.py --tree ../older-checkout
"""

from __future__ import annotations

import argparse
import ast
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]

WALKS = {
    "a proxy sends the call, and the service of a rollout rank starts it": """
        train:rl_steps RLRun.next_batch Rollouts.batch RolloutProcess.__getattr__
        RpcClient.call RpcClient.start RpcSocket.send
        | rpc:serve serve.listen serve.attend serve_trainer.answer RolloutRank.prepare_batch
        RolloutExecutor.prepare_batch RolloutExecutor._collect RolloutExecutor._start
        RolloutExecutor._fly RolloutExecutor._run RolloutExecutor._group
        RLVRWorkflow.arun_episode samples tried RLVRWorkflow.scored_reply
        Attempt.agenerate SamplingClient.agenerate SamplingClient._whole_reply
        SamplingClient._generate_part SamplingClient._generate_on
        ServerClient.generate ServerClient._pieces ServerClient._call_once
    """,
    "a call is handed on by process, caller, wire, head, engine and event loop": """
        train:train RLRun.next_batch Rollouts.batch RolloutProcess.rollout_batch
        RpcClient.call RpcClient.start RpcClient._send RpcSocket.send
        | serve.listen serve.attend serve_trainer.answer RolloutRank.rollout_batch
        RemoteSGLangEngine.rollout_batch EventLoopThread.run
        RolloutExecutor.rollout_batch RolloutExecutor._run_together RolloutExecutor._start RolloutExecutor._launch
        RolloutExecutor._fly RolloutExecutor._run RolloutExecutor._group
        RLVRWorkflow.arun_episode samples tried RLVRWorkflow.scored_reply
        Attempt.agenerate RemoteSGLangEngine.agenerate RemoteSGLangEngine._generate RemoteSGLangEngine._whole_reply
        RemoteSGLangEngine._generate_part RemoteSGLangEngine._generate_on
        ServerClient.generate ServerClient.call ServerClient._call_once
    """,
}
"""The functions that a prompt passes from the loop to its HTTP request, in their order; the tree has one of these ways.

Each is mentioned by a function before it; `file:` tells those of one name apart. Behind a bar the way goes on in
another process, at the other end of a socket.
"""
OLDER_NAMES = {
    "RLRun": "Experiment",
    "RpcClient": "Caller",
    "RpcSocket": "Wire",
    "RolloutRank": "RolloutHead",
}

RIDDLES = ("What", "Where", "Whether", "Those of", "That of", "All that")
"""Openings of a docstring that is half a sentence, the other half of which the reader has to find."""

Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class Walk:
    functions: int
    files: int


class Tree:
    """A checkout's package and README.

    >>> tree = Tree(ROOT)
    >>> tree.walk().functions, tree.lines(), tree.circles()
    """

    def __init__(self, root: Path) -> None:
        self.root, self.package = root, root / "megatron_rl"
        self.texts = {path: path.read_text(encoding="utf-8") for path in sorted(self.package.rglob("*.py"))}
        self.parsed = {path: ast.parse(text) for path, text in self.texts.items()}
        self.nodes = {path: list(ast.walk(tree)) for path, tree in self.parsed.items()}

    # -- the way of a prompt

    @cached_property
    def functions(self) -> dict[str, list[tuple[Path, Function]]]:
        """All functions by their qualified names inside a file."""
        found: dict[str, list[tuple[Path, Function]]] = {}

        def visit(node: ast.AST, prefix: str, path: Path) -> None:
            for child in ast.iter_child_nodes(node):
                named = isinstance(child, Function | ast.ClassDef)
                name = f"{prefix}{child.name}" if named else ""
                if isinstance(child, Function):
                    found.setdefault(name, []).append((path, child))
                visit(child, f"{name}." if named else prefix, path)

        for path, tree in self.parsed.items():
            visit(tree, "", path)
        return found

    def walk(self) -> Walk:
        """Return the length of the way that holds in this tree. LookupError says where each of them breaks off."""
        faults = []
        for title, names in WALKS.items():
            try:
                return self._follow(names.split())
            except LookupError as error:
                faults.append(f"{title}: {error.args[0]}")
        raise LookupError("WALKS has no way that this code goes: " + "; ".join(faults))

    def _follow(self, names: list[str]) -> Walk:
        mentioned: set[str] = set()
        files, is_across = set(), True
        for name in names:
            if name == "|":
                is_across = True
                continue
            path, function = self._find(name)
            # A generated method is not written anywhere: whoever calls it meets __getattr__.
            if not is_across and function.name not in mentioned | {"__getattr__"}:
                raise LookupError(f"nothing before {name} mentions it")
            files.add(path)
            mentioned |= words_of(function)
            is_across = False
        return Walk(functions=len(names) - names.count("|"), files=len(files))

    def _find(self, name: str) -> tuple[Path, Function]:
        file, _, qualified = name.rpartition(":")
        owner, _, method = qualified.partition(".")
        places = self.functions.get(qualified) or self.functions.get(
            ".".join(filter(None, (OLDER_NAMES.get(owner, owner), method))), []
        )
        places = [place for place in places if file in ("", place[0].stem)]
        if len(places) != 1:
            raise LookupError(f"there are {len(places)} functions {name}")
        return places[0]

    # -- how it reads

    def lines(self, room: str = "") -> int:
        """Count the lines of the package, or of one room."""
        chosen = self.package / room
        return sum(len(text.splitlines()) for path, text in self.texts.items() if path.is_relative_to(chosen))

    def rooms(self) -> dict[str, tuple[int, int]]:
        """Return (files, lines) of each room: a folder, or a file beside them."""
        rooms = sorted({path.relative_to(self.package).parts[0] for path in self.texts})
        files = Counter(path.relative_to(self.package).parts[0] for path in self.texts)
        return {room: (files[room], self.lines(room)) for room in rooms}

    def comments(self) -> int:
        """Count the lines that have a comment: alone, or two blanks after the code, as the formatter writes it."""
        return sum(len(re.findall(r"^(?:.*  |\s*)#[ !]", text, re.MULTILINE)) for text in self.texts.values())

    @cached_property
    def docstrings(self) -> list[str]:
        """Docstrings of modules, classes, functions and attributes."""
        return [text for nodes in self.nodes.values() for node in nodes for text in strings_in(node)]

    def riddles(self) -> list[str]:
        return [text for text in self.docstrings if re.match(rf"\s*({'|'.join(RIDDLES)})\b", text)]

    def public_names(self) -> int:
        """Count the functions and classes of modules whose names have no underscore before them."""
        named = [
            node for tree in self.parsed.values() for node in tree.body if isinstance(node, Function | ast.ClassDef)
        ]
        return sum(not node.name.startswith("_") for node in named)

    def circles(self) -> list[list[str]]:
        """Return the groups of files that import each other, be it inside a function or for types alone."""
        modules = {self._module(path): path for path in self.texts if path.name != "__init__.py"}
        imports = {name: modules_in(self.nodes[path]) & set(modules) - {name} for name, path in modules.items()}
        reached = {name: reach(name, imports) for name in imports}
        groups = {frozenset(other for other in reached[name] if name in reached[other]) for name in imports}
        return sorted(sorted(group) for group in groups if len(group) > 1)

    def _module(self, path: Path) -> str:
        return ".".join(path.relative_to(self.root).with_suffix("").parts)

    def readme(self) -> tuple[int, float, float]:
        """Return README's lines, its words a sentence, and its semicolons per 1,000 words, both without code."""
        text = (self.root / "README.md").read_text(encoding="utf-8")
        prose = re.sub(r"```.*?```|`[^`]*`|\]\([^)]*\)|<[^>]*>", " ", text, flags=re.DOTALL)
        prose = "\n".join(line for line in prose.splitlines() if not line.lstrip().startswith(("|", "#", "!", "    ")))
        sentences = [part for part in re.split(r"[.!?](?=\s)|\n\s*\n|\n\s*[-*] ", prose) if re.search(r"\w", part)]
        words = len(re.findall(r"\w[\w'’-]*", prose))
        return len(text.splitlines()), words / max(1, len(sentences)), 1000 * prose.count(";") / max(1, words)


def words_of(function: Function) -> set[str]:
    """Return the names that a function uses: variables, attributes, and strings that may be a method's name."""
    nodes = list(ast.walk(function))
    names = {node.id for node in nodes if isinstance(node, ast.Name)}
    names |= {node.attr for node in nodes if isinstance(node, ast.Attribute)}
    return names | {node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)}


def strings_in(node: ast.AST) -> Iterator[str]:
    body = getattr(node, "body", [])
    for line in body if isinstance(body, list) else []:
        if isinstance(line, ast.Expr) and isinstance(line.value, ast.Constant) and isinstance(line.value.value, str):
            yield line.value.value


def modules_in(nodes: list[ast.AST]) -> set[str]:
    """Return the full names of what is imported, `from a import b` as `a` and `a.b`."""
    modules = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    for node in nodes:
        if isinstance(node, ast.ImportFrom):
            modules |= {node.module or ""} | {f"{node.module}.{alias.name}" for alias in node.names}
    return modules


def reach(start: str, imports: dict[str, set[str]]) -> set[str]:
    """Return the modules that one imports in the end, itself among them where it is in a circle."""
    reached, ahead = set(), list(imports[start])
    while ahead:
        if (name := ahead.pop()) not in reached:
            reached.add(name)
            ahead += imports[name]
    return reached


def table(tree: Tree) -> dict[str, str]:
    """Return what is counted, in words, with the figure."""
    walk, lines, words = tree.walk(), tree.lines(), sum(len(text.split()) for text in tree.docstrings)
    readme_lines, sentence, semicolons = tree.readme()
    circles = tree.circles()
    rows = {
        "functions, files from the loop to the HTTP request": f"{walk.functions}, {walk.files}",
        "lines in megatron_rl, outside tools/": f"{lines:,}, {lines - tree.lines('tools'):,}",
        "comments per 100 lines": f"{100 * tree.comments() / lines:.1f}",
        f"docstrings that open with {'/'.join(RIDDLES)}, and per 1,000 words": (
            f"{len(tree.riddles())}, {1000 * len(tree.riddles()) / words:.2f}"
        ),
        "public names per 1,000 lines": f"{1000 * tree.public_names() / lines:.1f}",
        "import circles": f"{len(circles)} {circles or ''}".rstrip(),
        "README: lines, words a sentence, semicolons per 1,000 words": (
            f"{readme_lines}, {sentence:.1f}, {semicolons:.1f}"
        ),
    }
    return rows | {f"{room}: files, lines": f"{files}, {size:,}" for room, (files, size) in tree.rooms().items()}


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser("readability", description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--tree", type=Path, default=ROOT, help="a checkout; default: this one")
    args = parser.parse_args(argv)
    for what, figure in table(Tree(args.tree.resolve())).items():
        print(f"{what:<100} {figure}")


if __name__ == "__main__":
    main()
