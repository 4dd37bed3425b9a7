"""A process's end of a queue: packs and puts rows, takes and reads them.

A put is one call, a take is one call and one fetch, `done` is not waited for: what is wrong with it is said by the next
call. With several actors every one gets its groups' part of a put, with the same references. Failures name the queue,
the rank and its pool; the interpreter adds the stage.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import ray

from rlflow.backends.ray_runtime.dist_queue.columns import Field, Sent, rows
from rlflow.backends.ray_runtime.dist_queue.packing import pieces_of
from rlflow.backends.ray_runtime.dist_queue.reading import Reading
from rlflow.backends.ray_runtime.dist_queue.rows import EdgeSpec, Given, Piece, Refused, RowFacts
from rlflow.backends.ray_runtime.dist_queue.service import QueueService
from rlflow.backends.ray_runtime.dist_queue.shards import gather, split_rows
from rlflow.diagnostics.diagnostic import RunFailure

GRACE_S = 30.0
"""For an answer beyond the queue's own deadline."""


def start_queue(spec: EdgeSpec, **options: Any) -> list[Any]:
    """The actors of a queue; `options` are Ray's."""
    remote = ray.remote(**{"num_cpus": 0, "max_concurrency": 1000} | options)(QueueService)
    return [remote.remote(spec.shard(number)) for number in range(spec.shards)]


class DistQueue:
    """One queue. `rank` of `pool` is who says so where something goes wrong; `actors` as `start_queue` gives them."""

    def __init__(self, spec: EdgeSpec, actors: Sequence[Any], pool: str = "", rank: int = 0) -> None:
        self.spec = spec
        self._actors = list(actors)
        self._who = f"rank {rank} of pool `{pool}`" if pool else f"rank {rank}"
        self._unheard: list[Any] = []

    # --- producers ---------------------------------------------------------------------------------------------------

    def put(self, producer: str, facts: RowFacts, fields: Mapping[str, Field]) -> int:
        """Add rows; waits for room. Bytes that travelled."""
        return self.put_each([(producer, facts, fields)])

    def put_each(self, parts: Sequence[tuple[str, RowFacts, Mapping[str, Field]]]) -> int:
        """Add the rows of several producers that this process stands for; none waits for another's answer."""
        calls, sent = [], 0
        for producer, facts, fields in parts:
            self._fit(facts, fields)
            pieces = pieces_of(self.spec, fields)
            sent += sum(piece.nbytes for piece in pieces)
            for shard, part in split_rows(self.spec, facts):
                calls.append(self._actors[shard].put.remote(producer, part, pieces))
        self._all(calls)
        return sent

    def put_fields(self, facts: RowFacts, fields: Mapping[str, Field]) -> int:
        """Further fields of rows that are in the queue; of `facts` the ids and groups count. Rows that were there."""
        self._fit(facts, fields)
        pieces = pieces_of(self.spec, fields)
        parts = split_rows(self.spec, facts)
        calls = [
            self._actors[shard].put_fields.remote(
                part.ids, pieces, tuple(part.span(place) for place in range(len(part)))
            )
            for shard, part in parts
        ]
        return sum(self._all(calls))

    def close(self, producer: str) -> None:
        """The producer makes no more rows."""
        self._all([actor.close.remote(producer) for actor in self._actors])

    def fail(self, producer: str, message: str) -> None:
        """The producer died: takes say so (RLF5067)."""
        self._all([actor.fail.remote(producer, message) for actor in self._actors])

    def shorten(self, group: int, rows: int = 1) -> None:
        """So many rows of the group will not come."""
        self._all([self._of(group).shorten.remote(group, rows)])

    # --- consumers ---------------------------------------------------------------------------------------------------

    def take(self, consumer: str, least: int, most: int | None = None, reader: str = "") -> Reading:
        """Between `least` and `most` rows (default: exactly `least`) of whole groups that have all the consumer reads.

        Waits for them. At the end of the data it is what is left, and then nothing (`Reading.ended`).
        """
        most = least if most is None else most
        if len(self._actors) == 1:
            return self._reading(self._all([self._actors[0].take.remote(consumer, least, most, reader)]))
        found = gather(self.spec, self._actors, consumer, least, most, reader, self._all)
        if isinstance(found, Refused):
            raise self._refused(found)
        return self._reading(found)

    def take_each(self, consumers: Sequence[str], count: int) -> list[Reading]:
        """So many rows for each of several consumers that this process stands for."""
        if len(self._actors) > 1:
            return [self.take(consumer, count) for consumer in consumers]
        (actor,) = self._actors
        answers = self._all([actor.take.remote(consumer, count, count, "") for consumer in consumers])
        return [self._reading([given]) for given in answers]

    def take_groups(self, consumer: str, groups: Sequence[int], reader: str = "") -> Reading:
        """Exactly these groups, in this order; waits until they are ready."""
        by_shard: dict[int, list[int]] = {}
        for group in groups:
            by_shard.setdefault(self.spec.shard_of(group), []).append(group)
        calls = [self._actors[shard].take_groups.remote(consumer, part, reader) for shard, part in by_shard.items()]
        return self._reading(self._all(calls))

    def done(self, consumer: str, groups: Iterable[int]) -> None:
        """Everything that is needed of the groups was copied: they may go. Not waited for."""
        by_shard: dict[int, list[int]] = {}
        for group in groups:
            by_shard.setdefault(self.spec.shard_of(group), []).append(group)
        self._unheard += [self._actors[shard].done.remote(consumer, part) for shard, part in by_shard.items()]

    def give_back(self, consumer: str, reader: str = "") -> tuple[int, ...]:
        """A reader is gone: what it held is ready again. The groups."""
        return tuple(
            group
            for part in self._all([actor.give_back.remote(consumer, reader) for actor in self._actors])
            for group in part
        )

    def remove(self, group: int, reason: str, by: str | None = None) -> tuple[int, ...]:
        """Filtered, timed out, aborted or failed: the group's rows leave."""
        (found,) = self._all([self._of(group).remove.remote(group, reason, by)])
        return tuple(found)

    def facts(self) -> dict[str, int]:
        """Groups (`depth`) and bytes (`nbytes`) in the queue, groups that all have read (`freed`)."""
        parts = self._all([actor.facts.remote() for actor in self._actors])
        return {name: sum(part[name] for part in parts) for name in parts[0]}

    # --- inside ------------------------------------------------------------------------------------------------------

    def _of(self, group: int) -> Any:
        return self._actors[self.spec.shard_of(group)]

    def _fit(self, facts: RowFacts, fields: Mapping[str, Field]) -> None:
        """RLF5066 for fields that do not have the rows."""
        least = max((facts.span(place)[1] for place in range(len(facts))), default=0)
        for name, column in fields.items():
            if rows(column) < least or (not facts.spans and rows(column) != len(facts)):
                raise self._refused(Refused("misuse", f"field `{name}` has {rows(column)} rows, and {least} are put"))

    def _reading(self, given: Sequence[Given]) -> Reading:
        return Reading(given, self._fetch)

    def _fetch(self, pieces: list[Piece]) -> list[dict[str, Sent]]:
        """The columns of all pieces; RLF5064 where the process that put one has died."""
        pieces = self._brought(pieces)
        stored = [piece.data[0] for piece in pieces if piece.stored]
        try:
            found = iter(ray.get(stored, timeout=self.spec.deadline_s) if stored else ())
        except ray.exceptions.GetTimeoutError:
            raise self._late(f"{len(stored)} objects did not come out of the object store") from None
        except (ray.exceptions.ObjectLostError, ray.exceptions.RayActorError) as error:
            raise RunFailure(
                "RLF5064",
                f"rows of the queue `{self.spec.id}` that {self._who} reads are gone",
                notes=(_first_line(error),),
                help=("the process that made them has died: go on from the last checkpoint",),
            ) from None
        return [next(found) if piece.stored else piece.data for piece in pieces]

    def _brought(self, pieces: list[Piece]) -> list[Piece]:
        """The pieces with those that the actors have kept, in the same order."""
        places: dict[int, list[tuple[int, int, int]]] = {}
        for piece in pieces:
            if piece.at is not None:
                places.setdefault(self.spec.shard_of(piece.at[0]), []).append(piece.at)
        if not places:
            return pieces
        answers = self._all([self._actors[shard].pieces.remote(asked) for shard, asked in places.items()])
        found = {
            at: one
            for asked, own in zip(places.values(), answers, strict=True)
            for at, one in zip(asked, own, strict=True)
        }
        return [piece if piece.at is None else found[piece.at] for piece in pieces]

    def _all(self, calls: list[Any]) -> list[Any]:
        """The answers of some calls, and of those before that nobody waited for."""
        unheard, self._unheard = self._unheard, []
        try:
            answers = ray.get([*unheard, *calls], timeout=self.spec.deadline_s + GRACE_S)
        except ray.exceptions.GetTimeoutError:
            raise self._late("its actor does not answer") from None
        except ray.exceptions.RayActorError as error:
            raise RunFailure(
                "RLF5065",
                f"the queue `{self.spec.id}` that {self._who} uses has died",
                notes=(_first_line(error),),
                help=("go on from the last checkpoint: `rlflow run --resume RUN_DIR`",),
            ) from None
        for answer in answers:
            if isinstance(answer, Refused):
                raise self._refused(answer)
        return list(answers[len(unheard) :])

    def _refused(self, answer: Refused) -> RunFailure:
        if answer.kind == "late":
            return self._late(answer.text)
        if answer.kind == "failed":
            return RunFailure(
                "RLF5067", f"{self._who} waits for the queue `{self.spec.id}` in vain", notes=(answer.text,)
            )
        return RunFailure(
            "RLF5066",
            f"{self._who} uses the queue `{self.spec.id}` in a way that it does not allow",
            notes=(answer.text,),
        )

    def _late(self, text: str) -> RunFailure:
        return RunFailure(
            "RLF5019",
            f"{self._who} waited {self.spec.deadline_s:g} s for the queue `{self.spec.id}`",
            notes=(text,),
        )


def _first_line(error: Exception) -> str:
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0] if text else ''}"
