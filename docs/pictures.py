"""Draws the pictures of README and docs: python docs/pictures.py [RUN], the folder of a finished `make demo`.

Needs matplotlib. All but demo.svg need no run. demo.svg shows what benchmarks/results/demo.txt lists, a line for each
step. With RUN that list is written first.
"""

from __future__ import annotations

import json
import platform
import subprocess
import sys
from pathlib import Path

import matplotlib
from matplotlib.axes import Axes
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch

HERE = Path(__file__).resolve().parent
DEMO = HERE.parent / "benchmarks" / "results" / "demo.txt"
COMMAND = "python -m megatron_rl.launch configs/demo.yaml rollout.backend=embedded, as `make demo` does"
INK, SOFT = "#1f2933", "#5c6b7a"
BLUE, GREEN, AMBER, RED, GREY = "#dbe9f9", "#dff3e4", "#fdf0d0", "#f9dddd", "#eef1f4"


def canvas(width: float, height: float) -> tuple[Figure, Axes]:
    """Return an empty figure of so many inches whose axes count in hundredths of an inch."""
    figure = Figure(figsize=(width, height))
    FigureCanvasSVG(figure)
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set_xlim(0, width * 100)
    axes.set_ylim(0, height * 100)
    axes.axis("off")
    return figure, axes


def box(axes: Axes, x: float, y: float, width: float, height: float, title: str, text: str, color: str) -> None:
    """Draw a box from its lower left corner."""
    style = "round,pad=0,rounding_size=9"
    axes.add_patch(FancyBboxPatch((x, y), width, height, boxstyle=style, facecolor=color, edgecolor=INK, linewidth=1.1))
    middle = x + width / 2
    if text:
        axes.text(middle, y + height - 11, title, ha="center", va="top", fontsize=11, weight="bold", color=INK)
        axes.text(middle, y + height - 31, text, ha="center", va="top", fontsize=9, color=INK, linespacing=1.45)
    else:
        axes.text(middle, y + height / 2, title, ha="center", va="center", fontsize=10.5, weight="bold", color=INK)


def arrow(
    axes: Axes,
    start: tuple[float, float],
    end: tuple[float, float],
    text: str,
    at: tuple[float, float],
    *,
    bend: float = 0.0,
    dashed: bool = False,
) -> None:
    """Draw an arrow with its words at a place of their own."""
    style = "--" if dashed else "-"
    axes.add_patch(
        FancyArrowPatch(
            start,
            end,
            connectionstyle=f"arc3,rad={bend}",
            arrowstyle="-|>",
            mutation_scale=14,
            linestyle=style,
            linewidth=1.4,
            color=INK,
            shrinkA=0,
            shrinkB=0,
        )
    )
    axes.text(*at, text, ha="center", va="center", fontsize=9, color=SOFT, style="italic", linespacing=1.3)


def data_flow() -> Figure:
    """Trainer ranks, rollout process and servers, with the arrows of prompts, trajectories and weights."""
    figure, axes = canvas(8.8, 3.7)
    box(axes, 10, 190, 215, 160, "Trainer ranks", "Megatron-Core\nTP, PP, CP, EP, DP\nadvantages, loss, update", BLUE)
    box(axes, 335, 190, 215, 160, "Rollout process", "one for each data rank\nworkflows, admission\njournal", GREEN)
    box(axes, 655, 190, 215, 160, "Rollout servers", "SGLang on GPUs\nembedded server on CPU", AMBER)
    box(axes, 335, 20, 215, 75, "Reward workers", "killed at their deadline", GREY)
    arrow(axes, (225, 310), (335, 310), "asks for\ngroups", (280, 333))
    arrow(axes, (335, 240), (225, 240), "trajectories", (280, 228))
    arrow(axes, (550, 310), (655, 310), "prompts\n(token ids)", (602, 333))
    arrow(axes, (655, 240), (550, 240), "replies", (602, 228))
    arrow(axes, (415, 190), (415, 95), "replies", (385, 142))
    arrow(axes, (470, 95), (470, 190), "rewards", (500, 142))
    axes.plot([117, 117, 762], [190, 8, 8], color=INK, linewidth=1.4)
    arrow(axes, (762, 7), (762, 190), "new weights after each step,\nchecked by their checksums", (660, 42))
    return figure


def group_states() -> Figure:
    """The states of one group, from its prompt to the update."""
    figure, axes = canvas(8.8, 2.5)
    names = [("queued", GREY), ("running", GREEN), ("finished", GREEN), ("trained", BLUE)]
    for number, (name, color) in enumerate(names):
        box(axes, 15 + number * 240, 150, 130, 52, name, "", color)
    arrow(axes, (145, 176), (255, 176), "admitted", (200, 189))
    arrow(axes, (385, 176), (495, 176), "all replies\nhave rewards", (440, 199))
    arrow(axes, (625, 176), (735, 176), "taken by\na batch", (680, 199))
    box(axes, 255, 20, 130, 52, "given up", "", RED)
    arrow(axes, (320, 150), (320, 72), "every attempt failed,\nor rejected", (395, 88))
    axes.plot([560, 560, 80], [150, 118, 118], color=INK, linewidth=1.2, linestyle="--")
    words = "too old, or the step was full:\nits prompt is first in the queue"
    arrow(axes, (80, 117), (80, 150), words, (160, 97), dashed=True)
    return figure


def server_states() -> Figure:
    """The states of one server in a client: servers/membership.py."""
    figure, axes = canvas(8.8, 3.0)
    box(axes, 20, 210, 150, 52, "serving", "", GREEN)
    box(axes, 20, 30, 150, 52, "lost", "", RED)
    box(axes, 365, 30, 150, 52, "behind", "", AMBER)
    box(axes, 700, 30, 150, 52, "catching up", "", BLUE)
    arrow(axes, (35, 210), (35, 82), "a call or a\npublication\nfailed", (78, 146))
    arrow(axes, (130, 82), (130, 210), "generates\nas before", (168, 128))
    arrow(axes, (170, 68), (365, 68), "answers, was started anew\nor dropped", (268, 90))
    arrow(axes, (365, 44), (170, 44), "no answer", (268, 32))
    arrow(axes, (515, 68), (700, 68), "somebody has the\ncurrent weights", (608, 90))
    arrow(axes, (700, 44), (515, 44), "failed, or a\npublication began", (608, 26))
    arrow(axes, (420, 82), (170, 222), "took part in a publication", (440, 158), bend=0.15)
    arrow(axes, (775, 82), (170, 246), "has the current weights, and generates", (700, 232), bend=0.2)
    return figure


def retries() -> Figure:
    """Who tries again after what: rollout/executor.py."""
    figure, axes = canvas(8.8, 3.5)
    rows = [
        ("one HTTP request", "another server, 4 times: SamplingClient", "tokens so far", GREEN),
        ("one sample", "this sample alone, episode_attempts times: EpisodeEngine", "its replies", GREEN),
        ("the episode", "the whole workflow, episode_attempts times: RolloutExecutor", "its replies", AMBER),
        ("the prompt", "nobody: it is given up, counted and written to the dead letters", "", RED),
    ]
    for number, (what, who, kept, color) in enumerate(rows):
        y = 282 - 84 * number
        box(axes, 20, y, 205, 50, f"{what} failed" if color != RED else f"{what} has failed", "", color)
        axes.text(245, y + 25, who, ha="left", va="center", fontsize=10, color=INK)
        if kept:
            axes.text(860, y + 25, f"kept: {kept}", ha="right", va="center", fontsize=9.5, color=SOFT, style="italic")
            arrow(axes, (115, y), (115, y - 34), "still fails", (155, y - 17))
    return figure


def write_demo(run: Path) -> None:
    """List what a run of the demo measured: reward, held-out accuracy and length by step."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=True)
    text = [f"$ {COMMAND}", f"SmolLM2-135M, single-digit addition; {cpu()}, commit {commit.stdout.strip()}", ""]
    text.append("step  mean reward  held-out accuracy")
    rewards = {line["step"] + 1: line["reward/mean"] for line in lines if line["kind"] == "step"}
    scores = {line["step"]: line["accuracy"] for line in lines if line["kind"] == "evaluation"}
    for step in sorted(rewards.keys() | scores.keys()):
        reward, score = (f"{found[step]:.3f}" if step in found else "-" for found in (rewards, scores))
        text.append(f"{step:4}  {reward:>11}  {score:>17}")
    DEMO.write_text("\n".join(text) + "\n", encoding="utf-8")


def cpu() -> str:
    names = [line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")]
    name = " ".join(names[0].split(":")[1].split()[:2]) if names else platform.machine()
    return f"{len(names)} cores of {name}"


def demo() -> Figure:
    """Reward and held-out accuracy of the demo by step."""
    rows = [line.split() for line in DEMO.read_text(encoding="utf-8").splitlines() if line[:4].strip().isdigit()]
    figure = Figure(figsize=(6.4, 2.9), layout="constrained")
    FigureCanvasSVG(figure)
    axes = figure.add_subplot()
    rewards = [(int(step), float(reward)) for step, reward, _ in rows if reward != "-"]
    scores = [(int(step), float(score)) for step, _, score in rows if score != "-"]
    axes.plot(*zip(*rewards, strict=True), marker="o", markersize=3, color="#2f6fb7", label="mean reward of the step")
    axes.plot(*zip(*scores, strict=True), marker="s", color="#2f8f4e", linestyle="--", label="held-out sums, greedy")
    axes.set_xlabel("step")
    axes.set_ylim(0, 1)
    axes.grid(alpha=0.3)
    axes.legend(loc="lower right", frameon=False)
    return figure


def main(arguments: list[str]) -> None:
    matplotlib.rcParams |= {"svg.hashsalt": "megatron_rl", "svg.fonttype": "none", "font.family": "sans-serif"}
    if arguments:
        write_demo(Path(arguments[0]))
    for draw in (data_flow, group_states, server_states, retries, demo):
        if draw is not demo or DEMO.is_file():
            draw().savefig(HERE / f"{draw.__name__}.svg", metadata={"Date": None})


if __name__ == "__main__":
    main(sys.argv[1:])
