"""What is in a queue and where it lies: fields, late fields, pieces that are let go. Without Ray and without a clock."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlflow.backends.ray_runtime.dist_queue.reading import Reading
from rlflow.backends.ray_runtime.dist_queue.rows import EdgeSpec, Given, Piece, RowFacts
from rlflow.backends.ray_runtime.dist_queue.shards import split_rows
from rlflow.backends.ray_runtime.dist_queue.table import FEW, QueueTable
from rlflow.protocol.errors import ProtocolError
from rlflow.protocol.queue_entries import Status
from tests.unit.ray_runtime.dist_queue.rows_of import facts_of, fields_of, inline, same

READS: dict[str, tuple[str, ...] | None] = {"ref": ("tokens",), "train": ("tokens", "score", "ref")}


def table(consumers: dict[str, tuple[str, ...] | None] = READS, **more: Any) -> QueueTable:
    settings_ = {"capacity": None, "group": 1} | more
    return QueueTable(EdgeSpec("e", ("p",), consumers, **settings_))


def put(q: QueueTable, ids: Sequence[int], *names: str, **more: Any) -> bool:
    facts = facts_of(ids, q.spec.group, **more)
    return q.put("p", facts, inline(q.spec, fields_of(ids, *names)))


def late(q: QueueTable, ids: Sequence[int], *names: str) -> int:
    return q.put_fields(ids, inline(q.spec, fields_of(ids, *names)))


def read(*given: Given) -> Reading:
    return Reading(given, lambda pieces: [piece.data for piece in pieces])


def test_a_row_is_ready_when_it_has_all_that_the_consumer_reads() -> None:
    q = table()
    put(q, [3, 1, 2], "tokens", "score", versions=(7, 5, 6), lengths=(3, 1, 2))
    assert q.take("train", 1).status is Status.WAIT
    given = q.take("ref", 3)
    assert given.facts.ids == (3, 1, 2)
    assert (given.facts.versions, given.facts.lengths) == ((7, 5, 6), (3, 1, 2))
    assert same(read(given).columns(), [3, 1, 2], "tokens")
    assert late(q, [2, 3], "ref") == 2
    given = q.take("train", 1, 9)
    assert given.facts.ids == (3, 2)
    assert same(read(given).columns(), [3, 2], "tokens", "score", "ref")
    assert "1 groups lack `ref` for train" in q.describe()
    late(q, [1], "ref")
    assert q.take("train", 1).facts.ids == (1,)


def test_rows_that_got_their_fields_in_different_company_are_one_batch() -> None:
    q = table({"train": ("a", "b", "c")})
    put(q, [0], "a", "b", "c")
    put(q, [1], "a", "b")
    put(q, [2], "a")
    late(q, [1], "c")
    late(q, [2], "c", "b")
    assert same(read(q.take("train", 3)).columns(), [0, 1, 2], "a", "b", "c")


def test_who_reads_everything_gets_what_all_rows_came_with() -> None:
    q = table({"all": None, "train": ("late",)})
    put(q, [0], "a", "b")
    put(q, [1], "a")
    late(q, [0, 1], "late")
    assert same(read(q.take("all", 2)).columns(), [0, 1], "a")


def test_a_field_goes_when_its_readers_have_read_it() -> None:
    q = table({"judge": ("text",), "train": ("tokens",)})
    put(q, [4, 9], "text", "tokens", "nobody")
    whole = q.nbytes
    q.done("judge", q.take("judge", 2).groups)
    assert 0 < q.nbytes == sum(piece.nbytes for piece in inline(q.spec, fields_of([4, 9], "tokens"))) < whole
    q.take("train", 2)
    q.done("train", [4])
    assert q.nbytes, "the other row of the chunk is not read"
    q.done("train", [9])
    assert (q.nbytes, q.depth, q._chunks, q._rows) == (0, 0, {}, {})


def test_late_fields_of_rows_that_have_gone_are_passed_over() -> None:
    q = table()
    put(q, [0, 1], "tokens", "score")
    q.take("ref", 2)
    q.remove(0, "timed out", by="ref")
    assert late(q, [0, 1], "ref") == 1
    q.done("ref", [1])
    q.done("train", q.take("train", 1).groups)
    assert q.nbytes == 0
    with pytest.raises(ProtocolError, match="row 5 was never in the queue"):
        late(q, [5], "ref")


def test_of_many_pieces_everybody_asks_for_its_own() -> None:
    """The contents of all ranks would else go to all ranks."""
    ranks = 3 * FEW
    readers: dict[str, tuple[str, ...] | None] = {f"reader {number}": None for number in range(4)}
    q = table(readers, group=ranks, capacity=ranks)
    for rank in range(ranks):
        put(q, [rank], "tokens", "text")
    asked: list[Piece] = []

    def fetch(pieces: list[Piece]) -> list[Any]:
        asked.extend(pieces)
        return [piece.data for piece in q.pieces([piece.at for piece in pieces if piece.at is not None])]

    for number, reader in enumerate(readers):
        given = q.take(reader, ranks)
        assert not any(piece.data for piece in given.pieces)
        reading = Reading([given], fetch)
        own = range(number, ranks, 4)
        assert same(reading.columns(own), own, "tokens", "text")
        assert len(asked) == 2 * len(own), "a piece a field"
        last, *asked = asked
        asked.clear()
        q.done(reader, given.groups)
    assert (q.nbytes, q.depth, q._chunks, q._rows) == (0, 0, {}, {})
    assert last.at is not None
    with pytest.raises(ProtocolError, match="rows of group 0 are asked for after they were done"):
        q.pieces([last.at])


def test_fields_that_come_later_are_in_the_next_answer() -> None:
    """Answers of many pieces are kept for the next reader."""
    count = 2 * FEW
    q = table({"a": ("tokens",), "b": ("tokens",), "late": ("tokens", "score")}, group=count)
    for row in range(count):
        put(q, [row], "tokens")
    assert q.take("a", count).lanes[0].fields == q.take("b", count).lanes[0].fields == ("tokens",)
    assert q.take("late", count).status is Status.WAIT
    late(q, range(count), "score")
    given = q.take("late", count)
    reading = Reading([given], lambda pieces: [piece.data for piece in q.pieces([p.at for p in pieces if p.at])])
    assert same(reading.columns(), range(count), "tokens", "score")


def test_what_is_refused_changes_nothing() -> None:
    q = table(capacity=2)
    put(q, [0], "tokens", "score")
    late(q, [0], "ref")
    before = (q.nbytes, q.describe())
    wrong = inline(q.spec, {"score": fields_of([1], "tokens")["tokens"]})
    for call in (
        lambda: put(q, [0], "tokens"),
        lambda: put(q, [1, 1], "tokens"),
        lambda: late(q, [0], "ref"),
        lambda: late(q, [0, 0], "ref"),
        lambda: q.put("p", facts_of([1]), wrong),
        lambda: q.put("stranger", facts_of([1]), []),
    ):
        with pytest.raises(ProtocolError):
            call()
    assert not put(q, [1, 2], "tokens"), "no room for both"
    assert (q.nbytes, q.describe()) == before
    assert put(q, [1], "tokens", "score")


def test_parts_of_a_batch_are_runs_of_rows() -> None:
    """As pools exchange them: a row of the queue is what one rank made."""
    q = table({"reader": None}, group=2)
    parts = [[0, 1, 2], [10, 11]]
    for part, ids in reversed(list(enumerate(parts))):
        facts = RowFacts((part,), (0,), notes=(b"%d" % part,), spans=((0, len(ids)),))
        q.put("p", facts, inline(q.spec, fields_of(ids, "tokens", "text")))
    reading = read(q.take("reader", 2))
    assert reading.facts.notes == (b"0", b"1"), "in the order of the ranks, not of arrival"
    assert same(reading.columns([1]), [10, 11], "tokens", "text")
    assert same(reading.columns(), [0, 1, 2, 10, 11], "tokens", "text")


@given(
    st.lists(st.integers(1, 6), min_size=1, max_size=8),
    st.integers(1, 3),
    st.integers(1, 3),
    st.randoms(use_true_random=False),
)
@settings(max_examples=60, deadline=None)
def test_contents_follow_their_rows(sizes: list[int], group: int, shards: int, random: Any) -> None:
    """Random chunks over several tables, read in random order and in parts: always the row's own contents."""
    spec = EdgeSpec("e", ("p",), {"train": ("tokens", "text", "ref")}, None, group, shards=shards)
    tables = [QueueTable(spec.shard(number)) for number in range(shards)]
    ids = list(range(sum(sizes) * group))
    random.shuffle(ids)
    chunks = itertools.islice(iter(ids), len(ids))
    for size in sizes:
        chunk = [*itertools.islice(chunks, size * group)]
        pieces = inline(spec, fields_of(chunk, "tokens", "text"))
        for shard, facts in split_rows(spec, facts_of(chunk, group)):
            assert tables[shard].put("p", facts, pieces)
    random.shuffle(ids)
    pieces = inline(spec, fields_of(ids, "ref"))
    for shard, facts in split_rows(spec, facts_of(ids, group)):
        spans = [facts.span(place) for place in range(len(facts))]
        assert tables[shard].put_fields(facts.ids, pieces, spans) == len(facts)
    taken = [table.take("train", group, len(ids)) for table in tables]
    given = [one for one in taken if one.status is Status.ROWS]
    reading = read(*given)
    assert sorted(reading.facts.ids) == sorted(ids)
    assert same(reading.columns(), reading.facts.ids, "tokens", "text", "ref")
    some = random.sample(range(len(reading)), random.randint(1, len(reading)))
    assert same(reading.columns(some, ["tokens"]), [reading.facts.ids[place] for place in some], "tokens")
    for table_, one in zip(tables, taken, strict=True):
        table_.done("train", one.groups)
        assert (table_.nbytes, table_.depth) == (0, 0)
