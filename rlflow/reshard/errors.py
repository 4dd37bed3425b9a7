"""What is wrong with a reshard, all at once."""

from __future__ import annotations

from collections.abc import Iterable


class ReshardError(ValueError):
    """`problems` are sentences with the numbers that clash; the message is all of them, one a line."""

    def __init__(self, problems: str | Iterable[str]) -> None:
        self.problems = (problems,) if isinstance(problems, str) else tuple(problems)
        super().__init__("\n".join(self.problems))
