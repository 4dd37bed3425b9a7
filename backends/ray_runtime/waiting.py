"""Waiting for another process, never for ever."""

from __future__ import annotations

from typing import Any

import ray

from rlflow.diagnostics.diagnostic import RunFailure

ANSWER_GRACE_S = 60.0
"""Beyond a limit that the other side keeps itself: it says more when its time is up."""


def answer(refs: Any, limit_s: float, who: str, what: str) -> Any:
    """`ray.get` with an end. RLF5019 that says who waited for what, such as "an answer of the queue `q`"."""
    try:
        return ray.get(refs, timeout=limit_s)
    except ray.exceptions.GetTimeoutError:
        raise waited(who, limit_s, what, "it does not answer, and is not dead either") from None


def waited(who: str, limit_s: float, what: str, *notes: str) -> RunFailure:
    """RLF5019"""
    return RunFailure("RLF5019", f"{who} waited {limit_s:g} s for {what}", notes=notes)
