"""Why a plan lost, in numbers."""

from __future__ import annotations

from dataclasses import dataclass

from rlflow.amounts import GIB
from rlflow.passes.search.candidate import Candidate
from rlflow.passes.search.pool_time import Misfit


@dataclass(frozen=True, slots=True)
class Loss:
    """What the winner has over another plan."""

    seconds: float
    """How much longer the other's period is."""
    share: float
    """The same as a fraction of the winner's; 0 when both are 0."""
    more_devices: int
    """How many more devices the other uses; may be negative."""

    def __str__(self) -> str:
        devices = f"{abs(self.more_devices)} device{'s' if abs(self.more_devices) != 1 else ''}"
        count = f"{devices} {'more' if self.more_devices > 0 else 'fewer'}" if self.more_devices else ""
        if self.share > 0.0:
            return f"slower by {percent(self.share)}" + (f", with {count}" if count else "")
        return "equal period" + (f", with {count}" if count else "")


def loss(winner: Candidate, other: Candidate) -> Loss:
    seconds = other.period - winner.period
    share = seconds / winner.period if winner.period > 0.0 else (0.0 if seconds <= 0.0 else float("inf"))
    return Loss(seconds, share, other.devices - winner.devices)


def percent(share: float) -> str:
    """Two significant digits below ten, so that a small loss is not shown as none."""
    value = 100.0 * share
    return f"{value:.0f} %" if value >= 10.0 else f"{value:.2g} %"


def gib(count: int) -> str:
    return f"{count / GIB:.2f} GiB" if count >= GIB // 100 else f"{count} bytes"


def misfit_text(misfit: Misfit) -> str:
    """One sentence: what does not fit, and both numbers."""
    devices = f"{misfit.devices} device{'s' if misfit.devices != 1 else ''}"
    if misfit.needed_bytes is None:
        return f"`{misfit.stage}` has no layout for at most {devices}"
    shared = ", ".join(f"`{stage}`" for stage in misfit.stages)
    where = f"{shared} together on {devices}" if len(misfit.stages) > 1 else f"{shared} on {devices}"
    peak = f" while `{misfit.stage}` runs" if len(misfit.stages) > 1 else ""
    return (
        f"{where} does not fit: at least {gib(misfit.needed_bytes)} a device{peak}, "
        f"and a device has {gib(misfit.limit_bytes)}"
    )
