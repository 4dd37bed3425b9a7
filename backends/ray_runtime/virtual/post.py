"""Calls to other actors, counted, with those that go through the queues: what a run's control plane has to carry."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from typing import Any

Call = tuple[str, Any, tuple[Any, ...]]
"""(method, actor, arguments)"""


class Post:
    """Of one worker."""

    def __init__(self) -> None:
        self.sent: Counter[str] = Counter()
        """Calls by method; `fetch`: parts that were read."""
        self.waited = 0.0
        """Seconds in which answers were waited for."""

    def ask(self, calls: Sequence[Call]) -> list[Any]:
        """All at once; their answers in order."""
        import ray

        started = time.perf_counter()
        answers = ray.get([getattr(actor, method).remote(*arguments) for method, actor, arguments in calls])
        self.waited += time.perf_counter() - started
        self.sent.update(method for method, _, _ in calls)
        return list(answers)

    def count(self, what: str, seconds: float, times: int = 1) -> None:
        """Something that was sent elsewhere, and waited for so long."""
        self.sent[what] += times
        self.waited += seconds
