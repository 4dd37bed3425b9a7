"""Upper envelopes against the sum over steps."""

from __future__ import annotations

from itertools import accumulate

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlflow.backends.simulator.engine_envelope import envelope, steps_within

NUMBERS = st.integers(0, 12).map(float) | st.floats(0, 1, allow_subnormal=False)
LINES = st.lists(st.tuples(NUMBERS, NUMBERS), min_size=1, max_size=6)


@settings(max_examples=300, deadline=None)
@given(LINES, st.integers(1, 60))
def test_pieces_sum_to_the_maxima(lines: list[tuple[float, float]], steps: int) -> None:
    maxima = [max(base + slope * j for base, slope in lines) for j in range(steps)]
    pieces, seconds = envelope(lines, steps)
    assert seconds == pytest.approx(sum(maxima), rel=1e-12)
    assert len(pieces) <= len(lines)
    assert [piece.before for piece in pieces] == pytest.approx(
        [sum(maxima[: piece.first]) for piece in pieces], rel=1e-12
    )


@settings(max_examples=100, deadline=None)
@given(LINES, st.integers(1, 60))
def test_the_step_under_way_is_found(lines: list[tuple[float, float]], steps: int) -> None:
    lines = [(base + 1, slope) for base, slope in lines]  # a step takes time
    maxima = [max(base + slope * j for base, slope in lines) for j in range(steps)]
    pieces, _ = envelope(lines, steps)
    for step, (end, seconds) in enumerate(zip(accumulate(maxima), maxima, strict=True)):
        for share in (0.01, 0.5, 0.99):
            assert steps_within(pieces, end - share * seconds) == step + 1
    assert steps_within(pieces, 0.0) == 0


@given(st.lists(st.tuples(st.integers(1, 9), st.integers(0, 9)), min_size=1, max_size=5), st.integers(1, 40))
def test_the_very_end_of_a_step_is_its_end(lines: list[tuple[int, int]], step: int) -> None:
    pieces, seconds = envelope(lines, step)
    assert steps_within(pieces, seconds) == step
    ends = accumulate(max(base + slope * j for base, slope in lines) for j in range(step))
    assert [steps_within(pieces, end) for end in ends] == [*range(1, step + 1)]
