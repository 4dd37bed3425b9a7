"""Layouts drawn at random from all that four ranks allow, against one process."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from rlflow.backends.ray_runtime.parallel.legal import describe, refuse_impossible
from rlflow.diagnostics.diagnostic import RunFailure
from rlflow.ir.flow import Layout
from tests.unit.ray_runtime.parallel import models
from tests.unit.ray_runtime.parallel.check import equals_one_process
from tests.unit.ray_runtime.parallel.workers import Workers, started

DRAWN = 8


@pytest.fixture(scope="module")
def workers() -> Iterator[Workers]:
    with started(4) as found:
        yield found


def _layouts(kind: str) -> list[Layout]:
    """All of 4 ranks that the model can run under."""
    loaded = models.make(kind)
    found = []
    for dp, tp, pp, ep, etp, zero in itertools.product((1, 2, 4), (1, 2, 4), (1, 2), (1, 2, 4), (1, 2), range(4)):
        layout = Layout(dp=dp, tp=tp, pp=pp, ep=ep, etp=etp, zero=zero)
        if layout.size != 4 or dp * tp % (ep * etp):
            continue
        try:
            refuse_impossible(loaded, layout)
        except RunFailure:
            continue
        found.append(layout)
    return found


def _draw(seed: int) -> tuple[str, Layout, dict[str, Any], dict[str, Any]]:
    draw = random.Random(seed)
    kind = draw.choice(["llama", "qwen2", "qwen3", "qwen3_moe"])
    changes = {"tie_word_embeddings": draw.random() < 0.5, "vocab_size": draw.choice([14, 16, 19])}
    options = {"microbatch_tokens": draw.choice([10, 40, 4000]), "epochs": draw.choice([1, 2])}
    options["pack_above"] = draw.choice([0.0, 1.0])
    layout = draw.choice(_layouts(kind))
    return kind, replace(layout, sp=layout.tp > 1 and draw.random() < 0.5), changes, options


@pytest.mark.parametrize("seed", range(DRAWN))
def test_equals_one_process(workers: Workers, seed: int) -> None:
    kind, layout, changes, options = _draw(seed)
    print(kind, describe(layout), changes, options)  # what failed, where it fails
    equals_one_process(workers, kind, layout, changes, **options)


def test_many_layouts_are_drawn_from() -> None:
    assert len(_layouts("qwen3")) > 10
    assert len(_layouts("qwen3_moe")) > 40
