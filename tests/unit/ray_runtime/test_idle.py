"""What a rank did in a step: from its instructions' events."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from rlflow.backends.ray_runtime.idle import BETWEEN, idle_of
from rlflow.backends.ray_runtime.measure import StepMetrics, reduce_parts
from rlflow.plan import Plan


def event(instruction: str, start: int, end: int, **more: Any) -> dict[str, Any]:
    kind = instruction.partition(":")[0]
    return {"instruction": instruction, "kind": kind, "start_us": start, "duration_us": end - start, **more}


def test_waits_are_named_and_the_rest_is_work() -> None:
    events = [
        event("take:batch", 0, 10),  # from a data set: work
        event("reshard:actor", 10, 50, waited_us=30),
        event("run:samples", 50, 90),
        event("call:score", 60, 99),  # on another pool
        event("put:samples->learner", 90, 95),
        event("wait:score", 95, 99),
        event("take:scores", 99, 100),
    ]
    found = idle_of(events, 120, frozenset({"take:scores"}))
    assert found.waits_us == {
        "reshard:actor": 30, "put:samples->learner": 5, "wait:score": 4, "take:scores": 1, BETWEEN: 20
    }  # fmt: skip
    assert found.share == pytest.approx(60 / 120)
    assert str(found) == "50%, most of it in reshard:actor 0.000 s"


def test_a_wait_inside_a_refill_is_a_wait() -> None:
    events = [event("run:kept", 0, 100), event("run:samples", 10, 40), event("wait:score", 40, 70)]
    found = idle_of(events, 100, frozenset())
    assert found.waits_us == {"wait:score": 30, BETWEEN: 0}


@pytest.mark.parametrize("events", [[], [event("run:a", 0, 200)]])
def test_shares_stay_between_nothing_and_all(events: list[dict[str, Any]]) -> None:
    assert idle_of(events, 100, frozenset()).share == (0.0 if events else 1.0)
    assert idle_of(events, 0, frozenset()).share == 0.0


def test_a_pool_is_the_mean_of_its_ranks(small_plan: Plan) -> None:
    parts = []
    for rank, busy in enumerate((25, 75)):
        metrics = StepMetrics(small_plan, "main", rank)
        metrics.events = [event("run:a", 0, busy * 10_000)]
        metrics.whole_step(1.0, ranks=2)
        parts.append(metrics.parts())
    data = reduce_parts(parts)
    assert data["pool/main/idle"] == pytest.approx(0.5)
    assert (data["pool/main/idle_min"], data["pool/main/idle_max"]) == pytest.approx((0.25, 0.75))
    assert (data["rank/main/0/idle"], data["rank/main/1/idle"]) == pytest.approx((0.75, 0.25))
    assert data["pool/main/wait_s/between"] == pytest.approx(0.5)


def test_ages_are_counted_over_all_ranks(small_plan: Plan) -> None:
    parts = []
    for rank, ages in enumerate(([0, 1, 1], [1, 2], [])):
        metrics = StepMetrics(small_plan, "main", rank)
        metrics.ages("samples", np.array(ages, np.int64))
        parts.append(metrics.parts())
    assert reduce_parts(parts) == {
        "age/samples/mean": 1.0, "age/samples/max": 2.0,
        "age/samples/count/0": 1.0, "age/samples/count/1": 3.0, "age/samples/count/2": 1.0,
    }  # fmt: skip
