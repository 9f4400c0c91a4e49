"""Count what a stranger meets: comments, docstrings, names, rooms, README, and the path from the loop to a request.

python benchmarks/readability.py --tree ../older-checkout
python benchmarks/readability.py --path
"""

from __future__ import annotations

import argparse
import ast
import re
from collections import Counter
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path

import request_path

ROOT = Path(__file__).resolve().parents[1]

RIDDLES = ("What", "Where", "Whether", "Those of", "That of", "All that")
"""Openings of a docstring that is half a sentence, the other half of which the reader has to find."""

Function = ast.FunctionDef | ast.AsyncFunctionDef


class Tree:
    """A checkout's package and README.

    >>> tree = Tree(ROOT)
    >>> tree.lines(), tree.circles()
    """

    def __init__(self, root: Path) -> None:
        self.root, self.package = root, root / "megatron_rl"
        self.texts = {path: path.read_text(encoding="utf-8") for path in sorted(self.package.rglob("*.py"))}
        self.parsed = {path: ast.parse(text) for path, text in self.texts.items()}
        self.nodes = {path: list(ast.walk(tree)) for path, tree in self.parsed.items()}

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
    lines, words = tree.lines(), sum(len(text.split()) for text in tree.docstrings)
    readme_lines, sentence, semicolons = tree.readme()
    circles = tree.circles()
    rows = {
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


def print_path() -> None:
    found = request_path.traced()
    for process, steps in (("trainer", found.trainer), ("rollout process", found.rollout)):
        print(f"{process}: {len(steps)} functions in {len({file for file, _ in steps})} files")
        for file, name in steps:
            print(f"    {file:<32} {name}")
    print(f"together: {found.functions} functions in {found.files} files")


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser("readability", description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--tree", type=Path, default=ROOT, help="a checkout; default: this one")
    parser.add_argument("--path", action="store_true", help="trace a request from the loop to its socket")
    args = parser.parse_args(argv)
    if args.path:
        print_path()
        return
    for what, figure in table(Tree(args.tree.resolve())).items():
        print(f"{what:<100} {figure}")


if __name__ == "__main__":
    main()
