"""A few steps of a schedule as one self-contained SVG: a row per pool, a bar per stage, a line where a step ends."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

from rlflow.amounts import seconds
from rlflow.backends.visualizers.palette import GREY, INK, PAPER, stroke, tint
from rlflow.plan import Plan

STEPS = 4
"""Shown: as many as fit side by side and still have readable bars."""

_WIDTH, _LEFT, _RIGHT = 1000.0, 120.0, 16.0
_ROW, _GAP, _TOP = 30.0, 10.0, 40.0
_CHAR = 6.0
_TICKS = 6
_WAITS = ("take", "wait", "put")
"""Instructions in which a pool waits for another: they have no bar."""


@dataclass(frozen=True, slots=True)
class _Bar:
    start: float
    end: float
    pool: str
    name: str
    colour: str
    step: int


def gantt_svg(plan: Plan, events: Sequence[Mapping[str, Any]], steps: int = STEPS) -> str:
    """The last `steps` whole steps of the events, which are those of `rlflow.backends.visualizers.trace`.

    Only one rank of every pool is drawn. Instructions that take no time have no bar.
    """
    last = _whole_steps(plan, events)
    shown = [step for step in last if step > max(last, default=0) - steps]
    bars = _bars(plan, events, set(shown))
    pools = [pool.name for pool in plan.pools if any(bar.pool == pool.name for bar in bars)]
    row_of = {pool: row for row, pool in enumerate(pools)}
    rows = len(pools)
    height = _TOP + rows * (_ROW + _GAP) + 34
    begin = min((bar.start for bar in bars), default=0.0)
    length = max((bar.end for bar in bars), default=1.0) - begin or 1.0
    scale = (_WIDTH - _LEFT - _RIGHT) / length
    title = f"flow {plan.flow} on {plan.cluster}: " + (f"steps {shown[0]} to {shown[-1]}" if shown else "no step")
    parts = [f'<text x="10" y="22" font-size="14" font-weight="bold">{escape(title)}</text>']
    parts += _axis(length, scale, height)
    parts += _names(plan, pools)
    parts += [_bar(bar, row_of[bar.pool], begin, scale) for bar in bars]
    ends = [max((b.end for b in bars if b.step == step and b.name in _trained(plan)), default=None) for step in shown]
    for step, end in zip(shown, ends, strict=True):
        if end is not None:
            x = _LEFT + (end - begin) * scale
            line = f'<path d="M{x:.1f},{_TOP - 6:.1f} V{height - 28:.1f}" stroke="{INK}" stroke-dasharray="4 3"/>'
            words = (
                f'<text x="{x - 3:.1f}" y="{_TOP - 8:.1f}" text-anchor="end" font-size="10">end of step {step}</text>'
            )
            parts.append(line + words)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH:.0f}" height="{height:.0f}" '
        f'viewBox="0 0 {_WIDTH:.0f} {height:.0f}" font-family="Helvetica,Arial,sans-serif" font-size="11" fill="{INK}" '
        f'role="img"><title>{escape(title)}</title><rect width="100%" height="100%" fill="{PAPER}"/>\n'
        + "\n".join(parts)
        + "\n</svg>\n"
    )


def _whole_steps(plan: Plan, events: Sequence[Mapping[str, Any]]) -> list[int]:
    """Steps whose training has ended."""
    trained = _trained(plan)
    done = {int(e["step"]) for e in events if e["kind"] == "run" and e["stage"] in trained}
    return sorted(done)


def _trained(plan: Plan) -> set[str]:
    return {stage.id for stage in plan.stages if stage.op.kind == "train"}


def _bars(plan: Plan, events: Sequence[Mapping[str, Any]], shown: set[int]) -> list[_Bar]:
    """Bars of one rank of every pool of the plan."""
    kinds = {stage.id: stage.op.kind for stage in plan.stages}
    lead: dict[str, int] = {}
    for event in events:
        lead[event["pool"]] = min(int(event["rank"]), lead.get(event["pool"], int(event["rank"])))
    known = {pool.name for pool in plan.pools}
    bars = []
    for event in events:
        kind, pool, length = str(event["kind"]), str(event["pool"]), float(event["duration_us"])
        led = pool in known and int(event["rank"]) == lead[pool]
        if not led or not length or kind in _WAITS or int(event["step"]) not in shown:
            continue
        stage = str(event["stage"] or "")
        works = kind in ("run", "call")
        name = stage if works else f"{kind} {stage}".strip()
        colour = stroke(kinds.get(stage, kind) if works else kind)
        start = float(event["start_us"])
        bars.append(_Bar(start, start + length, pool, name, colour, int(event["step"])))
    return sorted(bars, key=lambda bar: (bar.pool, bar.start, -bar.end, bar.name))


def _names(plan: Plan, pools: Sequence[str]) -> list[str]:
    sizes = {pool.name: len(pool.ranks) for pool in plan.pools}
    parts = []
    for row, pool in enumerate(pools):
        y, right = _TOP + row * (_ROW + _GAP), f'x="{_LEFT - 8:.1f}" text-anchor="end"'
        parts.append(
            f'<rect x="{_LEFT:.1f}" y="{y:.1f}" width="{_WIDTH - _LEFT - _RIGHT:.1f}" height="{_ROW:.1f}" '
            f'fill="#F6F6F6" stroke="{tint(GREY, 0.3)}"/>'
            f'<text {right} y="{y + 14:.1f}" font-weight="bold">{escape(pool[:16])}</text>'
            f'<text {right} y="{y + 26:.1f}" font-size="9">x {sizes[pool]}</text>'
        )
    return parts


def _bar(bar: _Bar, row: int, begin: float, scale: float) -> str:
    x, y = _LEFT + (bar.start - begin) * scale, _TOP + row * (_ROW + _GAP)
    width = max((bar.end - bar.start) * scale, 0.6)
    words = f"{bar.name} ({bar.step})" if len(f"{bar.name} ({bar.step})") * _CHAR < width - 4 else bar.name
    label = ""
    if len(words) * _CHAR < width - 4:
        label = f'<text x="{x + width / 2:.1f}" y="{y + 19:.1f}" text-anchor="middle">{escape(words)}</text>'
    tip = f"{bar.name}, step {bar.step}: {seconds(round(bar.end - bar.start))}"
    return (
        f'<g><title>{escape(tip)}</title><rect x="{x:.2f}" y="{y + 3:.1f}" width="{width:.2f}" height="{_ROW - 6:.1f}" '
        f'fill="{tint(bar.colour, 0.35)}" stroke="{bar.colour}"/>{label}</g>'
    )


def _axis(length: float, scale: float, height: float) -> list[str]:
    """Times from the start of the first bar."""
    parts = []
    for number in range(_TICKS + 1):
        us = length * number / _TICKS
        x = _LEFT + us * scale
        parts.append(
            f'<path d="M{x:.1f},{height - 28:.1f} v5" stroke="{GREY}"/>'
            f'<text x="{x:.1f}" y="{height - 10:.1f}" text-anchor="{"end" if number == _TICKS else "middle"}" '
            f'font-size="10">{escape(seconds(round(us)))}</text>'
        )
    return parts
