"""What stages and transfers share: links of a device, and workers of Python functions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from rlflow.backends.simulator.clock import Clock, Process, Time, Wait
from rlflow.backends.simulator.clock import Signal as Signal


@dataclass(slots=True, eq=False)
class Link:
    """One direction of a link of every device of a pool. Transfers are served one at a time, in the order of asking."""

    name: str
    clock: Clock
    free_at: Time = 0
    bytes: int = 0
    """Of the busiest device, since the start."""
    used: list[tuple[Time, Time, int]] = field(default_factory=list)
    """(start, microseconds, bytes)."""

    def hold(self, us: Time, size: int) -> Time:
        """A transfer joins the queue; when it will have ended."""
        start = max(self.clock.now, self.free_at)
        self._use(start, us, size)
        self.free_at = start + us
        return self.free_at

    def interrupt(self, us: Time, size: int) -> None:
        """A transfer that somebody waits for goes first: what is queued is done so much later."""
        self._use(self.clock.now, us, size)
        self.free_at = max(self.clock.now, self.free_at) + us

    def _use(self, start: Time, us: Time, size: int) -> None:
        self.bytes += size
        self.used.append((start, us, size))


@dataclass(slots=True, eq=False)
class PoolLinks:
    """The links of the devices of a pool: to the host's memory and to other devices, a full-duplex pair each."""

    to_host: Link
    from_host: Link
    out: Link
    into: Link

    @classmethod
    def of(cls, pool: str, clock: Clock) -> PoolLinks:
        return cls(*(Link(f"{pool} {name}", clock) for name in ("to host", "from host", "out", "in")))

    @property
    def all(self) -> tuple[Link, ...]:
        return (self.to_host, self.from_host, self.out, self.into)


def transfer(clock: Clock, us: Time, parts: Sequence[tuple[Link, Time, int]]) -> Process:
    """Sleeps for a transfer of `us` microseconds that holds each link so long and moves so many bytes over it.

    It starts when all links are free, so that two of them on one link take as long as both.
    """
    while True:
        start = max((link.free_at for link, _, _ in parts), default=clock.now)
        if start <= clock.now:
            break
        yield start - clock.now  # another transfer may have come first meanwhile
    for link, held, size in parts:
        link.hold(held, size)
    yield us


@dataclass(slots=True, eq=False)
class Workers:
    """The workers of a pool of Python functions: a call has them all, the next one waits."""

    name: str
    clock: Clock
    busy: bool = False
    freed: Signal = field(default_factory=Signal)

    def call(self, us: Time) -> Process:
        while self.busy:
            yield Wait(self.freed, f"the workers of {self.name}")
        self.busy = True
        yield us
        self.busy = False
        self.clock.fire(self.freed)
