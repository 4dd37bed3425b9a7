"""Links as queues: the demand-bound test against the preemptive schedule, and host memory as a share."""

from __future__ import annotations

from fractions import Fraction
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlflow.passes.analysis.memory.host import host_share
from rlflow.passes.analysis.memory.transfers import (
    Job,
    earliest_deadline_first,
    exposed_seconds,
    link_suffices,
    tightest_window,
)

jobs_strategy = st.lists(
    st.builds(
        lambda size, release, length: (size, Fraction(release), Fraction(release + length)),
        st.integers(0, 8),
        st.integers(0, 10),
        st.integers(0, 8),
    ),
    max_size=6,
).map(lambda rows: [Job(f"j{i}", *row) for i, row in enumerate(rows)])


@settings(max_examples=200, deadline=None)
@given(jobs=jobs_strategy, rate=st.integers(1, 4))
def test_the_demand_bound_holds_exactly_where_earliest_deadline_first_is_in_time(jobs: list[Job], rate: int) -> None:
    slices = earliest_deadline_first(jobs, rate)
    late = Fraction(0)
    for job in jobs:
        mine = [s for s in slices if s.name == job.name]
        assert sum((s.end - s.start for s in mine), Fraction(0)) == Fraction(job.bytes, rate)
        assert all(s.start >= job.release for s in mine)
        if mine:
            late = max(late, mine[-1].end - job.deadline)
    for first, second in pairwise(slices):
        assert first.end <= second.start
    assert link_suffices(jobs, rate) == (late <= 0)
    worst = tightest_window(jobs, rate)
    if worst is not None:  # the greatest excess is the lateness that no schedule avoids
        assert max(worst.excess_seconds, Fraction(0)) == late


def test_the_tightest_window_is_named() -> None:
    jobs = [
        Job("a", 4, Fraction(0), Fraction(10)),
        Job("b", 6, Fraction(2), Fraction(5)),
        Job("c", 3, Fraction(3), Fraction(6)),
    ]
    worst = tightest_window(jobs, 2)
    assert worst is not None
    assert (worst.start, worst.end, worst.bytes, worst.excess_seconds) == (2, 6, 9, Fraction(1, 2))
    assert not link_suffices(jobs, 2)
    assert link_suffices(jobs, 3)
    assert tightest_window([], 1) is None


def test_exposed_is_what_windows_do_not_hide() -> None:
    pairs = [(Fraction(5), Fraction(3)), (Fraction(1), Fraction(4)), (Fraction(2), Fraction(2))]
    assert exposed_seconds(pairs) == 2


def test_devices_of_a_host_share_its_memory() -> None:
    assert host_share(1500, 8) == 187
    assert host_share(1500, 8, reserved_bytes=300) == 150
    assert host_share(100, 2, reserved_bytes=200) == 0
    with pytest.raises(ValueError, match="at least one device"):
        host_share(1, 0)
