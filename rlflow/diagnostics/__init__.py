"""Diagnostics as values. Imports nothing else of rlflow."""

from rlflow.diagnostics.codes import CODES, slug
from rlflow.diagnostics.diagnostic import (
    CompileError,
    Diagnostic,
    Label,
    RunFailure,
    Severity,
    did_you_mean,
    one_of,
)
from rlflow.diagnostics.source import SourceFile, Span

__all__ = [
    "CODES",
    "CompileError",
    "Diagnostic",
    "Label",
    "RunFailure",
    "Severity",
    "SourceFile",
    "Span",
    "did_you_mean",
    "one_of",
    "slug",
]
