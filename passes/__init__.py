"""The compiler's passes, one per file."""

from __future__ import annotations

if __name__ != "rlflow.passes":
    raise ImportError(f"import rlflow.passes, not {__name__}")
