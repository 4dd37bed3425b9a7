"""The picture of a plan in Graphviz's dot language."""

from __future__ import annotations

from rlflow.backends.visualizers.graph_parts import Arrow, Box, Group, Picture
from rlflow.backends.visualizers.palette import BLACK, BLUE, GREY, INK, ORANGE, PAPER, tint

_FONT = "Helvetica,Arial,sans-serif"
_SHAPE = {
    "data": "cylinder",
    "model": "box3d",
    "reward": "component",
    "stage": "box",
    "instruction": "ellipse",
    "queue": "hexagon",
}
_SMALL = frozenset({"data", "model", "reward", "instruction", "queue"})


def to_dot(picture: Picture) -> str:
    """The picture as dot text; the same picture gives the same text."""
    lines = [
        f"digraph {_quote(picture.title)} {{",
        "  graph ["
        + _attributes(
            label=f"{picture.title}\n{picture.legend}",
            labelloc="b",
            fontname=_FONT,
            fontsize="10",
            fontcolor=INK,
            bgcolor=PAPER,
            rankdir="TB",
            nodesep="0.35",
            ranksep="0.5",
            tooltip=picture.title,
        )
        + "]",
        "  node [" + _attributes(fontname=_FONT, fontsize="10", fontcolor=INK, margin="0.12,0.06") + "]",
        "  edge [" + _attributes(fontname=_FONT, fontsize="9", fontcolor=INK, arrowsize="0.7") + "]",
    ]
    boxes = {box.id: box for box in picture.boxes}
    grouped: set[str] = set()
    for group in picture.groups:
        lines += _group(group, boxes)
        grouped.update(group.members)
    lines += [f"  {_node(box)}" for box in picture.boxes if box.id not in grouped]
    lines += [f"  {_edge(arrow)}" for arrow in picture.arrows]
    return "\n".join([*lines, "}"]) + "\n"


def _group(group: Group, boxes: dict[str, Box]) -> list[str]:
    evaluation = group.kind == "evaluation"
    attributes = _attributes(
        label=group.title,
        labelloc="t",
        labeljust="l",
        fontsize="11",
        style="rounded,dashed" if evaluation else "rounded,filled",
        color=GREY,
        fillcolor="#F6F6F6",
        tooltip=group.title,
    )
    head = [f"  subgraph {_quote('cluster_' + group.id)} {{", f"    graph [{attributes}]"]
    return [*head, *(f"    {_node(boxes[member])}" for member in group.members), "  }"]


def _node(box: Box) -> str:
    lines = list(box.lines)
    style, colour, width = "filled", box.colour, "1.2"
    if box.inserted_by:
        lines.append(f"+ {box.inserted_by}")
        style, colour, width = "filled,dashed", ORANGE, "2"
    if box.shape == "stage":
        style += ",rounded"
    attributes = _attributes(
        label="\n".join(lines),
        shape=_SHAPE[box.shape],
        style=style,
        color=colour,
        fillcolor=tint(box.colour),
        penwidth=width,
        fontsize="9" if box.shape in _SMALL else "10",
        tooltip=box.tooltip,
    )
    return f"{_quote(box.id)} [{attributes}]"


def _edge(arrow: Arrow) -> str:
    look = {
        "data": {"style": "solid", "color": BLACK, "penwidth": "1.2"},
        "weights": {"style": "dashed", "color": BLUE, "penwidth": "2.4"},
        "order": {"style": "dotted", "color": BLACK, "penwidth": "1.4"},
        "uses": {"style": "solid", "color": GREY, "penwidth": "0.7"},
    }[arrow.kind]
    tips = {"tooltip": arrow.tooltip, "labeltooltip": arrow.tooltip, "edgetooltip": arrow.tooltip}
    source, target = arrow.source, arrow.target
    if arrow.back:  # written from the upper box to the lower one with its head at the start, so that rows stay in order
        source, target = target, source
        look["dir"] = "back"
    label = f"  {arrow.label}  " if arrow.label else ""
    return f"{_quote(source)} -> {_quote(target)} [{_attributes(label=label, **look, **tips)}]"


def _attributes(**values: str) -> str:
    return ", ".join(f"{key}={_quote(values[key])}" for key in sorted(values))


def _quote(text: str) -> str:
    """A dot string: backslashes and quotes escaped, line ends as centred line breaks."""
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n") + '"'
