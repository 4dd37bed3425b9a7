"""What is in a queue and where it lies, without Ray, clock or contents: an actor owns one and calls it from one thread.

`QueueState` decides what may enter, who gets what and when groups are ready; this keeps the facts of every row and the
pieces of its fields beside it, and lets a piece go as soon as no consumer that reads it lacks a row of it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from rlflow.backends.ray_runtime.dist_queue.rows import EdgeSpec, Given, Lane, Piece, RowFacts
from rlflow.protocol.errors import ProtocolError
from rlflow.protocol.queue import QueueState
from rlflow.protocol.queue_entries import Status, Taken

FEW = 16
"""Pieces that an answer holds with their contents. Of more, where several consumers share the rows of many producers,
everybody asks for those that it needs: else all contents would go to everybody."""


@dataclass(slots=True)
class Chunk:
    """What was put at one time. A piece is None when it has been let go."""

    pieces: list[Piece | None]
    left: dict[str, int]
    """Consumer to the rows that it has not read."""
    fields: frozenset[str]
    lacking: list[int]
    """For every piece the consumers that read it and have not read all rows."""
    waiting: int
    """Consumers that have not read all rows."""


@dataclass(slots=True)
class Row:
    """A row in the queue."""

    id: int
    group: int
    version: int | None
    length: int | None
    note: bytes | None
    places: list[tuple[int, int, int]] = field(default_factory=list)
    """(chunk, low, high): where its fields lie; the first came with the row."""


@dataclass
class Ticket:
    """Rows on their way in: those of `waiting` have not found room yet."""

    producer: str
    chunk: int
    facts: RowFacts
    fields: tuple[str, ...]
    waiting: dict[int, list[int]]
    """Group to the places of its rows in `facts`, in the order in which they were put."""


class QueueTable:
    """A queue of rows with fields. Calls that the protocol forbids raise `ProtocolError`, and nothing changes."""

    def __init__(self, spec: EdgeSpec) -> None:
        self.spec = spec
        needs = {name: fields for name, fields in spec.consumers.items() if fields is not None}
        self.state = QueueState(
            spec.producers, tuple(spec.consumers), capacity=spec.capacity, group=spec.group, needs=needs
        )
        self._rows: dict[int, Row] = {}
        self._members: dict[int, list[int]] = {}
        """Group to its rows."""
        self._chunks: dict[int, Chunk] = {}
        self._next_chunk = 0
        self._kinds: dict[str, str] = {}
        self._last_given: tuple[object, Given] | None = None
        """The answer to the last take of many pieces, which the next consumer gets too."""

    # --- producers ---------------------------------------------------------------------------------------------------

    def put(self, producer: str, facts: RowFacts, pieces: Sequence[Piece]) -> bool:
        """Add rows with the fields that they come with, all or none. False: no room now."""
        begins = {group for group in facts.groups if not self.state.has(group)}
        room = self.state.room
        if room is not None and len(begins) * self.spec.group > room:
            return False
        ticket = self.open(producer, facts, pieces)
        try:
            return self.enter(ticket)
        except ProtocolError:
            self.leave(ticket)
            raise

    def open(self, producer: str, facts: RowFacts, pieces: Sequence[Piece]) -> Ticket:
        """Announce rows, to be let in by `enter` as room comes."""
        fields = self._checked(pieces, facts)
        if len(set(facts.ids)) < len(facts):
            raise ProtocolError("a row is put twice")
        waiting: dict[int, list[int]] = {}
        for place, group in enumerate(facts.groups):
            waiting.setdefault(group, []).append(place)
        chunk = self._keep(pieces, fields, dict.fromkeys(self.spec.consumers, len(facts)))
        return Ticket(producer, chunk, facts, fields, waiting)

    def enter(self, ticket: Ticket, begin: bool = True) -> bool:
        """Let in what there is room for, whole groups in order; without `begin` only rows of groups that are there.

        Whether all rows are in.
        """
        facts, room = ticket.facts, self.state.room
        groups: list[int] = []
        for group in ticket.waiting:
            if not self.state.has(group):
                begin = begin and (room is None or room >= self.spec.group)
                if not begin:
                    continue
                room = None if room is None else room - self.spec.group
            groups.append(group)
        places = [(place, group) for group in groups for place in ticket.waiting[group]]
        if places:
            self.state.put(ticket.producer, [(facts.ids[place], group) for place, group in places], ticket.fields)
        for group in groups:
            del ticket.waiting[group]
        for place, group in places:
            id = facts.ids[place]
            self._members.setdefault(group, []).append(id)
            self._rows[id] = Row(
                id,
                group,
                facts.versions[place] if facts.versions else None,
                facts.lengths[place] if facts.lengths else None,
                facts.notes[place] if facts.notes else None,
                [(ticket.chunk, *facts.span(place))],
            )
        return not ticket.waiting

    def leave(self, ticket: Ticket) -> None:
        """Give up on the rows that have not found room."""
        count = sum(len(places) for places in ticket.waiting.values())
        ticket.waiting.clear()
        self._read(ticket.chunk, dict.fromkeys(self.spec.consumers, count))

    def put_fields(self, ids: Sequence[int], pieces: Sequence[Piece], spans: Sequence[tuple[int, int]] = ()) -> int:
        """Further fields of rows that are there, in the order of `ids`; rows that have gone are passed over.

        Number of rows that got them.
        """
        facts = RowFacts(tuple(ids), tuple(0 for _ in ids), spans=tuple(spans))
        fields = self._checked(pieces, facts)
        if len(set(ids)) < len(ids):
            raise ProtocolError("a row gets a field twice")
        here: list[int] = []
        for place, id in enumerate(ids):
            if id in self._rows:
                here.append(place)
            elif not self.state.knows(id):
                raise ProtocolError(f"row {id} was never in the queue")
        if not here:
            return 0
        counts = Counter(self._rows[ids[place]].group for place in here)
        for place in here:
            row = self._rows[ids[place]]
            has = frozenset[str]().union(*(self._fields_at(chunk) for chunk, _, _ in row.places))
            if double := has.intersection(fields):
                raise ProtocolError(f"row {row.id} has `{min(double)}` already")
        self.state.arrive(counts, fields)
        self._last_given = None
        left = dict.fromkeys(self.spec.consumers, 0)
        for group, count in counts.items():
            for consumer in self.state.waiting(group):
                left[consumer] += count
        chunk = self._keep(pieces, fields, left)
        for place in here:
            self._rows[ids[place]].places.append((chunk, *facts.span(place)))
        return len(here)

    # --- consumers ---------------------------------------------------------------------------------------------------

    def take(self, consumer: str, least: int, most: int | None = None, *, reader: str = "") -> Given:
        """Between `least` and `most` rows of whole groups that are ready for the consumer, see `QueueState.take`."""
        depth = self.depth
        return self._given(consumer, self.state.take(consumer, least, most, reader=reader), depth)

    def take_groups(self, consumer: str, groups: Sequence[int], *, reader: str = "") -> Given:
        """Exactly these groups, which are ready: what a consumption rule decided."""
        depth = self.depth
        return self._given(consumer, self.state.take_groups(consumer, groups, reader=reader), depth)

    def pieces(self, places: Sequence[tuple[int, int, int]]) -> list[Piece]:
        """Those at `Piece.at`. ProtocolError for one that all have read."""
        found = []
        for group, number, place in places:
            chunk = self._chunks.get(number)
            piece = None if chunk is None else chunk.pieces[place]
            if piece is None:
                raise ProtocolError(f"rows of group {group} are asked for after they were done")
            found.append(piece)
        return found

    def done(self, consumer: str, groups: Iterable[int]) -> tuple[int, ...]:
        """The consumer has copied what it took. Rows that have left the queue."""
        held = list(groups)
        freed = self.state.done(consumer, held)
        for group in held:
            for id in self._members[group]:
                for chunk, _, _ in self._rows[id].places:
                    self._read(chunk, {consumer: 1})
        self._forget(freed)
        return freed

    def give_back(self, consumer: str, reader: str = "") -> tuple[int, ...]:
        """A reader is gone: what it held is ready again. The groups."""
        return self.state.give_back(consumer, reader)

    def remove(self, group: int, reason: str, *, by: str | None = None) -> tuple[int, ...]:
        """Filtered, timed out, aborted or failed: the group's rows, which have left the queue."""
        waiting = self.state.waiting(group)
        rows = self.state.remove(group, reason, by=by)
        for id in rows:
            for chunk, _, _ in self._rows[id].places:
                self._read(chunk, dict.fromkeys(waiting, 1))
        self._forget(rows)
        return rows

    # --- facts -------------------------------------------------------------------------------------------------------

    @property
    def depth(self) -> int:
        """Groups in the queue."""
        return len(self._members)

    @property
    def nbytes(self) -> int:
        """Bytes of the pieces that are held."""
        return sum(piece.nbytes for chunk in self._chunks.values() for piece in chunk.pieces if piece is not None)

    def describe(self) -> str:
        """One line about what is there, who could take, who puts, and which fields are awaited."""
        lacking: Counter[str] = Counter()
        for consumer, fields in self.spec.consumers.items():
            for group, ids in self._members.items():
                if fields is None or consumer not in self.state.waiting(group):
                    continue
                have = [self._fields_of(self._rows[id]) for id in ids]
                lacking.update(f"`{name}` for {consumer}" for name in fields if any(name not in own for own in have))
        late = "".join(f"; {count} groups lack {what}" for what, count in sorted(lacking.items()))
        return self.state.describe() + late

    # --- inside ------------------------------------------------------------------------------------------------------

    def _checked(self, pieces: Sequence[Piece], facts: RowFacts) -> tuple[str, ...]:
        """The fields of all pieces, each once and of the kind that it has always had."""
        fields = [name for piece in pieces for name in piece.fields]
        if len(set(fields)) < len(fields):
            raise ProtocolError(f"fields {fields} name one twice")
        if any(high > low for low, high in (facts.span(place) for place in range(len(facts)))):
            found = {name: kind for piece in pieces for name, kind in zip(piece.fields, piece.kinds, strict=True)}
            for name, kind in found.items():
                if self._kinds.get(name, kind) != kind:
                    raise ProtocolError(f"field `{name}` is {kind}, and rows before had {self._kinds[name]}")
            self._kinds |= found
        return tuple(fields)

    def _keep(self, pieces: Sequence[Piece], fields: Iterable[str], left: dict[str, int]) -> int:
        number, self._next_chunk = self._next_chunk, self._next_chunk + 1
        lacking = [consumer for consumer, count in left.items() if count]
        readers = [sum(self._is_read(piece, consumer) for consumer in lacking) for piece in pieces]
        if lacking:
            kept = [piece if count else None for piece, count in zip(pieces, readers, strict=True)]
            self._chunks[number] = Chunk(kept, left, frozenset(fields), readers, len(lacking))
        return number

    def _read(self, number: int, counts: dict[str, int]) -> None:
        """So many rows of a chunk are read by these consumers, or will never be."""
        chunk = self._chunks.get(number)
        if chunk is None:
            return
        for consumer, count in counts.items():
            if not count:
                continue
            chunk.left[consumer] -= count
            if not chunk.left[consumer]:
                self._read_whole(chunk, consumer)
        if not chunk.waiting:
            del self._chunks[number]

    def _read_whole(self, chunk: Chunk, consumer: str) -> None:
        """The consumer needs nothing of it any more: let the pieces go that it was the last to read."""
        chunk.waiting -= 1
        for place, piece in enumerate(chunk.pieces):
            if piece is not None and self._is_read(piece, consumer):
                chunk.lacking[place] -= 1
                if not chunk.lacking[place]:
                    chunk.pieces[place] = None

    def _is_read(self, piece: Piece, consumer: str) -> bool:
        return any(self.spec.reads(consumer, name) for name in piece.fields)

    def _forget(self, rows: Iterable[int]) -> None:
        for id in rows:
            self._members.pop(self._rows[id].group, None)
            del self._rows[id]

    def _fields_at(self, chunk: int) -> frozenset[str]:
        found = self._chunks.get(chunk)
        return frozenset() if found is None else found.fields

    def _fields_of(self, row: Row) -> frozenset[str]:
        return frozenset[str]().union(*(self._fields_at(chunk) for chunk, _, _ in row.places))

    def _given(self, consumer: str, taken: Taken, depth: int) -> Given:
        """The rows of the groups with where the fields lie that the consumer reads."""
        if taken.status is not Status.ROWS:
            return Given(taken.status, depth=depth)
        asked = (taken.groups, self.spec.consumers[consumer])
        if self._last_given is not None and self._last_given[0] == asked:
            return replace(self._last_given[1], depth=depth)
        found = self._found(consumer, taken, depth)
        if any(piece.at is not None for piece in found.pieces):
            self._last_given = (asked, found)
        return found

    def _found(self, consumer: str, taken: Taken, depth: int) -> Given:
        rows = [self._rows[id] for group in taken.groups for id in sorted(self._members[group])]
        late = self.spec.consumers[consumer] is not None
        pieces: list[Piece] = []
        sources: list[dict[str, int]] = []
        number_of: dict[int, int] = {}
        lanes: dict[tuple[str, ...], list[tuple[int, int, int]]] = {}
        names: list[tuple[str, ...]] = []
        for row in rows:
            for chunk, low, high in row.places if late else row.places[:1]:
                if chunk not in number_of:
                    number_of[chunk] = len(sources)
                    sources.append(self._source(consumer, chunk, row.group, pieces))
                    names.append(tuple(sources[-1]))
                number = number_of[chunk]
                if names[number]:
                    lanes.setdefault(names[number], []).append((number, low, high))
        if any(len(runs) != len(rows) for runs in lanes.values()):
            lanes = self._lane_per_field(rows, number_of, sources)
        if len(pieces) <= FEW or len(self.spec.consumers) == 1:
            pieces = self.pieces([piece.at for piece in pieces if piece.at is not None])
        return Given(
            taken.status,
            taken.groups,
            _facts(rows),
            tuple(pieces),
            tuple(sources),
            tuple(Lane(fields, np.asarray(runs, dtype=np.int64)) for fields, runs in lanes.items()),
            depth,
        )

    def _lane_per_field(
        self, rows: Sequence[Row], number_of: dict[int, int], sources: Sequence[dict[str, int]]
    ) -> dict[tuple[str, ...], list[tuple[int, int, int]]]:
        """Where rows got their fields in different company; without fields that not all of them have."""
        lanes: dict[tuple[str, ...], list[tuple[int, int, int]]] = {}
        for row in rows:
            for chunk, low, high in row.places:
                for name in sources[number_of[chunk]] if chunk in number_of else ():
                    lanes.setdefault((name,), []).append((number_of[chunk], low, high))
        return {fields: runs for fields, runs in lanes.items() if len(runs) == len(rows)}

    def _source(self, consumer: str, number: int, group: int, pieces: list[Piece]) -> dict[str, int]:
        """The fields of a chunk that the consumer reads, with their pieces, which are added to `pieces` without their
        contents."""
        chunk = self._chunks.get(number)
        found: dict[str, int] = {}
        for place, piece in enumerate(() if chunk is None else chunk.pieces):
            if piece is None:
                continue
            wanted = [name for name in piece.fields if self.spec.reads(consumer, name)]
            if wanted:
                found |= dict.fromkeys(wanted, len(pieces))
                pieces.append(replace(piece, data=None, at=(group, number, place)))
        return found


def _facts(rows: Sequence[Row]) -> RowFacts:
    first = rows[0]
    return RowFacts(
        tuple(row.id for row in rows),
        tuple(row.group for row in rows),
        tuple(row.version or 0 for row in rows) if first.version is not None else (),
        tuple(row.length or 0 for row in rows) if first.length is not None else (),
        tuple(row.note or b"" for row in rows) if first.note is not None else (),
    )
