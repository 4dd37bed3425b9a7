"""Virtual time: order, sleeping, waiting."""

from __future__ import annotations

from fractions import Fraction

import pytest

from rlflow.backends.simulator.clock import Clock, Process, Signal, Wait


def test_what_happens_at_one_instant_keeps_the_order_of_asking() -> None:
    clock, seen = Clock(), list[str]()
    clock.at(5, lambda: seen.append("late"))
    clock.at(2, lambda: seen.append("first"))
    clock.at(2, lambda: seen.append("second"))
    assert clock.run() == ()
    assert seen == ["first", "second", "late"]
    assert clock.now == 5


def test_a_process_sleeps_and_a_signal_wakes_all_that_wait() -> None:
    clock, signal, seen = Clock(), Signal(), list[tuple[str, object]]()

    def waiter(name: str) -> Process:
        yield Wait(signal, "the bell")
        seen.append((name, clock.now))

    def ringer() -> Process:
        yield Fraction(1, 3)
        yield 0
        clock.fire(signal)

    clock.start("a", waiter("a"))
    clock.start("b", waiter("b"))
    clock.start("r", ringer())
    assert clock.run() == ()
    assert seen == [("a", Fraction(1, 3)), ("b", Fraction(1, 3))]


def test_a_process_that_waits_for_ever_is_named() -> None:
    clock = Clock()

    def waiter() -> Process:
        yield 3
        yield Wait(Signal(), "Godot")

    clock.start("vladimir", waiter())
    assert clock.run() == (("vladimir", "Godot"),)
    assert clock.now == 3


def test_the_past_is_refused() -> None:
    clock = Clock()
    clock.at(4, lambda: clock.at(3, lambda: None))
    with pytest.raises(ValueError, match="3 is before 4"):
        clock.run()
