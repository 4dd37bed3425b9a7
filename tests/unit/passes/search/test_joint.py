"""The joint choice of options on a pool, against trying all of them."""

from __future__ import annotations

import math
from collections.abc import Hashable
from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from search_oracles import LIMIT, options

from rlflow.passes.search.joint import Load, best_joint, evaluate, least_load, resident, swap_overflow
from rlflow.passes.search.options import StageOption


def swaps(load: Load) -> float:
    """Seconds of a made-up swap: steps in the peak, a slope in the static bytes, and an end."""
    over = max(0, load.peak_bytes - LIMIT)
    return math.inf if over > 15 else 2.0 * over + (load.static_bytes // 8 if over else 0)


SWAPS = {
    "resident": resident(LIMIT),
    "overflow": swap_overflow(LIMIT, 4.0),
    "host": swap_overflow(LIMIT, 4.0, 9),
    "steps": swaps,
}


@st.composite
def pools(draw: st.DrawFn) -> tuple[list[list[StageOption]], list[tuple[int, int]], dict[tuple[int, int], float]]:
    """Options of up to five stages, any links between them (not only of neighbours), and prices of class changes."""
    count = draw(st.integers(1, 5))
    stages = [draw(options((4,), most=4)) for _ in range(count)]
    pairs = [(a, b) for a in range(count) for b in range(count) if a != b]
    links = draw(st.lists(st.sampled_from(pairs), unique=True, max_size=6)) if pairs else []
    prices = {(a, b): float(draw(st.integers(0, 6))) for a, b in links}
    return stages, links, prices


@pytest.mark.parametrize("name", SWAPS)
@settings(max_examples=60, derandomize=True, deadline=None)
@given(pools(), st.sampled_from([math.inf, 5.0, 20.0]))
def test_it_is_the_best_of_all_choices(
    name: str,
    pool: tuple[list[list[StageOption]], list[tuple[int, int]], dict[tuple[int, int], float]],
    limit: float,
) -> None:
    stages, links, prices = pool
    swap = SWAPS[name]

    def reshard(a: int, class_a: Hashable, b: int, class_b: Hashable) -> float:
        return prices[a, b] * (1.0 if class_a != class_b else 0.25)

    def seconds(choices: tuple[StageOption, ...]) -> float:
        static = sum(o.static_bytes for o in choices)
        peak = max(static - o.static_bytes + o.peak_bytes for o in choices)
        moved = sum(reshard(a, choices[a].layout_class, b, choices[b].layout_class) for a, b in links)
        return sum(o.seconds for o in choices) + moved + swap(Load(static, peak))

    best = min(seconds(choices) for choices in product(*stages))
    found = best_joint(stages, links, reshard, swap, limit)
    if best > limit or best == math.inf:
        assert found is None
    else:
        assert found is not None
        assert found.seconds == pytest.approx(best, abs=1e-9)
        assert found.seconds == pytest.approx(seconds(found.choices), abs=1e-9)
        assert evaluate(found.choices, links, reshard, swap) == found


@settings(max_examples=60, derandomize=True, deadline=None)
@given(st.lists(options((4,), most=4), min_size=1, max_size=4))
def test_the_least_load_is_the_least_peak_of_all_choices(stages: list[list[StageOption]]) -> None:
    peaks = [
        max(sum(o.static_bytes for o in choices) - o.static_bytes + o.peak_bytes for o in choices)
        for choices in product(*stages)
    ]
    found = least_load(stages)
    assert found is not None
    load, position = found
    assert load.peak_bytes == min(peaks)
    assert 0 <= position < len(stages)


def option(seconds: float, static: int, peak: int, cls: str) -> StageOption:
    return StageOption(1, seconds, static, peak, cls, cls)


def test_a_slower_layout_wins_when_the_reshard_costs_more() -> None:
    """Rollout alone would take b (3 s), training a (5 s): two reshards of 4 s make a for both the best, 9 s."""
    rollout = [option(3.0, 1, 2, "b"), option(4.0, 1, 2, "a")]
    training = [option(5.0, 1, 2, "a"), option(9.5, 1, 2, "b")]

    def four(a: int, x: Hashable, b: int, y: Hashable) -> float:
        return 4.0 if x != y else 0.0

    found = best_joint([rollout, training], [(0, 1), (1, 0)], four, resident(LIMIT))
    assert found is not None
    assert found.seconds == 9.0
    assert [o.layout_class for o in found.choices] == ["a", "a"]
    split = evaluate([rollout[0], training[0]], [(0, 1), (1, 0)], four, resident(LIMIT))
    assert (split.seconds, split.reshard_seconds) == (16.0, (4.0, 4.0))


def test_bytes_add_up_over_the_stages_of_a_pool() -> None:
    """Each fits alone, and the quick ones do not fit together: 12 + 9 > 20, but 6 + 12 fits."""
    first = [option(1.0, 9, 10, "a"), option(2.0, 6, 8, "a")]
    second = [option(1.0, 3, 12, "a")]
    found = best_joint([first, second], [], lambda a, x, b, y: 0.0, resident(LIMIT))
    assert found is not None
    assert found.seconds == 3.0
    assert found.load == Load(9, 18)


def test_the_swap_price_is_weighed_against_time() -> None:
    quick, lean = option(1.0, 20, 20, "a"), option(4.0, 4, 8, "a")
    other = [option(1.0, 8, 8, "a")]
    cheap = best_joint([[quick, lean], other], [], lambda a, x, b, y: 0.0, swap_overflow(LIMIT, 16.0))
    dear = best_joint([[quick, lean], other], [], lambda a, x, b, y: 0.0, swap_overflow(LIMIT, 2.0))
    assert cheap is not None
    assert dear is not None
    assert (cheap.seconds, cheap.swap_seconds) == (3.0, 1.0)  # 28 bytes: 8 out and in at 16 byte/s
    assert (dear.seconds, dear.swap_seconds) == (5.0, 0.0)


def test_a_stage_without_options_has_no_choice() -> None:
    assert best_joint([[], [option(1.0, 1, 1, "a")]], [], lambda a, x, b, y: 0.0, resident(LIMIT)) is None
    assert least_load([[]]) is None
