"""Optimizer state, gradients and weights divided over data parallelism, against one process."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from rlflow.ir.flow import Layout
from tests.unit.ray_runtime.parallel import jobs
from tests.unit.ray_runtime.parallel.check import equals_one_process
from tests.unit.ray_runtime.parallel.workers import Workers, started


@pytest.fixture(scope="module")
def workers() -> Iterator[Workers]:
    with started(4) as found:
        yield found


UNTIED = {"tie_word_embeddings": False}


@pytest.mark.parametrize(
    ("kind", "layout", "changes", "options"),
    [
        ("qwen3", Layout(dp=2, zero=1), {}, {}),
        ("qwen2", Layout(dp=3, zero=2), {}, {"microbatch_tokens": 20}),
        ("qwen3", Layout(tp=2, dp=2, zero=1), {"num_key_value_heads": 1}, {"max_grad_norm": 0.01}),
        ("llama", Layout(tp=2, dp=2, zero=2), UNTIED, {"microbatch_tokens": 30}),
        ("llama", Layout(dp=2, zero=3), {}, {"microbatch_tokens": 20}),
        ("qwen3", Layout(dp=3, zero=3, recompute="full"), UNTIED, {"max_grad_norm": 0.01}),
        ("qwen2", Layout(tp=2, dp=2, zero=3), {"num_key_value_heads": 1}, {"microbatch_tokens": 40}),
    ],
)
def test_equals_one_process(
    workers: Workers, kind: str, layout: Layout, changes: dict[str, Any], options: dict[str, Any]
) -> None:
    equals_one_process(workers, kind, layout, changes, **options)


@pytest.mark.parametrize(("zero", "parts"), [(0, 1), (1, 4), (3, 4)])
def test_optimizer_state_is_divided(workers: Workers, zero: int, parts: int) -> None:
    layout = Layout(dp=4, zero=zero)
    for elements, whole in workers.run(jobs.moments, layout, ranks=4):
        assert elements == pytest.approx(2 * whole / parts, rel=0.05)


@pytest.mark.parametrize("layout", [Layout(dp=2, zero=1), Layout(dp=2, zero=3), Layout(tp=2)])
def test_a_rank_goes_on_from_its_saved_state(workers: Workers, layout: Layout) -> None:
    assert all(workers.run(jobs.saved_and_resumed, layout, ranks=2))
