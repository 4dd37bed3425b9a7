"""Stated times, estimates, and what is not known."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from rlflow import driver
from rlflow.backends.simulator.run import Options, simulate
from rlflow.diagnostics import RunFailure
from rlflow.plan import Plan

MakePlan = Callable[..., Plan]
EXAMPLES = Path(__file__).parents[3] / "examples"


def test_what_is_not_known_is_said() -> None:
    plan = driver.compile(EXAMPLES / "grpo_arithmetic.rlflow")
    with pytest.raises(RunFailure) as caught:
        simulate(plan, Options(stated={"ref": 1}))
    assert caught.value.code == "RLF4004"
    assert "`samples` and `actor.train` take" in caught.value.message
    assert caught.value.notes == ("the speed of the CPUs of `main` is measured, not stated",)
    assert caught.value.help == ("state it: `--stage samples=SECONDS` `--stage actor.train=SECONDS`",)


def test_stated_times_make_a_cpu_plan_simulable() -> None:
    plan = driver.compile(EXAMPLES / "grpo_arithmetic.rlflow")
    found = simulate(plan, Options(stated={"samples": 2, "ref": 0.5, "actor.train": 1.25}))
    assert found.period == 3_750_000
    # The Python function runs beside the reference, and the rest of it is waited for.
    slow = simulate(plan, Options(stated={"samples": 2, "ref": 0.5, "actor.train": 1.25, "score": 0.75}))
    assert slow.period == 4_000_000


@pytest.mark.parametrize("file", sorted(EXAMPLES.glob("*.rlflow")), ids=lambda file: file.stem)
def test_every_example_can_be_simulated(file: Path) -> None:
    """On one pool a step is the sum of its model stages; on several at least the longest pool."""
    plan = driver.compile(file)
    models = [stage for stage in plan.stages if stage.phase == "step" and stage.layout is not None]
    found = simulate(plan, Options(stated={stage.id: 2.0 for stage in models} | _no_reshards(plan), steps=6))
    pools = Counter(stage.pool for stage in models)
    assert float(found.period) == pytest.approx(2_000_000 * max(pools.values()))


def _no_reshards(plan: Plan) -> dict[str, float]:
    return {f"reshard {i.model}": 0.0 for program in plan.programs for i in program.step if i.kind == "reshard"}


def test_evaluations_are_run_when_asked_for() -> None:
    plan = driver.compile(EXAMPLES / "grpo_arithmetic.rlflow")
    times = {"samples": 2.0, "ref": 0.5, "actor.train": 1.5}
    with pytest.raises(RunFailure, match=r"all\.answers"):
        simulate(plan, Options(stated=times, evaluations=True))
    times |= {"all.answers": 10.0}
    found = simulate(plan, Options(stated=times, evaluations=True, steps=200, warm_up=0))
    assert found.ends[0] == 14_000_000  # before the first step
    assert found.ends[99] == 10_000_000 + 100 * 4_000_000
    assert found.ends[100] == found.ends[99] + 14_000_000  # after every 100
    assert float(found.period) == pytest.approx((found.ends[199] - found.ends[0]) / 199)


def test_an_unknown_name_is_refused(make_plan: MakePlan) -> None:
    with pytest.raises(RunFailure) as caught:
        simulate(make_plan("split"), Options(stated={"reff": 1}))
    assert caught.value.code == "RLF1001"
    assert caught.value.help == ("did you mean `ref`?",)


def test_a_stated_time_replaces_the_estimate_and_the_engines(make_plan: MakePlan) -> None:
    plan = make_plan("one pool", "", "grpo", 64)
    found = simulate(plan, Options(seed=1, stated={"s": 3, "ref": 2, "m.train.old": 1, "m.train": 4}))
    assert found.period == 10_000_000
    assert not found.sampled


def test_a_plan_that_stands_still_says_who_waits_for_what(make_plan: MakePlan) -> None:
    """No plan that compiles does; this one lost an instruction."""
    plan = make_plan("split", "", "grpo", 64)
    programs = [
        program.model_copy(update={"step": tuple(i for i in program.step if i.kind != "publish")})
        for program in plan.programs
    ]
    with pytest.raises(RunFailure) as caught:
        simulate(plan.model_copy(update={"programs": tuple(programs)}), Options(steps=2))
    assert caught.value.code == "RLF3007"
    assert "pool gen waits for version 1 of m" in caught.value.notes
    assert any(note.startswith("pool fit waits for batch 1 of the queue s->fit") for note in caught.value.notes)


def test_a_checkpoint_takes_its_stated_time() -> None:
    plan = driver.compile(EXAMPLES / "grpo_arithmetic.rlflow")
    program = plan.programs[0]
    saving = [i.model_copy(update={"every": 2}) if i.kind == "checkpoint" else i for i in program.step]
    plan = plan.model_copy(update={"programs": (program.model_copy(update={"step": tuple(saving)}),)})
    times = {"samples": 2.0, "ref": 1.0, "actor.train": 1.0, "checkpoint": 6.0}
    found = simulate(plan, Options(stated=times, steps=4, warm_up=0))
    assert found.ends == (4_000_000, 14_000_000, 18_000_000, 28_000_000)
