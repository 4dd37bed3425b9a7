"""Pipeline stages against one process."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from rlflow.backends.ray_runtime.packing import Sequences
from rlflow.ir.flow import Layout
from tests.unit.ray_runtime.parallel import jobs, models
from tests.unit.ray_runtime.parallel.check import equals_one_process
from tests.unit.ray_runtime.parallel.workers import Workers, started


@pytest.fixture(scope="module")
def workers() -> Iterator[Workers]:
    with started(4) as found:
        yield found


UNTIED = {"tie_word_embeddings": False}
FOUR = {"num_hidden_layers": 4}


@pytest.mark.parametrize(
    ("kind", "layout", "changes", "options"),
    [
        ("qwen3", Layout(pp=2), {}, {"max_grad_norm": 0.01}),  # the embedding on both ends
        ("llama", Layout(pp=2, dp=2, zero=1), UNTIED, {"microbatch_tokens": 20}),
        ("qwen2", Layout(pp=3, split=(1, 2, 1)), FOUR, {"microbatch_tokens": 30}),
        ("qwen3", Layout(pp=2, tp=2, recompute="full"), {}, {"microbatch_tokens": 40}),
        ("qwen3", Layout(pp=2, vp=2, split=(1, 1, 2, 0)), FOUR, {"microbatch_tokens": 20}),
        ("llama", Layout(pp=2, vp=2), FOUR, {}),
        ("qwen3", Layout(pp=2, dp=2), {}, {"microbatch_tokens": 40, "pack_above": 1.0}),  # rectangles
    ],
)
def test_equals_one_process(
    workers: Workers, kind: str, layout: Layout, changes: dict[str, Any], options: dict[str, Any]
) -> None:
    equals_one_process(workers, kind, layout, changes, **options)


@pytest.mark.parametrize(("layout", "tokens"), [(Layout(pp=4), 20), (Layout(pp=2, vp=2), 20), (Layout(pp=2), 4000)])
def test_both_ends_of_a_tied_pair_stay_equal(workers: Workers, layout: Layout, tokens: int) -> None:
    """The first stage embeds with it, the last predicts with it: each has gradients that the other lacks."""
    first, *middle, last = workers.run(jobs.tied_ends, layout, tokens, ranks=layout.size)
    assert first == last
    assert len(set(first)) == 5
    assert not any(middle)


@pytest.mark.parametrize("layout", [Layout(pp=2), Layout(tp=2), Layout(dp=2, zero=3), Layout(dp=2, zero=1)])
@pytest.mark.parametrize("shared", [True, False])
def test_value_models_equal_one_process(workers: Workers, layout: Layout, shared: bool) -> None:
    for difference in workers.run(jobs.critic_against_one_process, layout, shared, ranks=2):
        assert difference < 1e-5


def test_micro_batches_of_a_pipeline_have_one_width_and_every_row_once() -> None:
    batch = models.samples(11)
    sequences = Sequences(batch, 12)
    for budget, parts in ((1, 2), (40, 2), (10_000, 4), (10_000, 20)):
        found = sequences.even_micro_batches(np.arange(11), budget, 1, parts=parts)
        assert sorted(np.concatenate([micro.rows for micro in found])) == list(range(11))
        assert len({micro.ids.shape[1] for micro in found}) == 1
        assert len(found) >= min(parts, 11)
        assert max(len(m.rows) for m in found) - min(len(m.rows) for m in found) <= 1
        assert all(micro.ids.numel() <= budget or len(micro.rows) == 1 for micro in found)


@pytest.mark.parametrize(
    ("layout", "why"),
    [
        (Layout(pp=3), "its 2 layers do not divide into 3 equal parts"),
        (Layout(pp=2, split=(2, 0)), "a pipeline stage without a layer"),
        (Layout(pp=2, split=(1, 1, 1)), "a split of its 2 layers into 2 parts"),
        (Layout(pp=2, dp=2, zero=2), "weights and gradients whole"),
    ],
)
def test_what_cannot_run_is_refused(layout: Layout, why: str) -> None:
    assert why in jobs.refusal("qwen3", layout).notes[0]
