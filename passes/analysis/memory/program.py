"""The eviction problem as a small integer program with integer data.

Variables count pages absent in a gap; one row per phase covers what does not fit, one per phase boundary keeps the host
within its share. On a line every phase column has consecutive ones: an interval matrix, totally unimodular, so that
the relaxation is integral in pages of one size. A cyclic order is circular-ones, where it need not be.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import Enum
from fractions import Fraction

from rlflow.passes.analysis.memory.gaps import Eviction, Gap
from rlflow.passes.analysis.memory.objects import Device, Period, Resident
from rlflow.values import dataclass


@dataclass(frozen=True, slots=True)
class Column:
    """An integer variable from 0 to `limit`. One unit costs `seconds` and stands for `unit` bytes.

    `gap` is None for first host copies, which are no evictions themselves.
    """

    gap: Gap | None
    unit: int
    limit: int
    seconds: Fraction
    tail: bool = False


class RowKind(Enum):
    DEVICE = "device"
    """A phase must lose so many bytes; all terms are positive."""
    COPY = "copy"
    """A page that leaves has been copied."""
    HOST = "host"
    """The host's share at a phase boundary; all terms are negative."""


@dataclass(frozen=True, slots=True)
class Row:
    """The sum of coefficient x column is at least `least`."""

    terms: Mapping[int, int]
    least: int
    kind: RowKind = RowKind.DEVICE


@dataclass(frozen=True, slots=True)
class Program:
    """Minimise seconds over all columns that satisfy all rows."""

    columns: tuple[Column, ...]
    rows: tuple[Row, ...]

    def satisfied(self, counts: Sequence[int]) -> bool:
        return all(sum(k * counts[i] for i, k in row.terms.items()) >= row.least for row in self.rows)

    def seconds(self, counts: Sequence[int]) -> Fraction:
        return sum((c.seconds * n for c, n in zip(self.columns, counts, strict=True)), Fraction(0))

    def evictions(self, counts: Sequence[int]) -> tuple[Eviction, ...]:
        """What the counts say of every gap in which something is absent, in the order of the gaps."""
        full: dict[int, tuple[Gap, int, bool]] = {}
        for column, count in zip(self.columns, counts, strict=True):
            if column.gap is not None and count:
                _, pages, tail = full.get(id(column.gap), (column.gap, 0, False))
                full[id(column.gap)] = (column.gap, pages, True) if column.tail else (column.gap, pages + count, tail)
        return tuple(Eviction(gap, pages, tail) for gap, pages, tail in full.values())


def overflow(residents: Sequence[Resident], period: Period, device: Device, gone: Sequence[Eviction] = ()) -> list[int]:
    """Bytes by which every phase exceeds the device with all objects resident but `gone`; may be negative."""
    total = sum(resident.bytes for resident in residents) - device.hbm_bytes
    left = [total] * len(period.phases)
    for eviction in gone:
        for phase in eviction.gap.phases:
            left[phase] -= eviction.bytes
    return left


def build(
    gaps: Sequence[Gap],
    over: Sequence[int],
    host_bytes: int,
    period: Period,
    device: Device,
    gone: Sequence[Eviction] = (),
) -> Program:
    """The program of the gaps, with what each phase must lose and what the host has left.

    `gone` are evictions already decided; they cost nothing here but take their host memory. Host rows are left out
    where the host could hold everything.
    """
    columns: list[Column] = []
    of_gap: dict[int, list[int]] = {}
    for number, gap in enumerate(gaps):
        resident = gap.resident
        of_gap[number] = []
        for unit, limit, tail in (
            (resident.page_bytes, resident.full_pages, False),
            (resident.tail_bytes, 1 if resident.tail_bytes else 0, True),
        ):
            if limit:
                of_gap[number].append(len(columns))
                columns.append(Column(gap, unit, limit, gap.seconds(unit, device), tail))
    rows = [
        Row({i: columns[i].unit for n, gap in enumerate(gaps) if phase in gap.phases for i in of_gap[n]}, least)
        for phase, least in enumerate(over)
        if least > 0
    ]
    rows += _first_copies(gaps, of_gap, columns, device)
    rows += _host(gaps, of_gap, columns, host_bytes, period, gone)
    return Program(tuple(columns), tuple(rows))


def _first_copies(
    gaps: Sequence[Gap], of_gap: Mapping[int, Sequence[int]], columns: list[Column], device: Device
) -> list[Row]:
    """On a line a clean page is copied out once, in whichever gap comes first, unless it began on the host."""
    rows = []
    for name in dict.fromkeys(gap.resident.name for gap in gaps if gap.saves_once):
        mine = [n for n, gap in enumerate(gaps) if gap.resident.name == name]
        began = next((n for n in mine if not gaps[n].saves_once), None)
        for position in range(len(of_gap[mine[0]])):
            like = columns[of_gap[mine[0]][position]]
            copy = len(columns)
            columns.append(Column(None, like.unit, like.limit, Fraction(like.unit, device.d2h)))
            for n in mine:
                if gaps[n].saves_once:
                    terms = {copy: 1, of_gap[n][position]: -1}
                    if began is not None:
                        terms[of_gap[began][position]] = 1
                    rows.append(Row(terms, 0, RowKind.COPY))
    return rows


def _host(
    gaps: Sequence[Gap],
    of_gap: Mapping[int, Sequence[int]],
    columns: list[Column],
    host_bytes: int,
    period: Period,
    gone: Sequence[Eviction],
) -> list[Row]:
    """Dirty pages take host memory from the boundary before their gap to the one after it, both included, since a copy
    may still run there. Clean pages keep their copy, so they take the most that any gap evicts, all the time."""
    if host_holds_all(gaps, host_bytes - sum(eviction.bytes for eviction in gone if eviction.gap.pools_host)):
        return []
    copied = dict.fromkeys(gap.resident.name for gap in gaps if gap.keeps_host)
    pooled = [n for n, gap in enumerate(gaps) if gap.pools_host]
    rows, kept = [], {}
    for name in copied:
        mine = [n for n, gap in enumerate(gaps) if gap.resident.name == name]
        for position in range(len(of_gap[mine[0]])):
            like = columns[of_gap[mine[0]][position]]
            kept[len(columns)] = -like.unit
            rows += [Row({len(columns): 1, of_gap[n][position]: -1}, 0, RowKind.COPY) for n in mine]
            columns.append(Column(None, like.unit, like.limit, Fraction(0)))
    for boundary in range(len(period.phases) + (0 if period.cyclic else 1)):
        sides = boundary_sides(boundary, period)
        terms = {i: -columns[i].unit for n in pooled if sides & gaps[n].host_phases(period) for i in of_gap[n]}
        held = sum(e.bytes for e in gone if e.gap.pools_host and sides & e.gap.host_phases(period))
        if terms or kept or held > host_bytes:
            rows.append(Row(terms | kept, held - host_bytes, RowKind.HOST))
    return rows


def host_holds_all(gaps: Sequence[Gap], host_bytes: int) -> bool:
    """Whether everything could be evicted in every gap without more than `host_bytes`."""
    pooled = sum(gap.resident.bytes for gap in gaps if gap.pools_host)
    return (
        pooled + sum({gap.resident.name: gap.resident.bytes for gap in gaps if gap.keeps_host}.values()) <= host_bytes
    )


def boundary_sides(boundary: int, period: Period) -> set[int]:
    """The phases on both sides of the boundary before phase `boundary`; on a line the outer ones have one side."""
    size = len(period.phases)
    if period.cyclic:
        return {(boundary - 1) % size, boundary}
    return {phase for phase in (boundary - 1, boundary) if 0 <= phase < size}
