"""Rows that cross from a pool of some ranks to a pool of others: none lost, none twice, groups whole where they can be."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlflow.backends.ray_runtime.batch import Batch, Packed, Share
from rlflow.backends.ray_runtime.splitting import layout_of, regrouped, split
from rlflow.backends.ray_runtime.wire import joined, packed_message


def part(groups: list[int], rows: list[int], share: Share | None = None) -> Batch:
    """Rows `rows` (their numbers in the whole batch) of groups; row r has r % 3 tokens."""
    columns = {
        "uid": np.asarray(rows, dtype=np.int64),
        "group": np.asarray(groups, dtype=np.int64),
        "text": [str(row) for row in rows],
        "response_ids": Packed.from_rows([[row] * (row % 3) for row in rows], torch.int64),
    }
    return Batch(len(rows), columns, share)


def even(groups: int, size: int, ranks: int) -> list[Batch]:
    """What so many ranks generate: whole groups where they divide, else shares."""
    if groups % ranks == 0:
        each = groups // ranks
        return [
            part(np.repeat(np.arange(each), size).tolist(), [*range(r * each * size, (r + 1) * each * size)])
            for r in range(ranks)
        ]
    shares = [Share(groups, rank, ranks) for rank in range(ranks)]
    return [part([row // size for row in share.samples(size)], [*share.samples(size)], share) for share in shares]


def sent(parts: list[Batch], ranks: int) -> list[Batch]:
    """What each rank of the other pool gets."""
    messages = [packed_message(batch) for batch in parts]
    found = []
    for one in split([layout_of(batch) for batch in parts], ranks):
        columns = joined(messages, one.segments)
        if one.groups is not None:
            columns["group"] = one.groups
        found.append(Batch(sum(high - low for _, low, high in one.segments), columns, one.share))
    return found


@settings(max_examples=200, deadline=None)
@given(st.integers(1, 9), st.integers(1, 5), st.integers(1, 5), st.integers(1, 5))
def test_all_rows_arrive_once_in_order(groups: int, size: int, before: int, after: int) -> None:
    got = sent(even(groups, size, before), after)
    rows = [int(row) for batch in got for row in batch.array("uid")]
    assert rows == list(range(groups * size))
    for batch in got:
        assert batch.items("text") == [str(row) for row in batch.array("uid")]
        lengths = batch.packed("response_ids").lengths.tolist()
        assert lengths == [row % 3 for row in batch.array("uid").tolist()]
        first = batch.array("uid") // size
        if batch.share is None:
            assert (batch.array("group") == first - (first[0] if len(first) else 0)).all()
        else:
            assert batch.share == Share(groups, batch.share.rank, after)
            assert (batch.array("group") == first).all()
    if groups % after == 0 and (before != after):
        assert all(batch.share is None and batch.rows == groups // after * size for batch in got)


def test_equal_pools_keep_their_parts() -> None:
    parts = even(3, 4, 2)
    for mine, got in zip(parts, sent(parts, 2), strict=True):
        assert got.share == mine.share
        assert got.array("uid").tolist() == mine.array("uid").tolist()


def test_rows_of_a_refill_stand_where_one_rank_has_them() -> None:
    """By round, then rank; groups of unequal size are kept whole."""
    first, second = part([0, 0, 1], [0, 1, 4]), part([0, 0, 1, 1], [2, 3, 5, 6])
    first = first.with_columns(round=np.array([0, 0, 1]))
    second = second.with_columns(round=np.array([0, 0, 1, 1]))
    for ranks in (1, 3):
        assert [int(row) for batch in sent([first, second], ranks) for row in batch.array("uid")] == [*range(7)]
    sizes = [batch.rows for batch in sent([first, second], 3)]
    assert sizes == [4, 1, 2], "four groups on three ranks"


def test_a_rank_without_rows_has_the_columns() -> None:
    got = sent(even(1, 1, 1), 2)
    assert [batch.rows for batch in got] == [0, 1] or [batch.rows for batch in got] == [1, 0]
    assert {name for batch in got for name in batch.columns} == {"uid", "group", "text", "response_ids"}


@settings(max_examples=200, deadline=None)
@given(st.integers(1, 8), st.integers(1, 4), st.integers(1, 4), st.integers(1, 4), st.integers(1, 4))
def test_columns_find_their_rows(groups: int, size: int, made: int, scored: int, read: int) -> None:
    """Rows go from the ranks that make them to those that compute a column, and to those that read both; or back."""
    parts = even(groups, size, made)
    layouts = [layout_of(batch) for batch in parts]
    origin = None if scored == made else split(layouts, scored)
    columns = [packed_message(got.array("uid") * 10) for got in (parts if origin is None else sent(parts, scored))]
    for target, wanted in ((read, split(layouts, read)), (made, None)):
        if origin is None and wanted is None:
            continue
        expected = parts if wanted is None else sent(parts, read)
        for one, batch in zip(regrouped(wanted, origin, target), expected, strict=True):
            assert np.asarray(joined(columns, one.segments)[""]).tolist() == (batch.array("uid") * 10).tolist()
