"""Memory of one device of every pool: what is resident in each phase of a step, against the capacity."""

from __future__ import annotations

from typing import Any

from rlflow.backends.visualizers.report.colours import object_kind
from rlflow.plan import Plan


def memory_of(plan: Plan) -> list[dict[str, Any]]:
    """Pools of the plan's memory table. Objects of a phase: (name, bytes, kind), in the order of the kinds, so that
    layers keep their place from phase to phase.

    Where a simulation gives the times the page lays phases along them; between two phases it shows what is in both, at
    the smaller of its sizes, since the table has no entry for that time.
    """
    return [
        {
            "pool": memory.pool,
            "capacity": memory.capacity,
            "reserved": memory.reserved,
            "host_capacity": memory.host_capacity,
            "peak": memory.peak,
            "peak_without_swaps": memory.peak_without_swaps,
            "phases": [
                {
                    "stage": phase.stage,
                    "us": phase.us,
                    "bytes": phase.bytes,
                    "host_bytes": phase.host_bytes,
                    "objects": sorted(
                        ([name, count, object_kind(name)] for name, count in phase.contents if count),
                        key=lambda part: part[2],
                    ),
                }
                for phase in memory.phases
            ],
        }
        for memory in plan.memory
    ]
