"""Host memory: what one device may use of it, and what a plan uses."""

from __future__ import annotations

from collections.abc import Sequence

from rlflow.passes.analysis.memory.gaps import Eviction
from rlflow.passes.analysis.memory.objects import Kind, Period, Resident
from rlflow.passes.analysis.memory.program import boundary_sides


def host_share(host_bytes: int, devices: int, reserved_bytes: int = 0) -> int:
    """Bytes of host memory for each of `devices` that share a host, after `reserved_bytes` for everything else.

    ValueError if there is no device or a negative amount. 0 where the reserve takes all.
    """
    if devices < 1 or host_bytes < 0 or reserved_bytes < 0:
        raise ValueError("host memory is shared by at least one device, and amounts are not negative")
    return max(0, host_bytes - reserved_bytes) // devices


def standing_copies(residents: Sequence[Resident]) -> int:
    """Bytes of host copies that exist before any eviction and stay."""
    return sum(resident.bytes for resident in residents if resident.host_copy)


def kept_copies(evictions: Sequence[Eviction]) -> dict[str, int]:
    """Bytes per clean object that the host keeps because some gap evicts them, beside the standing copies."""
    pages: dict[str, dict[int, int]] = {}
    for eviction in evictions:
        resident = eviction.gap.resident
        if resident.kind is Kind.CLEAN and not resident.host_copy:
            pages.setdefault(resident.name, {}).update(eviction.pages())
    return {name: sum(sizes.values()) for name, sizes in pages.items()}


def host_by_boundary(residents: Sequence[Resident], evictions: Sequence[Eviction], period: Period) -> list[int]:
    """Bytes the host must hold at the boundary before each phase (and, on a line, after the last)."""
    constant = standing_copies(residents) + sum(kept_copies(evictions).values())
    pooled = [eviction for eviction in evictions if eviction.gap.pools_host]
    return [
        constant + sum(e.bytes for e in pooled if boundary_sides(boundary, period) & e.gap.host_phases(period))
        for boundary in range(len(period.phases) + (0 if period.cyclic else 1))
    ]
