"""Random times and random lengths: accepted plans never stand still, and no sample is older than the plan states."""

from __future__ import annotations

from collections.abc import Callable
from hashlib import blake2b

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rlflow.backends.simulator.clock import Time
from rlflow.backends.simulator.report import Result
from rlflow.backends.simulator.run import Options, simulate
from rlflow.plan import Plan

MakePlan = Callable[..., Plan]

RULES = [
    "",
    *(
        f"staleness m = {s} step{'s' * (s > 1)}, admit {rule}"
        for s in (1, 2, 3)
        for rule in ("in_order", "slack_edf", "wait", "evict", "count")
    ),
    *(f"staleness m = {s} steps, admit slack_edf, burst = {g} steps" for s, g in ((2, 2), (2, 3), (3, 2), (3, 3))),
    "staleness m = 2 steps, burst = 3 steps",
    *(
        f"{stale}trigger s at {share}%, carry {carry}"
        for stale in ("", "staleness m = 1 step\n", "staleness m = 2 steps\n")
        for share, carry in ((40, "partial"), (75, "partial"), (70, "finish"), (50, "nothing"))
    ),
]
PLACES = [("grpo", name) for name in ("split", "hybrid", "three pools")] + [("ppo", "critic apart"), ("remax", "split")]
FEW = settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def check_promises(plan: Plan, found: Result, steps: int) -> None:
    for stage, ages in found.ages.items():
        promised = found.promised[stage]
        rows = 32 * 8
        assert sum(ages.values()) <= rows * (steps + 16)
        assert promised is None or max(ages) <= promised
    assert len(found.ends) == steps
    assert list(found.ends) == sorted(found.ends)
    assert all(0 <= pool.busy <= 1 + 1e-9 for pool in found.pools.values())


@given(case=st.sampled_from(PLACES), rule=st.sampled_from(RULES), seed=st.integers(0, 10**6), lopsided=st.booleans())
@FEW
def test_blocks_of_random_times(
    make_plan: MakePlan, case: tuple[str, str], rule: str, seed: int, lopsided: bool
) -> None:
    plan = make_plan(case[1], rule, case[0], 64)

    def draw(name: str, step: int, known: Time) -> Time:
        word = blake2b(f"{seed}/{name}/{step}".encode(), digest_size=4).digest()
        drawn = int.from_bytes(word, "little") % 1000
        return drawn**4 if lopsided else drawn

    check_promises(plan, simulate(plan, Options(steps=30, warm_up=0, draw=draw)), 30)


@given(
    case=st.sampled_from([("grpo", "lent"), ("grpo", "lent by two"), ("remax", "lent")]),
    rule=st.sampled_from([rule for rule in RULES if "trigger" not in rule]),
    seed=st.integers(0, 10**6),
    engines=st.booleans(),
)
@settings(FEW, max_examples=25)
def test_pools_that_lend_their_devices(
    make_plan: MakePlan, case: tuple[str, str], rule: str, seed: int, engines: bool
) -> None:
    plan = make_plan(case[1], rule, case[0], 64)

    def draw(name: str, step: int, known: Time) -> Time:
        word = blake2b(f"{seed}/{name}/{step}".encode(), digest_size=4).digest()
        return (int.from_bytes(word, "little") % 1000) ** 2

    options = Options(steps=6, warm_up=0, seed=seed) if engines else Options(steps=20, warm_up=0, draw=draw)
    found = simulate(plan, options)
    check_promises(plan, found, options.steps)
    assert all(promised == 0 for stage, promised in found.promised.items() if stage.endswith(".on.fit"))


@given(case=st.sampled_from(PLACES), rule=st.sampled_from(RULES), seed=st.integers(0, 10**6))
@settings(FEW, max_examples=12)
def test_engines_with_drawn_lengths(make_plan: MakePlan, case: tuple[str, str], rule: str, seed: int) -> None:
    plan = make_plan(case[1], rule, case[0], 64)
    found = simulate(plan, Options(steps=6, warm_up=0, seed=seed))
    assert found.sampled
    check_promises(plan, found, 6)


def test_count_exceeds_what_a_hard_rule_keeps(make_plan: MakePlan) -> None:
    """So the bounds above are tested against lengths that break them where nothing holds them."""
    worst = {
        rule: simulate(
            make_plan("three pools", f"staleness m = 3 steps, admit {rule}"), Options(steps=8, seed=0)
        ).worst_age
        for rule in ("count", "slack_edf")
    }
    assert worst["slack_edf"] <= 3 < worst["count"]


@pytest.mark.parametrize("seed", [None, 5])
def test_the_same_again(make_plan: MakePlan, seed: int | None) -> None:
    plan = make_plan("hybrid", "staleness m = 2 steps\ntrigger s at 40%, carry partial", "grpo", 64)
    assert simulate(plan, Options(steps=6, seed=seed)) == simulate(plan, Options(steps=6, seed=seed))


def test_seeds_differ(make_plan: MakePlan) -> None:
    plan = make_plan("split", "staleness m = 1 step", "grpo", 64)
    assert simulate(plan, Options(steps=4, seed=1)).ends != simulate(plan, Options(steps=4, seed=2)).ends


def test_plans_draw_the_same_lengths(make_plan: MakePlan) -> None:
    """Common random numbers: two placements train on the same tokens where samples come in order."""
    options = Options(steps=5, warm_up=2, seed=9)
    runs = [simulate(make_plan(name, "", "grpo", 64), options) for name in ("split", "one pool")]
    assert runs[0].tokens_per_step == runs[1].tokens_per_step > 0
    assert all(result.tokens_drawn for result in runs)


@pytest.mark.parametrize("places", ["one pool", "split"])
def test_a_model_that_nobody_trains_generates(make_plan: MakePlan, places: str) -> None:
    """Its samples have no age; only the queue holds it back."""
    plan = make_plan(places, "", "teacher", 64)
    found = simulate(plan, Options(steps=6, seed=2))
    assert found.sampled
    assert found.ages == {}
    assert plan.cadence is not None
    assert float(found.period) == pytest.approx(plan.cadence.us, rel=0.25)


def test_overlap_makes_the_period_shorter_than_blocks(make_plan: MakePlan) -> None:
    """A stage that generates ahead fills the tail of one batch with the next, which one block of time cannot."""
    plan = make_plan("split", "staleness m = 3 steps, admit slack_edf", "grpo", 1024)
    blocks, engines = simulate(plan), simulate(plan, Options(steps=8, seed=0))
    assert float(engines.period) < 0.9 * float(blocks.period)


def test_early_start_on_the_same_batch_hides_training(make_plan: MakePlan) -> None:
    whole = simulate(make_plan("split", "", "grpo", 1024), Options(steps=4, seed=0))
    early = simulate(make_plan("split", "trigger s at 50%, carry nothing", "grpo", 1024), Options(steps=4, seed=0))
    assert early.worst_age == whole.worst_age == 0
    assert float(early.period) < float(whole.period)


@pytest.mark.parametrize("carry", ["partial", "finish", "nothing"])
def test_a_step_takes_time_for_the_samples_that_it_has(make_plan: MakePlan, carry: str) -> None:
    """What a trigger carries over is trained later: a step with half of the samples takes half of the time."""
    plan = make_plan("split", f"trigger s at 50%, carry {carry}", "grpo", 1024)
    found = simulate(plan, Options(steps=8, warm_up=0, seed=0))
    train = next(stage.id for stage in plan.stages if stage.op.kind == "train")
    whole = next(estimate.us for estimate in plan.estimates if estimate.stage == train)
    spent = {e["step"]: e["duration_us"] for e in found.events if e["instruction"] == f"run:{train}"}
    if carry == "nothing":  # all of the batch, with waits for its second half in between
        assert all(us >= 0.999 * whole for us in spent.values())
        return
    shares = [spent[step] / whole for step in sorted(spent)]
    assert all(0.4999 <= share <= 1.0001 for share in shares)
    assert min(shares) < 0.9
