"""docs/options.md has every option as it is now."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_rl.cli import main
from megatron_rl.tools.option_pages import BEGIN, END, described_options, options_markdown, options_text

PAGE = (Path(__file__).parents[1] / "docs" / "options.md").read_text(encoding="utf-8")
KEYS = {option.dotted for option in described_options()}


def test_the_page_is_what_the_command_writes():
    generated = PAGE.split(BEGIN)[1].split(END)[0]
    assert generated.strip() == options_markdown().strip(), "run megatron-rl options --write docs/options.md"


def test_a_section_a_key_and_everything_can_be_printed(capsys):
    main(["options", "batch"])
    printed = capsys.readouterr().out
    text = next(option.doc for option in described_options() if option.dotted == "batch.prompts_per_step")
    assert f"batch.prompts_per_step = 64 (int)\n  {text[:30]}" in printed and "algo." not in printed
    assert options_text("algo.clip_low").startswith("algo.clip_low = 0.2 (float)")
    everything = options_text()
    assert all(f"{key} " in everything for key in KEYS)


def test_an_unknown_section_is_answered_with_the_nearest():
    with pytest.raises(ValueError, match=r"options algos: no such section or key; did you mean algo\?"):
        options_text("algos")


def test_only_a_page_with_the_marks_is_rewritten(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("nothing")
    with pytest.raises(SystemExit, match="has no lines <!-- options --> and <!-- end -->"):
        main(["options", "--write", str(page)])
    assert page.read_text() == "nothing"
