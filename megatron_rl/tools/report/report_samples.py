"""Renders the report's table of logged samples. Readers can search and sort it offline.

The page contains the samples as JSON, with `<` escaped, and its script inserts them as text nodes only. This way, model
output is never interpreted as markup. A long run's page has samples evenly spread over its steps, and long texts are
cut. A live page asks its server instead, which searches all samples.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megatron_rl.telemetry.run_log import SAMPLES, TEXT
from megatron_rl.tools.report.sample_index import Key, SampleIndex

logger = logging.getLogger(__name__)
SAMPLE_BYTES = 2_000_000
"""Maximum size of a page's samples as JSON. If there are more, only every k-th is kept."""
ROUNDS_BYTES = 600_000
"""Maximum total size of the samples read from the first and last rounds of all evaluations."""
LETTERS = 6_000
"""Maximum characters of a text in a page that cannot contain all texts in full."""
TRAIN = "train"
COLUMNS = ("split", "step", "reward", "prompt", "answer", "reply", "turns")
Row = dict[str, Any]
"""A line of samples.jsonl."""


@dataclass(frozen=True, kw_only=True)
class ShownSamples:
    """The samples of a run that its page shows."""

    rows: list[Row] = field(default_factory=list)
    """Samples that the page's own script can search."""
    logged: int = 0
    """Number of samples in samples.jsonl."""
    rounds: dict[Key, list[Row]] = field(default_factory=dict)
    """Samples of each evaluation's first and last round, by split and step."""
    is_live: bool = False
    """True if the page asks its server to search all samples. Then `rows` is empty."""


def shown_samples(folder: Path) -> ShownSamples:
    """Read the samples that the page of a run shows. Samples that it does not show are not kept in memory."""
    index = SampleIndex(folder / SAMPLES)
    index.update()
    samples = choose_samples(index, is_live=False)
    if index.damaged:
        logger.warning("%s: %d line(s) are damaged and left out", index.path, len(index.damaged))
    return samples


def choose_samples(index: SampleIndex, *, is_live: bool) -> ShownSamples:
    """Choose the samples for a page. A live page contains only those of evaluations."""
    places = index.places()
    whole = sum(map(index.size, places))
    letters = LETTERS if whole > SAMPLE_BYTES else None
    # Texts will be cut, so a long row does not count in full. All turns of a dialogue share the limit of one text.
    kept = sum(min(index.size(it), 2 * LETTERS) for it in places) if letters else whole
    every = -(-kept // SAMPLE_BYTES) or 1
    rounds: dict[Key, list[Row]] = {}
    splits = list(dict.fromkeys(name for name, _ in index.blocks if name != TRAIN))
    for split in splits:
        steps = [step for name, step in index.blocks if name == split]
        for key in dict.fromkeys([(split, min(steps)), (split, max(steps))]):
            first = _first(index, key, ROUNDS_BYTES // (2 * len(splits)))
            rounds[key] = [shortened(row, letters) for row in index.rows(first)]
    rows = [] if is_live else [shortened(row, letters) for row in index.rows(places[::every])]
    return ShownSamples(rows=rows, logged=len(index), rounds=rounds, is_live=is_live)


def _first(index: SampleIndex, key: Key, most_bytes: int) -> list[int]:
    """Return the places of a round's first rows that together fit into `most_bytes`, but at least one place.

    key: the round's split and step.
    """
    places, size = index.places([key]), 0
    for count, place in enumerate(places):
        size += min(index.size(place), 2 * LETTERS)
        if size > most_bytes and count:
            return places[:count]
    return places


def shortened(row: Row, letters: int | None) -> Row:
    """Cut each text of a row to `letters` characters. If `letters` is None, return the row unchanged.

    The turns of a dialogue are cut to `letters` characters in total.
    """
    if letters is None:
        return row
    row = row | {name: _cut(row[name], letters) for name in ("prompt", "answer", "reply")}
    turns, left = [], letters
    for number, turn in enumerate(row.get("turns") or []):
        if left <= 0:
            rest = len(row["turns"]) - number
            turns.append({"by": "others", "text": f"... {rest:,} more turns are in samples.jsonl"})
            break
        turns.append(turn | {"text": _cut(turn["text"], left)})
        left -= len(turn["text"])
    return row | ({"turns": turns} if turns else {})


def _cut(text: str, letters: int) -> str:
    more = len(text) - letters
    return text if more <= 0 else f"{text[:letters]} ... {more:,} more characters are in samples.jsonl"


def samples_section(samples: ShownSamples) -> str:
    """Return the section's HTML, with its data and script; "" if the run has no samples."""
    if not samples.rows and not samples.is_live:
        return ""
    rows = [as_columns(row) for row in samples.rows]
    data = _data(rows)
    while (size := len(data.encode(**TEXT))) > SAMPLE_BYTES and len(rows) > 1:  # escapes make some texts much longer
        rows = rows[:: -(-size // SAMPLE_BYTES)]
        data = _data(rows)
    note = "" if len(rows) == samples.logged else f" of {samples.logged:,} in samples.jsonl"
    count = "all that are logged" if samples.is_live else f"{len(rows):,}{note}"
    names = [TRAIN, *(split for split, _ in samples.rounds)] if samples.is_live else [row[0] for row in rows]
    splits = "".join(f"<option>{name}</option>" for name in ("all", *dict.fromkeys(map(_safe, names))))
    return (
        f"<h2>Samples <small>{count}</small></h2><div class='finder'>"
        "<input id='find' type='search' placeholder='words in prompt, answer or reply' aria-label='words'>"
        f"<select id='split' aria-label='split'>{splits}</select>"
        "<select id='order' aria-label='order'><option value='newest'>newest first</option>"
        "<option value='oldest'>oldest first</option><option value='best'>highest reward</option>"
        "<option value='worst'>lowest reward</option><option value='longest'>longest reply</option></select>"
        "<span id='found'></span></div><div class='scroll'><table class='samples'><thead><tr><th>step</th>"
        "<th>reward</th><th>prompt</th><th>answer</th><th>reply</th></tr></thead>"
        "<tbody id='rows'></tbody></table></div><button id='more'>more</button>"
        f"<script type='application/json' id='samples'>{data}</script><script>{SCRIPT}</script>"
    )


def as_columns(row: Row) -> list[Any]:
    """Return a row as a list in the order of COLUMNS. Training steps count from 1, as in the terminal."""
    split, step = row["split"], row["step"] + (row["split"] == TRAIN)
    return [split, step, *(row[name] for name in ("reward", "prompt", "answer", "reply")), turns_of(row)]


def _data(rows: Sequence[list[Any]]) -> str:
    return json.dumps({"columns": COLUMNS, "rows": rows}, ensure_ascii=False).replace("<", "\\u003c")


def turns_of(sample: dict[str, Any]) -> list[list[str]]:
    """Return [speaker, text] of each turn after the prompt; an empty list for a single reply, which has no turns."""
    turns = [[turn["by"], turn["text"]] for turn in sample.get("turns") or []]
    return turns[1:] if turns and turns[0][0] != "policy" else turns


def _safe(name: object) -> str:
    return "".join(c for c in str(name) if c.isalnum() or c in "_-. ")


SCRIPT = """
(() => {
  const PAGE = 20, get = id => document.getElementById(id);
  const all = JSON.parse(get('samples').textContent).rows;
  const isLive = document.body.dataset.live === 'yes';
  let found = [], shown = 0, asked = 0, told = '';
  const orders = {
    newest: (a, b) => b[1] - a[1], oldest: (a, b) => a[1] - b[1], best: (a, b) => (b[2] ?? -1e9) - (a[2] ?? -1e9),
    worst: (a, b) => (a[2] ?? 1e9) - (b[2] ?? 1e9), longest: (a, b) => said(b).length - said(a).length,
  };
  const said = row => row[6].length ? row[6].map(turn => turn[1]).join('\\n') : row[5];
  const cell = (text, style) => {
    const td = document.createElement('td'), div = document.createElement('div');
    div.className = style; div.textContent = text; td.append(div); return td;
  };
  const dialogue = turns => {
    const td = cell('', 'text');
    for (const [by, text] of turns) {
      const div = document.createElement('div');
      div.className = by === 'policy' ? 'turn policy' : 'turn others';
      div.textContent = text; td.firstChild.append(div);
    }
    return td;
  };
  const more = () => {
    for (const [split, step, reward, prompt, answer, reply, turns] of found.slice(shown, shown + PAGE)) {
      const row = document.createElement('tr');
      const grade = reward === null ? 'none' : reward >= 0.999 ? 'good' : reward <= 0 ? 'bad' : 'part';
      row.append(cell(split === 'train' ? step : `${split} ${step}`, 'note'),
        cell(reward === null ? '–' : +reward.toFixed(3), 'reward ' + grade),
        cell(prompt, 'text'), cell(answer, 'text'), turns.length ? dialogue(turns) : cell(reply, 'text'));
      get('rows').append(row);
    }
    shown = Math.min(shown + PAGE, found.length);
    get('found').textContent = told || `${found.length} found`;
    get('more').hidden = shown >= found.length;
  };
  const search = () => {
    const words = get('find').value.toLowerCase().split(/\\s+/).filter(Boolean), split = get('split').value;
    found = all.filter(row => (split === 'all' || row[0] === split) &&
      words.every(word => [row[3], row[4], said(row)].some(text => text.toLowerCase().includes(word))));
    found.sort(orders[get('order').value]);
    get('rows').replaceChildren(); shown = 0; more();
  };
  const ask = async () => {
    const mine = ++asked;
    const query = new URLSearchParams(['find', 'split', 'order'].map(id => [id, get(id).value]));
    const answer = await fetch('/samples.json?' + query);
    if (!answer.ok) return;
    const { rows, note } = await answer.json();
    if (mine !== asked) return;  // another question was asked meanwhile
    found = rows; told = note;
    get('rows').replaceChildren(); shown = 0; more();
  };
  const begin = isLive ? ask : search;
  for (const id of ['find', 'split', 'order']) get(id).addEventListener('input', begin);
  if (isLive) document.addEventListener('fresh', () => { if (shown <= PAGE) ask(); });
  get('more').addEventListener('click', more);
  begin();
})();
"""
