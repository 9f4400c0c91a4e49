"""The page of `megatron-rl watch`: one self-contained file that polls state.json.

Model output is inserted as text nodes only, never as HTML.
"""

from megatron_rl.tools.report.report_css import STYLE

SCRIPT = """
const EVERY_MS = 2000;
const SVG = "http://www.w3.org/2000/svg";
let hasEnded = false;
const byId = (id) => document.getElementById(id);
function make(tag, text, ...children) {
  const made = document.createElement(tag);
  if (text !== "") made.textContent = String(text);
  made.append(...children);
  return made;
}
function row(cells, tag) { return make("tr", "", ...cells.map((cell) => make(tag || "td", cell))); }
function table(id, heads, rows, none) {
  const body = rows.length ? rows.map((cells) => row(cells)) : [row([none])];
  byId(id).replaceChildren(row(heads, "th"), ...body);
  byId(id + "-part").hidden = hasEnded && !rows.length;  // nothing more will come
}
function short(number) {
  if (number === null || number === undefined) return "";
  return Math.abs(number) >= 1000 ? Math.round(number).toLocaleString("en") : String(Math.round(number * 1000) / 1000);
}
function clock(seconds) {
  const whole = Math.round(seconds), rest = String(whole % 60).padStart(2, "0");
  return whole < 60 ? whole + " s" : Math.floor(whole / 60) + ":" + rest + " min";
}
function chart(id, steps, values) {
  const known = steps.map((step, n) => [step, values[n]]).filter(([, value]) => value !== null);
  const all = known.map(([, value]) => value), low = Math.min(...all), high = Math.max(...all);
  const first = known.length ? known[0][0] : 0, last = known.length ? known[known.length - 1][0] : 0;
  const x = (step) => 4 + 292 * (step - first) / Math.max(1, last - first);
  const y = (value) => 76 - 72 * (value - low) / (high - low || 1);
  const line = document.createElementNS(SVG, "path");
  line.setAttribute("d", known.map(([s, v], n) => (n ? "L" : "M") + x(s).toFixed(1) + " " + y(v).toFixed(1)).join(""));
  byId(id).replaceChildren(line);
  const newest = known.length ? short(all[all.length - 1]) + " (step " + last + "), " : "";
  byId(id + "-words").textContent = newest + (known.length ? short(low) + " to " + short(high) : "no value yet");
}
function show(state) {
  byId("name").textContent = state.run;
  byId("state").textContent = state.state;
  byId("state").className = "badge " + state.state;
  byId("about").textContent = state.about;
  hasEnded = state.state === "ended";
  byId("after").hidden = !hasEnded;
  const { steps } = state;
  chart("reward", steps.step, steps.reward);
  chart("staleness", steps.step, steps.staleness);
  chart("speed", steps.step, steps.tokens_per_s);
  table("episodes", ["state", "episodes"], Object.entries(state.episodes), "no rollout process has told yet");
  table("failures", ["kind", "times"], Object.entries(state.failures), "none");
  const servers = state.servers.map((it) => [it.url, it.state, it.calls, it.weights || "", it.failures, it.trouble]);
  table("servers", ["server", "state", "requests", "weights", "failures", "trouble"], servers, "none is known");
  const slow = state.slowest.map((it) => {
    const turns = it.turns.map((turn) => "[" + turn.tokens + " tokens] .." + turn.text).join("\\n");
    return [it.prompt, clock(it.seconds), it.version, it.replies, turns];
  });
  table("slowest", ["prompt", "for", "since version", "replies", "last turns"], slow, "none is under way");
  const lost = state.lost.map((it) => [it.time, it.error]);
  table("lost", ["when", "error"], lost, "none");
}
async function ask() {
  try {
    const answer = await fetch("state.json");
    if (!answer.ok) throw new Error("status " + answer.status);
    show(await answer.json());
    byId("gone").textContent = "";
  } catch (error) {
    byId("gone").textContent = "megatron-rl watch does not answer (" + error.message + "); start it again.";
  }
  setTimeout(ask, EVERY_MS);
}
ask();
"""
OWN_STYLE = """
table{border-collapse:collapse;width:100%;font-size:13px}
th,td{text-align:left;vertical-align:top;padding:4px 10px 4px 0;border-bottom:1px solid var(--rule);
white-space:pre-wrap;overflow-wrap:anywhere}
th:first-child,td:first-child{padding-left:12px}
.badge.running{color:var(--good)}.badge.silent,#gone{color:var(--bad)}
"""


def chart(name: str, title: str) -> str:
    return (
        f'<figure class="c0"><figcaption>{title}: <span id="{name}-words"></span></figcaption>'
        f'<svg id="{name}" viewBox="0 0 300 80" role="img" aria-label="{title}"></svg></figure>'
    )


def section(name: str, title: str) -> str:
    return f'<section id="{name}-part"><h2>{title}</h2><div class="scroll"><table id="{name}"></table></div></section>'


PAGE = f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width,initial-scale=1">
<title>megatron-rl watch</title><link rel="icon" href="data:,"><style>{STYLE}{OWN_STYLE}</style></head><body><main>
<h1><span id="name"></span> <small><b id="state"></b> <span id="about"></span></small></h1><p id="gone"></p>
<p id="after" hidden>The run has ended.</p>
<p>Replies, all metrics and times are in the <a href="report">report</a>.</p>
<div class="grid-of-charts">{chart("reward", "Reward by step")}{chart("staleness", "Staleness (versions)")}
{chart("speed", "Generated tokens per second")}</div>
{section("episodes", "Episodes by state")}{section("slowest", "Slowest episodes")}{section("servers", "Servers")}
{section("failures", "Failures by kind")}{section("lost", "Prompts given up, the last ones")}
</main><script>{SCRIPT}</script></body></html>
"""
