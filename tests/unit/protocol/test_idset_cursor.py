"""Sets of ids as ranges, and the data cursor of a resumed run."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlflow.protocol.cursor import DataCursor
from rlflow.protocol.errors import ProtocolError
from rlflow.protocol.idset import IdSet


@given(st.lists(st.integers(0, 30), max_size=60))
def test_the_set_is_a_set(ids: list[int]) -> None:
    mine, plain = IdSet(), set[int]()
    for id in ids:
        assert mine.add(id) is (id not in plain)
        plain.add(id)
        assert len(mine) == len(plain)
        assert {n for n in range(-1, 32) if n in mine} == plain
        assert mine.first_missing() == next(n for n in range(32) if n not in plain)
        assert all(a < b for (_, a), (b, _) in zip(mine.ranges, mine.ranges[1:], strict=False))
    assert IdSet(mine.ranges).ranges == mine.ranges


def test_ranges_that_touch_are_refused() -> None:
    with pytest.raises(ValueError, match="range 3 to 5"):
        IdSet([(0, 3), (3, 5)])


def again(cursor: DataCursor) -> DataCursor:
    return DataCursor.from_json(json.loads(json.dumps(cursor.to_json())))


def test_generated_and_untrained_prompts_come_again_after_a_resume() -> None:
    """Ids 0..7, generation of 4, training of 2, a checkpoint after the first update."""
    cursor = DataCursor()
    out = [cursor.issue(8) for _ in range(4)]
    trained = [out[3], out[1]]  # the short ones are finished first
    for id in trained:
        assert id is not None
        cursor.end(id, "trained")
    cursor = again(cursor)
    while (id := cursor.issue(8)) is not None:
        trained.append(id)
        cursor.end(id, "trained")
    assert trained == [3, 1, 0, 2, 4, 5, 6, 7]
    assert cursor.settled == 8


def test_dropped_prompts_do_not_pin_the_cursor() -> None:
    cursor = DataCursor()
    for _ in range(6):
        cursor.issue()
    for id in range(6):
        cursor.end(id, "stale" if id in (1, 4) else "trained")
    cursor = again(cursor)
    assert (cursor.settled, cursor.next_new, cursor.issue()) == (6, 6, 6)
    assert cursor.ends == {"trained": 4, "stale": 2}


def test_the_last_batch_that_is_not_whole_counts_exactly() -> None:
    """1,000 prompts, eight batches of 128: 24 prompts of the second epoch are used."""
    cursor = DataCursor()
    for _ in range(8 * 128):
        id = cursor.issue()
        assert id is not None
        cursor.end(id, "trained")
    assert again(cursor).next_new % 1000 == 24


def test_a_prompt_ends_once() -> None:
    cursor = DataCursor()
    cursor.issue()
    cursor.end(0, "trained")
    for id in (0, 1):
        with pytest.raises(ProtocolError, match="is not out"):
            cursor.end(id, "trained")
        with pytest.raises(ProtocolError, match="is not out"):
            cursor.retry(id)


@given(st.lists(st.tuples(st.sampled_from(["issue", "end", "retry", "resume"]), st.integers(0, 5)), max_size=60))
def test_every_prompt_ends_exactly_once_over_any_resumes(moves: list[tuple[str, int]]) -> None:
    cursor, ended = DataCursor(), list[int]()
    for move, k in moves:
        if move == "issue":
            assert cursor.issue(12) not in ended
        elif move == "resume":
            cursor = again(cursor)
        elif cursor.out:
            id = cursor.out[k % len(cursor.out)]
            if move == "retry":
                cursor.retry(id)
            else:
                cursor.end(id, "trained")
                ended.append(id)
    cursor = again(cursor)
    while (left := cursor.issue(12)) is not None:
        cursor.end(left, "trained")
        ended.append(left)
    assert sorted(ended) == list(range(12))
