"""Measures of hand-worked simulations."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from rlflow.backends.simulator.report import period_of
from rlflow.backends.simulator.report_study import Mean, Study
from rlflow.backends.simulator.report_text import study_lines, sweep_lines
from rlflow.backends.simulator.run import Options, simulate
from rlflow.backends.visualizers.trace import build_trace
from rlflow.backends.visualizers.trace_rules import validate_trace
from rlflow.plan import Plan

MakePlan = Callable[..., Plan]
TIMES = {"s": 10.0, "ref": 2.0, "m.train.old": 2.5, "m.train": 3.5, "reshard m": 1.0}


def test_shares_ages_and_depths_of_a_synchronous_split(make_plan: MakePlan) -> None:
    """A step: 1 s weights, 10 s samples, 2 s reference, 2.5 s old log-probabilities, 3.5 s training, one after the other."""
    found = simulate(make_plan("split"), Options(stated=TIMES))
    assert found.period == 19_000_000
    assert found.pools["gen"].busy == pytest.approx(10 / 19)
    assert found.pools["gen"].moving == pytest.approx(1 / 19)
    assert found.pools["fit"].busy == pytest.approx(8 / 19)
    assert found.bubble == pytest.approx(1 - (10 + 8) / 2 / 19)
    assert set(found.ages["s"]) == {0}
    assert found.queues["s->fit"].most == 1
    assert found.queues["s->fit"].mean == pytest.approx(18 / 19)  # from the start of the samples to the end of training
    # the first weights are there already
    assert [(float(time) / 1e6, depth) for time, depth in found.depths["s->fit"][:4]] == [
        (0, 0),
        (0, 1),
        (18, 0),
        (19, 1),
    ]
    assert [(float(a) / 1e6, float(b) / 1e6) for a, b, _ in found.work["gen"][:2]] == [(0, 10), (19, 29)]


def test_one_step_of_staleness_overlaps_them(make_plan: MakePlan) -> None:
    """Weights and samples take 11 s, reference and training 8 s beside them; the first batch is fresh."""
    plan = make_plan("split", "staleness m = 1 step, depth = 2 steps")
    found = simulate(plan, Options(stated=TIMES))
    assert found.period == 11_000_000
    assert found.pools["gen"].busy == pytest.approx(10 / 11)
    assert found.pools["fit"].busy == pytest.approx(8 / 11)
    ages = found.ages["s"]
    assert ages[0] == 32 * 8
    assert set(ages) == {0, 1}
    by_step = found.ages_by_step["s"]
    assert (by_step[0], by_step[1]) == ({0: 32 * 8}, {1: 32 * 8})
    assert sum(count for own in by_step.values() for count in own.values()) == sum(ages.values())
    assert found.worst_age == 1


def test_traffic_and_memory_are_those_of_the_plan(make_plan: MakePlan) -> None:
    plan = make_plan("split")
    (moved,) = plan.reshards
    found = simulate(plan, Options(stated=TIMES))
    assert found.links["fit out"].bytes == moved.sent
    assert found.links["gen in"].bytes == moved.busiest
    assert found.links["gen in"].busy == pytest.approx((moved.busiest / max(moved.busiest, moved.sent)) / 19)
    assert found.peak_bytes == {memory.pool: (memory.peak, memory.capacity) for memory in plan.memory}


def test_copies_to_the_host_are_counted_in_full(make_plan: MakePlan) -> None:
    plan = make_plan("small devices", max_new=4096)
    found = simulate(plan)
    moves = [i for program in plan.programs for i in program.step if i.kind in ("offload", "onload")]
    for kind, name in (("offload", "main to host"), ("onload", "main from host")):
        moved = [move for move in moves if move.kind == kind and getattr(move, "from_host", False)]
        expected = sum(move.bytes for move in moved if move.kind in ("offload", "onload"))
        # One device stands for all; a copy may be counted in the step in which it began.
        assert found.links[name].bytes == pytest.approx(expected, rel=0.1)


def test_a_copy_that_stages_no_longer_hide_is_waited_for(make_plan: MakePlan) -> None:
    plan = make_plan("small devices", max_new=4096)
    exposed = sum(i.exposed_us for p in plan.programs for i in p.step if i.kind in ("offload", "onload", "drop"))
    hidden = sum(i.us - i.exposed_us for p in plan.programs for i in p.step if i.kind == "onload" and i.from_host)
    assert hidden > 0
    short = {stage.id: 1e-6 for stage in plan.stages if stage.layout is not None}
    found = simulate(plan, Options(stated=short))
    assert float(found.period) > exposed + len(short)


def test_the_period_is_exact_where_steps_repeat() -> None:
    ends = [10, 13, 20, 23, 30, 33, 40, 43]
    assert period_of(ends, 0, repeats=True) == 5
    assert period_of(ends, 1, repeats=False) == pytest.approx(33 / 7)
    assert period_of([10, 11, 13, 14, 16, 17, 19], 0, repeats=True) == 1.5


def test_intervals_by_student() -> None:
    assert Mean.of([4.0]) == Mean(4.0, None)
    found = Mean.of([1.0, 2.0, 3.0])
    assert found.value == 2
    assert found.half == pytest.approx(4.303 / 3**0.5, rel=1e-3)
    with pytest.raises(ValueError, match="no values"):
        Mean.of([])


@pytest.mark.parametrize(("places", "seed"), [("split", None), ("hybrid", 3), ("small devices", None)])
def test_the_trace_is_one(make_plan: MakePlan, places: str, seed: int | None) -> None:
    plan = make_plan(places, "", "grpo", 64)
    found = simulate(plan, Options(steps=3, seed=seed))
    trace = build_trace(found.events, plan)
    assert validate_trace(trace) == []
    listed = {i.id for program in plan.programs for i in program.step if i.kind != "checkpoint"}
    assert listed <= {event["args"].get("instruction") for event in trace["traceEvents"] if event["ph"] == "X"}
    assert sum(event["name"].startswith("step 1") for event in trace["traceEvents"]) >= len(plan.programs)


def test_a_study_fits_a_screen(make_plan: MakePlan) -> None:
    plan = make_plan("three pools", "staleness m = 1 step", "grpo", 64)
    study = Study(tuple(simulate(plan, Options(steps=3, seed=seed)) for seed in range(2)), sampled=True)
    lines = study_lines(plan, study)
    assert len(lines) <= 40
    assert max(map(len, lines)) <= 120
    assert any("lengths drawn with 2 seeds" in line for line in lines)
    assert any("at most 1 is promised" in line for line in lines)
    found = study.to_json()
    assert found["step_s_interval"][0] <= found["step_s"] <= found["step_s_interval"][1]
    assert found["ages"]["s"]["worst"] <= 1


def test_a_sweep_is_a_table(make_plan: MakePlan) -> None:
    study = Study((simulate(make_plan("split"), Options(stated=TIMES)),), sampled=False)
    head, first, second = sweep_lines(["a"], [(["1"], study), (["22"], "error[RLF2004]: it does not fit")])
    assert head.split() == ["a", "step", "tokens/s", "idle", "worst", "age"]
    assert first.split()[:3] == ["1", "19", "s"]
    assert second == "22  error[RLF2004]: it does not fit"


def test_samples_thrown_out_of_a_full_cache_are_counted(make_plan: MakePlan) -> None:
    """Engines whose cache holds two of the longest responses: without headroom they throw out and compute again."""
    plan = make_plan("one pool", "", "grpo", 1024)
    small = tuple(
        e if e.engine is None else e.model_copy(update={"engine": e.engine.model_copy(update={"kv_tokens": 2600})})
        for e in plan.estimates
    )
    plan = plan.model_copy(update={"estimates": small})
    studies = [Study((simulate(plan, Options(steps=3, seed=0, headroom=h)),), True) for h in (0, 1024, None)]
    vllm, longest, usual = (study.first.thrown_out["s"] for study in studies)
    assert vllm.samples > 50
    assert vllm.tokens > 256 * vllm.samples
    assert longest.samples == longest.tokens == 0
    assert usual.samples < vllm.samples / 5
    text = "\n".join(study_lines(plan, studies[0]))
    assert "thrown out of the full cache of s: " in text
    assert "thrown out" not in "\n".join(study_lines(plan, studies[1]))
    assert studies[0].to_json()["thrown_out"]["s"]["samples_per_step"] == vllm.samples
