"""How many communicators a device is in, and how large their buffers may be beside what a plan keeps on it.

HCCL takes two buffers of HCCL_BUFFSIZE on the device for each, one for what is sent and one for what is received.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final, Protocol

DEFAULT_MIB: Final = 200
"""HCCL_BUFFSIZE when nobody sets it."""
LEAST_MIB: Final = 32
"""Below it every collective is cut into so many pieces that starting them is what takes time."""


class Axes(Protocol):
    """Sizes of a layout's axes: `rlflow.ir.flow.Layout`, and the plan's."""

    @property
    def tp(self) -> int: ...
    @property
    def cp(self) -> int: ...
    @property
    def dp(self) -> int: ...
    @property
    def pp(self) -> int: ...
    @property
    def ep(self) -> int: ...
    @property
    def etp(self) -> int: ...


def communicators(layouts: Iterable[Axes], between_pools: int = 0) -> int:
    """Groups that one device is in: all ranks of its pool, one per axis of every layout, one per exchange with another
    pool. Axes of different layouts that join the same ranks share one.

    Ranks are numbered with tp fastest, then cp, dp and pp; ep and etp cut what one pipeline stage holds.
    """
    groups = set()
    most = 1
    for layout in layouts:
        stage = layout.tp * layout.cp * layout.dp
        most = max(most, stage * layout.pp)
        axes = [
            (layout.tp, 1),
            (layout.cp, layout.tp),
            (layout.dp, layout.tp * layout.cp),
            (layout.dp * layout.cp, layout.tp),  # gradients
            (layout.pp, stage),
            (layout.etp, 1),
            (layout.ep, layout.etp),
        ]
        groups |= {(size, stride) for size, stride in axes if size > 1}
    groups.add((most, 1))
    return len(groups) + between_pools


def buffer_mib(groups: int, room_bytes: int) -> int:
    """HCCL_BUFFSIZE with which the buffers of so many communicators fit into the room: the default, or less."""
    return max(0, min(DEFAULT_MIB, room_bytes // (2 * groups) >> 20))
