"""Which statements stand in columns with their neighbours, and by how much each is padded."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import Any, Protocol

from rlflow.diagnostics import Span
from rlflow.grammar import nodes

WIDEST = 50
"""A line whose column is wider than this stands outside the columns of its neighbours."""

_BLANK_LINE = re.compile(r"\n[ \t\r\f]*\n")


class Item(Protocol):
    """A statement: any node with a span."""

    @property
    def span(self) -> Span: ...


def _stages(node: nodes.Place) -> str:
    return ", ".join(s.owner.text + (f".{s.stage.text}" if s.stage else "") for s in node.stages)


_WIDTHS: dict[type, Callable[[Any], tuple[int, ...]]] = {
    nodes.Declaration: lambda n: (len(n.kind), len(n.name.text)),
    nodes.Assign: lambda n: (len(n.name.text),),
    nodes.Pool: lambda n: (len(n.name.text),),
    nodes.Place: lambda n: (len(_stages(n)),),
    nodes.Entry: lambda n: (len(n.name.text),),
    nodes.Setting: lambda n: (len(n.name.text),),
}
"""The columns of a statement. Neighbours of one class without an empty line between them share theirs."""


def paddings(items: Sequence[Item], *, blanks: bool = True) -> dict[int, tuple[str, ...]]:
    """The spaces behind each column, by the `id` of the item; items without columns are left out.

    `blanks`: whether empty lines between the items are kept, and so part neighbours.
    """
    pads: dict[int, tuple[str, ...]] = {}
    for run in _runs(items, blanks):
        widths_of = _WIDTHS.get(type(run[0]))
        if widths_of is None:
            continue
        narrow = [(item, widths) for item in run if max(widths := widths_of(item)) <= WIDEST]
        widest = [max(column) for column in zip(*(widths for _, widths in narrow), strict=True)]
        for item, widths in narrow:
            pads[id(item)] = tuple(" " * (most - own) for most, own in zip(widest, widths, strict=True))
    return pads


def _runs(items: Sequence[Item], blanks: bool) -> Iterator[list[Item]]:
    run = list(items[:1])
    for before, item in pairwise(items):
        if type(item) is not type(before) or (blanks and _apart(before, item)):
            yield run
            run = []
        run.append(item)
    if run:
        yield run


def _apart(first: Item, second: Item) -> bool:
    """Whether the user left an empty line between two statements."""
    return bool(_BLANK_LINE.search(first.span.file.text, first.span.end, second.span.start))
