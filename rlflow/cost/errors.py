"""What the cost model cannot answer: a fact that nobody stated, a layout that does not fit the model."""

from __future__ import annotations


class CostError(Exception):
    """Base of the errors of this package."""


class UnknownFactError(CostError):
    """A fact that the answer depends on is not known; nothing is made up in its place."""

    def __init__(self, subject: str, fact: str) -> None:
        super().__init__(f"{subject} has no fact `{fact}`")
        self.subject = subject
        self.fact = fact


class LayoutError(CostError):
    """A layout that does not describe this model or this pool."""


class WorkloadError(CostError):
    """Numbers of a workload that contradict each other."""
