"""The learning curve is a well-formed, self-contained SVG for any metrics."""

from __future__ import annotations

import math
import re
import xml.etree.ElementTree as ET
from typing import Any

import pytest

from rlflow.backends.visualizers.curves import MAX_POINTS, learning_curve_svg, smooth


def rows(count: int, **more: float) -> list[dict[str, Any]]:
    return [{"step": i, "data": {"critic/score/mean": math.tanh(i / count), **more}} for i in range(1, count + 1)]


@pytest.mark.parametrize("count", [1, 2, 60, 2000])
def test_any_length(count: int) -> None:
    svg = learning_curve_svg(rows(count, **{"response_length/mean": 20.0, "timing_s/step": 1.5}))
    ET.fromstring(svg)
    assert "not recorded" not in svg
    assert "nan" not in svg
    assert len(svg) < 100_000


def test_many_steps_are_thinned() -> None:
    svg = learning_curve_svg(rows(2000))
    paths = re.findall(r'class="line" d="([^"]*)"', svg)
    assert all(path.count("L") < MAX_POINTS for path in paths)
    assert 'class="band"' in svg


@pytest.mark.parametrize(
    "metrics",
    [
        [],
        [{"step": 1, "data": {}}],
        [{"step": 3, "data": {"critic/score/mean": float("nan"), "timing_s/step": float("inf")}}],
        [{"step": 3, "data": {"critic/score/mean": "high"}}],
    ],
)
def test_nothing_to_draw(metrics: list[dict[str, Any]]) -> None:
    svg = learning_curve_svg(metrics)
    ET.fromstring(svg)
    assert svg.count("not recorded") == 3


def test_held_out_points() -> None:
    held = [{"step": s, "data": {"val/a<b/mean": 0.1 * s, "val/other/mean": 0.5}} for s in (0, 20, 40)]
    svg = learning_curve_svg([*rows(40), *held])
    words = " ".join(ET.fromstring(svg).itertext())
    assert "held out: a<b" in words
    assert svg.count(' l5,5 l-5,5 l-5,-5 Z"') == 8  # three points and one in the legend, twice


def test_constant_and_huge_values() -> None:
    for value in (0.0, -3.0, 1e12, 1e-9):
        svg = learning_curve_svg([{"step": s, "data": {"critic/score/mean": value}} for s in range(5)])
        ET.fromstring(svg)
        assert 'class="line"' in svg


def test_both_colour_schemes_and_nothing_from_outside() -> None:
    svg = learning_curve_svg(rows(5))
    assert "prefers-color-scheme: dark" in svg
    assert not re.search(r"(href|src|url\()", svg)


def test_smoothing_is_unbiased_and_damps() -> None:
    assert [y for _, y in smooth([(i, 2.0) for i in range(50)])] == pytest.approx([2.0] * 50)
    zigzag = smooth([(i, float(i % 2)) for i in range(200)])
    assert all(abs(y - 0.5) < 0.1 for _, y in zigzag[-50:])
