"""A queue on several actors, each with the groups that `EdgeSpec.shard_of` gives it.

The capacity is shared out, so that together they never hold more. A reader gathers from all of them, and of one
consumer one reader at a time. What it asks for at the least is no more than the smallest actor holds: then an actor
that is full can always answer it, and no writer waits for a reader that waits for it.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import ray

from rlflow.backends.ray_runtime.dist_queue.rows import EdgeSpec, Given, Refused, RowFacts, Stand
from rlflow.protocol.queue_entries import Status

_LOOK_S = 30.0
"""How long a question for changes may stay open."""


def split_rows(spec: EdgeSpec, facts: RowFacts) -> list[tuple[int, RowFacts]]:
    """Actor to the rows that it gets; where they lie in the packed columns stays the same."""
    if spec.shards == 1:
        return [(0, facts)]
    places: dict[int, list[int]] = {}
    for place, group in enumerate(facts.groups):
        places.setdefault(spec.shard_of(group), []).append(place)
    return [(shard, facts.select(own)) for shard, own in sorted(places.items())]


def refuse_too_many(spec: EdgeSpec, least: int, most: int) -> Refused | None:
    """Counts that several actors cannot promise."""
    whole = most // spec.group >= -(-least // spec.group)
    if least < 1 or most < least or not whole:
        return Refused("misuse", f"{least} to {most} rows hold no whole number of groups of {spec.group}")
    smallest = spec.shard(spec.shards - 1).capacity
    if smallest is not None and least > smallest:
        return Refused(
            "misuse",
            f"at least {least} rows are asked for, and each of {spec.shards} actors holds {smallest} of "
            f"{spec.capacity}: ask for at least {smallest}, or use one actor",
        )
    return None


def gather(
    spec: EdgeSpec,
    actors: Sequence[Any],
    consumer: str,
    least: int,
    most: int,
    reader: str,
    answers: Callable[[list[Any]], list[Any]],
) -> list[Given] | Refused:
    """`take` over all actors; `answers` waits for calls and raises what is wrong with them."""
    refused = refuse_too_many(spec, least, most)
    if refused is not None:
        return refused
    watching: dict[Any, int] = {}
    with _turn(actors[0], consumer, reader, answers):
        end = time.monotonic() + spec.deadline_s
        while True:
            stands: list[Stand] = answers([actor.stand.remote(consumer) for actor in actors])
            failure = next((stand.failure for stand in stands if stand.failure), None)
            if failure is not None:
                return Refused("failed", failure)
            rows = sum(stand.ready for stand in stands) * spec.group
            if rows >= least or (rows and all(stand.last for stand in stands)):
                given = _take(spec, actors, consumer, [stand.ready for stand in stands], most, reader, answers)
                if sum(len(one.groups) for one in given) * spec.group >= min(least, rows):
                    return given
                # Named groups were taken in between, which no turn holds back.
                for one in given:
                    shard = spec.shard_of(one.groups[0])
                    answers([actors[shard].release.remote(consumer, one.groups)])
            elif all(stand.ended for stand in stands):
                return [Given(Status.END)]
            left = end - time.monotonic()
            if left <= 0:
                said = answers([actor.describe.remote() for actor in actors])
                return Refused("late", f"{consumer} found no {least} rows to take: " + " | ".join(said))
            for number, actor in enumerate(actors):
                if number not in watching.values():
                    watching[actor.changed.remote(stands[number].changes, min(left, _LOOK_S))] = number
            done, _ = ray.wait(list(watching), num_returns=1, timeout=left)
            for call in done:
                answers([call])
                del watching[call]


@contextlib.contextmanager
def _turn(actor: Any, consumer: str, reader: str, answers: Callable[[list[Any]], list[Any]]) -> Iterator[None]:
    """Of several readers of a consumer one gathers at a time; the first actor says who."""
    answers([actor.turn.remote(consumer, reader)])
    try:
        yield
    finally:
        actor.end_turn.remote(consumer, reader)


def _take(
    spec: EdgeSpec,
    actors: Sequence[Any],
    consumer: str,
    ready: Sequence[int],
    most: int,
    reader: str,
    answers: Callable[[list[Any]], list[Any]],
) -> list[Given]:
    """At most `most` rows, from the actors with most first: those are nearest to holding writers back."""
    room = most // spec.group
    calls = []
    for shard in sorted(range(len(actors)), key=lambda number: -ready[number]):
        groups = min(ready[shard], room)
        room -= groups
        if groups:
            calls.append(actors[shard].take.remote(consumer, spec.group, groups * spec.group, reader, False))
    return [one for one in answers(calls) if one.status is Status.ROWS]
