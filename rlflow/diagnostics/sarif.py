"""Diagnostics as SARIF 2.1.0, the format in which code hosts and editors take the findings of a checker.

https://docs.oasis-open.org/sarif/sarif/v2.1.0/sarif-v2.1.0.html
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from pathlib import PurePath
from typing import Any
from urllib.parse import quote

from rlflow.diagnostics.codes import CODES, WARNINGS, page_path, page_text
from rlflow.diagnostics.diagnostic import Diagnostic, Label
from rlflow.diagnostics.github import is_in_file, message_with_notes
from rlflow.diagnostics.source import Span

_FIRST_LINE = {"startLine": 1}


def to_sarif(diagnostics: Iterable[Diagnostic], path: str | None = None) -> dict[str, Any]:
    """The log of one run of the checker, as plain values.

    Consumers refuse a result without a location, so diagnostics without a place in a file get the first line of
    `path`, the input.
    """
    from importlib.metadata import PackageNotFoundError, version

    found = list(diagnostics)
    codes = sorted({diagnostic.code for diagnostic in found})
    fallback = path if path is not None else _any_file(found)
    driver: dict[str, Any] = {"name": "rlflow", "rules": [_rule(code) for code in codes]}
    with contextlib.suppress(PackageNotFoundError):  # a tree that is not installed
        driver["version"] = version("rlflow-dsl")
    return {
        "$schema": "https://json.schemastore.org/sarif-2.1.0.json",
        "version": "2.1.0",
        "runs": [
            {
                "tool": {"driver": driver},
                "columnKind": "unicodeCodePoints",
                "results": [_result(diagnostic, codes.index(diagnostic.code), fallback) for diagnostic in found],
            }
        ],
    }


def _any_file(found: list[Diagnostic]) -> str:
    """A file that the diagnostics name; `.` when they name none."""
    files = (label.span.file.name for diagnostic in found for label in diagnostic.labels if is_in_file(label.span))
    return next(files, ".")


def _rule(code: str) -> dict[str, Any]:
    words = CODES[code].split("-")
    rule: dict[str, Any] = {
        "id": code,
        "name": "".join(word.capitalize() for word in words),
        "shortDescription": {"text": " ".join(words)},
        "defaultConfiguration": {"level": "warning" if code in WARNINGS else "error"},
    }
    page = page_text(code)
    if page:
        rule["fullDescription"] = {"text": _first_paragraph(page)}
        rule["help"] = {"text": page, "markdown": page}
        # SARIF wants an absolute address.
        rule["helpUri"] = page_path(code).resolve().as_uri()
    return rule


def _first_paragraph(page: str) -> str:
    """The paragraph under the title, on one line."""
    return " ".join(page.split("\n\n")[1].split())


def _result(diagnostic: Diagnostic, rule: int, fallback: str) -> dict[str, Any]:
    primary = next((label for label in diagnostic.labels if label.primary), None)
    if primary is not None and is_in_file(primary.span):
        location = _location(primary)
    else:
        location = {"physicalLocation": {"artifactLocation": {"uri": _uri(fallback)}, "region": _FIRST_LINE}}
    result: dict[str, Any] = {
        "ruleId": diagnostic.code,
        "ruleIndex": rule,
        "level": diagnostic.severity.value,
        "message": {"text": message_with_notes(diagnostic)},
        "locations": [location],
    }
    others = [label for label in diagnostic.labels if label is not primary and is_in_file(label.span)]
    if others:
        result["relatedLocations"] = [{"id": i, **_location(label)} for i, label in enumerate(others, start=1)]
    return result


def _location(label: Label) -> dict[str, Any]:
    location: dict[str, Any] = {
        "physicalLocation": {
            "artifactLocation": {"uri": _uri(label.span.file.name)},
            "region": _region(label.span),
        }
    }
    if label.text:
        location["message"] = {"text": label.text}
    return location


def _region(span: Span) -> dict[str, int]:
    end_line, end_column = span.end_position
    return {"startLine": span.line, "startColumn": span.column, "endLine": end_line, "endColumn": end_column}


def _uri(path: str) -> str:
    """A relative path as a relative URI, which consumers resolve against the root of the sources."""
    if PurePath(path).is_absolute():
        return PurePath(path).as_uri()
    return quote(PurePath(path).as_posix())
