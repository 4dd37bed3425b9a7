"""The actor in place of torch.distributed's process groups: which virtual workers have none of.

What ranks say to each other over gloo or hccl, virtual workers say through it: what a pool's first rank was told, a
pool's metrics, and that a version of weights has been sent. Beside it the bytes of weights do not move; their time is
slept by those who receive them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Hashable
from typing import Any


class Fabric:
    """Waits end after `deadline_s` seconds with a text that says what is missing, in place of an answer's list."""

    def __init__(self, deadline_s: float) -> None:
        self._deadline_s = deadline_s
        self._parts: dict[Hashable, dict[int, Any]] = {}
        self._sent: dict[str, dict[int, int]] = {}
        """Channel to every sender's newest version."""
        self._told: dict[str, tuple[int, Any]] = {}
        self._changed = asyncio.Condition()

    async def give(self, key: Hashable, member: int, value: Any) -> None:
        """A member's part of what `collect` of the same key puts together."""
        async with self._changed:
            self._parts.setdefault(key, {})[member] = value
            self._changed.notify_all()

    async def collect(self, key: Hashable, members: int) -> list[Any] | str:
        """The parts of all members, in order; once."""
        async with self._changed:
            if not await self._until(lambda: len(self._parts.get(key, ())) == members):
                return f"{len(self._parts.get(key, ()))} of {members} workers gave their part of {key}"
            parts = self._parts.pop(key)
        return [parts[member] for member in range(members)]

    async def tell(self, topic: str, number: int, value: Any) -> None:
        """To all of a pool; `number` counts up, and the one before is forgotten."""
        async with self._changed:
            self._told[topic] = (number, value)
            self._changed.notify_all()

    async def told(self, topic: str, number: int) -> list[Any] | str:
        """[what was told]"""
        async with self._changed:
            if not await self._until(lambda: self._told.get(topic, (-1, None))[0] >= number):
                return f"the first rank of pool {topic} has not said how step {number} goes on"
            return [self._told[topic][1]]

    async def announce(self, channel: str, member: int, version: int) -> None:
        """A worker that trains has version `version` of a channel's weights."""
        async with self._changed:
            self._sent.setdefault(channel, {})[member] = version
            self._changed.notify_all()

    async def version(self, channel: str, members: int, least: int) -> list[int] | str:
        """[the version that all of so many senders have], once it is `least` or newer."""

        def have() -> int:
            sent = self._sent.get(channel, {})
            return min(sent.values()) if len(sent) == members else 0

        async with self._changed:
            if not await self._until(lambda: have() >= least):
                return f"version {least} of {channel} has not come; version {have()} is there"
            return [have()]

    async def _until(self, ready: Callable[[], bool]) -> bool:
        try:
            await asyncio.wait_for(self._changed.wait_for(ready), self._deadline_s)
        except TimeoutError:
            return False
        return True
