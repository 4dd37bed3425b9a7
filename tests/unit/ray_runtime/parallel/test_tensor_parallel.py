"""Tensor and data parallelism against one process: gradients, losses, weights, and what each rank holds."""

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
        ("qwen3", Layout(tp=2), {}, {}),
        ("llama", Layout(tp=4), {}, {"microbatch_tokens": 30}),  # two ranks per key-value head, padded vocabulary
        ("qwen2", Layout(tp=2, dp=2), UNTIED, {"epochs": 2}),
        ("qwen3", Layout(tp=4), {"num_key_value_heads": 1, "vocab_size": 17} | UNTIED, {"max_grad_norm": 0.01}),
        ("qwen3", Layout(dp=2, tp=2, recompute="selective"), {}, {"microbatch_tokens": 20}),
        ("llama", Layout(tp=2, recompute="full"), {}, {}),
        ("qwen3", Layout(dp=4), {}, {"minibatch": 3}),
        ("qwen3", Layout(tp=2, sp=True), {}, {"microbatch_tokens": 30}),
        ("llama", Layout(tp=4, sp=True, recompute="full"), {}, {}),
        ("qwen2", Layout(tp=2, pp=2, sp=True), {}, {"microbatch_tokens": 30}),
        ("qwen3_moe", Layout(tp=2, dp=2, ep=2, etp=2, sp=True, zero=3), {}, {"microbatch_tokens": 30}),
    ],
)
def test_equals_one_process(
    workers: Workers, kind: str, layout: Layout, changes: dict[str, Any], options: dict[str, Any]
) -> None:
    equals_one_process(workers, kind, layout, changes, **options)


def test_bf16_is_as_near_to_fp32_as_one_process_is(workers: Workers) -> None:
    found = workers.run(jobs.bf16_errors, Layout(tp=2, dp=2), ranks=4)
    for alone, spread in found:
        assert 0 < spread < 2.0 * alone


@pytest.mark.parametrize("layout", [Layout(dp=2), Layout()])
def test_a_model_that_is_whole_on_every_rank_trains_as_before(workers: Workers, layout: Layout) -> None:
    """Bit for bit, against the same rows over a plain group."""
    assert all(workers.run(jobs.with_and_without_mesh, layout, ranks=layout.size))


@pytest.mark.parametrize(
    ("layout", "why", "nearest"),
    [
        (Layout(cp=2), "every sequence whole", "`dp = 2`"),
        (Layout(tp=3), "tp 3 does not divide its 4 heads", "`dp = 3`"),
        (Layout(tp=8, dp=2), "tp 8 does not divide its 4 heads", "`dp = 4, tp = 4`"),
        (Layout(pp=2, zero=3, dp=2), "weights and gradients whole", "`dp = 2, pp = 2, zero = 1`"),
    ],
)
def test_what_cannot_run_is_refused_with_the_nearest(layout: Layout, why: str, nearest: str) -> None:
    failure = jobs.refusal("qwen3", layout)
    assert failure.code == "RLF4003"
    assert why in failure.notes[0]
    assert failure.help == (f"the nearest layout that runs is {nearest}",)
