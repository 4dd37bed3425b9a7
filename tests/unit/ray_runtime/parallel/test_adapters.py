"""Training low-rank adapters on parts of a model, against one process."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from rlflow.ir.flow import Layout
from tests.unit.ray_runtime.parallel import jobs
from tests.unit.ray_runtime.parallel.workers import Workers, started


@pytest.fixture(scope="module")
def workers() -> Iterator[Workers]:
    with started(4) as found:
        yield found


@pytest.mark.parametrize(
    ("kind", "layout", "changes"),
    [
        ("qwen3", Layout(dp=2, zero=1, recompute="full"), {}),
        ("qwen3", Layout(dp=3, zero=2), {}),
        ("qwen3", Layout(tp=2), {}),
        ("qwen2", Layout(tp=2, dp=2, zero=1), {"num_key_value_heads": 1}),
        ("llama", Layout(dp=2, zero=3), {}),
        ("qwen3", Layout(tp=2, dp=2, zero=3, recompute="selective"), {"tie_word_embeddings": False}),
    ],
)
def test_equals_one_process(workers: Workers, kind: str, layout: Layout, changes: dict[str, Any]) -> None:
    found = workers.run(jobs.adapters_against_one_process, kind, layout, changes, "fp32", ranks=layout.size)
    assert [each["compared"] for each in found] == [True] + [False] * (layout.size - 1)
    for each in found:
        assert max(each["losses"], each["logprobs"], each["weights"]) < 1e-4, each
        assert each["frozen"]
        assert each["moved"] <= each["adapters"] + layout.dp


@pytest.mark.parametrize(
    ("kind", "layout", "why", "nearest"),
    [
        ("qwen3", Layout(pp=2, dp=2), "all of its layers on every rank", "`dp = 4`"),
        ("qwen3", Layout(tp=2, dp=2, sp=True, zero=1), "what lies between the parts", "`dp = 2, tp = 2, zero = 1`"),
        ("qwen3_moe", Layout(ep=2, dp=2), "all of its experts on every rank", "`dp = 2`"),
        ("qwen3_moe", Layout(tp=2, dp=2), "a model with experts and LoRA adapters", "`dp = 4`"),
    ],
)
def test_what_is_refused(kind: str, layout: Layout, why: str, nearest: str) -> None:
    failure = jobs.refusal(kind, layout, lora=True)
    assert (failure.code, why in failure.notes[0]) == ("RLF4003", True)
    assert failure.help == (f"the nearest layout that runs is {nearest}",)
