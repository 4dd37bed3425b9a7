"""The values that travel between a process and the actor of a queue. Nothing here needs torch or Ray."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

import numpy as np

from rlflow.protocol.queue_entries import Status


@dataclass(frozen=True)
class EdgeSpec:
    """What a queue is. All ends and actors of it have the same."""

    id: str
    producers: tuple[str, ...]
    """A group is made by one of them, or a part by each of some that all put their groups in the same order: else a
    full queue could wait for the rest of a group that stands behind one for which there is no room."""
    consumers: Mapping[str, tuple[str, ...] | None]
    """Who reads which fields, and waits for them; None: those that all rows of a take came with."""
    capacity: int | None
    """Places in rows, whole groups; None: unbounded. It holds what a consumer takes at the least, and where one waits
    for fields that another writes, what both take."""
    group: int = 1
    """Rows of a group. Groups enter, are taken and leave as a whole."""
    deadline_s: float = 1800.0
    """Of every wait for another rank."""
    shards: int = 1
    """Actors that share the groups."""

    def __post_init__(self) -> None:
        if self.shards < 1 or (self.capacity is not None and self.capacity // self.group < self.shards):
            raise ValueError(
                f"queue `{self.id}` holds {self.capacity} rows in groups of {self.group}: {self.shards} actors cannot "
                f"have a group each; the most is {(self.capacity or self.group) // self.group}"
            )

    def shard(self, number: int) -> EdgeSpec:
        """The part of one of its actors, of those that `shard_of` gives it: capacity is shared out in whole groups."""
        if self.capacity is None or self.shards == 1:
            return replace(self, shards=1)
        groups = (self.capacity // self.group + self.shards - 1 - number) // self.shards
        return replace(self, capacity=groups * self.group, shards=1)

    def shard_of(self, group: int) -> int:
        """The actor that has a group."""
        return group % self.shards

    def reads(self, consumer: str, name: str) -> bool:
        """Whether a consumer reads a field."""
        fields = self.consumers[consumer]
        return fields is None or name in fields


@dataclass(frozen=True)
class RowFacts:
    """What is known of rows without their contents; every tuple has an entry per row, or none at all."""

    ids: tuple[int, ...]
    """Unique in the queue for ever."""
    groups: tuple[int, ...]
    versions: tuple[int, ...] = ()
    """The oldest policy version that made a token of it."""
    lengths: tuple[int, ...] = ()
    """Tokens."""
    notes: tuple[bytes, ...] = ()
    """For the readers; the queue does not look into them."""
    spans: tuple[tuple[int, int], ...] = ()
    """[low, high) of the packed columns that a row is; nothing: one after another, one each."""

    def __post_init__(self) -> None:
        count = len(self.ids)
        for name in ("groups", "versions", "lengths", "notes", "spans"):
            if len(getattr(self, name)) not in ((count,) if name == "groups" else (0, count)):
                raise ValueError(f"{count} rows have {len(getattr(self, name))} {name}")

    def __len__(self) -> int:
        return len(self.ids)

    def span(self, place: int) -> tuple[int, int]:
        return self.spans[place] if self.spans else (place, place + 1)

    def select(self, places: Sequence[int]) -> RowFacts:
        """Some of the rows; where they lie stays the same."""

        def some(values: tuple[Any, ...]) -> tuple[Any, ...]:
            return tuple(values[place] for place in places) if values else ()

        return RowFacts(
            some(self.ids),
            some(self.groups),
            some(self.versions),
            some(self.lengths),
            some(self.notes),
            tuple(self.span(place) for place in places),
        )


@dataclass(frozen=True)
class Piece:
    """Fields of some rows that lie together, since the same consumers read them."""

    fields: tuple[str, ...]
    kinds: tuple[str, ...]
    """Of each field, as `columns.kind` says."""
    data: Any
    """Packed columns by name; or, as the only element of a list, the reference to them in the object store; None where
    `at` says where they are."""
    nbytes: int
    at: tuple[int, int, int] | None = None
    """Where the queue keeps it, to be asked for: a group of it, what was put at one time, place in it."""

    @property
    def stored(self) -> bool:
        """Whether the contents are in the object store."""
        return isinstance(self.data, list)


Source: TypeAlias = Mapping[str, int]
"""Field to the piece of it, in `Given.pieces`: what was put at one time."""


@dataclass(frozen=True)
class Lane:
    """Where fields of the given rows lie that always came together."""

    fields: tuple[str, ...]
    runs: np.ndarray
    """int64 [rows, 3]: source, first and last + 1 row in it."""


@dataclass(frozen=True)
class Given:
    """What a take answers."""

    status: Status
    groups: tuple[int, ...] = ()
    facts: RowFacts = field(default_factory=lambda: RowFacts((), ()))
    """Of the rows: groups in the order of the take, rows of a group in the order of their ids."""
    pieces: tuple[Piece, ...] = ()
    sources: tuple[Source, ...] = ()
    lanes: tuple[Lane, ...] = ()
    depth: int = 0
    """Groups that the queue held when these were taken, these among them."""


@dataclass(frozen=True)
class Refused:
    """Why a call did not get what it asked for. `kind`: `late` = waited too long, `failed` = a producer failed,
    `misuse` = it can never be granted."""

    kind: str
    text: str


@dataclass(frozen=True)
class Stand:
    """How a consumer stands at one actor."""

    ready: int
    """Groups that it could take."""
    last: bool
    """Nothing more can become ready, but what readers hold may come back."""
    ended: bool
    """It has had everything."""
    failure: str | None
    changes: int
