"""Queue state: exactly once per consumer, backpressure, groups, ends, failures."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlflow.protocol.errors import ProtocolError
from rlflow.protocol.queue import QueueState
from rlflow.protocol.queue_entries import Status


def queue(
    producers: int = 1, consumers: tuple[str, ...] = ("train",), capacity: int | None = None, group: int = 1
) -> QueueState:
    return QueueState([f"p{i}" for i in range(producers)], consumers, capacity=capacity, group=group)


def put(q: QueueState, *rows: int, producer: str = "p0") -> bool:
    return q.put(producer, [(row, row // q.group) for row in rows])


def again(q: QueueState) -> QueueState:
    return QueueState.from_json(json.loads(json.dumps(q.to_json())))


def test_backpressure_and_freeing_after_the_last_reader() -> None:
    q = queue(consumers=("reward", "train"), capacity=2)
    assert put(q, 0)
    assert put(q, 1)
    assert not put(q, 2)
    assert q.take("reward", 2).rows == (0, 1)
    assert q.done("reward", [0, 1]) == ()
    assert not put(q, 2)
    assert q.take("train", 1).rows == (0,)
    assert not put(q, 2)  # taken is not read
    assert q.done("train", [0]) == (0,)
    assert put(q, 2)
    assert q.room == 0


def test_an_empty_queue_is_not_the_end() -> None:
    q = queue()
    for _ in range(3):
        assert q.take("train", 1).status is Status.WAIT
    put(q, 0)
    q.close("p0")
    assert q.take("train", 4).rows == (0,)  # the last, short batch
    assert q.take("train", 4).status is Status.WAIT  # its reader may still give it back
    q.done("train", [0])
    assert q.take("train", 4).status is Status.END


def test_ten_prompts_and_a_batch_of_sixteen_are_one_update() -> None:
    q = queue()
    put(q, *range(10))
    assert q.take("train", 16).status is Status.WAIT
    q.close("p0")
    taken = q.take("train", 16)
    assert (taken.status, len(taken.rows)) == (Status.ROWS, 10)


def test_a_dead_producer_is_an_error_with_its_words() -> None:
    q = queue(2)
    put(q, 0)
    q.fail("p1", "KeyError: 'question'")
    q.fail("p0", "stopped")
    assert q.take("train", 1).status is Status.FAILED
    assert q.take_groups("train", [0]).status is Status.FAILED
    assert q.failure == "producer p1 failed: KeyError: 'question'"
    assert again(q).take("train", 1).status is Status.FAILED


@pytest.mark.parametrize(("producers", "readers"), [(4, 2), (2, 4), (1, 1)])
def test_all_rows_reach_the_readers_once(producers: int, readers: int) -> None:
    q = queue(producers, capacity=3)
    left = {f"p{i}": list(range(i, 20, producers)) for i in range(producers)}
    got: list[int] = []
    ended: set[str] = set()
    for turn in range(400):
        for name, rows in left.items():
            if rows and put(q, rows[0], producer=name):
                rows.pop(0)
                if not rows:
                    q.close(name)
        reader = f"r{turn % readers}"
        taken = q.take("train", 1, reader=reader)
        if taken.status is Status.ROWS:
            got += taken.rows
            q.done("train", taken.groups)
        elif taken.status is Status.END:
            ended.add(reader)
    assert sorted(got) == list(range(20))
    assert len(ended) == readers


def test_a_reader_that_dies_gives_back_in_the_old_order() -> None:
    q = queue()
    put(q, *range(6))
    q.take("train", 2, reader="a")
    q.take("train", 2, reader="b")
    assert again(q).give_back("train", "a") == (0, 1)
    assert q.give_back("train", "a") == (0, 1)
    assert q.give_back("train", "a") == ()
    assert q.take("train", 4).rows == (0, 1, 4, 5)
    with pytest.raises(ProtocolError):
        q.done("train", [6])


def test_groups_are_taken_whole_and_reserve_their_places() -> None:
    q = queue(capacity=4, group=2)
    assert put(q, 0)
    assert put(q, 2)
    assert not put(q, 4)  # two groups have begun: four places
    assert q.take("train", 2).status is Status.WAIT
    assert put(q, 3)  # a begun group always gets the rest of its rows
    assert q.take("train", 2).rows == (2, 3)
    assert put(q, 1)
    assert q.take("train", 2).rows == (0, 1)


def test_k_of_n_takes_between_the_two() -> None:
    q = queue(group=2)
    put(q, *range(10))
    assert q.take("train", 4, 7).groups == (0, 1, 2)
    assert q.take("train", 6, 8).status is Status.WAIT
    assert q.take("train", 4, 8).groups == (3, 4)


def test_a_short_group_goes_on_with_its_boundaries() -> None:
    q = queue(group=4)
    put(q, 0, 1, 2)
    q.shorten(0)
    put(q, 4, 5, 6, 7)
    taken = q.take("train", 8)
    assert (taken.groups, taken.rows) == ((0, 1), (0, 1, 2, 4, 5, 6, 7))
    put(q, 8)
    with pytest.raises(ProtocolError, match="not 4 to lose"):
        q.shorten(2, 4)
    with pytest.raises(ProtocolError, match=r"groups \[2\] lack rows"):
        q.close("p0")
    q.remove(2, "failed")
    q.close("p0")


def test_rules_choose_and_the_queue_obeys() -> None:
    q = queue()
    put(q, 0, 1, 2)
    assert q.take_groups("train", [2, 0]).rows == (2, 0)
    for groups in ([2], [1, 1], [7]):
        with pytest.raises(ProtocolError):
            q.take_groups("train", groups)
    assert q.take("train", 1).rows == (1,)


def test_removal_returns_the_places_once() -> None:
    q = queue(consumers=("filter", "train"), capacity=2)
    put(q, 0, 1)
    q.take("filter", 1)
    with pytest.raises(ProtocolError, match="filter is reading"):
        q.remove(0, "timed out")
    assert q.remove(0, "filtered", by="filter") == (0,)
    with pytest.raises(ProtocolError):
        q.remove(0, "filtered")
    with pytest.raises(ProtocolError):
        q.done("filter", [0])
    assert (q.room, q.removed) == (1, {"filtered": 1})
    assert q.take("train", 1).rows == (1,)


def test_rows_come_once() -> None:
    q = queue(group=2)
    put(q, 0, 1)
    q.take("train", 2)
    q.done("train", [0])
    for rows in ([(0, 0)], [(9, 0)], [(4, 2), (4, 2)], [(4, 2), (5, 2), (6, 2)]):
        with pytest.raises(ProtocolError):
            q.put("p0", rows)
    q.close("p0")
    with pytest.raises(ProtocolError, match="has closed"):
        put(q, 8)


def test_counts_that_can_never_be_met() -> None:
    q = queue(capacity=4, group=2)
    for least, most in ((0, 1), (5, 6), (3, 3), (4, 3)):
        with pytest.raises(ValueError, match="places"):
            q.take("train", least, most)
    for bad in ({"capacity": 1, "group": 2}, {"group": 0}):
        with pytest.raises(ValueError, match="group"):
            queue(**bad)  # type: ignore[arg-type]


def test_the_dump_names_lengths_and_waits() -> None:
    q = queue(2, capacity=8, group=2)
    put(q, 0, 1, 2)
    q.close("p1")
    assert q.describe() == "4 of 8 places, 1 groups incomplete; train could take 2; open producers: p0"


MOVES = st.lists(
    st.tuples(
        st.sampled_from(["put", "put", "put", "take", "done", "back", "remove", "save"]),
        st.integers(0, 50),
        st.integers(0, 2),
    ),
    max_size=90,
)


@given(MOVES, st.integers(1, 3), st.integers(1, 4))
@settings(max_examples=120, deadline=None)
def test_every_consumer_reads_every_row_once(moves: list[tuple[str, int, int]], group: int, groups: int) -> None:
    """Against plain sets; at the end the producer closes and everything left is read."""
    consumers = ("a", "b")
    q = queue(consumers=consumers, capacity=groups * group, group=group)
    put_rows: list[int] = []
    read: dict[str, list[int]] = {name: [] for name in consumers}
    held: dict[tuple[str, str], list[tuple[int, tuple[int, ...]]]] = {}
    removed: set[int] = set()
    freed: list[int] = []

    def rows_of(group_id: int) -> tuple[int, ...]:
        return tuple(row for row in put_rows if row // group == group_id)

    for move, k, r in moves:
        name, reader = consumers[k % 2], f"r{r}"
        match move:
            case "put":
                row = len(put_rows)
                live = {row // group for row in put_rows} - removed - {row // group for row in freed}
                fits = row // group in live or (len(live) + 1) * group <= groups * group
                if row // group in removed:
                    put_rows.append(row)  # this one was rejected before it came
                    continue
                assert put(q, row) is fits
                if fits:
                    put_rows.append(row)
            case "take":
                taken = q.take(name, group, reader=reader)
                for id in taken.groups:
                    assert id not in removed
                    held.setdefault((name, reader), []).append((id, rows_of(id)))
            case "done":
                for id, rows in held.pop((name, reader), []):
                    read[name] += rows
                    freed += q.done(name, [id])
            case "back":
                back = q.give_back(name, reader)
                assert sorted(back) == sorted(id for id, _ in held.pop((name, reader), []))
            case "remove":
                busy = {id for rows in held.values() for id, _ in rows}
                there = {row // group for row in put_rows} - removed - {row // group for row in freed}
                if there - busy:
                    id = sorted(there - busy)[k % len(there - busy)]
                    q.remove(id, "filtered")
                    removed.add(id)
            case "save":
                q = again(q)
        assert q.room is not None
        assert 0 <= q.room <= groups * group
    for name, reader in list(held):
        q.give_back(name, reader)
    for id in {row // group for row in put_rows} - removed - {row // group for row in freed}:
        if len(rows_of(id)) < group:
            q.remove(id, "failed")
            removed.add(id)
    q.close("p0")
    for name in consumers:
        while (taken := q.take(name, group)).status is Status.ROWS:
            read[name] += taken.rows
            freed += q.done(name, taken.groups)
        assert taken.status is Status.END
        kept = [row for row in put_rows if row // group not in removed]
        mine = [row for row in read[name] if row // group not in removed]
        assert sorted(mine) == kept
        assert len(set(read[name])) == len(read[name])
    assert sorted(freed) == [row for row in put_rows if row // group not in removed]
    assert q.room == groups * group
