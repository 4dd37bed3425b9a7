"""The language: text to syntax tree."""

from __future__ import annotations

if __name__ != "rlflow.grammar":
    raise ImportError(f"import rlflow.grammar, not {__name__}")
