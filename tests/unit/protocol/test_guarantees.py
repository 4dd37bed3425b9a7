"""What each rule promises, and the nearest legal values where a flow permits less."""

from __future__ import annotations

from fractions import Fraction
from math import ceil
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlflow.protocol.guarantees import check, guarantee
from rlflow.protocol.trigger import Trigger


@pytest.mark.parametrize(
    ("rule", "more", "ages", "drops", "ordered"),
    [
        ("in_order", {}, [0, 1, 2, 3, 8], False, True),
        ("slack_edf", {}, [0, 1, 2, 3, 8], False, False),
        ("evict", {}, [0, 1, 2, 3, 8], True, False),
        ("wait", {}, [0, 1, 3, 5, 15], False, False),
        ("wait", {"oldest_first": False}, [0, 2, 4, 6, 16], False, False),
        ("wait", {"cohorts_fit": True}, [0, 1, 2, 3, 8], False, False),
        ("wait", {"cohorts_fit": True, "burst": 2}, [0, 1, 3, 5, 15], False, False),
        ("count", {}, [None] * 5, False, False),
    ],
)
def test_worst_ages(rule: Any, more: dict[str, Any], ages: list[int | None], drops: bool, ordered: bool) -> None:
    for bound, age in zip((0, 1, 2, 3, 8), ages, strict=True):
        found = guarantee(rule, bound=bound, batch=8, **more)
        assert found.worst_age == age
        assert found.kind == ("aggregate" if age is None else "per sample")
        assert (found.drops_data, found.biased, found.deterministic_order) == (drops, drops, ordered)
        assert found.words


@pytest.mark.parametrize(
    ("bound", "percent", "age"), [(0, 50, 1), (1, 75, 2), (1, 50, 3), (0, 100, 0), (2, 40, 7), (0, 34, 2)]
)
def test_carry_over_is_staleness(bound: int, percent: int, age: int) -> None:
    trigger = Trigger.percent(percent)
    for rule in ("in_order", "slack_edf"):
        found = guarantee(rule, bound=bound, batch=100, trigger=trigger)
        assert found.worst_age == age == ceil((bound + 1) / trigger.share) - 1
        assert found.deterministic_order is (rule == "in_order" and percent == 100)


def test_rounding_to_groups_makes_samples_younger() -> None:
    """60 % of 8 in groups of 4 is 8: nothing carries over."""
    trigger = Trigger.percent(60)
    assert guarantee("slack_edf", bound=0, batch=8, trigger=trigger).worst_age == 1
    assert guarantee("slack_edf", bound=0, batch=8, group=4, trigger=trigger).worst_age == 0


def test_starting_early_on_the_same_batch_changes_no_age() -> None:
    early = Trigger(Fraction(1, 2), same_batch=True)
    for rule in ("in_order", "slack_edf"):
        assert guarantee(rule, bound=1, batch=8, trigger=early).worst_age == 1
    with pytest.raises(ValueError, match="start early"):
        guarantee("wait", bound=1, batch=8, trigger=early)


def test_count_with_known_durations() -> None:
    found = guarantee("count", bound=1, batch=8, longest=100, shortest_step=10)
    assert (found.kind, found.worst_age) == ("per sample", 12)
    assert guarantee("count", bound=1, batch=8, longest=99, shortest_step=10).worst_age == 11
    with pytest.raises(ValueError, match="positive"):
        guarantee("count", bound=1, batch=8, longest=1, shortest_step=0)


def test_bursts() -> None:
    assert guarantee("slack_edf", bound=2, batch=8, burst=3).live
    stuck = guarantee("slack_edf", bound=2, batch=8, burst=4)
    assert not stuck.live
    assert "bound + 1 = 3" in stuck.words


@pytest.mark.parametrize(
    "sizes", [{"batch": 6, "group": 4}, {"batch": 2, "group": 4}, {"batch": 8, "bound": -1}, {"batch": 8, "burst": 0}]
)
def test_senseless_sizes(sizes: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="whole groups"):
        guarantee("in_order", **{"bound": 1, **sizes})


@given(
    st.sampled_from(["in_order", "slack_edf", "wait", "evict", "count"]),
    st.integers(0, 4),
    st.integers(0, 4),
    st.integers(1, 6),
    st.integers(1, 3),
    st.integers(1, 100),
    st.booleans(),
)
@settings(max_examples=200, deadline=None)
def test_the_nearest_legal_values(
    rule: Any, permitted: int, bound: int, groups: int, group: int, percent: int, oldest: bool
) -> None:
    """By trying every share in whole groups and every bound."""
    batch = groups * group
    trigger = Trigger.percent(percent)

    def legal(bound: int, trigger: Trigger) -> bool:
        worst = guarantee(rule, bound=bound, batch=batch, group=group, trigger=trigger, oldest_first=oldest).worst_age
        return worst is not None and worst <= permitted

    found = check(
        rule, permitted=permitted, bound=bound, batch=batch, group=group, trigger=trigger, oldest_first=oldest
    )
    assert found.allowed is legal(bound, trigger)
    if found.allowed:
        assert (found.nearest_share, found.nearest_bound) == (None, None)
        return
    shares = [Fraction(k, groups) for k in range(1, groups + 1) if Fraction(k, groups) >= trigger.share]
    if trigger.carries:
        assert found.nearest_share == next((share for share in shares if legal(bound, Trigger(share))), None)
    else:
        assert found.nearest_share is None
    assert found.nearest_bound == max((s for s in range(bound) if legal(s, trigger)), default=None)


def test_a_trigger_needs_the_permission() -> None:
    """s = 1 at 50 % is 3 steps: with 2 permitted, 2/3 of the batch or s = 0."""
    found = check("in_order", permitted=2, bound=1, batch=512, trigger=Trigger.percent(50))
    assert (found.allowed, found.guarantee.worst_age) == (False, 3)
    assert found.nearest_share == Fraction(342, 512)
    assert found.nearest_bound == 0
