"""Virtual workers against the simulator and the plan: what takes how long, who reads what, how old it is."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rlflow.backends.ray_runtime.deliveries import Reading
from rlflow.backends.ray_runtime.virtual.clock import Clock
from rlflow.backends.simulator.run import simulate
from rlflow.diagnostics import RunFailure
from rlflow.plan import Plan, RunStage

from .conftest import FakeTime, Team

NewTeam = Callable[..., Team]


def events(folder: Path, pool: str, first: int = 0) -> list[dict[str, Any]]:
    text = (folder / "trace" / f"{pool}-{first}.jsonl").read_text("utf-8")
    return [json.loads(line) for line in text.splitlines()]


def test_workers_need_no_torch() -> None:
    code = (
        "import sys, rlflow.backends.ray_runtime.virtual.worker\n"
        "print(*{'torch', 'transformers', 'rlflow.backends.simulator'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == ""


def test_a_step_takes_what_the_simulator_says(team: NewTeam, fused_plan: Plan, fake_time: FakeTime) -> None:
    """Nothing but sleeps passes time here, so the step is exactly the simulated one, whatever the speed-up."""
    crew = team(fused_plan, speed_up=4.0, ranks_per_worker=16, stated={"digits": 0.01, "adv": 0.002})
    reports = crew.run(3, lambda: fake_time.clock(4.0))
    assert [report["step"] for report in reports] == [1, 2, 3, 3]
    assert reports[-1] == {"ended": True, "step": 3, "checkpoint": ""}
    simulated = float(simulate(fused_plan, _stated({"digits": 0.01, "adv": 0.002})).period) / 1e6
    for report in reports[:-1]:
        assert report["data"]["timing_s/step"] == pytest.approx(simulated, rel=1e-6)
        assert report["data"]["virtual/main/slept_s"] == pytest.approx(simulated / 4, rel=1e-6)
        assert report["data"]["virtual/main/overhead_ms"] == pytest.approx(0, abs=0.1)
    wanted = [i.id for i in fused_plan.programs[0].step if i.kind != "checkpoint"] * 3
    recorded = events(crew.folder, "main")
    assert [event["instruction"] for event in recorded if event["kind"] != "call"] == wanted
    took = {e["stage"]: e["duration_us"] for e in recorded if e["kind"] == "run" and e["step"] == 2}
    for estimate in fused_plan.estimates:
        assert took[estimate.stage] == pytest.approx(estimate.us, abs=2)


def _stated(times: dict[str, float]) -> Any:
    from rlflow.backends.simulator.run import Options

    return Options(steps=2, stated=times)


@pytest.mark.parametrize("each", [16, 4])
def test_two_pools_keep_the_order_and_the_bound(team: NewTeam, async_plan: Plan, each: int) -> None:
    crew = team(async_plan, speed_up=10.0, ranks_per_worker=each)
    reports = crew.run(5, lambda: Clock(10.0, 0.0))
    assert not [report for report in reports if isinstance(report, RunFailure)]
    steps = [r for r in reports if "age/samples/max" in r.get("data", {})]
    assert [r["step"] for r in steps] == [1, 2, 3, 4, 5]
    assert [r["data"]["age/samples/max"] for r in steps] == [0, 1, 1, 1, 1]
    versions = [e["version"] for e in events(crew.folder, "rollout") if e["kind"] == "run" and e["stage"] == "samples"]
    assert versions == [0, 0, 1, 2, 3]
    # Every rank puts a part of its own, and every replica of the learner takes once.
    rollouts = {r["step"]: r["data"] for r in reports if "virtual/rollout/messages" in r.get("data", {})}
    queues = 2
    assert rollouts[5]["virtual/rollout/messages"] >= queues * 16, "a part of every rank for each queue"


def test_the_queue_holds_the_source_back(team: NewTeam, async_plan: Plan) -> None:
    """The learner sleeps long: rollout may be two batches ahead, one in the queue for each step of staleness."""
    crew = team(async_plan, speed_up=10.0, ranks_per_worker=16, stated={"actor.train": 1.0, "samples": 0.01})
    crew.run(4, lambda: Clock(10.0, 0.0))
    # Who waits for a version may go on before its publisher has heard that it is out.
    trained = {e["step"]: e["start_us"] for e in events(crew.folder, "learner") if e["kind"] == "publish"}
    begun = {
        e["step"]: e["start_us"]
        for e in events(crew.folder, "rollout")
        if e["stage"] == "samples" and e["kind"] == "run"
    }
    for step in (3, 4):
        assert begun[step] >= trained[step - 2], "the weights of two steps before"


def test_samples_that_are_too_old_are_an_error(
    team: NewTeam, async_plan: Plan, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Reading, "of_step", lambda self, step: 0)
    crew = team(async_plan, speed_up=20.0, ranks_per_worker=16)
    worker = crew.worker(1)
    rollout = crew.worker(0)
    found: list[Any] = []
    import threading

    thread = threading.Thread(target=lambda: [None for _ in rollout.run(0, 3)], daemon=True)
    thread.start()
    found = list(worker.run(0, 3))
    failure = found[-1]
    assert isinstance(failure, RunFailure)
    assert failure.code == "RLF5058"
    assert failure.message == "step 3 trains on a sample that is 2 steps old, and the plan promises 1"
    assert failure.stage == "actor.train"
    thread.join(30)


def test_a_row_that_is_lost_is_an_error(team: NewTeam, async_plan: Plan) -> None:
    from rlflow.backends.ray_runtime.virtual.edges import Ends, Held
    from rlflow.backends.ray_runtime.virtual.rows import drawn

    crew = team(async_plan, ranks_per_worker=16)
    queue = async_plan.queues[0]

    def ends(pool: str) -> Ends:
        return Ends(async_plan, pool, range(16), crew.sizes, crew.queues, crew.post(), crew.end())

    source, target = ends("rollout"), ends("learner")
    rows = drawn(np.arange(512), 16, 0, lambda prompt, sample: 2 + sample % 2, 1.0, 12)
    source.put(queue.id, Held(rows, 512, 0))
    got, depth = target.take(queue.id, 512)
    assert depth == 1
    assert np.array_equal(got.rows.uid, rows.uid)
    assert np.array_equal(got.rows.payload, rows.payload)
    source.put(queue.id, Held(rows, 512, 0))  # the first batch once more
    with pytest.raises(RunFailure, match="samples 0 to 127 came, and those from 512 on are due") as failure:
        target.take(queue.id, 512)
    assert failure.value.code == "RLF5058"


def test_all_pools_stop_after_the_same_step(team: NewTeam, async_plan: Plan) -> None:
    crew = team(async_plan, speed_up=10.0, ranks_per_worker=4)
    crew.control.begin(3)
    crew.control.stop()
    reports = crew.run(50, lambda: Clock(10.0, 0.0))
    assert [report["step"] for report in reports if report.get("ended")] == [3, 3]


def test_lengths_are_those_of_the_simulator(team: NewTeam, async_plan: Plan) -> None:
    """Sample by sample, so that two plans, or a simulation and a run, can be compared."""
    from rlflow.cost.assumed_lengths import assumed_lengths, lengths_of

    facts = next(e.engine for e in async_plan.estimates if e.stage == "samples")
    assert facts is not None
    wide = async_plan.model_copy(
        update={
            "estimates": tuple(
                e.model_copy(update={"engine": facts.model_copy(update={"max_new": 512, "mean_new": 100.0})})
                if e.stage == "samples"
                else e
                for e in async_plan.estimates
            )
        }
    )
    crew = team(wide, speed_up=50.0, ranks_per_worker=16, batch_bytes=1 << 17)
    reports = crew.run(2, lambda: Clock(50.0, 0.0))
    engine = next(e.engine for e in wide.estimates if e.stage == "samples")
    assert engine is not None
    length = lengths_of(assumed_lengths(engine), 7, "samples")
    for step in (1, 2):
        wanted = [length(prompt, sample) for prompt in range(32 * (step - 1), 32 * step) for sample in range(16)]
        data = next(r["data"] for r in reports if r["step"] == step and "response_length/mean" in r["data"])
        assert data["response_length/mean"] == pytest.approx(np.mean(wanted))
        assert data["response_length/max"] == max(wanted)
    assert any(isinstance(i, RunStage) for i in wide.programs[0].step)
