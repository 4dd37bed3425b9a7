"""Each rule against a plain reading of its definition, on random histories."""

from __future__ import annotations

from fractions import Fraction
from itertools import combinations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlflow.protocol.batches import BatchSizes
from rlflow.protocol.errors import ProtocolError
from rlflow.protocol.evict import Evict, make_rule
from rlflow.protocol.rules import Count, InOrder, Rule, SlackEdf, Wait
from rlflow.protocol.trigger import Trigger
from rlflow.protocol.units import Unit

WHOLE = Trigger()
HISTORIES = st.lists(st.tuples(st.sampled_from("aaffffrdd"), st.integers(0, 30)), max_size=70)


class Mirror:
    """A rule and a list of (id, version, deadline, finish number or None) kept beside it."""

    def __init__(self, rule: Rule, bound: int) -> None:
        self.rule, self.bound = rule, bound
        self.rows: list[list[int | None]] = []
        self.next = self.finished = 0

    def add(self, version: int, deadline: int | None = None) -> None:
        unit = Unit(self.next, version, version + self.bound if deadline is None else deadline)
        self.rule.add(unit)
        self.rule.born(self.next, version)
        self.rows.append([self.next, version, unit.deadline, None])
        self.next += 1

    def finish(self, k: int) -> None:
        running = [row for row in self.rows if row[3] is None]
        if running:
            row = running[k % len(running)]
            row[3] = self.finished
            self.finished += 1
            assert row[0] is not None
            self.rule.finish(row[0])

    def remove(self, id: int) -> None:
        self.rule.remove(id)
        self.rows = [row for row in self.rows if row[0] != id]

    @property
    def arrived(self) -> list[list[int | None]]:
        return sorted((row for row in self.rows if row[3] is not None), key=lambda row: row[3] or 0)


def play(mirror: Mirror, moves: list[tuple[str, int]], check, batch: int) -> None:  # type: ignore[no-untyped-def]
    """A history: admit at one of the last versions, finish, reject, and take what the rule decides."""
    step = 0
    sizes = BatchSizes.constant(batch)
    for move, k in moves:
        if move == "a":
            mirror.add(step - k % 4)
        elif move == "f":
            mirror.finish(k)
        elif move == "r" and mirror.rows:
            id = mirror.rows[k % len(mirror.rows)][0]
            assert id is not None
            mirror.remove(id)
        for closed in (True, False):
            decision = mirror.rule.decide(step, sizes, closed=closed)
            least = min(batch, len(mirror.rows)) if closed else batch
            check(step, least, list(decision.take), list(decision.drop))
            assert decision.ready or decision.waits_for
        for id in decision.drop:
            mirror.remove(id)
        decision = mirror.rule.decide(step, sizes)
        if move == "d" and decision.ready:
            for id in decision.take:
                mirror.remove(id)
            step += 1


@given(HISTORIES, st.integers(1, 4))
@settings(max_examples=80, deadline=None)
def test_in_order_is_the_oldest_admitted(moves: list[tuple[str, int]], batch: int) -> None:
    mirror = Mirror(InOrder(WHOLE), 1)

    def check(step: int, least: int, take: list[int], drop: list[int]) -> None:
        head = mirror.rows[:batch]
        ready = least > 0 and len(head) >= least and all(row[3] is not None for row in head[:least])
        assert take == ([row[0] for row in head[:least]] if ready else [])

    play(mirror, moves, check, batch)


@given(HISTORIES, st.integers(1, 4))
@settings(max_examples=60, deadline=None)
def test_count_is_the_first_finished(moves: list[tuple[str, int]], batch: int) -> None:
    mirror = Mirror(Count(WHOLE), 1)

    def check(step: int, least: int, take: list[int], drop: list[int]) -> None:
        arrived = [row[0] for row in mirror.arrived]
        assert take == (arrived[:batch] if 0 < least <= len(arrived) else [])

    play(mirror, moves, check, batch)


@given(HISTORIES, st.integers(1, 4), st.integers(0, 3), st.booleans())
@settings(max_examples=80, deadline=None)
def test_wait_waits_for_what_reached_the_bound(
    moves: list[tuple[str, int]], batch: int, bound: int, oldest: bool
) -> None:
    mirror = Mirror(Wait(WHOLE, bound=bound, oldest_first=oldest), bound)

    def check(step: int, least: int, take: list[int], drop: list[int]) -> None:
        late = any(row[3] is None and row[1] is not None and step - row[1] >= bound for row in mirror.rows)
        rows = mirror.arrived
        if oldest:
            rows = sorted(rows, key=lambda row: (row[1], row[0]))
        ready = 0 < least <= len(rows) and not late
        assert take == ([row[0] for row in rows[:batch]] if ready else [])

    play(mirror, moves, check, batch)


@given(HISTORIES, st.integers(1, 4), st.integers(0, 2))
@settings(max_examples=80, deadline=None)
def test_evict_drops_what_is_too_old_and_nothing_else(moves: list[tuple[str, int]], batch: int, bound: int) -> None:
    mirror = Mirror(Evict(WHOLE, bound=bound), bound)

    def check(step: int, least: int, take: list[int], drop: list[int]) -> None:
        assert drop == [row[0] for row in mirror.rows if row[1] is not None and step - row[1] > bound]
        arrived = [row[0] for row in mirror.arrived]
        assert take == (arrived[:batch] if not drop and 0 < least <= len(arrived) else [])

    play(mirror, moves, check, batch)


def fits(deadlines: list[int], first: int, least: int) -> bool:
    """Whether steps first, first + 1, ... that take `least` groups each, earliest deadline first, meet all deadlines."""
    return all(first + k // least <= deadline for k, deadline in enumerate(sorted(deadlines)))


@given(
    st.lists(st.tuples(st.integers(0, 4), st.booleans()), max_size=9),
    st.integers(1, 4),
    st.integers(0, 2),
    st.sampled_from([Fraction(1), Fraction(1, 2), Fraction(3, 4)]),
)
@settings(max_examples=250, deadline=None)
def test_slack_edf_starts_exactly_when_some_choice_keeps_every_deadline(
    groups: list[tuple[int, bool]], batch: int, step: int, share: Fraction
) -> None:
    """Oracle: try every subset of the finished groups, and schedule the rest as late as the trigger allows."""
    trigger = Trigger(share)
    least = trigger.least(batch)
    if not fits([step + slack for slack, _ in groups], step, least):
        return  # not reachable: the rule keeps this true (checked in the game)
    rule = SlackEdf(trigger)
    for id, (slack, finished) in enumerate(groups):
        rule.add(Unit(id, 0, step + slack))
        if finished:
            rule.finish(id)
    take = rule.decide(step, BatchSizes.constant(batch)).take
    done = [id for id, (_, finished) in enumerate(groups) if finished]

    def rest(chosen: tuple[int, ...]) -> list[int]:
        return [step + slack for id, (slack, _) in enumerate(groups) if id not in chosen]

    possible = any(
        fits(rest(chosen), step + 1, least) for size in range(least, batch + 1) for chosen in combinations(done, size)
    )
    assert bool(take) is possible
    if take:
        assert set(take) <= set(done)
        assert least <= len(take) == min(batch, len(done))
        assert fits(rest(take), step + 1, least)


@given(st.lists(st.tuples(st.integers(0, 3), st.booleans()), max_size=9), st.integers(1, 4), st.integers(1, 4))
@settings(max_examples=150, deadline=None)
def test_starting_early_never_shuts_out_what_is_due(groups: list[tuple[int, bool]], batch: int, room: int) -> None:
    """After the early groups, the room left still takes all that this step has to take; and no more could be chosen."""
    if room > batch or not fits([slack for slack, _ in groups][: len(groups)], 0, batch):
        return
    rule = SlackEdf(Trigger(Fraction(1, 2), same_batch=True))
    for id, (slack, finished) in enumerate(groups):
        rule.add(Unit(id, 0, slack))
        if finished:
            rule.finish(id)

    def possible(chosen: tuple[int, ...]) -> bool:
        """Some groups, finished or not, fill the room, and the rest keeps its deadlines in later steps."""
        others = [id for id in range(len(groups)) if id not in chosen]
        more = min(room, len(groups)) - len(chosen)
        return more >= 0 and any(
            fits([groups[id][0] for id in others if id not in filled], 1, batch)
            for filled in combinations(others, more)
        )

    if not possible(()):
        return
    early = rule.early(0, room, BatchSizes.constant(batch))
    done = [id for id, (_, finished) in enumerate(groups) if finished]
    assert set(early) <= set(done)
    assert possible(early)
    assert len(early) == max(
        size for size in range(room + 1) for chosen in combinations(done, size) if possible(chosen)
    )


def test_in_order_with_a_carrying_trigger_is_slack_edf() -> None:
    half = Trigger.percent(50)
    assert isinstance(make_rule("in_order", trigger=half, bound=1), SlackEdf)
    assert isinstance(make_rule("in_order", trigger=Trigger(half.share, same_batch=True), bound=1), InOrder)
    with pytest.raises(ValueError, match="slack_edf"):
        InOrder(half)


def test_rules_by_name() -> None:
    for name, kind in (
        ("in_order", InOrder),
        ("slack_edf", SlackEdf),
        ("wait", Wait),
        ("count", Count),
        ("evict", Evict),
    ):
        rule = make_rule(name, trigger=WHOLE, bound=1)  # type: ignore[arg-type]
        assert type(rule) is kind
        assert rule.name == name
    with pytest.raises(ValueError, match="no rule `fifo`"):
        make_rule("fifo", trigger=WHOLE, bound=1)  # type: ignore[arg-type]
    for name in ("wait", "evict"):
        with pytest.raises(ValueError, match="start early"):
            make_rule(name, trigger=Trigger(Fraction(1, 2), same_batch=True), bound=1)  # type: ignore[arg-type]


def test_what_was_too_old_at_the_queue_is_dropped_at_consumption() -> None:
    """Made at version 5, consumed at 8, bound 2."""
    rule = Evict(WHOLE, bound=2)
    rule.add(Unit(0, 5, 7))
    rule.born(0, 5)
    rule.finish(0)
    one = BatchSizes.constant(1)
    assert rule.decide(7, one).take == (0,)
    assert rule.decide(8, one).drop == (0,)
    rule.born(0, 6)  # a retry made it younger
    assert rule.decide(8, one).take == (0,)


def test_what_has_no_token_is_not_old() -> None:
    rule = Evict(WHOLE, bound=0)
    rule.add(Unit(0, 0, 0))
    assert rule.decide(9, BatchSizes.constant(1)).drop == ()


def test_calls_out_of_turn_are_refused() -> None:
    rule = Count(WHOLE)
    rule.add(Unit(3, 0, 0))
    for call in (
        lambda: rule.add(Unit(3, 0, 0)),
        lambda: rule.add(Unit(2, 0, 0)),
        lambda: rule.finish(4),
        lambda: rule.remove(4),
    ):
        with pytest.raises(ProtocolError):
            call()
    rule.finish(3)
    with pytest.raises(ProtocolError, match="twice"):
        rule.finish(3)


def test_decisions_count_groups() -> None:
    rule = Count(WHOLE, group=4)
    for id in range(3):
        rule.add(Unit(id, 0, 0))
        rule.finish(id)
    assert rule.decide(0, BatchSizes.constant(8)).take == (0, 1)
