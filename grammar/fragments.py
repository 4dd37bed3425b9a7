"""Pieces of documents that several nodes share: numbers as written, lists with commas, brackets."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from rlflow.grammar import nodes
from rlflow.grammar.comments import Glue, Token
from rlflow.grammar.layout import Doc, Group, IfBroken, Line, Nest

_NUMBER = re.compile(r"\d[\d_]*(\.\d+)?([eE][+-]?\d+)?")


def number_text(node: nodes.Number | nodes.Quantity) -> str:
    """The number as the user wrote it; for a node that was made, not parsed: its shortest spelling."""
    written = _NUMBER.match(node.span.text)
    if written and _same_number(written[0], node.value):
        return written[0]
    return repr(node.value)


def _same_number(text: str, value: int | float) -> bool:
    text = text.replace("_", "")
    if isinstance(value, float):
        return float(text) == value
    return text.isdigit() and int(text) == value


def separated(docs: Iterable[Doc]) -> list[Doc]:
    """The documents with commas between, each on a line of its own where the group is broken."""
    parts: list[Doc] = []
    for doc in docs:
        parts += [",", Line()] if parts else []
        parts.append(doc)
    return parts


def brackets(opening: str, items: Sequence[Doc], closing: str) -> Doc:
    """A list in brackets, when broken with one item a line and a comma after the last."""
    start = Token(opening, Glue.LEFT if opening == "(" else Glue.NO)
    if not items:
        return Group([start, Line(""), closing])
    return Group([start, Nest([Line(""), *separated(items), IfBroken(",")]), Line(""), closing])
