"""The learning curve of a run as one self-contained SVG file: reward on top, length and time below.

Reads the rows of `metrics.jsonl` with verl's metric names. Follows the reader's light or dark setting.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

from rlflow.backends.visualizers.axes import Point, ticks, widen
from rlflow.backends.visualizers.palette import BLUE, GREEN, ORANGE, PURPLE, SKY, VERMILION

REWARD = ("critic/score/mean", "critic/rewards/mean")
LENGTH = ("response_length/mean",)
SECONDS = ("timing_s/step", "perf/time_per_step")


def is_drawn(name: str) -> bool:
    """Whether the picture reads a metric."""
    return name in (*REWARD, *LENGTH, *SECONDS) or name.startswith("val/")


MAX_POINTS = 400
"""Points drawn per line; above, each is the mean of its neighbours and the band shows their range."""

_WIDTH, _HEIGHT = 860.0, 560.0
_HELD = (VERMILION, GREEN, PURPLE, ORANGE)

# Plain rules, no variables: many viewers of SVG files know neither those nor the dark part, and show the light one.
_STYLE = """
text { font: 12px Helvetica, Arial, sans-serif; fill: #1A1A1A; }
.soft { fill: #5A5A5A; font-size: 11px; }
.title { font-size: 16px; font-weight: bold; }
.panel { font-weight: bold; }
.grid { stroke: #E3E3E3; stroke-width: 1; }
.axis { stroke: #5A5A5A; stroke-width: 1; }
.line { fill: none; stroke: LINE; stroke-width: 2.2; stroke-linejoin: round; }
.dot { fill: LINE; }
.raw { fill: none; stroke: RAW; stroke-width: 1; stroke-linejoin: round; opacity: 0.9; }
.band { fill: RAW; opacity: 0.25; stroke: none; }
.paper { fill: #FFFFFF; }
@media (prefers-color-scheme: dark) {
  text { fill: #EAEAEA; }
  .soft { fill: #A8A8A8; }
  .grid { stroke: #3A3A3A; }
  .axis { stroke: #A8A8A8; }
  .line { stroke: RAW; }
  .dot { fill: RAW; }
  .raw { stroke: LINE; }
  .band { fill: LINE; }
  .paper { fill: #161616; }
}
""".replace("LINE", BLUE).replace("RAW", SKY)


@dataclass(frozen=True, slots=True)
class _Panel:
    """A plot's inside in SVG units, and the ranges of its axes."""

    left: float
    top: float
    width: float
    height: float
    x_range: Point
    y_range: Point

    def at(self, point: Point) -> Point:
        (x0, x1), (y0, y1) = self.x_range, self.y_range
        x = self.left + (point[0] - x0) / (x1 - x0) * self.width
        return x, self.top + self.height - (point[1] - y0) / (y1 - y0) * self.height


def learning_curve_svg(metrics: Iterable[Mapping[str, Any]], title: str = "Learning curve") -> str:
    """The picture for rows `{"step": n, "data": {name: value}}`; later rows of a step win. Missing or infinite values
    are left out, and a panel without any says so."""
    rows = _by_step(metrics)
    held = _held_out(rows)
    reward = _series(rows, REWARD)
    steps = [step for step, data in rows.items() if data] or [0.0, 1.0]
    x_range = widen((min(steps), max(steps)), 1.0)
    below = (_WIDTH - 64 - 24 - 64) / 2
    parts = [
        _reward_panel(reward, held, x_range),
        _small_panel(_series(rows, LENGTH), "Mean response length (tokens)", 64.0, below, x_range),
        _small_panel(_series(rows, SECONDS), "Time per step (s)", 64.0 + below + 64, below, x_range),
    ]
    count = f"{len(reward)} step{'s' * (len(reward) != 1)}"
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH:.0f}" height="{_HEIGHT:.0f}" '
        f'viewBox="0 0 {_WIDTH:.0f} {_HEIGHT:.0f}" role="img"><title>{escape(title)}</title><style>{_STYLE}</style>'
        f'<rect class="paper" width="100%" height="100%"/><text class="title" x="64" y="30">{escape(title)}</text>'
        f'<text class="soft" x="{_WIDTH - 24:.0f}" y="30" text-anchor="end">{count}</text>\n'
        + "\n".join(parts)
        + "\n</svg>\n"
    )


def smooth(points: Sequence[Point]) -> list[Point]:
    """Exponentially weighted mean over about a twentieth of the points (4 to 25), unbiased at the start."""
    keep = 1 - 1 / min(max(len(points) / 20, 4.0), 25.0)
    total, weight, out = 0.0, 0.0, list[Point]()
    for x, y in points:
        total, weight = keep * total + y, keep * weight + 1
        out.append((x, total / weight))
    return out


def _reward_panel(reward: list[Point], held: dict[str, list[Point]], x_range: Point) -> str:
    values = [y for _, y in reward] + [y for points in held.values() for _, y in points]
    panel = _Panel(64, 76, _WIDTH - 64 - 24, 270, x_range, widen((min(values, default=0), max(values, default=1))))
    parts = [_axes(panel, "Mean reward", "step"), _lines(panel, reward)]
    legend: list[tuple[str, str]] = []
    if len(reward) > 1:
        legend = [
            ('<path class="raw" d="M0,-4 h20"/>', "each step"),
            ('<path class="line" d="M0,-4 h20"/>', "smoothed"),
        ]
    elif not reward and not held:
        parts.append(_nothing(panel))
    for number, (name, points) in enumerate(sorted(held.items())):
        colour = _HELD[number % len(_HELD)]
        placed = [panel.at(point) for point in _decimate(points)[0]]
        line = " ".join(f"{x:.1f},{y:.1f}" for x, y in placed)
        parts.append(f'<polyline points="{line}" fill="none" stroke="{colour}" stroke-dasharray="4 3"/>')
        parts += [_diamond(x, y, colour) for x, y in placed]
        legend.append((_diamond(10, -4, colour), f"held out: {name}"))
    x = panel.left
    for mark, words in legend:
        parts.append(f'<g transform="translate({x:.1f},62)">{mark}<text class="soft" x="26">{escape(words)}</text></g>')
        x += 26 + 6.4 * len(words) + 18
    return "".join(parts)


def _small_panel(points: list[Point], title: str, left: float, width: float, x_range: Point) -> str:
    values = [y for _, y in points]
    low, high = widen((min([*values, 0.0]), max(values, default=1.0)))
    panel = _Panel(left, 412, width, 104, x_range, (0.0 if min(values, default=0.0) >= 0 else low, high))
    return _axes(panel, title, "step") + (_lines(panel, points) if points else _nothing(panel))


def _axes(panel: _Panel, title: str, x_title: str) -> str:
    bottom, right = panel.top + panel.height, panel.left + panel.width
    is_large = panel.height > 200
    if is_large:
        place = f'class="soft" transform="translate(16,{panel.top + panel.height / 2:.1f}) rotate(-90)"'
        parts = [f'<text {place} text-anchor="middle">{escape(title)}</text>']
    else:
        parts = [f'<text class="panel" x="{panel.left:.1f}" y="{panel.top - 10:.1f}">{escape(title)}</text>']
    for value, words in ticks(panel.y_range, 6 if is_large else 3):
        y = panel.at((panel.x_range[0], value))[1]
        parts.append(f'<path class="grid" d="M{panel.left:.1f},{y:.1f} H{right:.1f}"/>')
        parts.append(f'<text class="soft" x="{panel.left - 8:.1f}" y="{y + 4:.1f}" text-anchor="end">{words}</text>')
    for value, words in ticks(panel.x_range, 10 if panel.width > 500 else 5, whole=True):
        x = panel.at((value, panel.y_range[0]))[0]
        parts.append(f'<path class="axis" d="M{x:.1f},{bottom:.1f} v4"/>')
        parts.append(f'<text class="soft" x="{x:.1f}" y="{bottom + 17:.1f}" text-anchor="middle">{words}</text>')
    parts.append(f'<path class="axis" d="M{panel.left:.1f},{panel.top:.1f} V{bottom:.1f} H{right:.1f}" fill="none"/>')
    parts.append(f'<text class="soft" x="{right:.1f}" y="{bottom + 32:.1f}" text-anchor="end">{escape(x_title)}</text>')
    return "".join(parts)


def _lines(panel: _Panel, points: list[Point]) -> str:
    """The raw line or, for many points, the band of their range; the smoothed line; a dot for a single point."""
    if not points:
        return ""
    if len(points) == 1:
        x, y = panel.at(points[0])
        return f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4" class="dot"/>'
    means, low, high = _decimate(points)
    parts = [f'<path class="raw" d="{_path(panel, means)}"/>']
    if low != high:
        parts.append(f'<path class="band" d="{_path(panel, [*high, *reversed(low)])}Z"/>')
    return "".join([*parts, f'<path class="line" d="{_path(panel, _decimate(smooth(points))[0])}"/>'])


def _decimate(points: list[Point]) -> tuple[list[Point], list[Point], list[Point]]:
    """At most MAX_POINTS means, lows and highs of equal runs of neighbours; the last point stays exact in x."""
    size = math.ceil(len(points) / MAX_POINTS)
    if size <= 1:
        return points, points, points
    runs = [points[i : i + size] for i in range(0, len(points), size)]
    xs = [run[-1][0] for run in runs]
    ys = [[y for _, y in run] for run in runs]
    means = [sum(run) / len(run) for run in ys]
    lows, highs = [min(run) for run in ys], [max(run) for run in ys]
    return list(zip(xs, means, strict=True)), list(zip(xs, lows, strict=True)), list(zip(xs, highs, strict=True))


def _path(panel: _Panel, points: Iterable[Point]) -> str:
    return "M" + " L".join(f"{x:.1f},{y:.1f}" for x, y in (panel.at(point) for point in points))


def _diamond(x: float, y: float, colour: str) -> str:
    return f'<path d="M{x:.1f},{y - 5:.1f} l5,5 l-5,5 l-5,-5 Z" fill="{colour}"/>'


def _nothing(panel: _Panel) -> str:
    x, y = panel.left + panel.width / 2, panel.top + panel.height / 2
    return f'<text class="soft" x="{x:.1f}" y="{y:.1f}" text-anchor="middle">not recorded</text>'


def _by_step(metrics: Iterable[Mapping[str, Any]]) -> dict[float, dict[str, float]]:
    rows: dict[float, dict[str, float]] = {}
    for row in metrics:
        numbers = {
            name: float(value)
            for name, value in row.get("data", {}).items()
            if isinstance(value, int | float) and math.isfinite(value)
        }
        rows.setdefault(float(row["step"]), {}).update(numbers)
    return dict(sorted(rows.items()))


def _series(rows: Mapping[float, Mapping[str, float]], names: Sequence[str]) -> list[Point]:
    """Values of the first of the names that a row has."""
    found = ((step, next((data[n] for n in names if n in data), None)) for step, data in rows.items())
    return [(step, value) for step, value in found if value is not None]


def _held_out(rows: Mapping[float, Mapping[str, float]]) -> dict[str, list[Point]]:
    """Name of each evaluation to its points: the keys `val/<name>/mean`."""
    held: dict[str, list[Point]] = {}
    for step, data in rows.items():
        for name, value in data.items():
            if name.startswith("val/") and name.endswith("/mean") and len(name) > len("val//mean"):
                held.setdefault(name[4:-5], []).append((step, value))
    return held
