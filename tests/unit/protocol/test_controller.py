"""Gate, ledger, samples and rule together: every exit returns its credit once."""

from __future__ import annotations

import json
from collections.abc import Callable
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlflow.protocol.controller import Controller
from rlflow.protocol.errors import ProtocolError
from rlflow.protocol.ledger import Ledger, Place
from rlflow.protocol.saved import restore, save
from rlflow.protocol.settings import Settings
from rlflow.protocol.trigger import Trigger


def again(c: Controller) -> Controller:
    return restore(json.loads(json.dumps(save(c))))


def run_group(c: Controller, *, finish: bool = True) -> tuple[int, ...]:
    ids = c.admit()
    for id in ids:
        c.begin(id, c.gate.version)
        c.extend(id, c.gate.version, 5)
        if finish:
            c.finish(id)
    return ids


def credits(c: Controller) -> tuple[int, ...]:
    """Free, running, queued, training, syncing."""
    c.check()
    return tuple(c.ledger.credits.values())


def test_a_credit_goes_round_once() -> None:
    c = Controller(Settings("in_order", 1, 4, group=2))
    assert credits(c) == (8, 0, 0, 0, 0)
    run_group(c)
    run_group(c, finish=False)
    assert credits(c) == (4, 2, 2, 0, 0)
    assert c.poll().batch is None
    for id in (2, 3):
        c.finish(id)
    batch = c.poll().batch
    assert batch is not None
    assert (batch.step, batch.groups, batch.ages) == (0, (0, 1), (0, 0, 0, 0))
    assert credits(c) == (4, 0, 0, 4, 0)
    c.trained(0)
    assert credits(c) == (4, 0, 0, 0, 4)
    assert c.capacity == 4
    c.publish(1)
    assert credits(c) == (8, 0, 0, 0, 0)
    assert not c.samples


def rejected(c: Controller, ids: tuple[int, ...]) -> None:
    assert c.reject(0, "filtered") == ids[1:]


def failed_one_by_one(c: Controller, ids: tuple[int, ...]) -> None:
    for id in reversed(ids):
        c.lose(id, "failed")


@pytest.mark.parametrize("leave", [rejected, failed_one_by_one])
def test_every_way_out_returns_the_credits_once(leave: Callable[[Controller, tuple[int, ...]], None]) -> None:
    c = Controller(Settings("in_order", 0, 3, group=3))
    ids = run_group(c, finish=False)
    c.finish(ids[0])
    assert c.capacity == 0
    leave(c, ids)
    assert credits(c) == (3, 0, 0, 0, 0)
    assert c.capacity == 3
    for call in (
        lambda: c.reject(0, "again"),
        lambda: c.finish(ids[0]),
        lambda: c.lose(ids[1], "again"),
        lambda: c.interrupt(ids[2]),
    ):
        with pytest.raises(ProtocolError, match="not outstanding"):
            call()
    assert credits(c) == (3, 0, 0, 0, 0)


def test_eviction_returns_credits_and_stops_what_runs() -> None:
    c = Controller(Settings("evict", 1, 2))
    for finish in (True, True, False, True):
        run_group(c, finish=finish)
    for step in (0, 1):
        assert c.too_old() == ()
        assert c.poll().batch is not None
        c.trained(step)
        c.publish(step + 1)
        run_group(c)  # of version 1, then 2
    assert c.too_old() == (2,)
    answer = c.poll()
    assert (answer.batch, answer.dropped) == (None, (2,))
    assert (c.tally.aborted, c.tally.wasted_tokens) == ({"too old": 1}, 5)
    assert credits(c) == (3, 0, 1, 0, 0)


def test_a_replacement_takes_the_place_with_a_younger_birth() -> None:
    c = Controller(Settings("slack_edf", 1, 2, group=2))
    first = run_group(c, finish=False)
    run_group(c)
    c.finish(first[0])
    new = c.replace(first[0], "failed")
    assert credits(c) == (0, 2, 2, 0, 0)
    assert c.samples[new].group == 0
    with pytest.raises(ProtocolError, match="only 0 may enter"):
        c.admit()
    c.poll()
    c.trained(0)
    c.publish(1)
    c.begin(new, 1)
    assert c.samples[new].birth == 1
    c.finish(new)
    c.finish(first[1])
    batch = c.poll().batch
    assert batch is not None
    assert sorted(zip((s.id for s in batch.samples), batch.ages, strict=True)) == [(first[1], 1), (new, 0)]
    with pytest.raises(ProtocolError, match="not outstanding"):
        c.replace(new, "late")


def test_a_short_group_keeps_its_places_until_it_is_consumed() -> None:
    c = Controller(Settings("in_order", 0, 4, group=4))
    ids = run_group(c, finish=False)
    for id in ids[1:]:
        c.finish(id)
    c.lose(ids[0], "timed out")
    assert credits(c) == (0, 0, 4, 0, 0)
    batch = c.poll().batch
    assert batch is not None
    assert [s.id for s in batch.samples] == list(ids[1:])
    c.trained(0)
    c.publish(1)
    assert credits(c) == (4, 0, 0, 0, 0)
    assert c.tally.rejected == {"timed out": 1}


def test_steps_and_versions_come_in_order() -> None:
    c = Controller(Settings("in_order", 1, 1), version=5)
    run_group(c)
    run_group(c)
    with pytest.raises(ProtocolError, match="not trained"):
        c.publish(6)
    assert c.poll().batch is not None
    assert c.poll().batch is not None
    with pytest.raises(ProtocolError, match="before an earlier"):
        c.trained(6)
    c.trained(5)
    with pytest.raises(ProtocolError, match="not in training"):
        c.trained(5)
    with pytest.raises(ProtocolError, match="not trained"):
        c.publish(7)
    c.trained(6)
    c.publish(7)  # two steps, one publication
    assert credits(c) == (2, 0, 0, 0, 0)


def test_the_end_of_the_data_makes_a_short_batch() -> None:
    c = Controller(Settings("in_order", 1, 16))
    for _ in range(10):
        run_group(c)
    assert c.poll().batch is None
    c.close()
    batch = c.poll().batch
    assert batch is not None
    assert len(batch.samples) == 10
    assert c.capacity == 0
    with pytest.raises(ProtocolError, match="closed"):
        c.admit()


def test_the_same_batch_starts_early_and_stays_the_batch() -> None:
    c = Controller(Settings("in_order", 1, 4, trigger=Trigger(Fraction(1, 2), same_batch=True)))
    ids = [run_group(c, finish=False)[0] for _ in range(8)]
    for k in (7, 3, 6, 5):
        c.finish(ids[k])
    assert c.poll().batch is None  # of the next four only one is finished
    c.finish(ids[0])
    batch = c.poll().batch
    assert batch is not None
    assert ([s.id for s in batch.samples], batch.complete) == ([0, 3], False)
    assert c.more() is None
    assert c.poll().batch is None
    with pytest.raises(ProtocolError, match="whole batch"):
        c.trained(0)
    c = again(c)
    c.finish(ids[1])
    c.finish(ids[2])
    more = c.more()
    assert more is not None
    assert ([s.id for s in more.samples], more.complete) == ([1, 2], True)
    c.trained(0)
    c.publish(1)
    assert credits(c) == (4, 1, 3, 0, 0)


def test_a_ledger_that_does_not_agree_is_found() -> None:
    ledger = Ledger(4)
    ledger.move(Place.FREE, Place.RUNNING, 3)
    ledger.check({Place.FREE: 1, Place.RUNNING: 3})
    with pytest.raises(ProtocolError, match="4 credits from running"):
        ledger.move(Place.RUNNING, Place.FREE, 4)
    with pytest.raises(ProtocolError, match="were counted there"):
        ledger.check({Place.RUNNING: 2})
    ledger.credits[Place.RUNNING] -= 1  # a credit is lost
    with pytest.raises(ProtocolError, match="not 4"):
        ledger.check({})
    assert str(ledger) == "1 free + 2 running + 0 queued + 0 training + 0 syncing = 4"


def test_a_controller_whose_credits_leak_is_found() -> None:
    c = Controller(Settings("in_order", 1, 2))
    run_group(c)
    c.gate.held -= 1
    with pytest.raises(ProtocolError, match="credits are held"):
        c.check()
    with pytest.raises(ProtocolError):
        again(c)


def test_another_format_is_refused() -> None:
    data = save(Controller(Settings("in_order", 1, 2)))
    with pytest.raises(ProtocolError, match="format 99"):
        restore({**data, "format": 99})


def test_changes_keep_the_ledger() -> None:
    c = Controller(Settings("wait", 2, 2))
    for _ in range(6):
        run_group(c)
    c.change_bound(0)
    assert credits(c) == (-4, 0, 6, 0, 0)
    assert again(c).rule.bound == 0  # type: ignore[attr-defined]
    assert c.change_batch(3) == 3  # samples out may be due until step 2
    c.poll()
    with pytest.raises(ValueError, match="step 0 has started"):
        c.change_batch(1, from_step=0)


MOVES = st.lists(
    st.tuples(
        st.sampled_from(
            [
                "admit",
                "begin",
                "finish",
                "finish",
                "interrupt",
                "restart",
                "replace",
                "lose",
                "reject",
                "poll",
                "poll",
                "trained",
                "publish",
                "save",
            ]
        ),
        st.integers(0, 99),
    ),
    max_size=120,
)


@given(
    MOVES,
    st.sampled_from(["in_order", "slack_edf", "wait", "evict", "count"]),
    st.integers(0, 2),
    st.integers(1, 2),
    st.integers(1, 2),
    st.sampled_from([100, 50]),
)
@settings(max_examples=150, deadline=None)
def test_the_invariant_holds_after_every_call(
    moves: list[tuple[str, int]], rule: str, bound: int, groups: int, group: int, percent: int
) -> None:
    """Any order of legal calls; every sample ends once: consumed, rejected, aborted or still out."""
    c = Controller(Settings(rule, bound, groups * group, group, trigger=Trigger.percent(percent)))  # type: ignore[arg-type]
    admitted: set[int] = set()
    consumed: list[int] = []
    for move, k in moves:
        out = [s for s in c.samples.values() if s.group in c.rule.units]
        running = [s.id for s in out if s.phase == "running"]
        waiting = [s.id for s in out if s.phase == "admitted"]
        open_ids = [s.id for s in out if not c.rule.units[s.group].finished]
        version = c.gate.version

        def pick(ids: list[int], k: int = k) -> int:
            return ids[k % len(ids)]

        if move == "admit" and c.capacity:
            admitted |= set(c.admit())
        elif move == "begin" and waiting:
            c.begin(pick(waiting), version)
            c.extend(pick(waiting), version, k % 3)
        elif move in ("finish", "interrupt", "restart") and running:
            getattr(c, move)(pick(running))
        elif move == "replace" and open_ids:
            admitted.add(c.replace(pick(open_ids), "failed"))
        elif move == "lose" and out:
            c.lose(pick([s.id for s in out]), "failed")
        elif move == "reject" and c.rule.units:
            c.reject(pick(list(c.rule.units)), "filtered")
        elif move == "poll":
            batch = c.poll().batch
            if batch is not None:
                consumed += [s.id for s in batch.samples]
        elif move == "trained":
            open_steps = [step for step, it in c.steps.items() if not it.trained]
            if open_steps:
                c.trained(open_steps[0])
        elif move == "publish":
            done = [step + 1 for step, it in c.steps.items() if it.trained]
            if done:
                c.publish(pick(done))
        elif move == "save":
            before = save(c)
            c = again(c)
            assert save(c) == before
        c.check()
    assert len(set(consumed)) == len(consumed) == c.tally.consumed
    ended = c.tally.consumed + c.tally.rejected.total() + c.tally.aborted.total()
    outstanding = sum(len(c.groups[id].members) for id in c.rule.units)
    assert len(admitted) == c.tally.admitted == ended + outstanding
