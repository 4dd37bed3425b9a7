"""The queue on Ray: contents by reference, several actors, memory that comes back, and failures in words."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from rlflow.backends.ray_runtime.dist_queue.client import DistQueue, start_queue
from rlflow.backends.ray_runtime.dist_queue.rows import EdgeSpec
from rlflow.diagnostics.diagnostic import RunFailure
from tests.unit.ray_runtime.dist_queue.rows_of import facts_of, fields_of, same

pytestmark = pytest.mark.ray

LARGE = 300_000
"""Numbers of a field that is not inline: 1.2 MB."""


@pytest.fixture
def open_queue(ray_cluster: Any) -> Iterator[Callable[..., DistQueue]]:
    """`open_queue(shards=2)` is an end of a new queue, of rank 0 of pool `learner`."""
    actors: list[Any] = []

    def build(**more: Any) -> DistQueue:
        settings: dict[str, Any] = {"producers": ("p",), "consumers": {"train": None}, "capacity": None}
        spec = EdgeSpec("samples->learner", **settings | {"deadline_s": 20.0} | more)
        made = start_queue(spec)
        actors.extend(made)
        return DistQueue(spec, made, "learner", 0)

    yield build
    for actor in actors:
        ray_cluster.kill(actor)


def test_readers_fetch_only_their_parts_of_many(open_queue: Callable[..., DistQueue]) -> None:
    """As between pools of many ranks: of two actors each has every other batch, and every part is an object."""
    ranks = 20
    readers = {f"reader {number}": None for number in range(2)}
    queue = open_queue(consumers=readers, group=ranks, capacity=4 * ranks, shards=2)
    for batch in range(2):
        for rank in range(ranks):
            facts = facts_of([batch * ranks + rank], ranks)
            big = {"big": np.full((1, LARGE // 10), rank, dtype=np.float32)} if rank % 2 else fields_of([rank], "big")
            queue.put("p", facts, big)
    for number, reader in enumerate(readers):
        for _ in range(2):
            reading = queue.take(reader, ranks)
            own = range(number, ranks, 2)
            reading.load(own)
            assert len(reading._contents) == ranks // 2
            for rank in own:
                (value,) = reading.columns([rank])["big"].reshape(-1)[:1].tolist()  # type: ignore[union-attr]
                assert value == (rank if rank % 2 else rank + len("big"))
            queue.done(reader, reading.groups)
    deadline = time.monotonic() + 10
    while queue.facts()["depth"] and time.monotonic() < deadline:  # `done` is not waited for
        time.sleep(0.05)
    assert queue.facts() == {"depth": 0, "nbytes": 0, "freed": 2}


@pytest.mark.parametrize("shards", [1, 3])
def test_rows_reach_two_consumers_and_late_fields_join_them(open_queue: Callable[..., DistQueue], shards: int) -> None:
    reads = {"ref": ("tokens",), "train": ("tokens", "text", "ref", "big")}
    queue = open_queue(consumers=reads, capacity=48, group=2, shards=shards)
    got: list[int] = []

    def reference() -> None:
        end = DistQueue(queue.spec, queue._actors, "reference", 0)
        while not (reading := end.take("ref", 2, 8)).ended:
            ids = reading.facts.ids
            assert same(reading.columns(), ids, "tokens")
            assert end.put_fields(reading.facts, fields_of(ids, "ref")) == len(ids)
            end.done("ref", reading.groups)

    def writer() -> None:
        end = DistQueue(queue.spec, queue._actors, "rollout", 0)
        for first in range(0, 96, 24):
            ids = range(first, first + 24)
            big = np.repeat(np.asarray(ids, dtype=np.float32)[:, None], 1000, 1)
            end.put("p", facts_of(ids, 2, versions=(first,) * 24), {**fields_of(ids, "tokens", "text"), "big": big})
        end.close("p")

    threads = [threading.Thread(target=work) for work in (reference, writer)]
    for thread in threads:
        thread.start()
    while not (reading := queue.take("train", 4, 16)).ended:
        assert 1 <= len(reading) <= 16
        assert reading.depth * 2 <= 48
        ids = reading.facts.ids
        assert same(reading.columns(fields=["tokens", "text", "ref"]), ids, "tokens", "text", "ref")
        big = reading.columns(fields=["big"])["big"]
        assert isinstance(big, np.ndarray)
        assert big[:, 999].tolist() == list(ids)
        assert reading.facts.versions == tuple(id // 24 * 24 for id in ids)
        got += ids
        queue.done("train", reading.groups)
    for thread in threads:
        thread.join()
    assert sorted(got) == list(range(96))
    deadline = time.monotonic() + 10
    while queue.facts()["depth"] and time.monotonic() < deadline:  # `done` is not waited for
        time.sleep(0.05)
    assert queue.facts() == {"depth": 0, "nbytes": 0, "freed": 48}


def test_memory_of_the_object_store_comes_back(open_queue: Callable[..., DistQueue], ray_cluster: Any) -> None:
    """Sixty batches of which two fit at a time: what has been read is let go."""

    def used() -> float:
        total, free = ray_cluster.cluster_resources(), ray_cluster.available_resources()
        return float(total["object_store_memory"] - free.get("object_store_memory", 0.0))

    queue = open_queue(capacity=2)
    before, most = used(), 0.0
    for batch in range(60):
        queue.put("p", facts_of([batch]), {"x": np.full((1, LARGE), batch, dtype=np.float32)})
        reading = queue.take("train", 1)
        column = reading.columns()["x"]
        assert isinstance(column, np.ndarray)
        assert not column.flags.writeable, "it is the memory of the object store itself"
        assert float(column[0, -1]) == batch
        del column, reading
        queue.done("train", [batch])
        most = max(most, used() - before)
    deadline = time.monotonic() + 10
    while queue.facts()["depth"] and time.monotonic() < deadline:  # `done` is not waited for
        time.sleep(0.05)
    assert queue.facts() == {"depth": 0, "nbytes": 0, "freed": 60}
    while used() > before and time.monotonic() < deadline:
        time.sleep(0.1)
    assert used() <= before
    assert most < 60 * LARGE * 4 / 2


def test_a_reader_that_died_is_replaced(open_queue: Callable[..., DistQueue]) -> None:
    queue = open_queue(shards=2)
    queue.put("p", facts_of(range(4)), fields_of(range(4), "tokens"))
    assert sorted(queue.take("train", 4, reader="dead").groups) == [0, 1, 2, 3]
    assert sorted(queue.give_back("train", "dead")) == [0, 1, 2, 3]
    assert queue.take_groups("train", [3, 1]).groups == (3, 1)
    assert sorted(queue.take("train", 2).facts.ids) == [0, 2]


def test_misuse_says_which_rule(open_queue: Callable[..., DistQueue]) -> None:
    queue = open_queue(capacity=128, shards=2)
    fields = fields_of([0], "score")
    queue.put("p", facts_of([0]), fields)
    for call, words in (
        (lambda: queue.put("p", facts_of([0]), fields), "row 0 was in the queue before"),
        (
            lambda: queue.put("p", facts_of([2]), {"score": [1]}),
            "field `score` is objects, and rows before had float32",
        ),
        (lambda: queue.put("p", facts_of([2, 3]), fields), "field `score` has 1 rows, and 2 are put"),
        (lambda: queue.take("train", 96), "each of 2 actors holds 64 of 128: ask for at least 64, or use one actor"),
        (lambda: queue.take("nobody", 1), "`nobody` is no consumer of this queue"),
    ):
        with pytest.raises(RunFailure) as caught:
            call()
        assert caught.value.code == "RLF5066"
        assert "rank 0 of pool `learner` uses the queue `samples->learner`" in caught.value.message
        assert words in caught.value.notes[0]
    queue.done("train", [0])  # not held; nobody waits for the answer
    with pytest.raises(RunFailure, match="in a way that it does not allow") as caught:
        queue.facts()
    assert "does not hold group 0" in caught.value.notes[0]


def test_waiting_ends_with_words(open_queue: Callable[..., DistQueue]) -> None:
    for shards in (1, 2):
        queue = open_queue(capacity=4, shards=shards, deadline_s=0.3)
        queue.put("p", facts_of([0]), fields_of([0], "tokens"))
        with pytest.raises(RunFailure) as caught:
            queue.take("train", 2)
        assert caught.value.code == "RLF5019"
        assert caught.value.message == "rank 0 of pool `learner` waited 0.3 s for the queue `samples->learner`"
        assert "train found no 2 rows to take" in caught.value.notes[0]


def test_a_failed_producer_ends_its_readers(open_queue: Callable[..., DistQueue]) -> None:
    for shards in (1, 2):
        queue = open_queue(shards=shards)
        queue.fail("p", "KeyError: 'question'")
        with pytest.raises(RunFailure) as caught:
            queue.take("train", 1)
        assert caught.value.code == "RLF5067"
        assert caught.value.notes == ("producer p failed: KeyError: 'question'",)


def test_a_dead_actor_is_named(open_queue: Callable[..., DistQueue], ray_cluster: Any) -> None:
    queue = open_queue()
    queue.facts()
    ray_cluster.kill(queue._actors[0])
    with pytest.raises(RunFailure) as caught:
        queue.take("train", 1)
    assert caught.value.code == "RLF5065"


def test_rows_of_a_dead_producer_are_said_to_be_gone(open_queue: Callable[..., DistQueue], ray_cluster: Any) -> None:
    """Small rows lie in the queue's actor and outlive it."""
    queue = open_queue()

    class Writer:
        def write(self, end: DistQueue) -> None:
            end.put("p", facts_of([0]), {"x": np.zeros((1, LARGE), dtype=np.float32)})
            end.put("p", facts_of([1]), {"x": np.ones((1, 3), dtype=np.float32)})

    writer = ray_cluster.remote(num_cpus=0)(Writer).remote()
    ray_cluster.get(writer.write.remote(queue))
    ray_cluster.kill(writer)

    def read_again() -> None:
        for _ in range(200):  # until Ray has noticed: as long as the object is on this host it can be read
            queue.take("train", 2).columns([0])
            queue.give_back("train")
            time.sleep(0.1)

    with pytest.raises(RunFailure) as caught:
        read_again()
    assert caught.value.code == "RLF5064"
    queue.give_back("train")
    reading = queue.take("train", 2)
    found = reading.columns([1])["x"]
    assert isinstance(found, np.ndarray)
    assert found.tolist() == [[1.0, 1.0, 1.0]]


def test_the_actor_is_light() -> None:
    code = "import sys, rlflow.backends.ray_runtime.dist_queue.service; print('torch' in sys.modules, 'ray' in sys.modules)"
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert said.split() == ["False", "False"]
