"""Text to syntax tree, and syntax errors to diagnostics."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

from lark import Lark, Token, Tree
from lark.exceptions import UnexpectedInput

from rlflow.diagnostics import CompileError, Diagnostic, Label, SourceFile, Span
from rlflow.grammar import nodes
from rlflow.grammar.build import Build
from rlflow.grammar.errors import syntax_error
from rlflow.grammar.words import grammar_text

MAX_DEPTH = 200
"""Levels of a tree; everything that walks one may recurse."""


@cache
def _lark(start: str) -> Lark:
    grammar = grammar_text(Path(__file__).with_name("rlflow.lark").read_text("utf-8"))
    return Lark(grammar, parser="lalr", start=start, propagate_positions=True, maybe_placeholders=True)


def parse(source: SourceFile) -> nodes.Program:
    """The tree of a whole file. Raises CompileError with one RLF0xxx diagnostic for text that is not a program."""
    items = _build(source, "start")
    return nodes.Program(source, tuple(items))


def parse_expression(source: SourceFile) -> nodes.Expr:
    """The tree of one expression, as in `--set key=EXPRESSION`. Raises CompileError."""
    result: nodes.Expr = _build(source, "expr")
    return result


def _build(source: SourceFile, start: str) -> Any:
    try:
        tree = _lark(start).parse(source.text)
    except UnexpectedInput as error:
        raise CompileError([syntax_error(source, error)]) from None
    deep = _too_deep(tree)
    if deep is not None:
        span = Span(source, deep.meta.start_pos, deep.meta.end_pos)
        raise CompileError(
            [
                Diagnostic(
                    "RLF0001", f"this is nested more than {MAX_DEPTH} levels deep", (Label(span, "write less here"),)
                )
            ]
        )
    builder = Build(source)
    result = builder.transform(tree)
    if builder.problems:
        raise CompileError(builder.problems)
    return result


def _too_deep(tree: Tree[Token]) -> Tree[Token] | None:
    """The first part of the tree below MAX_DEPTH levels, or None. A long sum is as deep as it has terms."""
    stack = [(tree, 1)]
    while stack:
        part, depth = stack.pop()
        if depth > MAX_DEPTH and not part.meta.empty:
            return part
        stack.extend((child, depth + 1) for child in reversed(part.children) if isinstance(child, Tree))
    return None
