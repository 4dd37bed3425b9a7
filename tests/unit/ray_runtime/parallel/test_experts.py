"""Experts on several ranks, tokens that travel to them, against one process."""

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


FEW = {"microbatch_tokens": 20}  # so small that some ranks get no row of some layer


@pytest.mark.parametrize(
    ("layout", "changes", "options"),
    [
        (Layout(dp=2, ep=2), {}, FEW),
        (Layout(dp=4, ep=2), {"num_experts": 4, "num_experts_per_tok": 3}, FEW),
        (Layout(tp=2), {"tie_word_embeddings": False}, {}),
        (Layout(tp=2, dp=2, ep=2, etp=2), {}, {"max_grad_norm": 0.01}),
        (Layout(pp=2, dp=2, ep=2), {}, {"microbatch_tokens": 30}),
        (Layout(tp=2, ep=2, pp=2), {}, {}),
        (Layout(dp=4, ep=2, zero=3, recompute="full"), {}, FEW),
        (Layout(dp=2, tp=2, ep=2, zero=2), {}, FEW),
    ],
)
def test_equals_one_process(workers: Workers, layout: Layout, changes: dict[str, Any], options: dict[str, Any]) -> None:
    equals_one_process(workers, "qwen3_moe", layout, changes, **options)


@pytest.mark.parametrize(
    ("kind", "layout", "why", "nearest"),
    [
        ("qwen3_moe", Layout(dp=3, ep=3), "ep 3 does not divide its 8 experts", "`dp = 3`"),
        ("qwen3_moe", Layout(dp=6, ep=2, etp=3), "etp 3 does not divide the width 16", "`dp = 6, ep = 2`"),
        ("qwen3", Layout(dp=2, ep=2), "it has no experts", "`dp = 2`"),
    ],
)
def test_what_cannot_run_is_refused(kind: str, layout: Layout, why: str, nearest: str) -> None:
    failure = jobs.refusal(kind, layout)
    assert why in failure.notes[0]
    assert failure.help == (f"the nearest layout that runs is {nearest}",)
