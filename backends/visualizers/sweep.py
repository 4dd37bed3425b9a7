"""What a sweep found as one self-contained SVG file: a panel a measure, over the first parameter, a line for every
value of the others.

A marker is a mean, and the bar through it a confidence interval. Colours are Okabe and Ito's, and every line has a
marker and a stroke of its own, so that the picture can be read without colours. Follows the reader's light or dark
setting.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape

from rlflow.backends.visualizers.axes import Point, ticks, widen
from rlflow.backends.visualizers.palette import BLUE, GREEN, GREY, ORANGE, PURPLE, SKY, VERMILION

LOGARITHMIC = 8
"""From this ratio of the largest to the smallest value on, positive values stand at their logarithms."""
LEAST_RANGE = 0.1
"""Of an axis, over its largest value: less would make noise look like a difference."""
MOST_NOTES = 6
"""Of values without a result, written out below the panels."""

_WIDTH, _LEFT, _RIGHT = 860.0, 70.0, 24.0
_PANEL, _GAP, _LEGEND = 150.0, 48.0, 20.0
_COLOURS = (BLUE, VERMILION, GREEN, ORANGE, PURPLE, SKY)
_MARKS = (
    '<circle r="4.5"/>',
    '<rect x="-4" y="-4" width="8" height="8"/>',
    '<path d="M0,-5.5 L5,4 H-5 Z"/>',
    '<path d="M0,-5.5 L5.5,0 L0,5.5 L-5.5,0 Z"/>',
    '<path d="M0,5.5 L5,-4 H-5 Z"/>',
    '<path d="M-5,-1.5 H-1.5 V-5 H1.5 V-1.5 H5 V1.5 H1.5 V5 H-1.5 V1.5 H-5 Z"/>',
)
_DASHES = ("", "7 3", "2 3", "9 3 2 3", "5 5", "1 4")
_NUMBER = re.compile(r"\s*([-+]?(?:\d[\d_]*\.?[\d_]*|\.\d[\d_]*)(?:[eE][-+]?\d+)?)\s*(.*)")

_STYLE = """
text { font: 12px Helvetica, Arial, sans-serif; fill: #1A1A1A; }
.soft { fill: #5A5A5A; font-size: 11px; }
.title { font-size: 16px; font-weight: bold; }
.panel { font-weight: bold; }
.grid { stroke: #E3E3E3; stroke-width: 1; }
.axis { stroke: #5A5A5A; stroke-width: 1; }
.line { fill: none; stroke-width: 1.8; stroke-linejoin: round; }
.bar { fill: none; stroke-width: 1.6; }
.paper { fill: #FFFFFF; }
@media (prefers-color-scheme: dark) {
  text { fill: #EAEAEA; }
  .soft { fill: #A8A8A8; }
  .grid { stroke: #3A3A3A; }
  .axis { stroke: #A8A8A8; }
  .paper { fill: #161616; }
}
"""


@dataclass(frozen=True, slots=True)
class Measure:
    """Something that is known of every result."""

    title: str
    """With the unit."""
    percent: bool = False
    """Values are shares, written as percentages."""


@dataclass(frozen=True, slots=True)
class Value:
    """A mean, and half the width of its interval; None where there is no interval."""

    mean: float
    half: float | None = None


@dataclass(frozen=True, slots=True)
class Row:
    """The result for one combination of values."""

    settings: tuple[str, ...]
    """One for every parameter, as it was written."""
    values: tuple[Value | None, ...] = ()
    """One for every measure, None where it is not known; empty where there is no result."""
    why: str = ""
    """What became of it where there is no result."""


@dataclass(frozen=True, slots=True)
class Sweep:
    title: str
    remark: str
    """What the results are, on the right of the title."""
    parameters: tuple[str, ...]
    measures: tuple[Measure, ...]
    rows: tuple[Row, ...]

    def __post_init__(self) -> None:
        for row in self.rows:
            if len(row.settings) != len(self.parameters) or len(row.values) not in (0, len(self.measures)):
                raise ValueError(f"{row} has not a setting a parameter and a value a measure")
        if not self.parameters or not self.rows:
            raise ValueError("a sweep has a parameter and a row")


@dataclass(frozen=True, slots=True)
class _Places:
    """Where the values of the first parameter stand, in SVG units."""

    x: dict[str, float]
    joined: bool
    """They are numbers, so lines between them mean something."""
    title: str


def sweep_svg(sweep: Sweep) -> str:
    places = _places(sweep)
    lines: dict[str, list[Row]] = {}
    for row in sweep.rows:
        lines.setdefault(_line_name(sweep, row), []).append(row)
    legend, top = _legend(list(lines)) if len(sweep.parameters) > 1 else ("", 44.0)
    parts = [legend]
    for number, measure in enumerate(sweep.measures):
        parts.append(_panel(measure, number, lines, places, top + 26))
        top += 26 + _PANEL + _GAP
    notes = _notes(sweep)
    parts += [
        f'<text class="soft" x="{_LEFT}" y="{top + 8 + 16 * i:.1f}">{escape(n)}</text>' for i, n in enumerate(notes)
    ]
    height = top + 16 * len(notes) + 4
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH:.0f}" height="{height:.0f}" '
        f'viewBox="0 0 {_WIDTH:.0f} {height:.0f}" role="img"><title>{escape(sweep.title)}</title>'
        f'<style>{_STYLE}</style><rect class="paper" width="100%" height="100%"/>'
        f'<text class="title" x="{_LEFT}" y="28">{escape(sweep.title)}</text>'
        f'<text class="soft" x="{_WIDTH - _RIGHT}" y="28" text-anchor="end">{escape(sweep.remark)}</text>\n'
        + "\n".join(part for part in parts if part)
        + "\n</svg>\n"
    )


# --- along x ----------------------------------------------------------------------------------------------------------


def _places(sweep: Sweep) -> _Places:
    """Numbers with a common unit on a scale, linear or logarithmic; anything else side by side."""
    texts = list(dict.fromkeys(row.settings[0] for row in sweep.rows))
    inside, width = _LEFT + 24, _WIDTH - _LEFT - _RIGHT - 48
    name = sweep.parameters[0]
    parsed = [_NUMBER.fullmatch(text) for text in texts]
    units = {match[2] for match in parsed if match is not None}
    numbers = [float(match[1].replace("_", "")) for match in parsed if match is not None]
    if len(numbers) == len(texts) == len(set(numbers)) and len(units) == 1:
        unit = units.pop()
        low, high = min(numbers), max(numbers)
        scaled = list(numbers)
        remarks = [unit] if unit else []
        if low > 0 and high / low >= LOGARITHMIC:
            scaled = [math.log(number) for number in numbers]
            remarks.append("logarithmic")
        low, high = widen((min(scaled), max(scaled)), 1.0)
        at = {text: inside + (x - low) / (high - low) * width for text, x in zip(texts, scaled, strict=True)}
        return _Places(at, True, f"{name} ({', '.join(remarks)})" if remarks else name)
    each = width / len(texts)
    return _Places({text: inside + (i + 0.5) * each for i, text in enumerate(texts)}, False, name)


def _labels(places: _Places, bottom: float) -> list[str]:
    """The values below the axis; one that would run into the one before is left out, and keeps its mark."""
    parts, free = [], -math.inf
    for text, x in sorted(places.x.items(), key=lambda item: item[1]):
        match = _NUMBER.fullmatch(text)
        words = match[1] if match is not None and places.joined else _cut(text, 24)
        parts.append(f'<path class="axis" d="M{x:.1f},{bottom:.1f} v4"/>')
        half = 3.2 * len(words) + 4
        if x - half >= free:
            parts.append(
                f'<text class="soft" x="{x:.1f}" y="{bottom + 17:.1f}" text-anchor="middle">{escape(words)}</text>'
            )
            free = x + half
    return parts


# --- panels -----------------------------------------------------------------------------------------------------------


def _panel(measure: Measure, number: int, lines: dict[str, list[Row]], places: _Places, top: float) -> str:
    right, bottom = _WIDTH - _RIGHT, top + _PANEL
    title = f'<text class="panel" x="{_LEFT}" y="{top - 10:.1f}">'
    every = [row.values[number] for rows in lines.values() for row in rows if row.values]
    known = [value for value in every if value is not None]
    scale, word = _scale([value.mean for value in known]) if not measure.percent else (0.01, "")
    low, high = _bounds(known, measure.percent)
    if low > 0:
        word += " (axis does not begin at 0)"
    parts = [f"{title}{escape(measure.title + word)}</text>"]

    def y(value: float) -> float:
        return bottom - (value - low) / (high - low) * _PANEL

    for value, words in ticks((low / scale, high / scale), 5):
        at = y(value * scale)
        words += "%" * measure.percent
        parts.append(f'<path class="grid" d="M{_LEFT},{at:.1f} H{right}"/>')
        parts.append(f'<text class="soft" x="{_LEFT - 8}" y="{at + 4:.1f}" text-anchor="end">{words}</text>')
    parts += _labels(places, bottom)
    parts.append(f'<path class="axis" d="M{_LEFT},{top:.1f} V{bottom:.1f} H{right}" fill="none"/>')
    parts.append(
        f'<text class="soft" x="{right}" y="{bottom + 32:.1f}" text-anchor="end">{escape(places.title)}</text>'
    )
    for line, (name, rows) in enumerate(lines.items()):
        # Side by side, so that bars of one value do not hide each other.
        shift = (line - (len(lines) - 1) / 2) * min(6.0, 60.0 / len(lines))
        points: list[Point] = []
        marks = []
        for row in sorted(rows, key=lambda row: places.x[row.settings[0]]):
            x = places.x[row.settings[0]] + shift
            if not row.values:
                marks.append(_cross(x, bottom - 7, f"{row.settings[0]}: {row.why}"))
            elif found := row.values[number]:
                points.append((x, y(found.mean)))
                marks.append(_mark(x, y, found, line, _said(places.title, row, name, measure, found)))
        if places.joined and len(points) > 1:
            path = " L".join(f"{x:.1f},{at:.1f}" for x, at in points)
            parts.append(f'<path class="line" d="M{path}" {_stroke(line)}/>')
        parts += marks
    if not known:
        x, middle = (_LEFT + right) / 2, (top + bottom) / 2
        parts.append(f'<text class="soft" x="{x:.1f}" y="{middle:.1f}" text-anchor="middle">not known</text>')
    return "".join(parts)


def _bounds(values: Sequence[Value], percent: bool) -> Point:
    """From 0, unless all lies so close together that differences would be lost. Shares are from 0 to 1."""
    lows = [value.mean - (value.half or 0.0) for value in values]
    highs = [value.mean + (value.half or 0.0) for value in values]
    low, high = min(lows, default=0.0), max(highs, default=1.0)
    if percent:
        return min(0.0, low), max(1.0, high)
    if 0 <= low < 0.7 * high:
        return 0.0, high * 1.05
    middle, least = (low + high) / 2, abs(high) * LEAST_RANGE
    return (middle - least / 2, middle + least / 2) if high - low < least else widen((low, high))


def _scale(values: Sequence[float]) -> tuple[float, str]:
    largest = max((abs(value) for value in values), default=0.0)
    for scale, word in ((1e9, ", billions"), (1e6, ", millions"), (1e4, ", thousands")):
        if largest >= scale:
            return (1e3, word) if scale == 1e4 else (scale, word)
    return 1.0, ""


def _mark(x: float, y: Callable[[float], float], value: Value, line: int, said: str) -> str:
    colour = _COLOURS[line % len(_COLOURS)]
    bar = ""
    if value.half:
        low, high = y(value.mean - value.half), y(value.mean + value.half)
        path = f"M{x:.1f},{high:.1f} V{low:.1f} M{x - 4:.1f},{high:.1f} h8 M{x - 4:.1f},{low:.1f} h8"
        bar = f'<path class="bar" d="{path}" stroke="{colour}"/>'
    shape = _MARKS[_mark_of(line)]
    return (
        f'<g class="value"><title>{escape(said)}</title>{bar}'
        f'<g transform="translate({x:.1f},{y(value.mean):.1f})" fill="{colour}">{shape}</g></g>'
    )


def _cross(x: float, y: float, said: str) -> str:
    """No result."""
    return (
        f'<g class="none"><title>{escape(said)}</title>'
        f'<path d="M{x - 4:.1f},{y - 4:.1f} l8,8 m0,-8 l-8,8" stroke="{GREY}" stroke-width="2" fill="none"/></g>'
    )


def _said(parameter: str, row: Row, line: str, measure: Measure, value: Value) -> str:
    """For people who point at a mark, and for readers of the screen."""
    number = f"{value.mean:.1%}" if measure.percent else f"{value.mean:.4g}"
    half = "" if value.half is None else f" +- {value.half:.1%}" if measure.percent else f" +- {value.half:.2g}"
    where = f"{parameter.partition(' (')[0]} = {row.settings[0]}" + (f", {line}" if line else "")
    return f"{where}: {measure.title} {number}{half}"


# --- what the lines are -----------------------------------------------------------------------------------------------


def _line_name(sweep: Sweep, row: Row) -> str:
    return ", ".join(f"{name} = {value}" for name, value in list(zip(sweep.parameters, row.settings, strict=True))[1:])


def _mark_of(line: int) -> int:
    """After a round of colours the markers move on by one, so that 36 lines look different."""
    return (line + line // len(_COLOURS)) % len(_MARKS)


def _stroke(line: int) -> str:
    dash = _DASHES[_mark_of(line)]
    return f'stroke="{_COLOURS[line % len(_COLOURS)]}"' + (f' stroke-dasharray="{dash}"' if dash else "")


def _legend(names: Sequence[str]) -> tuple[str, float]:
    """The rows of the legend, and where they end."""
    parts, x, y = [], _LEFT, 52.0
    for line, name in enumerate(names):
        words = _cut(name, 100)
        wide = 44 + 6.0 * len(words) + 18
        if x > _LEFT and x + wide > _WIDTH - _RIGHT:
            x, y = _LEFT, y + _LEGEND
        colour = _COLOURS[line % len(_COLOURS)]
        parts.append(
            f'<g class="legend" transform="translate({x:.1f},{y:.1f})">'
            f'<path class="line" d="M0,-4 h34" {_stroke(line)}/>'
            f'<g transform="translate(17,-4)" fill="{colour}">{_MARKS[_mark_of(line)]}</g>'
            f'<text class="soft" x="42">{escape(words)}</text></g>'
        )
        x += wide
    return "".join(parts), y + 12


def _notes(sweep: Sweep) -> list[str]:
    """What became of values without a result: a cross at the foot of the panels."""
    found = []
    for row in sweep.rows:
        if not row.values:
            names = ", ".join(f"{n} = {v}" for n, v in zip(sweep.parameters, row.settings, strict=True))
            found.append(_cut(f"x  {names}: {row.why}", 128))
    more = [f"x  {len(found) - MOST_NOTES} more without a result"] if len(found) > MOST_NOTES else []
    return found[:MOST_NOTES] + more


def _cut(text: str, most: int) -> str:
    return text if len(text) <= most else text[: most - 3] + "..."
