"""Engines and new weights as in a run: whole batches in order wait for each other, and `carry finish` for its samples."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from rlflow.backends.simulator.engine import Engine
from rlflow.backends.simulator.engine_messages import Request
from rlflow.backends.simulator.interpreter_edges import Edge
from rlflow.backends.simulator.run import Options, simulate
from rlflow.backends.simulator.run_engines import settings_of_engine
from rlflow.cost.assumed_lengths import assumed_lengths, lengths_of
from rlflow.plan import Plan
from rlflow.protocol.controller import Batch

MakePlan = Callable[..., Plan]
GROUP = 8


def test_a_batch_in_order_begins_when_the_one_before_is_finished(make_plan: MakePlan) -> None:
    """One step ahead, where generation is the slower pool: each batch takes what it takes alone."""
    plan = make_plan("split", "staleness m = 1 step", "grpo", 1024)
    facts = next(estimate.engine for estimate in plan.estimates if estimate.stage == "s")
    assert facts is not None
    length = lengths_of(assumed_lengths(facts), 4, "s")
    found = simulate(plan, Options(steps=4, warm_up=0, seed=4))
    took = {e["step"]: e["duration_us"] / 1e6 for e in found.events if e["instruction"] == "run:s"}
    for step in range(4):
        requests: list[list[Request]] = [[] for _ in range(facts.replicas)]
        for sample in range(32 * GROUP):
            group, member = divmod(sample, GROUP)
            tokens = length(32 * step + group, member)
            requests[sample % facts.replicas].append(Request(sample, facts.prompt_tokens, tokens, group))
        alone = max(Engine(settings_of_engine(facts)).run(batch)[-1].time for batch in requests)
        assert took[step + 1] == pytest.approx(alone, rel=1e-6)


@pytest.mark.parametrize(
    ("rule", "one_version"),
    [
        ("staleness m = 1 step\ntrigger s at 50%, carry finish", True),
        ("staleness m = 2 steps, burst = 3 steps", True),
        ("staleness m = 1 step\ntrigger s at 50%, carry partial", False),
        ("staleness m = 2 steps, admit slack_edf", False),
    ],
)
def test_which_samples_are_made_by_one_version(
    rule: str, one_version: bool, make_plan: MakePlan, monkeypatch: pytest.MonkeyPatch
) -> None:
    versions: list[set[int]] = []
    add = Edge._add

    def seen(edge: Edge, batch: Batch) -> None:
        versions.extend({part.version for part in sample.segments} for sample in batch.samples)
        add(edge, batch)

    monkeypatch.setattr(Edge, "_add", seen)
    simulate(make_plan("split", rule, "grpo", 1024), Options(steps=6, seed=0))
    assert len(versions) > 6 * 32 * GROUP / 2
    assert (max(map(len, versions)) == 1) == one_version
