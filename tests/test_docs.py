"""README, docs and the examples' READMEs: links, commands, config keys, code blocks and figures are true.

    python tests/test_docs.py --write

copies benchmarks/results into docs/benchmarks.md.
"""

from __future__ import annotations

import ast
import dataclasses
import functools
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[1]
EXAMPLES = sorted((ROOT / "examples").rglob("README.md"))
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), *EXAMPLES]
BENCHMARKS = ROOT / "docs" / "benchmarks.md"
RESULTS = ROOT / "benchmarks" / "results"

TRIED = {
    "make demo": "trains SmolLM2-135M for minutes: tests/end_to_end/test_training.py trains a tiny model as it does",
    "make demo-tiny": "trains for minutes: tests/end_to_end/test_training.py",
    "make test": "is what runs this",
    "make readme-tables": "tests/test_readme_tables.py",
    "make soak": "takes twenty minutes: tests/end_to_end/kills.py is imported by tests of single kills",
    "make bench-trl": "needs TRL, which is not installed: tests/end_to_end/test_benchmarks.py tries its arguments",
    ".venv/bin/torchrun ": "tests/end_to_end/test_training.py starts ranks with torchrun's variables",
    ".venv/bin/megatron-rl plan ": "tests/unit/tools/test_plan.py",
    ".venv/bin/hf download ": "needs the network: tests/unit/weights/test_published_models.py has each model's name",
    ".venv/bin/python -m pip ": "needs the network: CI installs the extras",
    ".venv/bin/megatron-rl convert smollm2 ": "tests/unit/tools/test_gguf_files.py",
    "scripts/first_hour.sh": "tests/unit/test_first_hour.py",
    ".venv/bin/megatron-rl launch ": "tests/unit/launch/test_local_launch.py",
    "python -m megatron_rl.train ": "tests/end_to_end/test_data_runs.py",
    "sbatch ": "tests/slurm",
    ".venv/bin/megatron-rl serve-training ": "tests/servers/test_training_server.py",
    ".venv/bin/megatron-rl sft ": "tests/end_to_end/test_examples.py",
    ".venv/bin/python examples/": "tests/end_to_end/test_examples.py",
    ".venv/bin/python benchmarks/": "tests/end_to_end/test_benchmarks.py",
    ".venv/bin/python tests/test_docs.py": "is this file",
    "python csrc/build.py": "tests/conftest.py builds the operators for every session",
}
"""The beginning of each command in the pages, and the test that tries it or the reason why none does."""
RUN_BY = {
    "tutorial.md": "tests/test_tutorial.py",
    "gpu.md": "tests/test_gpu_and_cluster_pages.py",
    "cluster.md": "tests/test_gpu_and_cluster_pages.py",
}
"""Pages whose blocks a test of their own runs, or holds to what commands and configs take."""
TRIED_BY = {
    ("algorithms.md", "@estimator"): "tests/unit/algo/test_algorithms_page.py",
    ("algorithms.md", "MegatronEngine"): "tests/test_readme.py, in a process of its own",
    ("training_server.md", "# quickstart"): "tests/servers/test_training_server.py",
    ("workflows.md", "import openai"): "tests/unit/agents/test_agent_proxy.py",
    ("workflows.md", "ShortAnswers"): "tests/test_readme.py",
    ("workflows.md", "class Guess"): "tests/unit/workflows/test_conversations.py",
    ("README.md", "def brief"): "tests/test_readme.py",
    ("README.md", "rl.train_on"): "tests/test_other_trainers.py",
    ("from_other_trainers.md", "# quickstart.py"): "tests/test_other_trainers.py",
    ("from_other_trainers.md", "# remax.py"): "tests/test_other_trainers.py",
    ("from_other_trainers.md", "# actor.py"): "tests/test_other_trainers.py",
    ("from_other_trainers.md", "# loop.py"): "tests/test_other_trainers.py",
}
"""Python blocks that another test runs, by a word of theirs."""
WRITTEN_BY_RUNS = ("runs/", "models/", ".venv/", "shared/", "data/", "my_task/")
"""Folders that commands or the reader of the tutorial write."""
FILES = ("log", "lock", "jsonl", "json", "yaml", "txt", "py", "md", "html", "sh", "png")
"""File endings: `name.yaml` is a file and no config key."""

NAME_LINK = re.compile(r"\[`([\w.]+?)(?:\(\))?`\]\(([\w./-]+\.py)\)")
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```", re.MULTILINE | re.DOTALL)
RESULT = re.compile(r"(<!-- results: (\S+) -->\n```text\n)(.*?)(^```)", re.MULTILINE | re.DOTALL)


@functools.cache
def text_of(page: Path) -> str:
    return page.read_text(encoding="utf-8")


def prose_of(text: str) -> str:
    """Return a page without its code blocks, comments and tables."""
    text = re.sub(r"<!--.*?-->", "", BLOCK.sub("", text), flags=re.DOTALL)
    return "\n".join(line for line in text.splitlines() if not line.startswith("|"))


def name_of(page: Path) -> str:
    """Return a page's name, with the folder of those that are all called README.md."""
    return page.relative_to(ROOT).as_posix() if page in EXAMPLES else page.name


def by_page(*pages: Path) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("page", pages or PAGES, ids=name_of)


# -- links ------------------------------------------------------------------------------------------------------------


def anchors_of(page: Path) -> set[str]:
    """Return the anchors that a Markdown page's headings have on GitHub."""
    headings = re.findall(r"^#+ (.*)$", BLOCK.sub("", text_of(page)), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@by_page()
def test_every_link_resolves(page):
    for target in re.findall(r"\]\(([^)\s]+)\)", BLOCK.sub("", text_of(page))):
        if target.startswith(("http://", "https://")):
            continue
        name, _, anchor = target.partition("#")
        path = (page.parent / name).resolve() if name else page
        assert path.exists(), f"{name_of(page)}: {target}"
        if anchor and path.suffix == ".md":
            assert anchor in anchors_of(path), f"{name_of(page)}: {target}"


@functools.cache
def names_of(path: Path) -> set[str]:
    """Return the functions, classes, methods and constants of a file."""
    return set(_names(ast.parse(path.read_text(encoding="utf-8")).body, ""))


def _names(body: list[ast.stmt], prefix: str) -> Iterator[str]:
    for node in body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield prefix + node.name
            if isinstance(node, ast.ClassDef):
                yield from _names(node.body, f"{prefix}{node.name}.")
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            yield from (prefix + target.id for target in targets if isinstance(target, ast.Name))


@by_page()
def test_every_link_to_a_name_finds_it_in_its_file(page):
    for name, target in NAME_LINK.findall(text_of(page)):
        path = (page.parent / target).resolve()
        is_file = path.name == name.rpartition("/")[2]
        assert is_file or name in names_of(path), f"{name_of(page)}: {target} has no {name}"


# -- names ------------------------------------------------------------------------------------------------------------


def code_of(page: Path) -> list[str]:
    """Return the inline code of a page, tables included, and the lines of its shell blocks."""
    return re.findall(r"`([^`\n]+)`", BLOCK.sub("", text_of(page))) + commands_of(page)


@by_page()
def test_every_path_in_code_is_there(page):
    named = {
        it for code in code_of(page) for it in re.findall(r"(?<![\w./:*-])[\w.-]+/[\w./-]+\.(?:py|yaml|md|sh)\b", code)
    }
    missing = [it for it in named if not it.startswith(WRITTEN_BY_RUNS) and not (ROOT / it).exists()]
    assert not missing, f"{name_of(page)}: {missing}"


@by_page()
def test_every_name_of_the_package_in_code_is_there(page):
    for name in {it for code in code_of(page) for it in re.findall(r"\bmegatron_rl(?:\.\w+)+(?::[a-z]\w+)?", code)}:
        *parts, last = re.split(r"[.:]", name)
        homes = [ROOT.joinpath(*parts).with_suffix(".py"), ROOT.joinpath(*parts, "__init__.py")]
        is_module = ROOT.joinpath(*parts, last).is_dir() or ROOT.joinpath(*parts, f"{last}.py").is_file()
        assert is_module or any(home.is_file() and _has(home, last) for home in homes), f"{name_of(page)}: {name}"


def _has(path: Path, name: str) -> bool:
    return name in names_of(path) or re.search(rf"\b{name}\b", path.read_text(encoding="utf-8")) is not None


def test_threads_of_the_architecture_are_started_by_these_names():
    (table,) = re.findall(
        r"^## Threads\n(.*?)^## ", text_of(ROOT / "docs" / "architecture.md"), re.MULTILINE | re.DOTALL
    )
    code = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "megatron_rl").rglob("*.py"))
    for line in table.splitlines():
        for name in re.findall(r"`([\w-]+)`", line.split("|")[2]) if line.startswith("|") else []:
            assert re.search(rf"name(_prefix)?=f?\"{name.replace('-N', '-{')}|EventLoopThread\(\"{name}", code), name


# -- config keys ------------------------------------------------------------------------------------------------------


@by_page()
def test_every_config_key_in_code_is_one_of_the_config(page):
    from megatron_rl.config.loading import SECTIONS

    for code in re.findall(r"`([^`\n]+)`", prose_of(text_of(page))):
        for section, key in re.findall(r"(?<![\w./:-])(\w+)\.(\w+)\b(?![(/:])", code):
            if section in SECTIONS and key not in FILES:
                fields = {field.name for field in dataclasses.fields(SECTIONS[section])}
                assert key in fields, f"{name_of(page)}: `{code}`: {section} has no {key}"


# -- code blocks ------------------------------------------------------------------------------------------------------


def commands_of(page: Path) -> list[str]:
    """Return the lines of shell blocks and the inline code that starts like a command."""
    blocks = [line for language, body in BLOCK.findall(text_of(page)) if language == "bash" for line in _joined(body)]
    inline = [it for it in re.findall(r"`([^`\n]+)`", text_of(page)) if it.startswith(("make ", "python ", ".venv/"))]
    return [line.split(" #")[0].strip() for line in blocks + inline if line.split("#")[0].strip()]


def _joined(body: str) -> list[str]:
    return body.replace("\\\n", " ").splitlines()


def test_every_command_is_tried_or_says_why_not():
    commands = [(page, line) for page in PAGES if name_of(page) not in RUN_BY for line in commands_of(page)]
    for page, line in commands:
        assert any(line.startswith(beginning) for beginning in TRIED), f"{name_of(page)}: {line}: add it to TRIED"
    for beginning, by in TRIED.items():
        assert any(line.startswith(beginning) for _, line in commands), f"{beginning}: is in no page any more"
        for path in re.findall(r"tests/[\w/.]+\w", by):
            assert (ROOT / path).exists(), path


@by_page()
def test_overrides_in_commands_are_options(page):
    from megatron_rl.config import load_config

    for line in commands_of(page):
        words = line.split()
        config = [word for word in words if re.fullmatch(r"(configs/\w+|examples/\w+/config)\.yaml", word)]
        if config:
            load_config(ROOT / config[0], [word for word in words if "=" in word and not word.startswith("-")])


@by_page()
def test_every_block_says_what_it_is_and_runs(page, tmp_path):
    if name_of(page) in RUN_BY:
        assert (ROOT / RUN_BY[page.name]).is_file()
        return
    for language, body in BLOCK.findall(text_of(page)):
        assert language in ("bash", "python", "yaml", "json", "text"), f"{name_of(page)}: a block of {language!r}"
        if language == "python" and not any(name_of(page) == name and word in body for name, word in TRIED_BY):
            exec(compile(body, page.name, "exec"), {"__name__": page.stem})
        elif language == "json":
            assert all(json.loads(line) for line in body.splitlines())
        elif language == "yaml":
            _load(body, tmp_path)


def _load(body: str, folder: Path) -> None:
    """Load a part of a config, with what every config needs."""
    from megatron_rl.config import load_config

    whole = {"model": {"path": "some"}, "data": {"train": "a.jsonl"}, "generation": {"n_samples": 2}}
    for section, keys in yaml.safe_load(body).items():
        whole[section] = whole.get(section, {}) | keys
    (folder / "part.yaml").write_text(yaml.safe_dump(whole))
    load_config(folder / "part.yaml", [])


def test_blocks_that_others_run_are_there():
    for (name, word), by in TRIED_BY.items():
        (page,) = [page for page in PAGES if name_of(page) == name]
        assert any(word in body for language, body in BLOCK.findall(text_of(page)) if language == "python"), word
        for path in re.findall(r"tests/[\w/.]+\w", by):
            assert (ROOT / path).exists(), path


# -- figures ----------------------------------------------------------------------------------------------------------


def figures_in(text: str) -> set[str]:
    return set(re.findall(r"(?<![\w.])\d[\d,]*(?:\.\d+)?(?![\w-])", text))


@by_page(*(page for page in PAGES if RESULT.search(text_of(page))))
def test_outputs_on_the_page_are_those_of_the_results(page):
    for _, name, body, _ in RESULT.findall(text_of(page)):
        assert body == (RESULTS / name).read_text(encoding="utf-8"), f"{name}: python tests/test_docs.py --write"


def test_every_result_is_on_a_page():
    shown = {name for page in PAGES for _, name, _, _ in RESULT.findall(text_of(page))}
    assert shown == {path.name for path in RESULTS.glob("*.txt")}


def test_figures_of_the_readme_stand_in_the_results():
    rows = re.findall(r"^\| .* \| ([\d.,x ]+) \| \[\w+\]\((\S+\.txt)\) \|$", text_of(PAGES[0]), re.MULTILINE)
    assert len(rows) == 5
    for figures, path in rows:
        missing = set(figures.split(", ")) - figures_in((ROOT / path).read_text(encoding="utf-8"))
        assert not missing, f"{path} has no {sorted(missing)}"


def test_contributing_names_every_test_that_asks_for_each_family():
    section = text_of(ROOT / "CONTRIBUTING.md").split("**Add a family of models**")[1].split("**Add a loss")[0]
    asking = re.compile(r"from (megatron_rl\.weights\.families|tests\.kit\.models) import .*\bFAMILIES\b")
    tests = [path for path in (ROOT / "tests").rglob("test_*.py") if asking.search(path.read_text(encoding="utf-8"))]
    assert len(tests) >= 3 and not [path.name for path in tests if f"{path.relative_to(ROOT)}" not in section]
    for path in re.findall(r"`(tests/[\w/.]+\.py)", section):
        assert (ROOT / path).is_file(), path


def test_readme_counts_what_the_tables_of_correctness_show():
    text = text_of(ROOT / "docs" / "correctness.md")
    layouts, families = (re.findall(rf"<!-- proven: {name} -->\n(.*?)<!--", text, re.DOTALL)[0] for name in TABLES)
    same = [row.split("|") for row in layouts.splitlines()[2:]]
    count = sum(len(row[1].split(",")) for row in same if row[2].strip() == "yes")
    assert f"in {count - 1} layouts" in text_of(PAGES[0]), "one process is what the others are compared with"
    count = sum(len(row.split("|")[1].split(",")) for row in families.splitlines()[2:])
    assert f"of {count} model families" in text_of(PAGES[0]).replace("\n", " ")


TABLES = ("layouts", "families")


# -- writing ----------------------------------------------------------------------------------------------------------


def write() -> None:
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        page.write_text(RESULT.sub(lambda it: it[1] + (RESULTS / it[2]).read_text(encoding="utf-8") + it[4], text))


if __name__ == "__main__":
    if sys.argv[1:] != ["--write"]:
        sys.exit("usage: python tests/test_docs.py --write")
    write()
