"""The Ray actor around a `SampleEdge`: calls wait inside it for what they ask for, each with a deadline. No torch."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rlflow.backends.ray_runtime.streams.sample_edge import Orders, SampleEdge
from rlflow.backends.ray_runtime.streams.specs import StreamSpec
from rlflow.protocol.cursor import DataCursor


class EdgeActor:
    """What waits longer than `deadline_s` gets the reason as a text. `replicas`: ranks that sample."""

    def __init__(self, spec: StreamSpec, replicas: int, deadline_s: float) -> None:
        self._spec, self._replicas, self._deadline_s = spec, replicas, deadline_s
        self._found: SampleEdge | None = None
        self._wanted = 0
        self._changed = asyncio.Condition()

    async def begin(self, done: int, last: int, cursor: Mapping[str, Any] | None) -> None:
        """Steps done + 1 to `last` follow. `cursor`: of the data, at a resume."""
        self._found = SampleEdge(
            self._spec.settings,
            self._replicas,
            done,
            last,
            early=self._spec.binds_early,
            cursor=None if cursor is None else DataCursor.from_json(cursor),
        )
        self._found.want(self._wanted)
        await self._tell()

    # --- replicas -----------------------------------------------------------------------------------------------------

    async def orders(self, replica: int, wait_s: float) -> Orders:
        """What is new; waits so long for something, and then gives nothing."""
        async with self._changed:
            await self._until(lambda: self._found is not None and self._found.has_orders(replica), wait_s)
            return Orders() if self._found is None else self._found.orders(replica)

    async def batch(self, replica: int, step: int) -> list[int] | str:
        """The prompts of the step's groups that this replica has made. A text: why they are not known in time."""
        found: list[list[int]] = []

        def known() -> bool:
            if self._found is None:
                return False
            self._found.ask(step)
            positions = self._found.positions(step, replica)
            if positions is not None:
                found.append(positions)
            return positions is not None

        if self._found is not None:
            self._found.ask(step)
            await self._tell()
        async with self._changed:
            if not await self._until(known, self._deadline_s):
                return await self.describe()
            self._changed.notify_all()
        return found[0]

    async def began(self, samples: Sequence[int], version: int) -> None:
        self._edge.began(samples, version)

    async def paused(self, tokens: Mapping[int, int], version: int) -> None:
        self._edge.paused(tokens, version)

    async def finished(self, samples: Sequence[int]) -> None:
        self._edge.finished(samples)
        await self._tell()

    async def loaded(self, replica: int, version: int) -> None:
        self._edge.loaded(replica, version)
        await self._tell()

    # --- training -----------------------------------------------------------------------------------------------------

    async def want(self, step: int) -> None:
        """Training is about to begin the step."""
        self._wanted = max(self._wanted, step)
        if self._found is not None:
            self._found.want(step)
            await self._tell()

    async def trained(self, step: int) -> None:
        self._edge.trained(step)
        await self._tell()

    async def cursor(self) -> dict[str, Any]:
        """The data cursor at the trained frontier."""
        return self._edge.cursor_json()

    # --- anybody ------------------------------------------------------------------------------------------------------

    async def facts(self) -> dict[str, Any]:
        """What became of the samples so far."""
        return self._edge.facts()

    async def ended(self) -> None:
        """Never returns: who holds the reference hears of the actor's death."""
        await asyncio.Event().wait()

    async def describe(self) -> str:
        """One line about what is there and who waits."""
        return "the run has not begun" if self._found is None else self._found.describe()

    # --- inside -------------------------------------------------------------------------------------------------------

    @property
    def _edge(self) -> SampleEdge:
        assert self._found is not None, "called before begin"
        return self._found

    async def _tell(self) -> None:
        async with self._changed:
            self._changed.notify_all()

    async def _until(self, ready: Callable[[], bool], seconds: float) -> bool:
        """Whether `ready` became true in time. Holds the lock when it looks."""
        try:
            await asyncio.wait_for(self._changed.wait_for(ready), seconds)
        except TimeoutError:
            return False
        return True
