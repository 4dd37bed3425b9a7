"""Words added to diagnostics that the layout of the text explains."""

from __future__ import annotations

from dataclasses import replace

from rlflow.diagnostics import Diagnostic
from rlflow.frontend.conditions import walk
from rlflow.grammar import nodes


def with_hints(program: nodes.Program, diagnostics: list[Diagnostic]) -> list[Diagnostic]:
    """The diagnostics, with a word on what is called and cannot be when the `(` stands on a later line."""
    if not any(found.code == "RLF1007" for found in diagnostics):
        return diagnostics
    places: dict[tuple[int, int], nodes.Expr] = {}
    for node in walk(program.items):
        if isinstance(node, nodes.Call | nodes.Attribute):
            places.setdefault((node.span.start, node.span.end), node)
        if isinstance(node, nodes.Call):  # it is the function that cannot be called
            places[node.function.span.start, node.function.span.end] = node
    out: list[Diagnostic] = []
    for found in diagnostics:
        span = found.span
        if found.code == "RLF1007" and span is not None and span.file is program.file:
            expr = places.get((span.start, span.end))
            line = None if expr is None else _later_bracket(expr)
            if line is not None:
                hint = f"the `(` on line {line} goes on with the line before: a statement cannot begin with `(`"
                found = replace(found, help=(*found.help, hint))
        out.append(found)
    return out


def _later_bracket(expr: nodes.Expr) -> int | None:
    """The line of the first `(` of a chain of calls that stands on another line than what it calls."""
    line = None
    while isinstance(expr, nodes.Call | nodes.Attribute):
        if isinstance(expr, nodes.Call):
            end = expr.function.span.end
            bracket = expr.span.file.text.find("(", end, expr.span.end)
            here = expr.span.file.position(bracket)[0]
            if bracket >= 0 and here != expr.function.span.end_position[0]:
                line = here
        expr = expr.function if isinstance(expr, nodes.Call) else expr.base
    return line
