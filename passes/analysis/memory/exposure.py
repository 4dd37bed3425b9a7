"""The least seconds that swapping can add to a period: a linear program over amounts per gap and phase.

Transfer feasibility as rows per phase and boundary. Amounts flow instead of moving in pages, and the host is not
limited, so that the value is a lower bound for every plan. Beside a phase, copies out run early and copies in late;
what they hold is convex in time, so that memory is fullest at the ends of the phase and needs rows there only.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rlflow.passes.analysis.memory.gaps import Eviction, Gap, all_gaps
from rlflow.passes.analysis.memory.objects import Device, Period, Resident

Terms = list[tuple[int, float]]


def least_exposed(
    residents: Sequence[Resident], period: Period, device: Device, evictions: Sequence[Eviction] | None = None
) -> tuple[float, tuple[tuple[Gap, float], ...]] | None:
    """(seconds, bytes absent per gap); None if the device is too small whatever leaves.

    With `evictions`, the bytes per gap are given and only the copies are laid out; else any amount may leave.
    """
    gaps = [gap for gap in all_gaps(residents, period) if not gap.always]
    program = _Exposure(gaps, period, device)
    if evictions is not None:
        chosen = {(e.gap.resident.name, e.gap.first): e.bytes for e in evictions}
        for number, gap in enumerate(gaps):
            size = chosen.get((gap.resident.name, gap.first), 0)
            program.limits[program.absent[number]] = (size, size)
    gone = sum(gap.resident.bytes for gap in all_gaps(residents, period) if gap.always)
    program.memory(sum(resident.bytes for resident in residents) - gone)
    program.copies()
    found = program.solve()
    if found is None:
        return None
    value, amounts = found
    return value, tuple((gap, amounts[program.absent[number]]) for number, gap in enumerate(gaps))


class _Exposure:
    """Columns: bytes absent per gap; per gap and phase of it the bytes still to leave and already back, at its start
    and end; seconds of waiting per boundary. Rows: sum of terms <= most."""

    def __init__(self, gaps: Sequence[Gap], period: Period, device: Device) -> None:
        self.gaps, self.period, self.device = gaps, period, device
        self.limits: list[tuple[float, float | None]] = []
        self.rows: list[tuple[Terms, float]] = []
        self.costs: list[float] = []
        self.absent, self.waiting, self.back = [], [], []
        for gap in gaps:
            rebuild = float(gap.seconds(1, device)) if gap.rebuilds else 0.0
            self.absent.append(self._column(gap.resident.bytes, rebuild))
            # (at the start of the phase, at its end)
            out, back = (None if gap.saves else 0), (None if gap.returns else 0)
            self.waiting.append([(self._column(out), self._column(out)) for _ in gap.phases])
            self.back.append([(self._column(back), self._column(back)) for _ in gap.phases])
        self.boundaries = [self._column(None, 1.0) for _ in period.phases]

    def _column(self, most: float | None, cost: float = 0.0) -> int:
        self.limits.append((0, most))
        self.costs.append(cost)
        return len(self.costs) - 1

    def _row(self, terms: Iterable[tuple[int, float]], most: float) -> None:
        self.rows.append((list(terms), most))

    def _here(self, phase: int) -> list[tuple[int, int]]:
        """(number of the gap, position in it) of the gaps that hold a phase."""
        return [(n, gap.phases.index(phase)) for n, gap in enumerate(self.gaps) if phase in gap.phases]

    def memory(self, total: int) -> None:
        """What is needed, still to leave or already back fits at both ends of every phase."""
        for phase in range(len(self.period.phases)):
            here = self._here(phase)
            for end in (0, 1):
                held = [(column[n][at][end], 1.0) for n, at in here for column in (self.waiting, self.back)]
                self._row([*held, *((self.absent[n], -1.0) for n, _ in here)], self.device.hbm_bytes - total)

    def copies(self) -> None:
        """Every page leaves before it comes back, and the link carries what moves beside phases and at boundaries."""
        for n, gap in enumerate(self.gaps):
            for at in range(len(gap.phases)):
                (wait_start, wait_end), (back_start, back_end) = self.waiting[n][at], self.back[n][at]
                self._row([(wait_end, 1), (wait_start, -1)], 0)
                self._row([(back_start, 1), (back_end, -1)], 0)
                self._row([(wait_end, 1), (back_end, 1), (self.absent[n], -1)], 0)
                if at:
                    self._row([(wait_start, 1), (self.waiting[n][at - 1][1], -1)], 0)
                    self._row([(self.back[n][at - 1][1], 1), (back_start, -1)], 0)
                else:
                    self._row([(wait_start, 1), (self.absent[n], -1)], 0)
        for phase, boundary in enumerate(self.boundaries):
            window = float(self.period.phases[phase].window)
            here = self._here(phase)
            out = [(self.waiting[n][at][end], 1.0 - 2 * end) for n, at in here for end in (0, 1)]
            back = [(self.back[n][at][end], 2.0 * end - 1) for n, at in here for end in (0, 1)]
            self._row(out, self.device.d2h * window)
            self._row(back, self.device.h2d * window)
            if phase or self.period.cyclic:
                out, back = self._between(phase)
                self._row([*out, (boundary, -float(self.device.d2h))], 0)
                self._row([*back, (boundary, -float(self.device.h2d))], 0)

    def _between(self, phase: int) -> tuple[Terms, Terms]:
        """What moves at the boundary before a phase, out and in."""
        out: Terms = []
        back: Terms = []
        for n, gap in enumerate(self.gaps):
            if phase in gap.phases:
                at = gap.phases.index(phase)
                before = self.waiting[n][at - 1][1] if at else self.absent[n]
                if gap.saves:
                    out += [(before, 1), (self.waiting[n][at][0], -1)]
                back.append((self.back[n][at][0], 1))
                if at:
                    back.append((self.back[n][at - 1][1], -1))
            if gap.last == (phase - 1) % len(self.period.phases):
                out.append((self.waiting[n][-1][1], 1))
                if gap.returns:
                    back += [(self.absent[n], 1), (self.back[n][-1][1], -1)]
        return out, back

    def solve(self) -> tuple[float, list[float]] | None:
        if not self.gaps:
            return (0.0, []) if all(most >= 0 for _, most in self.rows) else None
        import numpy as np
        from scipy.optimize import linprog

        # In units of the largest object, so that bytes and seconds are numbers near 1.
        unit = float(max(1, *(gap.resident.bytes for gap in self.gaps)))
        scale = np.full(len(self.costs), unit)
        scale[self.boundaries] = 1.0
        matrix, most = np.zeros((len(self.rows), len(self.costs))), np.zeros(len(self.rows))
        for number, (terms, limit) in enumerate(self.rows):
            for column, factor in terms:
                matrix[number, column] += factor * scale[column] / unit
            most[number] = limit / unit
        limits = [
            (low / s, None if high is None else high / s) for (low, high), s in zip(self.limits, scale, strict=True)
        ]
        result = linprog(np.array(self.costs) * scale, A_ub=matrix, b_ub=most, bounds=limits, method="highs")
        if result.status == 2:
            return None
        if result.status != 0:
            raise ArithmeticError(f"HiGHS: {result.message}")
        return float(result.fun), [float(value) for value in result.x * scale]
