"""Diagnostics to text: `full` with source excerpts, `concise` one line each, and for other programs `json`, `sarif`
and `github`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from rlflow.diagnostics.codes import CODES
from rlflow.diagnostics.diagnostic import Diagnostic, Label, Severity
from rlflow.diagnostics.github import to_github
from rlflow.diagnostics.sarif import to_sarif
from rlflow.diagnostics.source import Span

FORMATS = ("full", "concise", "json", "sarif", "github")

MACHINE_FORMATS = ("json", "sarif", "github")
"""Formats that another program reads, from standard output."""

_WIDTH = 120
"""Characters shown of a long line."""

_STYLES = {"error": "\x1b[1;31m", "warning": "\x1b[1;33m", "bold": "\x1b[1m", "blue": "\x1b[1;34m", "off": "\x1b[0m"}


def render(diagnostics: Iterable[Diagnostic], format: str, *, color: bool = False, path: str | None = None) -> str:
    """All diagnostics in one format, without a final newline; empty for none (json: an empty list, sarif: a log
    without results). `path` is the input, in which sarif and github place what has no place of its own."""
    found = list(diagnostics)
    if format in ("sarif", "json"):
        import json

        whole = to_sarif(found, path) if format == "sarif" else [to_json(d) for d in found]
        return json.dumps(whole, indent=2, ensure_ascii=False)
    if format == "github":
        return to_github(found, path)
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
        source, column, last = _excerpt(span)
        arrow = "-->" if index == 0 else ":::"
        lines.append(paint("blue", f"{' ' * gutter}{arrow}") + f" {span}")
        indent = "".join("\t" if char == "\t" else " " for char in source[: column - 1])
        mark = ("^" if label.primary else "-") * max(1, last - column)
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


def _excerpt(span: Span) -> tuple[str, int, int]:
    """The line on which a place starts, its column there and the column after it; of a long line only a part."""
    source = span.file.line(span.line)
    end_line, end_column = span.end_position
    column, last = span.column, end_column if end_line == span.line else len(source) + 1
    if len(source) > _WIDTH:
        start = min(max(0, column - 1 - _WIDTH // 3), len(source) - 2 * _WIDTH // 3)
        before, after = "..." if start else "", "..." if start + _WIDTH < len(source) else ""
        source = before + source[start : start + _WIDTH] + after
        shift = start - len(before)
        column, last = column - shift, min(last - shift, len(source) + 1)
    # Characters that a terminal would act on, such as an escape, are not sent to it.
    return "".join(c if c.isprintable() or c == "\t" else "\N{REPLACEMENT CHARACTER}" for c in source), column, last


def summary_line(diagnostics: Iterable[Diagnostic]) -> str:
    """`2 errors, 1 warning`; empty when there is nothing."""
    found = list(diagnostics)
    errors = sum(d.severity is Severity.ERROR for d in found)
    warnings = len(found) - errors
    parts = [f"{n} {word}{'s' if n != 1 else ''}" for n, word in ((errors, "error"), (warnings, "warning")) if n]
    return ", ".join(parts)
