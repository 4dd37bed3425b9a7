"""Hosts that fail: the closed form against runs that are interrupted at random, and what the command says."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from math import inf
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlflow.backends.simulator.failures import Failures, Run, forecast
from rlflow.backends.simulator.run import Options, simulate
from rlflow.cli import main
from rlflow.plan import Plan

MakePlan = Callable[..., Plan]
EXAMPLES = Path(__file__).parents[3] / "examples"


def drawn(run: Run, steps: int, rng: random.Random) -> float:
    """Seconds of one segment: failures interrupt it, and a restart and a cold start come before every other attempt."""
    spent, need = 0.0, steps * run.step_s + run.checkpoint_s
    while True:
        fails = rng.expovariate(run.per_s)
        if fails >= need:
            return spent + need
        spent += fails
        need = run.restart_s + run.cold_s + steps * run.step_s + run.checkpoint_s


@pytest.mark.parametrize(
    ("run", "steps"),
    [
        (Run(10.0, 5.0, 20.0, 1 / 500, 60.0), 8),
        (Run(100.0, 0.0, 0.0, 1 / 300, 0.0), 3),
        (Run(1.0, 30.0, 5.0, 1 / 5000, 600.0), 200),
    ],
)
def test_segments_take_as_long_as_drawn_ones(run: Run, steps: int) -> None:
    rng = random.Random(11)
    draws = 20_000
    assert sum(drawn(run, steps, rng) for _ in range(draws)) / draws == pytest.approx(run.segment(steps), rel=0.03)


@given(
    st.builds(
        Run,
        st.floats(0.1, 5000),
        st.floats(0, 600),
        st.floats(0, 5000),
        st.floats(1e-8, 1e-3),
        st.floats(0, 3600),
    )
)
@settings(max_examples=60, deadline=None)
def test_no_other_number_of_steps_between_checkpoints_is_better(run: Run) -> None:
    best = run.best()
    least = run.mean_step(best)
    nearby = range(max(1, best - 50), best + 50)
    spread = [1, 2, 5, 10, 20, 50, 100, 1000, 10_000]
    assert all(run.mean_step(steps) >= least * (1 - 1e-9) for steps in (*nearby, *spread))


def test_the_best_is_youngs_where_failures_are_rare() -> None:
    """sqrt(2 x checkpoint x mean time between failures) of work between checkpoints (Young 1974)."""
    run = Run(step_s=1.0, checkpoint_s=50.0, cold_s=0.0, per_s=1e-6, restart_s=100.0)
    assert run.best() == pytest.approx((2 * 50 * 1e6) ** 0.5, rel=0.01)
    assert run.mean_step(run.best()) > 1.0


def test_what_never_gets_through_has_no_end() -> None:
    assert Run(1e6, 0.0, 0.0, 1e-2, 0.0).segment(10) == inf


def test_a_plan_that_saves(make_plan: MakePlan) -> None:
    """Checkpoints every 4 steps in a plan of 16 devices on 2 hosts; their time is not counted twice."""
    plan = make_plan("split")
    programs = tuple(
        program.model_copy(
            update={
                "step": tuple(i.model_copy(update={"every": 4}) if i.kind == "checkpoint" else i for i in program.step)
            }
        )
        for program in plan.programs
    )
    saving = plan.model_copy(update={"programs": programs})
    times = {"s": 10.0, "ref": 2.0, "m.train.old": 2.5, "m.train": 3.5, "reshard m": 1.0}
    bare = simulate(saving, Options(stated=times, steps=20))
    for checkpoint, waited in ((8.0, 0.0), (30.0, 19.0)):  # 11 s of it run beside weights and samples
        result = simulate(saving, Options(stated=times | {"checkpoint": checkpoint}, steps=20))
        found = forecast(saving, [result], [bare], Failures(100 * 3600.0, 300.0), checkpoint)
        assert found.hosts == 2
        assert found.between_s == pytest.approx(50 * 3600)
        assert found.every == 4
        expected = Run(19.0, waited, 0.0, 2 / 360_000, 300.0).mean_step(4)
        assert found.step_s == pytest.approx(expected, rel=1e-3)
        assert found.lost == pytest.approx(1 - 19.0 / expected, abs=1e-3)


def test_nothing_is_known_without_a_checkpoint_or_an_end(make_plan: MakePlan) -> None:
    plan = make_plan("split")
    found = forecast(plan, [bare := simulate(plan)], [bare], Failures(3600.0 * 1000, 600.0), 0.0)
    assert found.every is None
    assert found.step_s is None
    assert found.best_every == 1


def test_the_command_says_what_failures_cost(capsys: pytest.CaptureFixture[str]) -> None:
    file, options = EXAMPLES / "async_grpo.rlflow", ["--steps", "3", "--mtbf", "0.5", "--restart", "30"]
    with pytest.raises(SystemExit):
        main(["simulate", str(file), *options, "--set", "save.every=100", "--stage", "checkpoint=0.2"])
    text = capsys.readouterr().out
    assert "with a failure of 4 hosts every 450 s: a step every " in text
    assert "  a checkpoint every " in text
    with pytest.raises(SystemExit):
        main(["simulate", str(file), *options, "--set", "save.every=100", "--format", "json"])
    found = json.loads(capsys.readouterr().out)
    assert found["failures"]["checkpoint_every"] == 100
    assert found["failures"]["step_s"] > found["step_s"]
    assert 0 < found["failures"]["best_lost"] <= found["failures"]["lost"] < 1
    with pytest.raises(SystemExit):
        main(["simulate", str(file), *options, "--sweep", "save.every=10,1000000"])
    table = capsys.readouterr().out.splitlines()
    assert table[0].endswith("lost to failures")
    assert all(line.rstrip().endswith("%") for line in table[1:])


@pytest.mark.parametrize(("mtbf", "restart"), [(0.0, 1.0), (inf, 1.0), (1.0, -1.0), (1.0, inf)])
def test_impossible_failures(mtbf: float, restart: float) -> None:
    with pytest.raises(ValueError, match="time between failures"):
        Failures(mtbf, restart)
