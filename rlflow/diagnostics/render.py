"""Diagnostics to text: `full` with source excerpts, `concise` one line each, `json`."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

from rlflow.diagnostics.codes import CODES
from rlflow.diagnostics.diagnostic import Diagnostic, Label, Severity

FORMATS = ("full", "concise", "json")

_STYLES = {"error": "\x1b[1;31m", "warning": "\x1b[1;33m", "bold": "\x1b[1m", "blue": "\x1b[1;34m", "off": "\x1b[0m"}


def render(diagnostics: Iterable[Diagnostic], format: str, *, color: bool = False) -> str:
    """All diagnostics in one format, without a final newline; empty for none (json: an empty list)."""
    found = list(diagnostics)
    if format == "json":
        return json.dumps([to_json(d) for d in found], indent=2, ensure_ascii=False)
    if format == "concise":
        return "\n".join(_concise(d) for d in found)
    return "\n\n".join(_full(d, color) for d in found)


def to_json(diagnostic: Diagnostic) -> dict[str, Any]:
    """One diagnostic as plain values; lines and columns from 1, ends exclusive."""
    return {
        "code": diagnostic.code,
        "name": CODES[diagnostic.code],
        "severity": diagnostic.severity.value,
        "message": diagnostic.message,
        "labels": [_label_json(label) for label in diagnostic.labels],
        "notes": list(diagnostic.notes),
        "help": list(diagnostic.help),
    }


def _label_json(label: Label) -> dict[str, Any]:
    end_line, end_column = label.span.end_position
    return {
        "file": label.span.file.name,
        "line": label.span.line,
        "column": label.span.column,
        "end_line": end_line,
        "end_column": end_column,
        "text": label.text,
        "primary": label.primary,
    }


def _concise(diagnostic: Diagnostic) -> str:
    where = f"{diagnostic.span}: " if diagnostic.span is not None else ""
    return f"{where}{diagnostic.severity.value}[{diagnostic.code}] {diagnostic.message}"


def _full(diagnostic: Diagnostic, color: bool) -> str:
    def paint(style: str, text: str) -> str:
        return f"{_STYLES[style]}{text}{_STYLES['off']}" if color else text

    severity = diagnostic.severity.value
    lines = [paint(severity, f"{severity}[{diagnostic.code}]") + paint("bold", f": {diagnostic.message}")]
    labels = sorted(diagnostic.labels, key=lambda label: not label.primary)
    gutter = max((len(str(label.span.line)) for label in labels), default=1)
    for index, label in enumerate(labels):
        span = label.span
        source = span.file.line(span.line)
        arrow = "-->" if index == 0 else ":::"
        lines.append(paint("blue", f"{' ' * gutter}{arrow}") + f" {span}")
        last = span.end_position[1] if span.end_position[0] == span.line else len(source) + 1
        indent = "".join("\t" if char == "\t" else " " for char in source[: span.column - 1])
        mark = ("^" if label.primary else "-") * max(1, last - span.column)
        text = f" {label.text}" if label.text else ""
        lines.append(paint("blue", f"{span.line:>{gutter}} |") + f" {source}")
        mark_style = severity if label.primary else "blue"
        lines.append(paint("blue", f"{' ' * gutter} |") + f" {indent}{paint(mark_style, mark + text)}")
    for word, texts in (("note", diagnostic.notes), ("help", diagnostic.help)):
        for text in texts:
            first, *rest = text.splitlines() or [""]
            lines.append(paint("blue", f"{' ' * gutter} =") + f" {paint('bold', word)}: {first}")
            lines.extend(f"{' ' * gutter}         {line}" for line in rest)
    return "\n".join(lines)


def summary_line(diagnostics: Iterable[Diagnostic]) -> str:
    """`2 errors, 1 warning`; empty when there is nothing."""
    found = list(diagnostics)
    errors = sum(d.severity is Severity.ERROR for d in found)
    warnings = len(found) - errors
    parts = [f"{n} {word}{'s' if n != 1 else ''}" for n, word in ((errors, "error"), (warnings, "warning")) if n]
    return ", ".join(parts)
