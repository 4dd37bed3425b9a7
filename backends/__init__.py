"""What is done with a plan: run it, draw it."""

from __future__ import annotations

if __name__ != "rlflow.backends":
    raise ImportError(f"import rlflow.backends, not {__name__}")
