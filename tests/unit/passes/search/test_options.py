"""Tables keep what can matter, and nothing else."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from search_oracles import LIMIT, options

from rlflow.passes.search.options import StageOption, StageTable

SIZES = (1, 2, 4, 8)


def option(devices: int = 1, seconds: float = 1.0, static: int = 0, peak: int = 1, cls: str = "a") -> StageOption:
    return StageOption(devices, seconds, static, peak, (devices, seconds, static, peak), cls)


@settings(max_examples=80, derandomize=True, deadline=None)
@given(options(SIZES, most=12))
def test_at_each_size_the_pareto_set_of_each_class_and_no_more(given_options: list[StageOption]) -> None:
    table = StageTable.of(given_options, LIMIT)
    for devices in (*SIZES, 3, 100):
        fitting = [o for o in given_options if o.devices <= devices and o.peak_bytes <= LIMIT]
        for cls in "ab":
            mine = [o for o in fitting if o.layout_class == cls]
            expected = {
                (o.seconds, o.static_bytes, o.peak_bytes)
                for o in mine
                if not any(
                    (p.seconds, p.static_bytes, p.peak_bytes) != (o.seconds, o.static_bytes, o.peak_bytes)
                    and p.seconds <= o.seconds
                    and p.static_bytes <= o.static_bytes
                    and p.peak_bytes <= o.peak_bytes
                    for p in mine
                )
            }
            found = [o for o in table.options(devices) if o.layout_class == cls]
            assert {(o.seconds, o.static_bytes, o.peak_bytes) for o in found} == expected
            assert len(found) == len(expected), "an equal option twice"
            assert all(o.devices <= devices for o in found)
        assert table.least_seconds(devices) == min((o.seconds for o in fitting), default=math.inf)
    assert table.envelope(SIZES) == [table.least_seconds(n) for n in SIZES]
    assert table.envelope(SIZES) == sorted(table.envelope(SIZES), reverse=True)
    fits = [o for o in given_options if o.peak_bytes <= LIMIT]
    assert table.least_area() == min((o.devices * o.seconds for o in fits), default=math.inf)


@settings(max_examples=40, derandomize=True, deadline=None)
@given(options(SIZES, most=10), st.randoms(use_true_random=False))
def test_the_order_of_the_options_does_not_matter(given_options: list[StageOption], random: object) -> None:
    shuffled = list(given_options)
    random.shuffle(shuffled)  # type: ignore[attr-defined]
    one, other = StageTable.of(given_options, LIMIT), StageTable.of(shuffled, LIMIT)
    for devices in SIZES:
        assert sorted(
            (o.layout_class, o.seconds, o.static_bytes, o.peak_bytes) for o in one.options(devices)
        ) == sorted((o.layout_class, o.seconds, o.static_bytes, o.peak_bytes) for o in other.options(devices))


def test_with_more_devices_a_smaller_layout_may_still_be_the_best() -> None:
    table = StageTable.of([option(2, 1.0), option(8, 3.0)], LIMIT)
    assert table.least_seconds(8) == 1.0
    assert table.options(8)[0].devices == 2, "and the devices really used are known"


def test_more_memory_for_less_time_is_kept() -> None:
    slow, quick = option(4, 5.0, 0, 4), option(4, 3.0, 0, 9)
    assert StageTable.of([slow, quick], LIMIT).options(4) == (quick, slow)


def test_a_class_can_be_forbidden_and_options_can_be_pinned() -> None:
    table = StageTable.of([option(cls="a"), option(seconds=2.0, cls="b"), option(4, 0.5, cls="b")], LIMIT)
    assert table.without_class("a").least_seconds(1) == 2.0
    assert table.without_class("a").without_class("b").options(4) == ()
    assert table.where(lambda o: o.devices == 1).least_seconds(4) == 1.0


def test_what_exceeds_the_memory_is_out_but_remembered() -> None:
    table = StageTable.of([option(1, peak=50), option(2, peak=40), option(2, peak=60), option(4, peak=LIMIT)], LIMIT)
    assert table.least_seconds(2) == math.inf
    assert table.least_seconds(4) == 1.0
    assert [(o.devices, o.peak_bytes) for o in table.too_large] == [(1, 50), (2, 40)]


@pytest.mark.parametrize(
    "bad",
    [
        {"devices": 0},
        {"seconds": -1.0},
        {"seconds": math.inf},
        {"seconds": math.nan},
        {"static": 5, "peak": 4},
        {"static": -1},
    ],
)
def test_options_without_sense_are_refused(bad: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=r"devices?|seconds|bytes|device"):
        option(**bad)  # type: ignore[arg-type]
