"""Generate stages on engines, against an engine that is run alone, and the facts that a plan keeps about them."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from rlflow.backends.simulator.engine import Engine
from rlflow.backends.simulator.engine_messages import Request
from rlflow.backends.simulator.run import Options, simulate
from rlflow.backends.simulator.run_engines import settings_of_engine
from rlflow.cost.assumed_lengths import assumed_lengths, lengths_of
from rlflow.passes.analysis.engine_facts import bands_of
from rlflow.plan import Plan
from rlflow.plan_decisions import EngineEstimate

MakePlan = Callable[..., Plan]


def facts_of(plan: Plan) -> EngineEstimate:
    found = next(estimate.engine for estimate in plan.estimates if estimate.stage == "s")
    assert found is not None
    return found


def test_a_batch_takes_as_long_as_engines_alone(make_plan: MakePlan) -> None:
    """Samples are dealt one by one to the engine with the fewest; the slowest engine sets the time."""
    plan = make_plan("one pool", "", "grpo", 64)
    facts, length = facts_of(plan), lengths_of(assumed_lengths(facts_of(plan)), 4, "s")
    assert facts.lock_step == 1
    requests: list[list[Request]] = [[] for _ in range(facts.replicas)]
    for sample in range(32 * 8):
        group, member = divmod(sample, 8)
        request = Request(sample, facts.prompt_tokens, length(group, member), group)
        requests[sample % facts.replicas].append(request)
    alone = max(Engine(settings_of_engine(facts)).run(batch)[-1].time for batch in requests)
    found = simulate(plan, Options(steps=1, warm_up=0, seed=4))
    event = next(e for e in found.events if e["instruction"] == "run:s" and e["step"] == 1)
    assert event["duration_us"] / 1e6 == pytest.approx(alone, rel=1e-9)


def test_drawn_lengths_have_the_mean_that_the_estimate_assumes(make_plan: MakePlan) -> None:
    facts = facts_of(make_plan("one pool"))
    length = lengths_of(assumed_lengths(facts), 0, "s")
    drawn = [length(prompt, sample) for prompt in range(4000) for sample in range(4)]
    assert sum(drawn) / len(drawn) == pytest.approx(facts.mean_new, rel=0.05)
    assert max(drawn) <= facts.max_new
    assert min(drawn) >= 1


@pytest.mark.parametrize("kinks", [[(0.03, 0.0)], [(0.03, 1e-4)], [(0.03, 0.0), (0.002, 4e-4)]])
def test_bands_are_close_to_the_step_time(kinks: list[tuple[float, float]]) -> None:
    """At every batch size, for the largest of some lines: reading weights, then computing with them."""

    def seconds(running: int) -> float:
        return max(fixed + each * running for fixed, each in kinks)

    bands = bands_of(seconds, 256)
    assert [band[0] for band in bands] == sorted({band[0] for band in bands})
    assert bands[-1][0] == 256
    assert len(bands) <= 3 * len(kinks)
    for running in range(1, 257):
        _, fixed, each = next(band for band in bands if band[0] >= running)
        assert fixed + each * running == pytest.approx(seconds(running), rel=0.02)
        assert fixed >= 0
        assert each >= 0


def test_bands_follow_experts_that_a_larger_batch_touches() -> None:
    def seconds(running: int) -> float:
        return 0.01 + 0.04 * (1 - (1 - 8 / 256) ** running)

    for last, fixed, each in bands_of(seconds, 100):
        assert fixed + each * last == pytest.approx(seconds(last), rel=1e-5)
    for running in range(1, 101):
        _, fixed, each = next(band for band in bands_of(seconds, 100) if band[0] >= running)
        assert fixed + each * running == pytest.approx(seconds(running), rel=0.02)


def test_estimates_and_engines_agree(make_plan: MakePlan) -> None:
    """Two models of the same batch: closed form against events, with drawn lengths."""
    plan = make_plan("one pool")
    block = next(estimate.us for estimate in plan.estimates if estimate.stage == "s")
    found = simulate(plan, Options(steps=6, seed=0))
    runs = [e["duration_us"] for e in found.events if e["instruction"] == "run:s"]
    assert sum(runs) / len(runs) == pytest.approx(block, rel=0.1)
