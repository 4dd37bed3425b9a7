"""Text to syntax tree, and syntax errors to diagnostics."""

from __future__ import annotations

from typing import Any

from rlflow.diagnostics import CompileError, Diagnostic, Label, SourceFile, Span
from rlflow.grammar import lalr, nodes
from rlflow.grammar.build import Build
from rlflow.grammar.errors import syntax_error
from rlflow.grammar.tables import load

MAX_DEPTH = 200
"""Levels of a tree; everything that walks one may recurse. A long sum is as deep as it has terms."""


def parse(source: SourceFile) -> nodes.Program:
    """The tree of a whole file. Raises CompileError with one RLF0xxx diagnostic for text that is not a program."""
    items = _build(source, "start")
    return nodes.Program(source, tuple(items))


def parse_expression(source: SourceFile) -> nodes.Expr:
    """The tree of one expression, as in `--set key=EXPRESSION`. Raises CompileError."""
    result: nodes.Expr = _build(source, "expr")
    return result


def _build(source: SourceFile, start: str) -> Any:
    builder = Build(source)
    try:
        result, levels = lalr.parse(load(start), source.text, lambda name: getattr(builder, name))
    except (lalr.UnexpectedTokenError, lalr.UnexpectedCharacterError) as error:
        raise CompileError([syntax_error(source, error)]) from None
    if levels > MAX_DEPTH:
        label = Label(Span(source, *_too_deep(source.text, start)), "write less here")
        raise CompileError([Diagnostic("RLF0001", f"this is nested more than {MAX_DEPTH} levels deep", (label,))])
    if builder.problems:
        raise CompileError(builder.problems)
    return result


class _Part:
    """A part of the text as such, where only the shape of the tree counts."""

    __slots__ = ("extent", "parts")

    def __init__(self, extent: lalr.Extent, children: list[Any]) -> None:
        self.extent = extent
        self.parts = [child for child in children if isinstance(child, _Part)]


def _too_deep(text: str, start: str) -> lalr.Extent:
    """The first part of the tree below MAX_DEPTH levels; there is one."""
    tree, _ = lalr.parse(load(start), text, lambda name: _Part)
    stack = [(tree, 1)]
    while True:
        part, depth = stack.pop()
        if depth > MAX_DEPTH:
            extent: lalr.Extent = part.extent
            return extent
        stack.extend((child, depth + 1) for child in reversed(part.parts))
