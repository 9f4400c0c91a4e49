"""Draws charts as inline SVG. Colours and fonts are the page's CSS classes, so a chart suits light and dark mode."""

from __future__ import annotations

import html
import math
from collections.abc import Sequence
from dataclasses import dataclass

LEFT, RIGHT, TOP, BOTTOM = 54, 12, 10, 24
"""Margins in pixels for the axis labels."""
HOVER_POINTS = 50
"""Maximum hover points per curve. More would make a long run's page megabytes larger."""
COLUMN = 2
"""Width in pixels of the columns into which a long curve is divided. Each shows its lowest and highest value."""
TINY = 1e-290
"""Smaller axis ranges count as 0, because the power of ten of their tick step would underflow a float."""
LONG_CURVE = 30
"""Curves with at least this many points are shown with their moving average."""
NOTHING = '<p class="empty">no values</p>'


@dataclass(frozen=True, kw_only=True)
class Series:
    """Points of one curve; a y of None is a gap. style: line, dashed, faint or marker, plus a colour c0 to c7.

    For example:

        scores = Series(x=[0, 10, 20], y=[0.25, None, 0.5], style="marker c1", label="held-out accuracy")
        page = line_chart([Series(x=[0, 1, 2], y=[0.1, 0.2, 0.4]), scores], title="Reward by step")
    """

    x: Sequence[float]
    y: Sequence[float | None]
    style: str = "line c0"
    label: str = ""

    @property
    def points(self) -> list[tuple[float, float]]:
        return [(x, y) for x, y in zip(self.x, self.y, strict=True) if y is not None]


@dataclass(frozen=True, kw_only=True)
class Frame:
    """Maps data coordinates to pixels of a chart of `width` x `height`, and draws its axes."""

    width: int
    height: int
    x_ticks: list[float]
    y_ticks: list[float]
    x_range: tuple[float, float]

    def x(self, value: float) -> float:
        low, high = self.x_range
        return LEFT + (value - low) / ((high - low) or 1) * (self.width - LEFT - RIGHT)

    def y(self, value: float) -> float:
        low, high = self.y_ticks[0], self.y_ticks[-1]
        return self.height - BOTTOM - (value - low) / ((high - low) or 1) * (self.height - TOP - BOTTOM)

    def axes(self) -> str:
        parts = []
        for tick in self.y_ticks:
            y, label = f"{self.y(tick):.1f}", tick_label(tick, self.y_ticks[1] - self.y_ticks[0])
            parts.append(f'<line class="grid" x1="{LEFT}" x2="{self.width - RIGHT}" y1="{y}" y2="{y}"/>')
            parts.append(f'<text class="tick" x="{LEFT - 6}" y="{y}" dy="0.35em" text-anchor="end">{label}</text>')
        return "".join(parts) + self.x_axis()

    def x_axis(self) -> str:
        return "".join(
            f'<text class="tick" x="{self.x(tick):.1f}" y="{self.height - 6}" text-anchor="middle">{short(tick)}</text>'
            for tick in self.x_ticks
        )


def line_chart(series: list[Series], *, width: int = 340, height: int = 170, title: str, y_zero: bool = False) -> str:
    """Draw curves by step. title: text for screen readers. y_zero: True if the y axis must include 0."""
    points = [point for one in series for point in one.points]
    if not points:
        return NOTHING
    xs, ys = [x for x, _ in points], [y for _, y in points]
    low = min(0.0, *ys) if y_zero else min(ys)
    frame = Frame(
        width=width,
        height=height,
        x_ticks=whole_ticks(min(xs), max(xs)),
        y_ticks=ticks(low, max(ys)),
        x_range=(min(xs), max(xs)),
    )
    body = frame.axes() + "".join(draw_series(one, frame) for one in series)
    return svg(body, width, height, title)


def draw_series(series: Series, frame: Frame) -> str:
    if "marker" in series.style:
        return "".join(
            f'<circle class="{series.style}" cx="{frame.x(x):.1f}" cy="{frame.y(y):.1f}" r="4.5">'
            f"<title>{html.escape(series.label)} after {short(x)} steps: {short(y)}</title></circle>"
            for x, y in series.points
        )
    if len(series.points) == 1:
        x, y = series.points[0]
        return f'<circle class="dot {series.style}" cx="{frame.x(x):.1f}" cy="{frame.y(y):.1f}" r="2.5"/>'
    path, pen_is_up = [], True
    for place, value in without_crowds(series, frame):
        if value is not None:
            path.append(f"{'M' if pen_is_up else 'L'}{frame.x(place):.1f} {frame.y(value):.1f}")
        pen_is_up = value is None
    return f'<path class="{series.style}" d="{" ".join(path)}"/>{hover_points(series, frame)}'


def without_crowds(series: Series, frame: Frame) -> list[tuple[float, float | None]]:
    """Return a curve's points. Of a long curve, keep only the lowest and the highest point in each COLUMN pixels.

    The curve looks the same, and an outlier of one step remains. A column without any value is a gap.
    """
    points = list(zip(series.x, series.y, strict=True))
    if len(points) <= (frame.width - LEFT - RIGHT) * 2 // COLUMN:
        return points
    columns: dict[int, list[tuple[float, float | None]]] = {}
    for x, y in points:
        columns.setdefault(int(frame.x(x) // COLUMN), []).append((x, y))
    kept: list[tuple[float, float | None]] = []
    for inside in columns.values():
        known = [(y, x) for x, y in inside if y is not None]
        kept += sorted({(x, y) for y, x in (min(known), max(known))}) if known else [inside[0]]
    return kept


def hover_points(series: Series, frame: Frame) -> str:
    """Draw about HOVER_POINTS invisible points that show their values on hover. Faint and dashed curves get none."""
    if "faint" in series.style or "dashed" in series.style:
        return ""
    color, points = series.style.split()[-1], series.points
    # -(-a // b) rounds up. A curve without points would make it 0, which is no valid slice step.
    return "".join(
        f'<circle class="hover {color}" cx="{frame.x(x):.1f}" cy="{frame.y(y):.1f}" r="5">'
        f"<title>step {short(x)}: {y:.4g}</title></circle>"
        for x, y in points[:: -(-len(points) // HOVER_POINTS) or 1]
    )


def stacked_bars(
    bars: list[dict[str, float]], x: list[float], order: list[str], *, width: int, height: int, title: str
) -> str:
    """Draw one stacked bar per entry of `x`.

    bars: {part: size} of each bar. order: the parts from bottom to top; number i of these has the colour c<i % 8>.
    """
    frame = frame_of_bars(x, ticks(0.0, max(sum(bar.values()) for bar in bars)), width=width, height=height)
    slot = (width - LEFT - RIGHT) / len(bars)
    thick = min(max(slot * 0.8, 1.0), 48.0)
    parts = [frame.axes()]
    for place, bar in zip(x, bars, strict=True):
        centre, bottom = frame.x(place), 0.0
        for number, name in enumerate(order):
            value = bar.get(name, 0.0)
            if value > 0:
                top, base = frame.y(bottom + value), frame.y(bottom)
                parts.append(
                    f'<rect class="fill c{number % 8}" x="{centre - thick / 2:.1f}" y="{top:.1f}" width="{thick:.1f}" '
                    f'height="{base - top:.1f}"><title>{html.escape(name)}, step {short(place)}: {value:.2f} s</title>'
                    "</rect>"
                )
                bottom += value
    return svg("".join(parts), width, height, title)


def stacked_areas(
    areas: list[tuple[str, Sequence[float]]],
    x: Sequence[float],
    *,
    width: int,
    height: int,
    title: str,
    mark: str,
    spans: Sequence[tuple[float, str]] = (),
) -> str:
    """Draw areas over `x`, stacked from the bottom up.

    areas: (name, one value per entry of `x`) of each area. mark: hover text of the point where the areas' sum is
    highest. spans: (start, name) of labelled sections of x.
    """
    totals = [sum(values) for values in zip(*(values for _, values in areas), strict=True)]
    if not totals:
        return NOTHING
    frame = Frame(
        width=width,
        height=height,
        x_ticks=whole_ticks(min(x), max(x)),
        y_ticks=ticks(0.0, max(totals)),
        x_range=(min(x), max(x)),
    )
    parts, below = [], [0.0] * len(totals)
    for number, (name, values) in enumerate(areas):
        below = [low + value for low, value in zip(below, values, strict=True)]
        edge = " ".join(f"{frame.x(place):.1f},{frame.y(value):.1f}" for place, value in zip(x, below, strict=True))
        path = f"{frame.x(x[0]):.1f},{frame.y(0):.1f} {edge} {frame.x(x[-1]):.1f},{frame.y(0):.1f}"
        label = f"<title>{html.escape(name)}</title>"
        parts.append(f'<polygon class="fill c{number % 8}" points="{path}">{label}</polygon>')
    parts = [*reversed(parts), frame.axes()]  # every area reaches down to 0, so draw the lower ones on top
    parts += [
        f'<line class="grid" x1="{frame.x(place):.1f}" x2="{frame.x(place):.1f}" y1="{TOP}" y2="{height - BOTTOM}"/>'
        f'<text class="tick" x="{frame.x(place) + 4:.1f}" y="{TOP + 10}">{html.escape(name)}</text>'
        for place, name in spans
    ]
    top = totals.index(max(totals))
    at = f'{frame.x(x[top]):.1f}" cy="{frame.y(totals[top]):.1f}'
    parts.append(f'<circle class="peak" cx="{at}" r="4.5"><title>{html.escape(mark)}</title></circle>')
    return svg("".join(parts), width, height, title)


def bars(rows: list[tuple[str, float, str, str]], *, width: int, title: str) -> str:
    """Draw one horizontal bar per row. A row is (name, value, value as text, colour class)."""
    if not rows:
        return NOTHING
    start, line = width * 0.55, 22
    room, most = width - start - 110, max(value for _, value, _, _ in rows) or 1
    parts = []
    for number, (name, value, written, color) in enumerate(rows):
        y = 4 + number * line
        long = max(room * value / most, 1)
        parts.append(
            f'<text class="tick" x="{start - 8:.0f}" y="{y + 12}" text-anchor="end">{html.escape(name)}</text>'
        )
        parts.append(f'<rect class="fill {color}" x="{start:.0f}" y="{y}" width="{long:.1f}" height="16"/>')
        parts.append(f'<text class="tick" x="{start + long + 6:.1f}" y="{y + 12}">{html.escape(written)}</text>')
    return svg("".join(parts), width, 8 + len(rows) * line, title)


def heat_map(
    columns: list[dict[str, float]], x: list[float], classes: list[str], *, width: int, height: int, title: str
) -> str:
    """Draw one column of cells per entry of `x`, in which darker cells have larger shares.

    columns: {class: its share in [0, 1]} of each column. classes: the names of the rows from bottom to top. The y axis
    shows only a name's first word, which is the lowest value of the class.
    """
    frame = frame_of_bars(x, [0.0, float(len(classes))], width=width, height=height)
    thick = (width - LEFT - RIGHT) / len(columns)
    tall = (height - TOP - BOTTOM) / len(classes)
    parts = [frame.x_axis()]
    for row, name in enumerate(classes):
        y, label = frame.y(row + 0.5), html.escape(name)
        # If there are many classes, skip labels that would overlap.
        if row % -(-len(classes) // 10) == 0:
            lowest = html.escape(name.partition(" ")[0])
            parts.append(f'<text class="tick" x="{LEFT - 6}" y="{y:.1f}" dy="0.35em" text-anchor="end">{lowest}</text>')
        for place, column in zip(x, columns, strict=True):
            share = column.get(name, 0.0)
            if share > 0:
                # Opacity starts at 0.06, so that a rare class is still visible.
                parts.append(
                    f'<rect class="fill c0" x="{frame.x(place) - thick / 2:.1f}" y="{y - tall / 2:.1f}" '
                    f'width="{thick:.1f}" height="{tall:.1f}" fill-opacity="{0.06 + 0.94 * share:.2f}">'
                    f"<title>{label}, step {short(place)}: {share:.1%}</title></rect>"
                )
    return svg("".join(parts), width, height, title)


def frame_of_bars(x: list[float], y_ticks: list[float], *, width: int, height: int) -> Frame:
    """Return the frame of a bar chart with bars centred at `x`. Adds half a bar of space at both ends."""
    half = 0.5 * ((max(x) - min(x)) / (len(x) - 1) if len(x) > 1 else 1.0)
    x_range = (min(x) - half, max(x) + half)
    return Frame(width=width, height=height, x_ticks=whole_ticks(min(x), max(x)), y_ticks=y_ticks, x_range=x_range)


def svg(body: str, width: int, height: int, title: str) -> str:
    name = html.escape(title, quote=True)
    size = "wide" if width > 600 else "half" if width > 400 else "small"  # CSS enlarges the text of wide ones on phones
    return f'<svg class="{size}" viewBox="0 0 {width} {height}" role="img" aria-label="{name}">{body}</svg>'


def ticks(low: float, high: float, wanted: int = 4) -> list[float]:
    """Return about `wanted` + 1 round numbers at even distances that enclose [low, high].

    If low equals high, the numbers also enclose 0.
    """
    if high - low <= max(1e-6 * max(abs(low), abs(high)), TINY):  # differences of rounding only
        low, high = min(0.0, low), max(0.0, high)
        high = high if high - low > TINY else 1.0
    raw = (high - low) / wanted
    magnitude = 10.0 ** math.floor(math.log10(raw))
    # 0.999 and 1e-9 tolerate rounding: 0.1 / 4 must give the step 0.025, without an extra tick.
    step = next(m for m in (1, 2, 2.5, 5, 10) if m * magnitude >= raw * 0.999) * magnitude
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [i * step for i in range(first, last + 1)]


def whole_ticks(low: float, high: float, wanted: int = 6) -> list[float]:
    """Return whole-number ticks inside [low, high], for axes that count steps."""
    step = max(1, math.ceil((high - low) / wanted))
    magnitude = 10 ** (len(str(step)) - 1)
    step = next(m for m in (1, 2, 5, 10) if m * magnitude >= step) * magnitude
    return [float(i) for i in range(math.ceil(low / step) * step, math.floor(high) + 1, step)]


def short(value: float) -> str:
    """Format a number in few characters: 0.25, 12, 34k, 1e-05."""
    if value == 0:
        return "0"
    if abs(value) >= 10_000:
        for limit, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
            if abs(value) >= limit:
                return f"{value / limit:.3g}{unit}"
    return f"{value:.0f}" if float(value).is_integer() or abs(value) >= 1000 else f"{value:.3g}"


def tick_label(value: float, step: float) -> str:
    """Format a tick like `short`, but with enough decimals to tell it from the next tick (0.99998, 1.00000)."""
    return f"{value:.{-math.floor(math.log10(step))}f}" if step < 1e-2 * abs(value) and step < 1 else short(value)


def smooth(values: Sequence[float | None], weight: float = 0.85) -> list[float | None]:
    """Return the exponential moving average with bias correction, as in Adam. Gaps (None) stay gaps."""
    total = norm = 0.0  # `norm` is the total weight of all values so far; it approaches 1
    result: list[float | None] = []
    for value in values:
        if value is None:
            result.append(None)
            continue
        total, norm = weight * total + (1 - weight) * value, weight * norm + (1 - weight)
        result.append(total / norm)
    return result
