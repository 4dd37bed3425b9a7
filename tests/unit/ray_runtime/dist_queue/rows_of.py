"""Rows whose contents say who they are, and a clock that goes as fast as it can."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Coroutine, Sequence
from typing import Any, TypeVar

import numpy as np

from rlflow.backends.ray_runtime.dist_queue.columns import Field, Ragged, kind, nbytes, sent
from rlflow.backends.ray_runtime.dist_queue.rows import EdgeSpec, Piece, RowFacts

T = TypeVar("T")


def facts_of(ids: Sequence[int], group: int = 1, **more: Any) -> RowFacts:
    """Row i is of group i // group."""
    return RowFacts(tuple(ids), tuple(id // group for id in ids), **more)


def fields_of(ids: Sequence[int], *names: str) -> dict[str, Field]:
    """`tokens`: row i has i % 5 tokens i · `text`: its number in words · any other name: i, plus the name's length."""
    made: dict[str, Field] = {}
    for name in names:
        if name == "tokens":
            lengths = [id % 5 for id in ids]
            made[name] = Ragged(np.repeat(np.asarray(ids, dtype=np.int64), lengths), np.cumsum([0, *lengths]))
        elif name == "text":
            made[name] = [f"row {id}" for id in ids]
        else:
            made[name] = np.asarray(ids, dtype=np.float32) + len(name)
    return made


def plain(column: Field) -> list[Any]:
    """A field as a list of rows."""
    if isinstance(column, Ragged):
        offsets = column.offsets.tolist()
        return [column.values[low:high].tolist() for low, high in itertools.pairwise(offsets)]
    return column if isinstance(column, list) else column.tolist()


def same(found: dict[str, Field], ids: Sequence[int], *names: str) -> bool:
    """Whether exactly these fields of exactly these rows were read, in this order."""
    expected = fields_of(ids, *names)
    return found.keys() == expected.keys() and all(plain(found[name]) == plain(expected[name]) for name in names)


def inline(spec: EdgeSpec, fields: dict[str, Field]) -> list[Piece]:
    """A piece per field that somebody reads, without an object store."""
    return [
        Piece((name,), (kind(column),), {name: sent(column)}, nbytes(sent(column)))
        for name, column in fields.items()
        if any(spec.reads(consumer, name) for consumer in spec.consumers)
    ]


class FastClock(asyncio.SelectorEventLoop):
    """Jumps to the next timer when nothing else is to be done; an error where nothing ever will be."""

    def __init__(self) -> None:
        super().__init__()
        self._now = 0.0

    def time(self) -> float:
        return self._now

    def _run_once(self) -> None:
        if not self._ready:  # type: ignore[attr-defined]
            if not self._scheduled:  # type: ignore[attr-defined]
                raise AssertionError("everybody waits for ever")
            self._now = max(self._now, self._scheduled[0].when())  # type: ignore[attr-defined]
        super()._run_once()  # type: ignore[misc]


def run(scenario: Coroutine[Any, Any, T]) -> T:
    """The result of a scenario under a fast clock."""
    with asyncio.Runner(loop_factory=FastClock) as runner:
        return runner.run(scenario)
