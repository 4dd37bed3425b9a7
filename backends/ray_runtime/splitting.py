"""Which rows of a batch that one pool made each rank of another pool gets.

Where both pools have the same number of ranks every rank gets what its counterpart made: nothing moves that need not,
and a plan of two pools computes what the plan of one pool does, to the last bit. Otherwise the parts are put in the
order that they have on a single rank and cut again: at groups where these divide over the ranks, else inside groups of
one size (then ranks share groups, see `Share`), else at groups as evenly as they allow.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from rlflow.backends.ray_runtime.batch import Batch, Share
from rlflow.backends.ray_runtime.wire import Segment


@dataclass(frozen=True)
class Layout:
    """How one rank's part is made up, for those that cut the whole."""

    rows: int
    runs: np.ndarray
    """int64 [runs, 3]: number of the group, rows, and round of consecutive rows of one group."""
    share: Share | None
    grouped: bool
    rounds: bool


def layout_of(rows: Batch) -> Layout:
    """Of a part. Rows without a column `group` are prompts: each is a group of its own."""
    grouped = "group" in rows.columns
    groups = rows.array("group") if grouped else np.arange(rows.rows)
    rounds = rows.array("round") if "round" in rows.columns else np.zeros(rows.rows, dtype=np.int64)
    starts = np.flatnonzero(np.r_[True, (np.diff(groups) != 0) | (np.diff(rounds) != 0)]) if rows.rows else np.zeros(0)
    starts = starts.astype(np.int64)
    counts = np.diff(np.r_[starts, rows.rows])
    runs = np.stack([groups[starts], counts, rounds[starts]], 1).astype(np.int64)
    return Layout(rows.rows, runs, rows.share, grouped, "round" in rows.columns)


@dataclass(frozen=True)
class Split:
    """One rank's rows of a batch."""

    segments: tuple[Segment, ...]
    groups: np.ndarray | None
    """int64 [rows]: the new column `group`; None = keep the old one."""
    share: Share | None
    renumbered: bool
    """The rows are in the order of a single rank: the column `round` has done its work."""


def split(parts: Sequence[Layout], ranks: int) -> list[Split]:
    """What each of `ranks` ranks gets of the parts."""
    if len(parts) == ranks:
        return [Split(((i, 0, part.rows),), None, part.share, False) for i, part in enumerate(parts)]
    runs = _whole(parts)
    sizes = [sum(high - low for _, low, high in group) for group in runs]
    grouped = parts[0].grouped if parts else False
    if len(runs) % ranks and len(set(sizes)) == 1:
        shares = [Share(len(runs), rank, ranks) for rank in range(ranks)]
        return [_rows_of(runs, share.samples(sizes[0]), share, grouped) for share in shares]
    first = np.cumsum([0, *sizes])
    cuts = [int(first[part[0]]) if len(part) else 0 for part in np.array_split(np.arange(len(runs)), ranks)]
    ends = [int(first[part[-1] + 1]) if len(part) else 0 for part in np.array_split(np.arange(len(runs)), ranks)]
    return [_rows_of(runs, range(low, high), None, grouped) for low, high in zip(cuts, ends, strict=True)]


def regrouped(wanted: Sequence[Split] | None, origin: Sequence[Split] | None, ranks: int) -> list[Split]:
    """Where the rows of each of `ranks` ranks lie in a column that other ranks have made.

    Both splits count in the parts in which the rows themselves were made. `wanted`: how the rows came to these ranks,
    None = they made them; `origin`: how they came to the ranks that made the column, None = those made them.
    """
    if wanted is None:
        sizes = [0] * ranks
        for one in origin or ():
            for part, _, high in one.segments:
                sizes[part] = max(sizes[part], high)
        wanted = [Split(((rank, 0, size),), None, None, False) for rank, size in enumerate(sizes)]
    if origin is None:
        return list(wanted)
    places: dict[int, list[tuple[int, int, int, int]]] = {}  # part to: rows, and where they begin in whose column
    for number, one in enumerate(origin):
        row = 0
        for part, low, high in one.segments:
            places.setdefault(part, []).append((low, high, number, row))
            row += high - low
    found = []
    for one in wanted:
        segments: list[Segment] = []
        for part, low, high in one.segments:
            for first, last, number, row in sorted(places.get(part, ())):
                begin, end = max(low, first), min(high, last)
                if begin < end:
                    segments.append((number, row + begin - first, row + end - first))
        found.append(Split(tuple(segments), one.groups, one.share, one.renumbered))
    return found


def _whole(parts: Sequence[Layout]) -> list[list[Segment]]:
    """The groups of the whole batch in the order of a single rank, each with where its rows lie."""
    order: list[tuple[int, int, int, int, Segment]] = []  # round, part, place in the part, group, rows
    for number, part in enumerate(parts):
        low = 0
        for place, (group, count, round_) in enumerate(part.runs.tolist()):
            order.append((round_, number, place, group, (number, low, low + count)))
            low += count
    order.sort(key=lambda run: run[:3])
    found: list[list[Segment]] = []
    last: tuple[int, int] | None = None
    for round_, number, _, group, segment in order:
        # Ranks that share groups number them over the whole step, others each for itself.
        key = (round_, group) if parts[number].share is not None else None
        if key is not None and key == last:
            found[-1].append(segment)
        else:
            found.append([segment])
        last = key
    return found


def _rows_of(runs: list[list[Segment]], wanted: range, share: Share | None, grouped: bool) -> Split:
    """Rows `wanted` of the whole batch."""
    segments: list[Segment] = []
    numbers: list[int] = []
    counts: list[int] = []
    row = 0
    for group, pieces in enumerate(runs):
        for part, low, high in pieces:
            begin, end = max(wanted.start, row), min(wanted.stop, row + high - low)
            if begin < end:
                segments.append((part, low + begin - row, low + end - row))
                numbers.append(group)
                counts.append(end - begin)
            row += high - low
    groups = np.repeat(np.asarray(numbers, dtype=np.int64), counts)
    if share is None and len(groups):
        groups = groups - groups[0]
    return Split(tuple(segments), groups if grouped else None, share, True)
