"""Walking a tree, against the definition that recurses; and what deciding conditions leaves alone."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from pathlib import Path

import pytest

from rlflow.diagnostics import SourceFile, Span
from rlflow.frontend.conditions import LeftOut, select, walk
from rlflow.frontend.constants import Qty, Reporter
from rlflow.grammar import nodes
from rlflow.grammar.parse import parse

FILES = sorted((Path(__file__).parents[3] / "examples").glob("*.rlflow"))
IFS = """\
flow f(a = true, n = 2) {
  if a { data d = x("y", 1 + n, [n, 2]) } else if not a { stop after 2 steps }
  step { x = d.take(1 if a else 2)
    if n == 2 { y = z(x) } else { y = x } }
}
"""
TEXTS = [IFS, *(file.read_text("utf-8") for file in FILES)]


def plainly(part: object) -> Iterator[object]:
    if isinstance(part, tuple):
        for item in part:
            yield from plainly(item)
    elif is_dataclass(part) and not isinstance(part, Span | SourceFile):
        yield part
        for each in fields(part):
            yield from plainly(getattr(part, each.name))


@pytest.mark.parametrize("text", TEXTS)
def test_every_node_in_the_order_of_the_text(text: str) -> None:
    items = parse(SourceFile("x", text)).items
    found, expected = list(walk(items)), list(plainly(items))
    assert len(found) > 20
    assert list(map(id, found)) == list(map(id, expected))


def test_depth_is_no_limit() -> None:
    deep: nodes.Expr = nodes.Name("x", Span(SourceFile("x", ""), 0, 0))
    for _ in range(5000):
        deep = nodes.Negate(deep, deep.span)
    assert sum(1 for _ in walk(deep)) == 5001


def test_parts_without_conditions_are_not_copied() -> None:
    (flow,) = parse(SourceFile("x", IFS)).flows
    (plain,) = parse(SourceFile("x", "flow g(n = 2) { stop after 2 steps step { x = y(n) } }")).flows
    assert select(plain, {"n": Qty(2)}, LeftOut(), Reporter()) is plain
    (other,) = parse(
        SourceFile("x", IFS.replace("stop after 2 steps", "").replace("step {", "save every 2 steps step {"))
    ).flows
    chosen = select(other, {"a": True, "n": Qty(2)}, LeftOut(), Reporter())
    kept = next(item for item in other.items if isinstance(item, nodes.Save))
    assert any(item is kept for item in chosen.items)
    assert not any(isinstance(node, nodes.If | nodes.Conditional) for node in walk(chosen))
    assert any(isinstance(node, nodes.If) for node in walk(flow))
