"""Diagnostics as workflow commands of GitHub Actions, which shows them beside the lines of a pull request."""

from __future__ import annotations

from collections.abc import Iterable

from rlflow.diagnostics.codes import CODES
from rlflow.diagnostics.diagnostic import Diagnostic, Severity
from rlflow.diagnostics.source import Span


def to_github(diagnostics: Iterable[Diagnostic], path: str | None = None) -> str:
    """One command a line, errors first: GitHub shows only the first ten of each kind of a step.

    Diagnostics without a place in a file are shown on the first line of `path`, the input.
    """
    ordered = sorted(diagnostics, key=lambda diagnostic: diagnostic.severity is not Severity.ERROR)
    return "\n".join(_command(diagnostic, path) for diagnostic in ordered)


def is_in_file(span: Span) -> bool:
    """Whether a place is in a file, not on the command line (`--set batch.count=8`)."""
    return not span.file.name.startswith("--")


def message_with_notes(diagnostic: Diagnostic) -> str:
    """The message with its notes and help on further lines, for formats that have no place for them."""
    notes = [f"note: {text}" for text in diagnostic.notes] + [f"help: {text}" for text in diagnostic.help]
    if diagnostic.span is not None and not is_in_file(diagnostic.span):
        notes.insert(0, f"note: given as `{diagnostic.span.file.name}`")
    return "\n".join([diagnostic.message, *notes])


def _command(diagnostic: Diagnostic, path: str | None) -> str:
    properties = {**_place(diagnostic, path), "title": f"{diagnostic.code} {CODES[diagnostic.code]}"}
    listed = ",".join(f"{key}={_escape_property(value)}" for key, value in properties.items())
    return f"::{diagnostic.severity.value} {listed}::{_escape(message_with_notes(diagnostic))}"


def _place(diagnostic: Diagnostic, path: str | None) -> dict[str, str]:
    span = diagnostic.span
    if span is None or not is_in_file(span):
        return {} if path is None else {"file": path, "line": "1"}
    end_line, end_column = span.end_position
    place = {"file": span.file.name, "line": str(span.line), "endLine": str(end_line)}
    if end_line == span.line:
        place |= {"col": str(span.column), "endColumn": str(end_column)}
    return place


def _escape(text: str) -> str:
    return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def _escape_property(text: str) -> str:
    return _escape(text).replace(":", "%3A").replace(",", "%2C")
