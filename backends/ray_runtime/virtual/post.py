"""Calls to other actors and objects in Ray's store, counted: what a run's control plane has to carry."""

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
        """Calls by method, `store` and `fetch`."""
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

    def store(self, value: Any) -> Any:
        """A reference to an object in the store."""
        import ray

        self.sent["store"] += 1
        return ray.put(value)

    def fetch(self, references: Sequence[Any]) -> list[Any]:
        import ray

        self.sent["fetch"] += len(references)
        return list(ray.get(list(references)))
