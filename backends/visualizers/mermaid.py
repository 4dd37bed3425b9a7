"""The picture of a plan as Mermaid text, for forges and documentation sites that render it."""

from __future__ import annotations

from rlflow.backends.visualizers.graph_parts import Arrow, Box, Picture
from rlflow.backends.visualizers.palette import BLACK, BLUE, GREY, INK, ORANGE, tint

_BRACKETS = {
    "data": ('[("', '")]'),
    "model": ('[["', '"]]'),
    "reward": ('>"', '"]'),
    "stage": ('("', '")'),
    "instruction": ('(["', '"])'),
    "queue": ('[/"', '"/]'),
}
_LINK = {
    "data": f"stroke:{BLACK},stroke-width:1.5px",
    "weights": f"stroke:{BLUE},stroke-width:3px,stroke-dasharray:8 4",
    "order": f"stroke:{BLACK},stroke-width:1.5px,stroke-dasharray:2 3",
    "uses": f"stroke:{GREY},stroke-width:1px",
}
_PLAIN = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789 .,:;=+-/()_")


def to_mermaid(picture: Picture) -> str:
    """The picture as a Mermaid flowchart; the same picture gives the same text."""
    ids = _short_ids([box.id for box in picture.boxes])
    boxes = {box.id: box for box in picture.boxes}
    lines = [f"%% {_comment(picture.title)}", f"%% {_comment(picture.legend)}", "flowchart TD"]
    grouped: set[str] = set()
    group_ids = _short_ids([group.id for group in picture.groups], prefix="group_")
    for group in picture.groups:
        lines.append(f'  subgraph {group_ids[group.id]}["{escape(group.title)}"]')
        lines += [f"    {_node(boxes[member], ids)}" for member in group.members]
        lines.append("  end")
        grouped.update(group.members)
    lines += [f"  {_node(box, ids)}" for box in picture.boxes if box.id not in grouped]
    lines += [f"  {_edge(arrow, ids)}" for arrow in picture.arrows]
    for kind in sorted(_LINK):
        numbers = [str(i) for i, arrow in enumerate(picture.arrows) if arrow.kind == kind]
        if numbers:
            lines.append(f"  linkStyle {','.join(numbers)} {_LINK[kind]}")
    for box in picture.boxes:
        outline = f"stroke:{box.colour}"
        if box.inserted_by:
            outline = f"stroke:{ORANGE},stroke-width:2px,stroke-dasharray:5 3"
        lines.append(f"  style {ids[box.id]} fill:{tint(box.colour)},{outline},color:{INK}")
    for group in picture.groups:
        dashes = ",stroke-dasharray:5 3" if group.kind == "evaluation" else ""
        lines.append(f"  style {group_ids[group.id]} fill:#F6F6F6,stroke:{GREY},color:{INK}{dashes}")
    return "\n".join(lines) + "\n"


def escape(text: str) -> str:
    """Text for a quoted Mermaid label: letters and plain signs stay, line ends become <br/>, all else an entity."""
    parts: list[str] = []
    for char in text:
        if char == "\n":
            parts.append("<br/>")
        elif char in _PLAIN or (not char.isascii() and char.isprintable()):
            parts.append(char)
        else:
            parts.append(f"#{ord(char)};")
    return "".join(parts)


def _node(box: Box, ids: dict[str, str]) -> str:
    lines = [*box.lines, *([f"+ {box.inserted_by}"] if box.inserted_by else [])]
    left, right = _BRACKETS[box.shape]
    return f"{ids[box.id]}{left}{escape(chr(10).join(lines))}{right}"


def _edge(arrow: Arrow, ids: dict[str, str]) -> str:
    line = "-.->" if arrow.kind in ("weights", "order") else "-->"
    label = f'|"{escape(arrow.label)}"|' if arrow.label else ""
    return f"{ids[arrow.source]} {line}{label} {ids[arrow.target]}"


def _short_ids(names: list[str], prefix: str = "n_") -> dict[str, str]:
    """Distinct identifiers of [A-Za-z0-9_]; the prefix keeps them off Mermaid's own words."""
    taken: set[str] = set()
    result: dict[str, str] = {}
    for name in names:
        base = prefix + "".join(char if char.isascii() and char.isalnum() else "_" for char in name)
        candidate, count = base, 2
        while candidate in taken:
            candidate, count = f"{base}_{count}", count + 1
        taken.add(candidate)
        result[name] = candidate
    return result


def _comment(text: str) -> str:
    return text.replace("\n", " ").replace("{", "(").replace("}", ")")
