"""The picture of a plan as SVG without Graphviz: one lane per group, rows by how far a box is from the start.

Plainer than dot's drawing, with the same content. Sizes are in SVG user units (pixels at 100 %).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from rlflow.backends.visualizers.graph_parts import Arrow, Box, Picture
from rlflow.backends.visualizers.palette import BLACK, BLUE, GREY, INK, ORANGE, PAPER, tint

_CHAR = 6.2
"""Width of a character at the text size used; a guess on the safe side."""
_LINE = 14.0
_GAP_X = 28.0
_GAP_Y = 52.0
_PAD = 16.0
_TITLE = 26.0
_DETOUR = 48.0
"""Room beside the boxes of a lane for arrows that go around them."""

_LABEL_SIZE = 9.5 / 11
_LABEL_PLACES = (0.5, 0.42, 0.58, 0.34, 0.66, 0.26, 0.74, 0.18, 0.82)
"""Along an arrow, from its start (0) to its end (1)."""

_Point = tuple[float, float]

_LOOK = {
    "data": (BLACK, "1.3", ""),
    "weights": (BLUE, "2.6", "8 4"),
    "order": (BLACK, "1.4", "2 4"),
    "uses": (GREY, "0.8", ""),
}


@dataclass(frozen=True, slots=True)
class _Rect:
    x: float
    y: float
    width: float
    height: float

    @property
    def middle(self) -> float:
        return self.x + self.width / 2

    @property
    def bottom(self) -> float:
        return self.y + self.height


def to_svg(picture: Picture) -> str:
    """The picture as a self-contained SVG; the same picture gives the same text."""
    rects, frames, width, height = _place(picture)
    parts: list[str] = []
    for title, frame, dashed in frames:
        dashes = ' stroke-dasharray="5 3"' if dashed else ""
        parts.append(
            f'<rect x="{frame.x:.1f}" y="{frame.y:.1f}" width="{frame.width:.1f}" height="{frame.height:.1f}" rx="8" '
            f'fill="#F6F6F6" stroke="{GREY}"{dashes}/>'
            f'<text x="{frame.x + 10:.1f}" y="{frame.y + 17:.1f}" font-weight="bold">{escape(title)}</text>'
        )
    taken = list(rects.values())
    curves = _curves(picture.arrows, rects)
    parts += [_arrow(arrow, points, taken) for arrow, points in zip(picture.arrows, curves, strict=True)]
    parts += [_box(box, rects[box.id]) for box in picture.boxes]
    foot = height + _PAD
    width = max(width, _text_width(picture.legend) + 2 * _PAD)
    width = max([width, *(x + _PAD for curve in curves for x, _ in curve)])
    parts.append(f'<text x="{_PAD:.1f}" y="{foot:.1f}" font-weight="bold">{escape(picture.title)}</text>')
    parts.append(f'<text x="{_PAD:.1f}" y="{foot + _LINE + 2:.1f}">{escape(picture.legend)}</text>')
    heads = "".join(
        f'<marker id="{kind}" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="9" markerHeight="9" '
        f'markerUnits="userSpaceOnUse" orient="auto"><path d="M0,0.5 L8,4 L0,7.5 z" fill="{_LOOK[kind][0]}"/></marker>'
        for kind in sorted(_LOOK)
    )
    total = foot + _LINE + _PAD
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width:.0f}" height="{total:.0f}" '
        f'viewBox="0 0 {width:.0f} {total:.0f}" font-family="Helvetica,Arial,sans-serif" font-size="11" fill="{INK}">'
        f"<title>{escape(picture.title)}</title><defs>{heads}</defs>"
        f'<rect width="100%" height="100%" fill="{PAPER}"/>\n' + "\n".join(parts) + "\n</svg>\n"
    )


def _rows(picture: Picture) -> dict[str, int]:
    """Row of every box: its distance from the start over arrows that stay within a step."""
    import networkx  # slow to import; only this drawing needs it

    graph = networkx.DiGraph()
    graph.add_nodes_from(box.id for box in picture.boxes)
    for arrow in picture.arrows:
        if not arrow.back and arrow.source != arrow.target:
            graph.add_edge(arrow.source, arrow.target)
            if not networkx.has_path(graph, arrow.target, arrow.source):
                continue
            graph.remove_edge(arrow.source, arrow.target)  # would close a cycle: draw it, do not rank by it
    return {box: row for row, boxes in enumerate(networkx.topological_generations(graph)) for box in boxes}


_Lane = tuple[str, str, list[str]]
"""Title, kind of group and boxes; without a title it has no frame."""


def _lanes(picture: Picture, rows: dict[str, int]) -> list[_Lane]:
    """What is declared, then the groups by where their work begins; queues beside the pool that fills them."""
    lane_of = {member: group.id for group in picture.groups for member in group.members}
    queues: dict[str, list[str]] = {}
    declared: list[str] = []
    for box in picture.boxes:
        if box.shape == "queue":
            filled_by = next((a.source for a in picture.arrows if a.target == box.id), "")
            queues.setdefault(lane_of.get(filled_by, ""), []).append(box.id)
        elif box.id not in lane_of:
            declared.append(box.id)
    first = [min((rows[member] for member in group.members), default=0) for group in picture.groups]
    lanes: list[_Lane] = [("", "", declared), ("", "", queues.get("", []))]
    for _, group in sorted(zip(first, picture.groups, strict=True), key=lambda pair: pair[0]):
        lanes += [(group.title, group.kind, list(group.members)), ("", "", queues.get(group.id, []))]
    return [lane for lane in lanes if lane[2] or lane[0]]


def _place(picture: Picture) -> tuple[dict[str, _Rect], list[tuple[str, _Rect, bool]], float, float]:
    """Place of every box, frames as (title, place, dashed), and the width and height used."""
    rows = _rows(picture)
    boxes = {box.id: box for box in picture.boxes}
    lanes = _lanes(picture, rows)
    heights = {row: max(_size(boxes[b])[1] for b in rows if rows[b] == row) for row in sorted(set(rows.values()))}
    tops: dict[int, float] = {}
    y = _PAD + _TITLE + _PAD
    for row, tall in heights.items():
        tops[row] = y
        y += tall + _GAP_Y
    bottom = y - _GAP_Y + _PAD
    rects: dict[str, _Rect] = {}
    frames: list[tuple[str, _Rect, bool]] = []
    x = _PAD
    for title, kind, members in lanes:
        in_row = {row: [m for m in members if rows[m] == row] for row in heights}
        spans = [sum(_size(boxes[m])[0] for m in found) + _GAP_X * (len(found) - 1) for found in in_row.values()]
        inner = max([*(span + 2 * _DETOUR for span in spans), _text_width(title) * 1.08])
        for row, found in in_row.items():
            used = sum(_size(boxes[m])[0] for m in found) + _GAP_X * (len(found) - 1)
            left = x + _PAD + (inner - used) / 2
            for member in found:
                wide, tall = _size(boxes[member])
                rects[member] = _Rect(left, tops[row] + (heights[row] - tall) / 2, wide, tall)
                left += wide + _GAP_X
        if title:
            frames.append((title, _Rect(x, _PAD, inner + 2 * _PAD, bottom - _PAD), kind == "evaluation"))
        x += inner + 2 * _PAD + _GAP_X
    return rects, frames, x - _GAP_X + _PAD, bottom


def _lines(box: Box) -> list[str]:
    return [*box.lines, *([f"+ {box.inserted_by}"] if box.inserted_by else [])]


def _size(box: Box) -> tuple[float, float]:
    lines = _lines(box)
    return max(_text_width(line) for line in lines) + 20, len(lines) * _LINE + 12


def _text_width(text: str) -> float:
    return len(text) * _CHAR


def _box(box: Box, rect: _Rect) -> str:
    line = f'stroke="{ORANGE}" stroke-width="2" stroke-dasharray="5 3"' if box.inserted_by else f'stroke="{box.colour}"'
    paint = f'fill="{tint(box.colour)}" {line}'
    radius = {"stage": 6.0, "instruction": rect.height / 2}.get(box.shape, 0.0)
    parts = [
        f"<g><title>{escape(box.tooltip)}</title>",
        f'<rect x="{rect.x:.1f}" y="{rect.y:.1f}" width="{rect.width:.1f}" height="{rect.height:.1f}" '
        f'rx="{radius:.1f}" {paint}/>',
    ]
    if box.shape in ("data", "model", "reward"):  # a bar at the left edge marks declarations
        parts.append(
            f'<rect x="{rect.x:.1f}" y="{rect.y:.1f}" width="4" height="{rect.height:.1f}" fill="{box.colour}"/>'
        )
    for number, line_text in enumerate(_lines(box)):
        weight = ' font-weight="bold"' if number == 0 else ""
        y = rect.y + 6 + _LINE * (number + 0.8)
        parts.append(f'<text x="{rect.middle:.1f}" y="{y:.1f}" text-anchor="middle"{weight}>{escape(line_text)}</text>')
    return "".join([*parts, "</g>"])


def _arrow(arrow: Arrow, points: list[_Point], taken: list[_Rect]) -> str:
    """An arrow with its label where that covers nothing in `taken`, which gets the label."""
    colour, width, dashes = _LOOK[arrow.kind]
    (x0, y0), (x1, y1), (x2, y2), (x3, y3) = points
    path = f"M{x0:.1f},{y0:.1f} C{x1:.1f},{y1:.1f} {x2:.1f},{y2:.1f} {x3:.1f},{y3:.1f}"
    dash = f' stroke-dasharray="{dashes}"' if dashes else ""
    label = ""
    if arrow.label:
        x, y, place = _label_place(points, _text_width(arrow.label) * _LABEL_SIZE, taken)
        taken.append(place)
        words = f'x="{x:.1f}" y="{y:.1f}" text-anchor="middle" font-size="9.5"'
        halo = f'stroke="{PAPER}" stroke-width="3" stroke-linejoin="round"'
        label = f"<text {words} {halo}>{escape(arrow.label)}</text><text {words}>{escape(arrow.label)}</text>"
    return (
        f'<g><title>{escape(arrow.tooltip)}</title><path d="{path}" fill="none" stroke="{colour}" '
        f'stroke-width="{width}"{dash} marker-end="url(#{arrow.kind})"/>{label}</g>'
    )


def _label_place(points: list[_Point], width: float, taken: list[_Rect]) -> tuple[float, float, _Rect]:
    """Middle and base line of a label on the curve, and what it covers: the first place that is free, else the one that
    overlaps the least."""
    tried: list[tuple[float, int, float, float, _Rect]] = []
    for at in _LABEL_PLACES:
        x, y = (sum(w * p[i] for w, p in zip(_weights(at), points, strict=True)) for i in (0, 1))
        place = _Rect(x - width / 2, y - 9, width, 12)
        covered = sum(_overlap(place, other) for other in taken)
        if not covered:
            return x, y, place
        tried.append((covered, len(tried), x, y, place))
    _, _, x, y, place = min(tried)
    return x, y, place


def _overlap(a: _Rect, b: _Rect) -> float:
    """The area that both cover."""
    wide = min(a.x + a.width, b.x + b.width) - max(a.x, b.x)
    tall = min(a.bottom, b.bottom) - max(a.y, b.y)
    return wide * tall if wide > 0 and tall > 0 else 0.0


def _curves(arrows: Sequence[Arrow], rects: dict[str, _Rect]) -> list[list[_Point]]:
    """The curve of every arrow. Arrows that leave a box downwards, or come to it from above, share its edge in the
    order of where they lead or come from, so that they do not run on top of each other."""
    down = [number for number, a in enumerate(arrows) if rects[a.target].y > rects[a.source].bottom]
    leaves: dict[str, list[int]] = {}
    comes: dict[str, list[int]] = {}
    for number in down:
        leaves.setdefault(arrows[number].source, []).append(number)
        comes.setdefault(arrows[number].target, []).append(number)
    starts: dict[int, float] = {}
    ends: dict[int, float] = {}
    for box, numbers in leaves.items():
        numbers.sort(key=lambda n: (rects[arrows[n].target].middle, n))
        starts |= _shared_edge(rects[box], numbers)
    for box, numbers in comes.items():
        numbers.sort(key=lambda n: (rects[arrows[n].source].middle, n))
        ends |= _shared_edge(rects[box], numbers)
    return [
        _curve(rects[a.source], rects[a.target], starts.get(number, 0.0), ends.get(number, 0.0), list(rects.values()))
        for number, a in enumerate(arrows)
    ]


def _runs_through(points: list[_Point], box: _Rect) -> int:
    """How many of some places on the curve are in a box."""
    places = ([sum(w * p[i] for w, p in zip(at, points, strict=True)) for i in (0, 1)] for at in _ALONG)
    return sum(box.x <= x <= box.x + box.width and box.y <= y <= box.bottom for x, y in places)


def _shared_edge(rect: _Rect, numbers: Sequence[int]) -> dict[int, float]:
    """Arrow to its x on the upper or lower edge of a box."""
    return {n: rect.x + rect.width * (i + 1) / (len(numbers) + 1) for i, n in enumerate(numbers)}


def _curve(source: _Rect, target: _Rect, x0: float, x1: float, boxes: Sequence[_Rect]) -> list[_Point]:
    """Four points of a Bezier curve from one box to another. Downwards from x0 to x1, it swings aside where it would
    run through other boxes, as far as it must."""
    if target.y > source.bottom:
        y0, y1 = source.bottom, target.y
        bend = (y1 - y0) / 2
        others = [box for box in boxes if box not in (source, target)]
        tried = []
        for place, swing in enumerate(_SWINGS):
            if swing and min(x0, x1) + swing < _PAD:
                continue  # off the paper
            sideways = bend / 2 if swing else bend
            points = [(x0, y0), (x0 + swing, y0 + sideways), (x1 + swing, y1 - sideways), (x1, y1)]
            through = sum(_runs_through(points, box) for box in others)
            if not through:
                return points
            tried.append((through, place, points))
        return min(tried)[2]
    # to the same row or upwards: out of the side and around
    forward = target.x > source.x
    x0, x1 = (source.x + source.width, target.x) if forward else (source.x, target.x + target.width)
    y0, y1 = source.y + source.height / 2, target.y + target.height / 2
    reach = max(abs(x1 - x0) / 2, 40.0) * (1 if forward else -1)
    return [(x0, y0), (x0 + reach, y0), (x1 - reach, y1), (x1, y1)]


def _weights(t: float) -> tuple[float, float, float, float]:
    """Bernstein weights of a cubic Bezier curve at `t` in 0..1."""
    u = 1 - t
    return u * u * u, 3 * u * u * t, 3 * u * t * t, t * t * t


_SWINGS = (0.0, -60.0, 60.0, -120.0, 120.0, -200.0, 200.0, -300.0, 300.0)
"""To the side, in the order in which they are tried."""
_ALONG = tuple(_weights(number / 24) for number in range(1, 24))
