"""Batch sizes by step: constant until changed, so that sums over steps are exact and short to save."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable

from rlflow.values import dataclass


@dataclass(frozen=True, slots=True)
class BatchSizes:
    """`sizes[k]` samples per step from step `starts[k]` on, until the next start. Raises ValueError where malformed."""

    starts: tuple[int, ...]
    sizes: tuple[int, ...]

    def __post_init__(self) -> None:
        if len(self.starts) != len(self.sizes) or not self.starts or self.starts[0] != 0:
            raise ValueError(f"batch sizes {self.sizes} from steps {self.starts}: one start a size, the first 0")
        if any(b <= a for a, b in zip(self.starts, self.starts[1:], strict=False)):
            raise ValueError(f"steps {self.starts} at which the batch changes must rise")
        if min(self.sizes) < 1:
            raise ValueError(f"batch sizes {self.sizes} must be at least 1")

    @classmethod
    def constant(cls, batch: int) -> BatchSizes:
        return cls((0,), (batch,))

    def at(self, step: int) -> int:
        """Samples of step `step` (>= 0)."""
        return self.sizes[bisect_right(self.starts, step) - 1]

    def changed(self, batch: int, from_step: int) -> BatchSizes:
        """The same sizes before `from_step`, `batch` from it on (later changes are forgotten)."""
        if from_step < 0:
            raise ValueError(f"the batch cannot change at step {from_step}")
        kept = [(start, size) for start, size in zip(self.starts, self.sizes, strict=True) if start < from_step]
        starts, sizes = zip(*kept, (from_step, batch), strict=True)
        return BatchSizes(starts, sizes)

    def total(self, first: int, last: int, of: Callable[[int], int] = lambda batch: batch) -> int:
        """Sum of `of(batch)` over the steps `first` to `last`, both included; 0 where last < first."""
        total = 0
        for k, (start, size) in enumerate(zip(self.starts, self.sizes, strict=True)):
            end = self.starts[k + 1] - 1 if k + 1 < len(self.starts) else last
            steps = min(end, last) - max(start, first) + 1
            if steps > 0:
                total += steps * of(size)
        return total
