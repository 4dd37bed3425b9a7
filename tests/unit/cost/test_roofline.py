"""Efficiencies that saturate, against the table that they follow."""

from __future__ import annotations

import pytest

from rlflow.cost.roofline import memory_seconds, memory_share, operation_seconds, product_seconds, product_share


def test_roofline():
    """0.95 at 128 GFLOP on an A100, a tenth near 0.75 GFLOP; memory 0.9, 0.75, 0.6, 0.3 of it at 100, 10, 1, 0.1 MB."""
    assert product_share(128e9, 312e12) == pytest.approx(0.95)
    assert product_share(0.75e9, 312e12) == pytest.approx(0.1, abs=0.01)
    assert [round(0.9 * memory_share(x), 3) for x in (1e9, 1e8, 1e7, 1e6, 1e5, 1)] == [0.9, 0.9, 0.75, 0.6, 0.3, 0.3]
    assert product_seconds(128e9, 312e12, 0.5) == pytest.approx(128e9 / 312e12 / 0.5 / 0.95)
    assert product_seconds(0, 1e12, 0.5, 7) == memory_seconds(0, 1e12, 0.5) == 0
    compute, memory = product_seconds(1e12, 312e12, 0.7), memory_seconds(1e6, 2e12, 0.9)
    assert operation_seconds(1e12, 1e6, 312e12, 2e12, 0.7, 0.9, 5e-6) == max(compute, memory) + 5e-6
    assert operation_seconds(1e6, 1e11, 312e12, 2e12, 0.7, 0.9) == pytest.approx(1e11 / 1.8e12)
