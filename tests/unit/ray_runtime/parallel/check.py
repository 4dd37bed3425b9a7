"""What every layout must satisfy, from what `jobs.against_one_process` found on its ranks."""

from __future__ import annotations

from typing import Any

from rlflow.ir.flow import Layout
from tests.unit.ray_runtime.parallel import jobs
from tests.unit.ray_runtime.parallel.workers import Workers

GRADIENTS = 2e-5
"""Of the largest gradient of the same weight: float32 sums in another order."""
LOSSES = 1e-4


def equals_one_process(
    workers: Workers, kind: str, layout: Layout, changes: dict[str, Any] | None = None, **options: Any
) -> None:
    found = workers.run(jobs.against_one_process, kind, layout, changes or {}, options, "fp32", ranks=layout.size)
    for rank, result in enumerate(found):
        assert not result["names"], f"rank {rank}: {result['names']}"
        assert result["gradients"] < GRADIENTS, (rank, result)
        for name in ("metrics", "logprobs", "loaded", "step 1", "step 2", "step 3"):
            assert result[name] < LOSSES, (rank, name, result)
        assert result["weights"] < 1e-3, (rank, result)
    same_where_shared([result["digests"] for result in found])


def same_where_shared(digests: list[list[tuple[str, str, str]]]) -> None:
    """Ranks that hold the same part of a weight hold the same bits after training: (name, part, digest) by rank."""
    seen: dict[tuple[str, str], tuple[int, str]] = {}
    for rank, mine in enumerate(digests):
        for name, part, digest in mine:
            first, other = seen.setdefault((name, part), (rank, digest))
            assert digest == other, f"{name} differs between ranks {first} and {rank}"
