"""Times out of recorded events, worked by hand and against the length of a union of intervals."""

from __future__ import annotations

from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from rlflow.profile.events import exclusive_us, recorded


def event(instruction: str, start: int, length: int, step: int = 1, rank: int = 0, **more: Any) -> dict[str, Any]:
    kind, _, stage = instruction.partition(":")
    named = "" if kind == "publish" else stage
    base = {"pool": "main", "rank": rank, "instruction": instruction, "stage": named, "kind": kind, "step": step}
    return base | {"start_us": start, "duration_us": length} | more


def call(stage: str, start: int, length: int, result: int, step: int = 1, rank: int = 0) -> dict[str, Any]:
    return event(f"call:{stage}", start, length, step, rank, pool="cpu", result_us=result)


def test_a_stage_takes_what_its_slowest_rank_takes_and_works_on_what_all_have() -> None:
    found = recorded(
        [
            event("run:s", 0, 100, tokens=7),
            event("run:s", 10, 130, rank=1, tokens=5),
            event("run:s", 500, 90, step=2, tokens=8),
            event("publish:m", 200, 4),
        ]
    )
    assert found.stages == {"s": {1: 130, 2: 90}}
    assert found.tokens == {"s": {1: 12, 2: 8}}
    assert found.instructions == {"publish:m": {1: 4}}


def test_waiting_for_a_queue_is_no_work() -> None:
    events = [
        event("take:b", 0, 10, tokens=3),
        event("run:s", 10, 100, tokens=30),
        event("put:s", 110, 900),
        event("take:s", 0, 1200, pool="learner"),
        event("run:m.train", 1200, 50, pool="learner"),
    ]
    found = recorded(events)
    assert found.stages == {"b": {1: 10}, "s": {1: 100}, "m.train": {1: 50}}
    assert found.tokens == {"b": {1: 3}, "s": {1: 30}}


def test_what_a_selection_runs_again_is_not_its_own_time() -> None:
    events = [
        event("take:b", 0, 10, tokens=3),
        event("run:s", 10, 100, tokens=30),
        event("run:best", 110, 205),
        event("take:b", 111, 12, tokens=3),
        event("run:s", 124, 140, tokens=33),
    ]
    found = recorded(events)
    assert found.stages == {"b": {1: 22}, "s": {1: 240}, "best": {1: 205 - 152}}
    assert found.tokens == {"b": {1: 6}, "s": {1: 63}}


def test_a_function_that_somebody_waits_for() -> None:
    """Handed over until 30, there at 90, waited for since 50, fetched at 95."""
    found = recorded([event("run:w", 10, 20), event("wait:w", 50, 45), call("w", 10, 85, 80)])
    assert found.stages == {"w": {1: 60}}
    assert found.calls == {"w": {1: 20 + 5}}


def test_a_function_that_is_done_before_somebody_waits() -> None:
    """Handed over until 30, there at 40, waited for at 70 and fetched at 73."""
    found = recorded([event("run:w", 10, 20), event("wait:w", 70, 3), call("w", 10, 63, 30)])
    assert found.stages == {"w": {1: 10}}
    assert found.calls == {"w": {1: 20 + 3}}


def test_a_function_that_is_done_while_its_samples_are_handed_over() -> None:
    found = recorded([event("run:w", 10, 20), event("wait:w", 70, 3), call("w", 10, 63, 5)])
    assert found.stages == {"w": {1: 0}}
    assert found.calls == {"w": {1: 23}}


def test_a_function_that_is_called_again_in_the_same_step_adds_up() -> None:
    events = [
        event("run:w", 0, 10), event("wait:w", 20, 10), call("w", 0, 30, 25),
        event("run:w", 100, 10), event("wait:w", 115, 40), call("w", 100, 55, 50),
    ]  # fmt: skip
    found = recorded(events)
    assert found.stages == {"w": {1: 15 + 40}}
    assert found.calls == {"w": {1: (10 + 5) + (10 + 5)}}


@st.composite
def nested(draw: st.DrawFn) -> list[dict[str, Any]]:
    """A tree of intervals, each inside its parent, children one after the other."""
    events: list[dict[str, Any]] = []

    def fill(start: int, end: int, depth: int) -> None:
        place = start
        while place < end and draw(st.booleans()):
            begin = draw(st.integers(place, end - 1))
            stop = draw(st.integers(begin + 1, end))
            events.append(event(f"run:x{len(events)}", begin, stop - begin))
            if depth:
                fill(begin, stop - 1, depth - 1)
            place = stop + 1

    fill(0, 60, 2)
    return sorted(events, key=lambda e: (e["start_us"], -e["duration_us"]))


@given(nested())
@settings(max_examples=60, deadline=None)
def test_own_times_cover_the_step_once(events: list[dict[str, Any]]) -> None:
    covered: set[int] = set()
    for each in events:
        covered |= set(range(each["start_us"], each["start_us"] + each["duration_us"]))
    assert sum(exclusive_us(events)) == len(covered)
