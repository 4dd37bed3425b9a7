"""Queue state of one edge: which rows are there, who has read them, when they may go. Their contents are elsewhere."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rlflow.protocol.errors import ProtocolError
from rlflow.protocol.idset import IdSet
from rlflow.protocol.queue_entries import QueueGroup, Status, Taken


class QueueState:
    """A queue from some producers to some consumers; every consumer gets every group exactly once.

    Counts are *places*: a group takes `group` places however many of its rows are lost, so that batches stay whole. The
    first row reserves the places of all its group, hence half-arrived groups cannot fill the queue and block it.
    Several readers of one consumer (its data-parallel ranks) share its groups. `capacity` None: unbounded.
    `needs`: fields that a consumer reads; a group is ready for it when it is complete and all its rows have these.
    """

    def __init__(
        self,
        producers: Iterable[str],
        consumers: Iterable[str],
        *,
        capacity: int | None = None,
        group: int = 1,
        needs: Mapping[str, Iterable[str]] | None = None,
    ) -> None:
        self.producers: dict[str, bool] = dict.fromkeys(producers, True)
        """Whether it is open."""
        self.consumers = tuple(consumers)
        if not self.producers or not self.consumers or len(set(self.consumers)) < len(self.consumers):
            raise ValueError("a queue has at least one producer and one consumer, each named once")
        if group < 1 or (capacity is not None and capacity < group):
            raise ValueError(f"a capacity of {capacity} places does not hold one group of {group}")
        self.needs = {name: tuple(dict.fromkeys((needs or {}).get(name, ()))) for name in self.consumers}
        if unknown := set(needs or ()) - set(self.consumers):
            raise ValueError(f"fields are needed by {sorted(unknown)}, which are no consumers")
        self.capacity = capacity
        self.group = group
        self.failure: str | None = None
        self.freed: int = 0
        """Groups that all consumers have read."""
        self.removed: Counter[str] = Counter()
        """Groups taken out, by reason."""
        self._groups: dict[int, QueueGroup] = {}
        self._ready: dict[str, dict[int, None]] = {name: {} for name in self.consumers}
        """By consumer: groups that it could take, in the order in which they became complete."""
        self._seen_rows = IdSet()
        self._seen_groups = IdSet()
        self._next_number = 0
        self._begun = 0

    # --- producers ----------------------------------------------------------------------------------------------------

    @property
    def room(self) -> int | None:
        """Free places; None: unbounded."""
        return None if self.capacity is None else self.capacity - len(self._groups) * self.group

    def put(self, producer: str, rows: Sequence[tuple[int, int]], fields: Iterable[str] = ()) -> bool:
        """Adds (row, group) pairs, all or none. False: no room, try again after something is freed (backpressure).
        `fields`: what the rows bring along, of what consumers need.

        Raises `ProtocolError` for a closed producer, a row or a group that was in the queue before, or a full group.
        """
        self._open(producer)
        if len({row for row, _ in rows}) < len(rows):
            raise ProtocolError("a row is put twice")
        adds = Counter(group for _, group in rows)
        for row, _ in rows:
            if row in self._seen_rows:
                raise ProtocolError(f"row {row} was in the queue before")
        for id, count in adds.items():
            known = self._groups.get(id)
            if known is None and id in self._seen_groups:
                raise ProtocolError(f"group {id} was in the queue before and is gone")
            have = len(known.rows) + known.lost if known else 0
            if have + count > self.group:
                raise ProtocolError(f"group {id} has {have} of {self.group} rows and gets {count} more")
        new = sum(id not in self._groups for id in adds)
        if self.room is not None and new * self.group > self.room:
            return False
        self._begun += new
        for row, id in rows:
            self._seen_rows.add(row)
            self._seen_groups.add(id)
            self._groups.setdefault(id, QueueGroup()).rows.append(row)
        needed = self._needed(fields)
        for id, count in adds.items():
            for name in needed:
                self._groups[id].fields[name] += count
            self._complete(id)
        return True

    def arrive(self, groups: Mapping[int, int], fields: Iterable[str]) -> None:
        """So many rows of each group have got these fields, which they did not have. ProtocolError for more than lack
        one, or for a group that is not there."""
        needed = self._needed(fields)
        for id, count in groups.items():
            entry = self._get(id)
            for name in needed:
                if count < 1 or entry.fields[name] + count > len(entry.rows):
                    raise ProtocolError(
                        f"`{name}` comes for {count} rows of group {id}, and {entry.fields[name]} of its "
                        f"{len(entry.rows)} rows have it"
                    )
        for id, count in groups.items():
            for name in needed:
                self._groups[id].fields[name] += count
            self._offer(id)

    def shorten(self, group: int, rows: int = 1) -> None:
        """So many rows of the group will not come. A group without any is `remove`d instead."""
        entry = self._get(group)
        if rows < 1 or len(entry.rows) + entry.lost + rows > self.group or not entry.rows:
            raise ProtocolError(f"group {group} has {len(entry.rows)} rows, lost {entry.lost}: not {rows} to lose")
        entry.lost += rows
        self._complete(group)

    def close(self, producer: str) -> None:
        """The end of what this producer makes. After the last one no group may lack rows (ProtocolError)."""
        self._open(producer)
        if sum(self.producers.values()) == 1:
            short = [id for id, entry in self._groups.items() if entry.number is None]
            if short:
                raise ProtocolError(f"the last producer closes, but groups {short} lack rows: shorten or remove them")
        self.producers[producer] = False

    def fail(self, producer: str, message: str) -> None:
        """The producer died. From now on every take says so."""
        if producer not in self.producers:
            raise ProtocolError(f"no producer `{producer}`")
        self.failure = self.failure or f"producer {producer} failed: {message}"

    # --- consumers ----------------------------------------------------------------------------------------------------

    def take(self, consumer: str, least: int, most: int | None = None, *, reader: str = "") -> Taken:
        """K of N: between `least` and `most` places (default: exactly `least`) of complete groups, the first first.

        At the end of the stream less than `least` is what is left. ValueError for counts that can never be met.
        """
        ready = self._consumer(consumer)
        most = least if most is None else most
        if least < 1 or most < least or most // self.group < -(-least // self.group):
            raise ValueError(f"{least} to {most} places hold no whole number of groups of {self.group}")
        if self.capacity is not None and least > self.capacity:
            raise ValueError(f"{least} places are asked for, but the capacity is {self.capacity}")
        if self.failure:
            return Taken(Status.FAILED)
        ended = not any(self.producers.values())
        if not ready:
            return Taken(Status.END if ended and self._had_all(consumer) else Status.WAIT)
        if len(ready) * self.group < least and not self.last(consumer):
            return Taken(Status.WAIT)
        return self._give(consumer, list(ready)[: most // self.group], reader)

    def take_groups(self, consumer: str, groups: Sequence[int], *, reader: str = "") -> Taken:
        """Exactly these, in this order: what a consumption rule decided on. ProtocolError where one is not ready."""
        ready = self._consumer(consumer)
        if self.failure:
            return Taken(Status.FAILED)
        missing = [id for id in groups if id not in ready]
        if missing or len(set(groups)) < len(groups):
            raise ProtocolError(f"groups {missing or list(groups)} are not ready for `{consumer}`, or asked for twice")
        return self._give(consumer, groups, reader)

    def done(self, consumer: str, groups: Iterable[int]) -> tuple[int, ...]:
        """The consumer has read them; the rows that no consumer needs any more, to be freed."""
        held = list(groups)
        if len(set(held)) < len(held):
            raise ProtocolError(f"groups {held} name one twice")
        for id in held:
            self._held(consumer, id)
        freed: list[int] = []
        for id in held:
            entry = self._groups[id]
            del entry.readers[consumer]
            entry.done.add(consumer)
            if len(entry.done) == len(self.consumers):
                freed += entry.rows
                del self._groups[id]
                self.freed += 1
        return tuple(freed)

    def give_back(self, consumer: str, reader: str = "") -> tuple[int, ...]:
        """The reader is gone: the groups it held are ready again, at their old place in the order."""
        self._consumer(consumer)
        back = tuple(id for id, entry in self._groups.items() if entry.readers.get(consumer) == reader)
        self.release(consumer, back)
        return back

    def release(self, consumer: str, groups: Sequence[int]) -> None:
        """Groups that a reader of the consumer holds are ready again, at their old place in the order."""
        ready = self._consumer(consumer)
        for id in groups:
            self._held(consumer, id)
        for id in groups:
            del self._groups[id].readers[consumer]
            ready[id] = None
        self._sort(consumer)

    def remove(self, group: int, reason: str, *, by: str | None = None) -> tuple[int, ...]:
        """Filtered, timed out, aborted or failed: the group's rows, to be freed; its places come back, once.

        `by` is the consumer that found out, which may hold it; while another holds it this is a ProtocolError.
        """
        entry = self._get(group)
        others = [name for name in entry.readers if name != by]
        if others:
            raise ProtocolError(f"group {group} cannot be removed: {', '.join(others)} is reading it")
        del self._groups[group]
        for ready in self._ready.values():
            ready.pop(group, None)
        self.removed[reason] += 1
        return tuple(entry.rows)

    def waiting(self, group: int) -> tuple[str, ...]:
        """Consumers that have not read the group."""
        entry = self._get(group)
        return tuple(name for name in self.consumers if name not in entry.done)

    def knows(self, row: int) -> bool:
        """Whether the row is or was in the queue."""
        return row in self._seen_rows

    @property
    def steps(self) -> tuple[int, int]:
        """Groups that have begun and groups that were complete, since the start. A put that leaves both as they are
        changes nothing for others."""
        return self._begun, self._next_number

    def has(self, group: int) -> bool:
        """Whether the group holds places now."""
        return group in self._groups

    def ready(self, consumer: str) -> tuple[int, ...]:
        """Groups that it could take, the first first."""
        return tuple(self._consumer(consumer))

    def may_take(self, consumer: str, group: int) -> bool:
        """Whether the group is ready for the consumer or may become so."""
        self._consumer(consumer)
        entry = self._groups.get(group)
        if entry is None:
            return group not in self._seen_groups
        return consumer not in entry.done and consumer not in entry.readers

    def last(self, consumer: str) -> bool:
        """Whether what is ready for the consumer is the last, but for what its readers may give back."""
        return not any(self.producers.values()) and not self._awaits(consumer)

    def ended(self, consumer: str) -> bool:
        """Whether nothing can become ready for the consumer any more, and it has read all there was."""
        return not any(self.producers.values()) and not self._consumer(consumer) and self._had_all(consumer)

    def describe(self) -> str:
        """One line for the dump of a run that stands still."""
        ready = ", ".join(f"{name} could take {len(ready) * self.group}" for name, ready in self._ready.items())
        partial = sum(entry.number is None for entry in self._groups.values())
        open_ = [name for name, is_open in self.producers.items() if is_open]
        limit = "unbounded" if self.capacity is None else f"of {self.capacity}"
        held = len(self._groups) * self.group
        return (
            f"{held} {limit} places, {partial} groups incomplete; {ready}; open producers: {', '.join(open_) or 'none'}"
        )

    # --- inside -------------------------------------------------------------------------------------------------------

    def _complete(self, id: int) -> None:
        entry = self._groups[id]
        if entry.number is None and len(entry.rows) + entry.lost == self.group:
            entry.number, self._next_number = self._next_number, self._next_number + 1
        self._offer(id)

    def _offer(self, id: int) -> None:
        """Show a complete group to the consumers for which it has all they read; twice is once."""
        entry = self._groups[id]
        if entry.number is None:
            return
        for name, ready in self._ready.items():
            if id in ready or name in entry.readers or name in entry.done:
                continue
            if all(entry.fields[field] == len(entry.rows) for field in self.needs[name]):
                late = bool(ready) and (self._groups[next(reversed(ready))].number or 0) > entry.number
                ready[id] = None
                if late:
                    self._sort(name)

    def _sort(self, consumer: str) -> None:
        ready = self._ready[consumer]
        self._ready[consumer] = dict.fromkeys(sorted(ready, key=lambda id: self._groups[id].number or 0))

    def _needed(self, fields: Iterable[str]) -> tuple[str, ...]:
        """Those that a consumer waits for."""
        wanted = {name for needs in self.needs.values() for name in needs}
        return tuple(name for name in dict.fromkeys(fields) if name in wanted)

    def _give(self, consumer: str, groups: Sequence[int], reader: str) -> Taken:
        for id in groups:
            del self._ready[consumer][id]
            self._groups[id].readers[consumer] = reader
        return Taken(Status.ROWS, tuple(groups), tuple(row for id in groups for row in self._groups[id].rows))

    def _had_all(self, consumer: str) -> bool:
        """Whether nothing can become ready for it again: what its readers hold may still be given back."""
        return all(consumer in entry.done for entry in self._groups.values())

    def _awaits(self, consumer: str) -> bool:
        """Whether there is a group that it has not had and could not take now: rows or fields of it are missing."""
        ready = self._ready[consumer]
        return any(
            id not in ready and consumer not in entry.readers and consumer not in entry.done
            for id, entry in self._groups.items()
        )

    def _open(self, producer: str) -> None:
        if not self.producers.get(producer, False):
            raise ProtocolError(f"`{producer}` is no producer of this queue, or has closed")

    def _consumer(self, name: str) -> dict[int, None]:
        if name not in self._ready:
            raise ProtocolError(f"`{name}` is no consumer of this queue")
        return self._ready[name]

    def _get(self, group: int) -> QueueGroup:
        if group not in self._groups:
            raise ProtocolError(f"group {group} is not in the queue")
        return self._groups[group]

    def _held(self, consumer: str, group: int) -> None:
        self._consumer(consumer)
        if consumer not in self._get(group).readers:
            raise ProtocolError(f"`{consumer}` does not hold group {group}")

    # --- JSON ---------------------------------------------------------------------------------------------------------

    def to_json(self) -> dict[str, Any]:
        return {
            "producers": dict(self.producers),
            "consumers": list(self.consumers),
            "capacity": self.capacity,
            "group": self.group,
            "needs": {name: list(fields) for name, fields in self.needs.items()},
            "failure": self.failure,
            "freed": self.freed,
            "removed": dict(sorted(self.removed.items())),
            "groups": [
                [id, list(it.rows), it.lost, it.number, dict(it.readers), sorted(it.done), dict(it.fields)]
                for id, it in self._groups.items()
            ],
            "seen_rows": [list(part) for part in self._seen_rows.ranges],
            "seen_groups": [list(part) for part in self._seen_groups.ranges],
            "next_number": self._next_number,
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> QueueState:
        """What readers held is held still: `give_back` for those that are gone."""
        queue = cls(
            data["producers"], data["consumers"], capacity=data["capacity"], group=data["group"], needs=data["needs"]
        )
        queue.producers = dict(data["producers"])
        queue.failure, queue.freed, queue.removed = data["failure"], data["freed"], Counter(data["removed"])
        queue._next_number = data["next_number"]
        queue._seen_rows = IdSet((start, end) for start, end in data["seen_rows"])
        queue._seen_groups = IdSet((start, end) for start, end in data["seen_groups"])
        for id, rows, lost, number, readers, done, fields in data["groups"]:
            queue._groups[id] = QueueGroup(list(rows), lost, number, dict(readers), set(done), Counter(fields))
        for _, id in sorted((it.number, id) for id, it in queue._groups.items() if it.number is not None):
            queue._offer(id)
        return queue
