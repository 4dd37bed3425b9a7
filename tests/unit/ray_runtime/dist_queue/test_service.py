"""A queue for callers that wait, under a clock that jumps: who waits for whom, and what is said when nobody comes."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest

from rlflow.backends.ray_runtime.dist_queue import table as table_module
from rlflow.backends.ray_runtime.dist_queue.reading import Reading
from rlflow.backends.ray_runtime.dist_queue.rows import EdgeSpec, Given, Piece, Refused
from rlflow.backends.ray_runtime.dist_queue.service import QueueService
from rlflow.protocol.queue_entries import Status
from tests.unit.ray_runtime.dist_queue.rows_of import facts_of, fields_of, inline, run, same


def service(**more: Any) -> QueueService:
    settings: dict[str, Any] = {"producers": ("p", "r"), "consumers": {"train": None}, "capacity": 4, "deadline_s": 60}
    return QueueService(EdgeSpec("e", **settings | more))


async def put(q: QueueService, ids: Sequence[int], producer: str = "p", *names: str) -> Refused | None:
    fields = fields_of(ids, *(names or ("tokens",)))
    return await q.put(producer, facts_of(ids, q.table.spec.group), inline(q.table.spec, fields))


async def take(q: QueueService, least: int, most: int | None = None) -> Given:
    found = await q.take("train", least, most)
    assert isinstance(found, Given), found
    return found


def test_a_put_of_many_groups_enters_as_room_comes() -> None:
    async def scenario() -> None:
        q = service(capacity=4, group=2)
        writing = asyncio.ensure_future(put(q, range(10)))
        for group in range(0, 4, 2):
            given = await take(q, 4)  # the reader wants all that there is room for
            assert given.groups == (group, group + 1)
            assert not writing.done(), "taken is not read"
            await q.done("train", given.groups)
        assert await writing is None
        assert (await take(q, 2)).groups == (4,)

    run(scenario())


def test_who_waits_longest_is_served_first() -> None:
    async def scenario() -> None:
        q = service(capacity=4)
        await put(q, range(4))
        large = asyncio.ensure_future(put(q, range(4, 8)))
        await asyncio.sleep(1)
        small = [asyncio.ensure_future(put(q, [id], "r")) for id in range(8, 11)]
        for _ in range(4):
            await asyncio.sleep(1)
            await q.done("train", (await take(q, 1)).groups)
        assert await large is None
        assert not any(one.done() for one in small)
        large_take = asyncio.ensure_future(take(q, 4))
        small_take = asyncio.ensure_future(take(q, 1))
        assert (await large_take).groups == (4, 5, 6, 7)
        await asyncio.sleep(1)
        assert not small_take.done()
        await q.done("train", [4])
        assert (await small_take).groups == (8,)
        await q.done("train", [5, 6, 7, 8])
        assert await asyncio.gather(*small) == [None] * 3

    run(scenario())


def test_rows_of_a_begun_group_overtake() -> None:
    """A full queue of half groups would stand still."""

    async def scenario() -> None:
        q = service(capacity=2, group=2)
        assert await put(q, [0]) is None
        blocked = asyncio.ensure_future(put(q, [2, 3]))
        await asyncio.sleep(1)
        assert await put(q, [1], "r") is None
        await q.done("train", (await take(q, 2)).groups)
        assert await blocked is None

    run(scenario())


def test_named_groups_are_waited_for() -> None:
    async def scenario() -> None:
        q = service(consumers={"train": ("tokens", "ref")})
        wanted = asyncio.ensure_future(q.take_groups("train", [1, 0]))
        await put(q, [0, 1])
        await asyncio.sleep(1)
        assert not wanted.done()
        assert await q.put_fields([0, 1], inline(q.table.spec, fields_of([0, 1], "ref"))) == 2
        given = await wanted
        assert isinstance(given, Given)
        assert given.groups == (1, 0)
        again = await q.take_groups("train", [1])
        assert isinstance(again, Refused)
        assert (again.kind, again.text) == ("misuse", "groups [1] are not ready for `train`, or asked for twice")

    run(scenario())


@pytest.mark.parametrize("call", ["put", "take", "groups", "turn"])
def test_waiting_too_long_says_how_things_stand(call: str) -> None:
    """A rank turns the text into RLF5019."""

    async def scenario() -> tuple[Any, float]:
        q = service(deadline_s=7.0)
        if call == "put":
            await put(q, [0, 1, 2])
            return await put(q, [3, 4, 5]), asyncio.get_running_loop().time()
        if call == "turn":
            await q.turn("train", "a")
            return await q.turn("train", "b"), asyncio.get_running_loop().time()
        found = await (q.take("train", 1) if call == "take" else q.take_groups("train", [8]))
        return found, asyncio.get_running_loop().time()

    said, when = run(scenario())
    assert isinstance(said, Refused)
    assert (said.kind, when) == ("late", 7.0)
    words = {
        "put": "p found no room for group 4, 5: 4 of 4 places",
        "take": "train found no 1 rows to take: 0 of 4 places",
        "groups": "train found no 1 rows to take: 0 of 4 places",
        "turn": "train waited for another of its readers: 0 of 4 places",
    }
    assert said.text.startswith(words[call])


def test_a_reader_that_died_holds_nobody_up() -> None:
    async def scenario() -> None:
        q = service()
        await put(q, [0, 1])
        await q.turn("train", "dead")
        await q.take("train", 2, reader="dead")
        turn = asyncio.ensure_future(q.turn("train", "next"))
        await asyncio.sleep(1)
        assert not turn.done()
        assert await q.give_back("train", "dead") == (0, 1)
        assert await turn is None
        assert (await take(q, 2)).groups == (0, 1)

    run(scenario())


def test_parts_of_a_batch_wake_readers_once() -> None:
    """Of a thousand ranks every one puts a part: who waits for the whole is not to be woken a thousand times."""

    async def scenario() -> None:
        q = service(consumers={"a": None, "b": None}, group=40, capacity=80)
        waiting = [asyncio.ensure_future(q.take(name, 40)) for name in ("a", "b")]
        await asyncio.sleep(1)
        seen = await q.changed(-1, 1.0)
        for part in range(40):
            assert await put(q, [part]) is None
            await asyncio.sleep(1)
            assert all(one.done() for one in waiting) == (part == 39)
        assert await q.changed(-1, 1.0) == seen + 2, "the group has begun, and it is whole"

    run(scenario())


class Trial:
    """Random producers, readers, failures and late fields on one queue; everything ends before the deadline."""

    def __init__(self, seed: int) -> None:
        self.random = draw = random.Random(seed)
        self.group = draw.randint(1, 3)
        self.groups = draw.randint(8, 30)
        # The sum of what two consumers that wait for each other ask for fits, or they would wait for ever.
        self.least = draw.randint(1, 2)
        capacity = self.group * draw.randint(2 * self.least, 2 * self.least + 3)
        self.capacity = draw.choice([capacity, capacity, None])
        self.q = QueueService(
            EdgeSpec(
                "e",
                ("p0", "p1", "p2"),
                {"ref": ("tokens",), "judge": ("text", "tokens"), "train": ("tokens", "ref")},
                self.capacity,
                self.group,
                deadline_s=1e5,
            )
        )
        self.read: dict[str, Counter[int]] = {name: Counter() for name in self.q.table.spec.consumers}
        self.removed: set[int] = set()
        self.most = self.left = 0

    async def pause(self) -> None:
        await asyncio.sleep(self.random.expovariate(1))
        depth = self.q.table.depth * self.group
        assert self.capacity is None or depth <= self.capacity
        self.most = max(self.most, depth)

    def contents(self, pieces: list[Piece]) -> list[Any]:
        """Of what came with a take, and of what it has left in the queue."""
        found = [piece if piece.at is None else self.q.table.pieces([piece.at])[0] for piece in pieces]
        self.left += sum(piece.at is not None for piece in pieces)
        return [piece.data for piece in found]

    async def produce(self, name: str, rows: list[int]) -> None:
        """Rows, a few at a time."""
        while rows:
            await self.pause()
            count = self.random.randint(1, 2 * self.group)
            now, rows = rows[:count], rows[count:]
            assert await put(self.q, now, name, "tokens", "text") is None
        assert await self.q.close(name) is None

    async def consume(self, consumer: str, reader: str) -> None:
        draw = self.random
        while True:
            await self.pause()
            least = draw.randint(1, self.least) * self.group
            given = await self.q.take(consumer, least, least + self.group * draw.randint(0, 2), reader)
            assert isinstance(given, Given), given
            if given.status is Status.END:
                return
            reading = Reading([given], self.contents)
            assert same(reading.columns(fields=["tokens"]), given.facts.ids, "tokens")
            if consumer == "train":
                assert same(reading.columns(fields=["ref"]), given.facts.ids, "ref")
            await self.pause()
            if draw.random() < 0.1:  # it dies; somebody notices, and another goes on under its name
                await self.pause()
                back = await self.q.give_back(consumer, reader)
                assert isinstance(back, tuple)
                assert sorted(back) == sorted(given.groups)
                continue
            if consumer == "ref":
                ids = list(given.facts.ids)
                draw.shuffle(ids)
                await self.q.put_fields(ids, inline(self.q.table.spec, fields_of(ids, "ref")))
            for group in given.groups:
                if consumer == "judge" and draw.random() < 0.1:
                    found = await self.q.remove(group, "filtered", by=consumer)
                    if not isinstance(found, Refused):
                        self.removed.add(group)
                        continue
                assert await self.q.done(consumer, [group]) is None
                self.read[consumer].update(id for id in given.facts.ids if id // self.group == group)

    async def go(self) -> None:
        draw, rows = self.random, range(self.groups * self.group)
        makers = self.q.table.spec.producers[: draw.randint(1, min(3, self.group))]
        shares: dict[str, list[int]] = {name: [] for name in self.q.table.spec.producers}
        if draw.random() < 0.5:  # every group is made by all of some producers, in the same order
            for row in rows:
                shares[makers[row % self.group % len(makers)]].append(row)
        else:  # or each by one, in any order
            for group in draw.sample(range(self.groups), self.groups):
                shares[draw.choice(list(shares))] += range(group * self.group, (group + 1) * self.group)
        readers = [(name, f"{name} {k}") for name in self.read for k in range(self.random.randint(1, 2))]
        await asyncio.gather(
            *(self.produce(name, rows) for name, rows in shares.items()),
            *(self.consume(consumer, reader) for consumer, reader in readers),
        )


@pytest.mark.parametrize("seed", range(25))
def test_every_consumer_reads_every_row_once_and_nothing_stays(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    if seed % 2:
        monkeypatch.setattr(table_module, "FEW", 0)  # contents stay in the queue until they are asked for
    trial = Trial(seed)
    run(trial.go())
    assert bool(trial.left) == bool(seed % 2)
    rows = {row for row in range(trial.groups * trial.group) if row // trial.group not in trial.removed}
    for name, read in trial.read.items():
        assert {row for row in read if row // trial.group not in trial.removed} == rows, name
        assert set(read.values()) <= {1}, name
    table = trial.q.table
    assert (table.nbytes, table.depth, table._chunks, table._rows) == (0, 0, {}, {})
    assert trial.most > 0
