"""The swap plan of one device: what leaves, when, and what it costs; or why no plan exists."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from enum import Enum
from fractions import Fraction

from rlflow.passes.analysis.memory.bounds import Bounds, lower_bounds
from rlflow.passes.analysis.memory.choice import Choice, Infeasible, choose, rounded
from rlflow.passes.analysis.memory.gaps import Eviction
from rlflow.passes.analysis.memory.host import kept_copies
from rlflow.passes.analysis.memory.instructions import ORDER, Instruction, instructions_of
from rlflow.passes.analysis.memory.movement import Action, Movement, lay_out
from rlflow.passes.analysis.memory.objects import Device, Kind, Period, Resident, check_inputs
from rlflow.passes.analysis.memory.timeline import Timeline, build_timeline
from rlflow.passes.analysis.memory.transfers import Demand, Job, tightest_window
from rlflow.values import dataclass


class Objective(Enum):
    BUSY = "busy"
    """Least seconds of copying and rebuilding: exact, and the least bytes where both directions are equally fast."""
    EXPOSED = "exposed"
    """Least seconds added to the period, as far as found; `least_exposed_seconds` bounds what is left to gain."""


@dataclass(frozen=True, slots=True)
class Priming:
    """A copy that is made once, before the first period: the host copy of a clean object, or what is never needed."""

    resident: str
    bytes: int
    seconds: Fraction


@dataclass(frozen=True, slots=True)
class Alternative:
    """A way to run: `resident` keeps everything, `planned` is this plan, `least` keeps only what each phase needs."""

    name: str
    peak_bytes: int
    fits: bool


@dataclass(frozen=True, slots=True)
class SwapPlan:
    """One period of one device, in the steady state if the period is cyclic. Bytes and seconds per period.

    An executor may copy beside phases, page by page in the order of `moves`, as the timeline shows. One that does not
    overlap does everything of a boundary there: drops, offloads, onloads, rebuilds, each kind complete before the next.
    That fits as well; it only waits longer.
    """

    instructions: tuple[Instruction, ...]
    evictions: tuple[Eviction, ...]
    movement: Movement
    timeline: Timeline
    alternatives: tuple[Alternative, ...]
    priming: tuple[Priming, ...]
    bounds: Bounds
    link: tuple[Demand | None, Demand | None]
    """The tightest window of the copies out and in, on the period's own clock, before any waiting."""
    least_exposed_seconds: float | None = None
    """No plan adds less; None where the plan was not made for it."""

    @property
    def peak_bytes(self) -> int:
        return self.timeline.peak.bytes

    @property
    def exposed_seconds(self) -> Fraction:
        """What swapping adds to the period."""
        return self.movement.exposed_seconds

    @property
    def offload_bytes(self) -> int:
        return self._bytes(Action.OFFLOAD)

    @property
    def onload_bytes(self) -> int:
        return self._bytes(Action.ONLOAD)

    @property
    def busy_seconds(self) -> Fraction:
        """Seconds of link, both directions added, and of rebuilding."""
        return sum((instruction.seconds for instruction in self.instructions), Fraction(0))

    def before(self, phase: str) -> tuple[Instruction, ...]:
        """The instructions of the boundary before a phase: drops, offloads, onloads, rebuilds."""
        mine = (instruction for instruction in self.instructions if instruction.boundary == phase)
        return tuple(sorted(mine, key=lambda instruction: ORDER.index(instruction.action)))

    def moved(self, kind: Kind) -> tuple[str, ...]:
        """Names of the objects of a kind that are absent at some time, in the order of the residents."""
        names = (e.gap.resident.name for e in self.evictions if e.gap.resident.kind is kind)
        return tuple(dict.fromkeys(names))

    def _bytes(self, action: Action) -> int:
        return sum(instruction.bytes for instruction in self.instructions if instruction.action is action)


def plan_swaps(
    residents: Sequence[Resident],
    period: Period,
    device: Device,
    *,
    whole: bool = False,
    objective: Objective = Objective.BUSY,
) -> SwapPlan | Infeasible:
    """The plan with the least seconds of copying and rebuilding, its copies hidden behind phases where there is room.

    `whole` moves every object entirely or not at all, as frameworks with one flag per object do; otherwise pages move.
    Nothing moves where everything fits. ValueError for inputs that contradict themselves (`check_inputs`).
    """
    check_inputs(residents, period)
    if whole:
        residents = [resident.whole() for resident in residents]
    choice = choose(residents, period, device)
    if isinstance(choice, Infeasible):
        return choice
    plan = _plan(choice, residents, period, device)
    return plan if objective is Objective.BUSY else _less_exposed(plan, residents, period, device)


def _plan(choice: Choice, residents: Sequence[Resident], period: Period, device: Device) -> SwapPlan:
    evictions = choice.evictions
    movement = lay_out(evictions, residents, period, device)
    timeline = build_timeline(residents, evictions, movement, period)
    return SwapPlan(
        instructions_of(evictions, movement, period),
        evictions,
        movement,
        timeline,
        _alternatives(residents, period, device, timeline),
        _priming(evictions, period, device),
        lower_bounds(residents, period, device, choice.bound_seconds),
        _link(evictions, period, device),
    )


def _less_exposed(plan: SwapPlan, residents: Sequence[Resident], period: Period, device: Device) -> SwapPlan:
    """The plan, or one from the amounts that would add least if pages could be split, whichever adds less."""
    if not plan.exposed_seconds:
        return replace(plan, least_exposed_seconds=0.0)
    from rlflow.passes.analysis.memory.exposure import least_exposed

    found = least_exposed(residents, period, device)
    if found is None:
        raise ArithmeticError("a plan exists, but the solver finds none")
    least, amounts = found
    choice = rounded(amounts, residents, period, device)
    if choice is not None:
        other = _plan(choice, residents, period, device)
        if (other.exposed_seconds, other.busy_seconds) < (plan.exposed_seconds, plan.busy_seconds):
            plan = replace(other, bounds=plan.bounds)
    return replace(plan, least_exposed_seconds=min(max(0.0, least), float(plan.exposed_seconds)))


def least_peak(residents: Sequence[Resident], period: Period) -> int:
    """Bytes below which no swapping helps: the most that one phase needs at once."""
    return max(sum(r.bytes for r in residents if phase.name in r.needed) for phase in period.phases)


def _alternatives(
    residents: Sequence[Resident], period: Period, device: Device, timeline: Timeline
) -> tuple[Alternative, ...]:
    peaks = {
        "resident": sum(resident.bytes for resident in residents),
        "planned": timeline.peak.bytes,
        "least": least_peak(residents, period),
    }
    return tuple(Alternative(name, peak, peak <= device.hbm_bytes) for name, peak in peaks.items())


def _priming(evictions: Sequence[Eviction], period: Period, device: Device) -> tuple[Priming, ...]:
    if not period.cyclic:
        return ()
    sizes = kept_copies(evictions)
    sizes |= {e.gap.resident.name: e.bytes for e in evictions if e.gap.always and e.gap.pools_host}
    return tuple(Priming(name, size, Fraction(size, device.d2h)) for name, size in sizes.items())


def _link(evictions: Sequence[Eviction], period: Period, device: Device) -> tuple[Demand | None, Demand | None]:
    """Copies may start when their gap starts and must end when it ends. Gaps that wrap are unrolled once; a window
    longer than the period is cut by taking every job in one place only."""
    starts = [Fraction(0)]
    for phase in (*period.phases, *period.phases):
        starts.append(starts[-1] + phase.window)
    out, back = [], []
    for eviction in evictions:
        gap = eviction.gap
        job = Job(gap.resident.name, eviction.bytes, starts[gap.first], starts[gap.first + len(gap.phases)])
        if gap.saves:
            out.append(job)
        if gap.returns:
            back.append(job)
    return tightest_window(out, device.d2h), tightest_window(back, device.h2d)
