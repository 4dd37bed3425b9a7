"""A queue for callers that wait: puts for room, takes for rows. Plain asyncio; Ray makes it an actor.

Who waits is served in the order of arrival: a put that begins groups does not overtake another, nor does a take another
of the same consumer. Rows of groups that have begun always enter, or a full queue of half groups would stand still; and
a put enters group by group as room comes, or one of many groups could wait for ever while the reader waits for it.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from typing import TypeVar

from rlflow.backends.ray_runtime.dist_queue.rows import EdgeSpec, Given, Piece, Refused, RowFacts, Stand
from rlflow.backends.ray_runtime.dist_queue.table import QueueTable, Ticket
from rlflow.protocol.errors import ProtocolError
from rlflow.protocol.queue_entries import Status

T = TypeVar("T")


class QueueService:
    """Calls return a `Refused` where they do not get what they ask for: Ray would hide an exception's own words."""

    def __init__(self, spec: EdgeSpec) -> None:
        self.table = QueueTable(spec)
        self._puts: deque[Ticket] = deque()
        self._takes: dict[str, deque[object]] = {name: deque() for name in spec.consumers}
        self._turns: dict[str, deque[str]] = {name: deque() for name in spec.consumers}
        """Readers that gather from several actors: the first may, the others wait."""
        self._changed = asyncio.Event()
        self._changes = 0

    # --- producers ---------------------------------------------------------------------------------------------------

    async def put(self, producer: str, facts: RowFacts, pieces: Sequence[Piece]) -> Refused | None:
        """Add rows; waits for room."""
        try:
            ticket = self.table.open(producer, facts, pieces)
        except (ProtocolError, ValueError) as error:
            return Refused("misuse", str(error))
        self._puts.append(ticket)
        failed: dict[int, ProtocolError] = {}

        def entered() -> bool:
            before = self.table.state.steps
            try:
                self.table.enter(ticket, begin=self._puts[0] is ticket)
            except ProtocolError as error:
                failed[0] = error
            if self.table.state.steps != before:
                self._change()  # for a part of a group that has begun and is not whole nobody waits
            return bool(failed) or not ticket.waiting

        in_time = await self._until(entered)
        first = self._puts[0] is ticket
        self._puts.remove(ticket)
        if first and self._puts:
            self._change()  # the next may begin
        if in_time and not failed:
            return None
        left = [str(group) for group in ticket.waiting]
        self.table.leave(ticket)
        if failed:
            return Refused("misuse", str(failed[0]))
        return Refused("late", f"{producer} found no room for group {', '.join(left)}: {self.table.describe()}")

    async def put_fields(
        self, ids: Sequence[int], pieces: Sequence[Piece], spans: Sequence[tuple[int, int]] = ()
    ) -> Refused | int:
        """Further fields of rows; how many of the rows were still there."""
        return self._now(lambda: self.table.put_fields(ids, pieces, spans))

    async def shorten(self, group: int, rows: int = 1) -> Refused | None:
        """So many rows of the group will not come."""
        return self._now(lambda: self.table.state.shorten(group, rows))

    async def close(self, producer: str) -> Refused | None:
        """The producer makes no more rows."""
        return self._now(lambda: self.table.state.close(producer))

    async def fail(self, producer: str, message: str) -> Refused | None:
        """The producer died: every take says so from now on."""
        return self._now(lambda: self.table.state.fail(producer, message))

    # --- consumers ---------------------------------------------------------------------------------------------------

    async def take(
        self, consumer: str, least: int, most: int | None = None, reader: str = "", wait: bool = True
    ) -> Refused | Given:
        """Between `least` and `most` rows of whole groups; waits for them unless told otherwise."""
        return await self._take(consumer, lambda: self.table.take(consumer, least, most, reader=reader), least, wait)

    async def take_groups(self, consumer: str, groups: Sequence[int], reader: str = "") -> Refused | Given:
        """Exactly these groups; waits until they are ready."""

        def attempt() -> Given:
            if not self.table.state.failure and not set(groups) <= set(self.table.state.ready(consumer)):
                gone = [id for id in groups if not self.table.state.may_take(consumer, id)]
                if not gone:
                    return Given(Status.WAIT)
            return self.table.take_groups(consumer, groups, reader=reader)

        return await self._take(consumer, attempt, len(groups) * self.table.spec.group, True, ordered=False)

    async def pieces(self, places: Sequence[tuple[int, int, int]]) -> Refused | list[Piece]:
        """What a take has left in the queue, at `Piece.at`."""
        try:
            return self.table.pieces(places)
        except ProtocolError as error:
            return Refused("misuse", str(error))

    async def done(self, consumer: str, groups: Sequence[int]) -> Refused | None:
        """The consumer has copied them."""
        found = self._now(lambda: self.table.done(consumer, groups))
        return found if isinstance(found, Refused) else None

    async def give_back(self, consumer: str, reader: str = "") -> Refused | tuple[int, ...]:
        """A reader is gone: what it held is ready again, and it gathers no more."""
        turns = self._turns.get(consumer, deque())
        while reader in turns:
            turns.remove(reader)
        return self._now(lambda: self.table.give_back(consumer, reader))

    async def release(self, consumer: str, groups: Sequence[int]) -> Refused | None:
        """Groups that a reader took and has not read are ready again."""
        return self._now(lambda: self.table.state.release(consumer, groups))

    async def remove(self, group: int, reason: str, by: str | None = None) -> Refused | tuple[int, ...]:
        """Filtered, timed out, aborted or failed: the group's rows leave."""
        return self._now(lambda: self.table.remove(group, reason, by=by))

    # --- for readers that gather from several actors -----------------------------------------------------------------

    async def turn(self, consumer: str, reader: str) -> Refused | None:
        """Wait until no other reader of the consumer gathers: two that each hold a part would wait for each other."""
        if consumer not in self._turns:
            return Refused("misuse", f"`{consumer}` is no consumer of this queue")
        turns = self._turns[consumer]
        turns.append(reader)
        if await self._until(lambda: turns[0] == reader if turns else True):
            return None
        if reader in turns:
            turns.remove(reader)
        return Refused("late", f"{consumer} waited for another of its readers: {self.table.describe()}")

    async def end_turn(self, consumer: str, reader: str) -> None:
        """The reader has gathered."""
        if reader in self._turns[consumer]:
            self._turns[consumer].remove(reader)
        self._change()

    async def changed(self, seen: int, wait_s: float) -> int:
        """Number of the last change; waits for one after `seen`, at most so long."""
        await self._until(lambda: self._changes > seen, wait_s)
        return self._changes

    # --- facts -------------------------------------------------------------------------------------------------------

    async def stand(self, consumer: str) -> Stand | Refused:
        """How a consumer stands."""

        state = self.table.state
        try:
            ready = len(state.ready(consumer))
        except ProtocolError as error:
            return Refused("misuse", str(error))
        return Stand(ready, state.last(consumer), state.ended(consumer), state.failure, self._changes)

    async def facts(self) -> dict[str, int]:
        """Groups and bytes held now, groups that all have read."""
        state = self.table.state
        return {"depth": self.table.depth, "nbytes": self.table.nbytes, "freed": state.freed}

    async def ended(self) -> None:
        """Never returns: who holds the reference hears of the actor's death."""
        await asyncio.Event().wait()

    async def describe(self) -> str:
        """One line about what is there and who waits."""
        return self.table.describe()

    # --- inside ------------------------------------------------------------------------------------------------------

    async def _take(
        self, consumer: str, attempt: Callable[[], Given], least: int, wait: bool, ordered: bool = True
    ) -> Refused | Given:
        if consumer not in self._takes:
            return Refused("misuse", f"`{consumer}` is no consumer of this queue")
        line, mine = self._takes[consumer], object()
        if ordered:
            line.append(mine)
        found: list[Refused | Given] = []

        def taken() -> bool:
            if ordered and line[0] is not mine:
                return False
            try:
                given = attempt()
            except (ProtocolError, ValueError) as error:
                found.append(Refused("misuse", str(error)))
                return True
            if given.status is Status.FAILED:
                found.append(Refused("failed", self.table.state.failure or ""))
            elif given.status is not Status.WAIT:
                found.append(given)
            return bool(found)

        try:
            if wait:
                await self._until(taken)
            else:
                taken()
        finally:
            if ordered:
                line.remove(mine)
                if line:
                    self._change()
        if found:
            return found[0]
        if not wait:
            return Given(Status.WAIT)
        return Refused("late", f"{consumer} found no {least} rows to take: {self.table.describe()}")

    def _now(self, call: Callable[[], T]) -> T | Refused:
        try:
            found = call()
        except (ProtocolError, ValueError) as error:
            return Refused("misuse", str(error))
        self._change()
        return found

    def _change(self) -> None:
        self._changes += 1
        self._changed.set()
        self._changed = asyncio.Event()

    async def _until(self, ready: Callable[[], bool], wait_s: float | None = None) -> bool:
        """Whether `ready` became true in time; it is called once now and after every change."""
        loop = asyncio.get_running_loop()
        end = loop.time() + (self.table.spec.deadline_s if wait_s is None else wait_s)
        while not ready():
            left = end - loop.time()
            if left <= 0:
                return False
            try:
                await asyncio.wait_for(self._changed.wait(), left)
            except TimeoutError:
                return ready()
        return True
