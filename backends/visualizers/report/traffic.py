"""What crosses links when weights are resharded, as a matrix from node to node."""

from __future__ import annotations

from dataclasses import dataclass

from rlflow.amounts import seconds, size
from rlflow.plan import Plan
from rlflow.plan_decisions import Reshard


@dataclass(frozen=True, slots=True)
class Cell:
    text: str
    share: float
    """Of the largest cell, 0..1."""
    tip: str


@dataclass(frozen=True, slots=True)
class Matrix:
    """Of one reshard. Rows send, columns receive."""

    title: str
    words: str
    what: str
    """`node`, or `pool` where the plan has too many nodes to list them."""
    columns: tuple[str, ...]
    rows: tuple[tuple[str, tuple[Cell, ...]], ...]


def matrices(plan: Plan) -> list[Matrix]:
    return [_matrix(reshard) for reshard in plan.reshards]


def _matrix(reshard: Reshard) -> Matrix:
    traffic = reshard.traffic or ((reshard.source, reshard.target, reshard.received),)
    names = sorted({name for start, end, _ in traffic for name in (start, end)}, key=_natural)
    bytes_ = {(start, end): count for start, end, count in traffic}
    most = max(bytes_.values(), default=0)
    rows = []
    for start in names:
        cells = []
        for end in names:
            count = bytes_.get((start, end), 0)
            where = f"inside {start}" if start == end else f"{start} to {end}"
            cells.append(Cell(size(count) if count else "", count / most if most else 0.0, f"{where}: {size(count)}"))
        rows.append((start, tuple(cells)))
    how = (
        "all-to-all of experts"
        if reshard.all_to_all
        else f"{reshard.rounds} round{'s' * (reshard.rounds != 1)} of {size(reshard.bucket_bytes)}"
    )
    words = (
        f"{size(reshard.received)} received, the least possible; {size(reshard.local)} already there; busiest device "
        f"{size(reshard.busiest)} in, {size(reshard.sent)} out; {how}"
    )
    if reshard.us:
        words += f"; {seconds(reshard.us)}, links allow {seconds(reshard.bound_us)}"
    title = f"{reshard.model}: {reshard.source} to {reshard.target}"
    return Matrix(title, words, "node" if reshard.traffic else "pool", tuple(names), tuple(rows))


def _natural(name: str) -> list[tuple[bool, int, str]]:
    """So that host-10 comes after host-9."""
    parts: list[str] = [""]
    for character in name:
        if parts[-1] and character.isdigit() != parts[-1][-1].isdigit():
            parts.append("")
        parts[-1] += character
    return [(part.isdigit(), int(part) if part.isdigit() else 0, part) for part in parts]
