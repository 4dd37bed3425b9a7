"""Rows that were taken: their facts at once, their contents when they are asked for."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import numpy as np

from rlflow.backends.ray_runtime.dist_queue.columns import Field, Sent, cut, joined, merged_runs, opened
from rlflow.backends.ray_runtime.dist_queue.rows import Given, Piece, RowFacts
from rlflow.protocol.queue_entries import Status


class Reading:
    """What one take gave, of one actor or of several. Arrays may only be read: they lie in the object store.

    `fetch` gives the packed columns of pieces, in one request. When everything is copied call `DistQueue.done`.
    """

    def __init__(self, given: Sequence[Given], fetch: Callable[[list[Piece]], list[dict[str, Sent]]]) -> None:
        self.given = tuple(given)
        self._fetch = fetch
        self._contents: dict[tuple[int, int], dict[str, Sent]] = {}
        self._opened: dict[tuple[int, int, str], Field] = {}
        self.facts = _joined_facts([one.facts for one in self.given])
        self.groups = tuple(group for one in self.given for group in one.groups)
        self.depth = sum(one.depth for one in self.given)
        """Groups in the queue when these were taken, these among them."""

    def __len__(self) -> int:
        return len(self.facts)

    @property
    def ended(self) -> bool:
        """There was nothing to take, and there will be nothing."""
        return not self.facts.ids and all(one.status is Status.END for one in self.given)

    @property
    def fields(self) -> tuple[str, ...]:
        """Names of what can be read."""
        return tuple(name for lane in self.given[0].lanes for name in lane.fields) if self.given else ()

    def load(self, places: Iterable[int] | None = None, fields: Iterable[str] | None = None) -> None:
        """Fetch what some rows need at once; without it `columns` fetches by itself."""
        wanted: dict[tuple[int, int], Piece] = {}
        names = None if fields is None else set(fields)
        for number, chosen in self._chosen(places):
            given = self.given[number]
            for lane in given.lanes:
                own = [name for name in lane.fields if names is None or name in names]
                for source in dict.fromkeys(lane.runs[chosen, 0].tolist()) if own else ():
                    for name in own:
                        piece = given.sources[source][name]
                        if (number, piece) not in self._contents:
                            wanted[number, piece] = given.pieces[piece]
        if wanted:
            self._contents |= zip(wanted, self._fetch(list(wanted.values())), strict=True)

    def columns(self, places: Sequence[int] | None = None, fields: Iterable[str] | None = None) -> dict[str, Field]:
        """Fields of some rows (default: all), in the given order. KeyError for one that the consumer does not read.

        Where the rows lie side by side arrays are not copied.
        """
        names = self.fields if fields is None else tuple(fields)
        self.load(places, names)
        parts: dict[str, list[Field]] = {name: [] for name in names}
        like: dict[str, Field] = {}
        for number, chosen in self._chosen(places):
            given = self.given[number]
            for lane in given.lanes:
                own = [name for name in lane.fields if name in parts]
                for source, low, high in merged_runs(lane.runs[chosen]):
                    for name in own:
                        parts[name].append(cut(self._open(number, source, name), low, high))
                for name in own:
                    if name not in like:
                        like[name] = cut(self._open(number, int(lane.runs[chosen][0, 0]), name), 0, 0)
        if missing := [name for name in names if name not in like]:
            raise KeyError(f"no field {missing} was taken; there are {sorted(self.fields)}")
        return {name: joined(found or [like[name]]) for name, found in parts.items()}

    # --- inside ------------------------------------------------------------------------------------------------------

    def _chosen(self, places: Iterable[int] | None) -> Iterable[tuple[int, np.ndarray]]:
        """Number of the answer, and places of rows in it, in order."""
        counts = [len(one.facts) for one in self.given]
        if places is None:
            return [(number, np.arange(count)) for number, count in enumerate(counts) if count]
        found: list[tuple[int, list[int]]] = []
        starts = np.cumsum([0, *counts])
        for place in places:
            number = int(np.searchsorted(starts, place, side="right")) - 1
            if not found or found[-1][0] != number:
                found.append((number, []))
            found[-1][1].append(place - int(starts[number]))
        return [(number, np.asarray(chosen, dtype=np.int64)) for number, chosen in found]

    def _open(self, number: int, source: int, name: str) -> Field:
        piece = self.given[number].sources[source][name]
        key = (number, piece, name)
        if key not in self._opened:
            self._opened[key] = opened(self._contents[number, piece][name])
        return self._opened[key]


def _joined_facts(parts: Sequence[RowFacts]) -> RowFacts:
    parts = [part for part in parts if len(part)]
    if len(parts) == 1:
        return parts[0]

    def all_of(name: str) -> tuple[object, ...]:
        return tuple(value for part in parts for value in getattr(part, name))

    names = ("ids", "groups", "versions", "lengths", "notes")
    return RowFacts(**{name: all_of(name) for name in names})  # type: ignore[arg-type]
