"""Interval unions against sets, boxes against boolean arrays, flat ranges against numpy's memory order."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from rlflow.reshard import boxes, intervals

small = settings(max_examples=60, deadline=None, derandomize=True)
unions = st.lists(st.tuples(st.integers(0, 12), st.integers(0, 12)), max_size=5).map(intervals.normalise)
shapes = st.lists(st.integers(1, 4), min_size=1, max_size=3).map(tuple)


def members(union):
    return {n for low, high in union for n in range(low, high)}


@st.composite
def boxes_in(draw, shape, count):
    def one():
        cut = [sorted((draw(st.integers(0, n)), draw(st.integers(0, n)))) for n in shape]
        return tuple((low, high) for low, high in cut)

    return [one() for _ in range(draw(st.integers(0, count)))]


def mask(region, shape):
    found = np.zeros(shape, int)
    for box in region:
        found[boxes.slices(box)] += 1
    return found


@small
@given(unions, unions)
def test_interval_unions_are_sets(a, b):
    assert members(intervals.union(a, b)) == members(a) | members(b)
    assert members(intervals.intersection(a, b)) == members(a) & members(b)
    assert members(intervals.difference(a, b)) == members(a) - members(b)
    assert intervals.length(a) == len(members(a))
    assert intervals.contains(a, b) == (members(b) <= members(a))
    for found in (intervals.union(a, b), intervals.intersection(a, b), intervals.difference(a, b)):
        assert found == intervals.normalise(found)


@small
@given(st.data())
def test_regions_are_sets_of_indices(data):
    shape = data.draw(shapes)
    a, b = data.draw(boxes_in(shape, 3)), data.draw(boxes_in(shape, 3))
    one = boxes.disjoint(a)
    assert (mask(one, shape) == (mask(a, shape) > 0)).all()
    left = boxes.difference(one, b)
    assert (mask(left, shape) == ((mask(a, shape) > 0) & (mask(b, shape) == 0))).all()
    assert boxes.union_volume(a) == (mask(a, shape) > 0).sum()
    if a and b:
        both = boxes.intersect(a[0], b[0])
        expected = (mask(a[:1], shape) > 0) & (mask(b[:1], shape) > 0)
        assert (mask([both] if both else [], shape) == expected).all()


@small
@given(st.data())
def test_flat_ranges_and_runs_follow_memory_order(data):
    shape = data.draw(shapes)
    order = np.arange(np.prod(shape)).reshape(shape)
    first, last = sorted(data.draw(st.tuples(st.integers(0, order.size), st.integers(0, order.size))))
    found = boxes.flat_boxes(shape, first, last)
    assert [n for box in found for n in order[boxes.slices(box)].ravel()] == list(range(first, last))
    assert len(found) <= max(2 * len(shape) - 1, 0)
    for box in data.draw(boxes_in(shape, 1)):
        if boxes.volume(box):
            pieces = list(boxes.runs(box, shape))
            listed = [n for piece, at in pieces for n in range(at, at + boxes.volume(piece))]
            assert listed == order[boxes.slices(box)].ravel().tolist()
            assert boxes.address_span(box, shape) == (listed[0], listed[-1] + 1)
            count, each = boxes.rows(box)
            cut = [boxes.take_rows(box, r, r + 1) for r in range(count)]
            assert [boxes.volume(b) for b in cut] == [each] * count
            assert (mask(cut, shape) == mask([box], shape)).all()


def test_large_rows_are_cut_along_a_further_dimension():
    box = ((2, 4), (0, 3), (0, 5))
    assert list(boxes.with_rows_below(box, 15)) == [box]
    assert list(boxes.with_rows_below(box, 14)) == [((2, 3), (0, 3), (0, 5)), ((3, 4), (0, 3), (0, 5))]
    assert list(boxes.with_rows_below(((0, 3), (0, 5)), 2)) == [((0, 3), (0, 5))]


def test_products():
    assert boxes.products([((0, 1), (2, 4)), ((5, 6),)]) == [((0, 1), (5, 6)), ((2, 4), (5, 6))]
    assert boxes.volume(()) == 1
    assert boxes.flat_boxes((), 0, 1) == [()]
