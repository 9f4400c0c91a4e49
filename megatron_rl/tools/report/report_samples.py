"""Renders the report's table of logged samples. Readers can search and sort it offline.

The page contains the samples as JSON, with `<` escaped, and its script inserts them as text nodes only. This way, model
output is never interpreted as markup.
"""

from __future__ import annotations

import json
from typing import Any

from megatron_rl.telemetry.run_log import RunRecord

TEXT_BUDGET = 4_000_000
"""Approximate maximum of sample characters in a page. Above it, only every k-th sample is kept."""
COLUMNS = ("split", "step", "reward", "prompt", "answer", "reply", "turns")


def samples_section(run: RunRecord) -> str:
    """Return the section's HTML, with its data and script; "" if the run has no samples."""
    rows = [
        [
            split,
            step + (split == "train"),  # the terminal counts training steps from 1
            *(sample[name] for name in ("reward", "prompt", "answer", "reply")),
            turns_of(sample),
        ]
        for (split, step), samples in sorted(run.samples.items())
        for sample in samples
    ]
    if not rows:
        return ""
    kept = thin_out(rows)
    note = "" if len(kept) == len(rows) else f" of {len(rows):,} in samples.jsonl"
    data = json.dumps({"columns": COLUMNS, "rows": kept}, ensure_ascii=False).replace("<", "\\u003c")
    splits = "".join(f"<option>{name}</option>" for name in ("all", *dict.fromkeys(_safe(row[0]) for row in kept)))
    return (
        f"<h2>Samples <small>{len(kept):,}{note}</small></h2><div class='finder'>"
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


def turns_of(sample: dict[str, Any]) -> list[list[str]]:
    """Return [speaker, text] of each turn after the prompt. Empty for samples without turns, such as single replies."""
    turns = [[turn["by"], turn["text"]] for turn in sample.get("turns") or []]
    return turns[1:] if turns and turns[0][0] != "policy" else turns


def thin_out(rows: list[list[object]]) -> list[list[object]]:
    """Return every k-th sample, with the smallest k for which 1/k of the text fits into TEXT_BUDGET."""
    size = sum(len(str(cell)) for row in rows for cell in row)
    every = -(-size // TEXT_BUDGET) or 1
    return rows if every == 1 else rows[::every]


def _safe(name: object) -> str:
    return "".join(c for c in str(name) if c.isalnum() or c in "_-. ")


SCRIPT = """
(() => {
  const PAGE = 20, get = id => document.getElementById(id);
  const all = JSON.parse(get('samples').textContent).rows;
  let found = [], shown = 0;
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
    get('found').textContent = `${found.length} found`;
    get('more').hidden = shown >= found.length;
  };
  const search = () => {
    const words = get('find').value.toLowerCase().split(/\\s+/).filter(Boolean), split = get('split').value;
    found = all.filter(row => (split === 'all' || row[0] === split) &&
      words.every(word => [row[3], row[4], said(row)].some(text => text.toLowerCase().includes(word))));
    found.sort(orders[get('order').value]);
    get('rows').replaceChildren(); shown = 0; more();
  };
  for (const id of ['find', 'split', 'order']) get(id).addEventListener('input', search);
  get('more').addEventListener('click', more);
  search();
})();
"""
