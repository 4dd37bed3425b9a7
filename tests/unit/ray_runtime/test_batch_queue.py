"""The actor of a queue without Ray: who waits for whom, and what is said when nobody comes."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from rlflow.backends.ray_runtime.batch_queue import QueueActor, QueueSettings
from rlflow.backends.ray_runtime.run_control import RunControl


def settings(**more: Any) -> QueueSettings:
    return QueueSettings(**{"id": "a->b", "capacity": 1, "parts": 2, "readers": 2, "deadline_s": 5.0} | more)


def test_every_reader_gets_every_batch_once_and_in_order() -> None:
    async def scenario() -> list[list[Any]]:
        actor = QueueActor(settings())

        async def write(part: int) -> None:
            for batch in range(5):
                assert await actor.put(part, batch, f"{batch}.{part}") == ""

        async def read(reader: int) -> list[Any]:
            found = []
            for batch in range(5):
                await asyncio.sleep(0.001 * reader)
                found.append(await actor.take(reader))
                await actor.done(reader, batch)
            return found

        done = await asyncio.gather(write(0), write(1), read(0), read(1))
        assert actor._held == {}, "what all have read is let go"
        return [found for found in done if found is not None]

    first, second = asyncio.run(scenario())
    assert first == second == [[f"{batch}.0", f"{batch}.1"] for batch in range(5)]


def test_a_full_queue_holds_its_writers_back() -> None:
    async def scenario() -> None:
        actor = QueueActor(settings(readers=1))
        await asyncio.gather(actor.put(0, 0, "a"), actor.put(1, 0, "b"))
        waiting = asyncio.ensure_future(actor.put(0, 1, "c"))
        await asyncio.sleep(0.02)
        assert not waiting.done()
        assert await actor.take(0) == ["a", "b"]
        await asyncio.sleep(0.02)
        assert not waiting.done(), "taken is not read"
        await actor.done(0, 0)
        assert await waiting == ""

    asyncio.run(scenario())


@pytest.mark.parametrize("call", ["put", "take"])
def test_waiting_too_long_says_how_things_stand(call: str) -> None:
    """A rank turns the text into RLF5019."""

    async def scenario() -> Any:
        actor = QueueActor(settings(deadline_s=0.02))
        if call == "take":
            return await actor.take(1)
        await asyncio.gather(actor.put(0, 0, "a"), actor.put(1, 0, "b"))
        return await actor.put(0, 1, "c")

    said = asyncio.run(scenario())
    assert isinstance(said, str)
    assert "of 2 places" in said
    assert ("rank 0 found no room for batch 1" if call == "put" else "reader 1 found no batch") in said


def test_all_pools_end_after_the_same_step() -> None:
    control = RunControl(parts=2)
    assert control.begin(1)
    assert control.begin(2), "the pool that is ahead"
    control.stop()
    assert not control.begin(3)
    assert control.begin(2), "the pool that is behind goes on to it"
    assert [control.saved(2), control.saved(2)] == [False, True]
