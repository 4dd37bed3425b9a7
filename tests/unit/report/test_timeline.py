"""Events as rows: bars of a row never overlap, idle stretches fill what work leaves, ages are the simulator's."""

from __future__ import annotations

from itertools import accumulate, pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlflow import driver
from rlflow.backends.visualizers.report import flows, timeline
from rlflow.backends.visualizers.report.timeline import Labels, measured_track
from rlflow.plan import Plan
from rlflow.reports import Simulation, gather


@pytest.fixture(scope="module")
def plan() -> Plan:
    return driver.compile("examples/async_grpo.rlflow")


def event(start: float, length: float, **more: Any) -> dict[str, Any]:
    base = {"pool": "learner", "rank": 0, "instruction": "run:ref", "stage": "ref", "kind": "run", "step": 1}
    return {**base, "start_us": start, "duration_us": length, "version": None, **more}


def measured(plan: Plan, events: list[dict[str, Any]]) -> dict[str, Any]:
    return measured_track(plan, events, Labels(plan))


def bars(track: dict[str, Any]) -> list[tuple[int, int, int]]:
    """(row, start, end)"""
    starts = accumulate(track["start"])
    return [(row, s, s + length) for row, s, length in zip(track["row"], starts, track["length"], strict=True)]


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.lists(st.tuples(st.integers(0, 50), st.integers(0, 20), st.integers(0, 1)), min_size=1, max_size=25))
def test_bars_of_a_row_do_not_overlap(plan, drawn):
    track = measured(plan, [event(start + 10**15, length, rank=rank) for start, length, rank in drawn])
    found = bars(track)
    assert len(found) == len(drawn)
    for number in range(len(track["rows"])):
        own = [(start, end) for row, start, end in found if row == number]
        assert all(before[1] <= after[0] for before, after in pairwise(own))
    least = min(start for start, _, _ in drawn)
    assert sorted((s, e) for _, s, e in found) == sorted((s - least, s - least + n) for s, n, _ in drawn)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.lists(st.tuples(st.integers(0, 50), st.integers(1, 20), st.booleans()), min_size=1, max_size=25))
def test_work_and_idle_stretches_fill_the_time_once(plan, drawn):
    kinds = {True: {"kind": "wait", "instruction": "wait:digits"}, False: {}}
    track = measured(plan, [event(start, length, **kinds[waits]) for start, length, waits in drawn])
    least = min(start for start, _, _ in drawn)
    busy = {t - least for start, length, waits in drawn if not waits for t in range(start, start + length)}
    idle = track["idle"]
    free = [t for s, n in zip(idle["start"], idle["length"], strict=True) for t in range(s, s + n)]
    assert sorted(free) == sorted(set(range(track["last"])) - busy)


def test_a_pool_of_functions_is_never_idle(plan):
    call = event(50, 10, pool="cpu", kind="call", instruction="call:digits", stage="digits")
    track = measured(plan, [event(0, 10), call, event(90, 10)])
    assert [track["rows"][row]["pool"] for row in track["idle"]["row"]] == ["learner"]
    assert (track["idle"]["start"], track["idle"]["length"]) == ([10], [80])


def test_rows_come_in_the_order_of_the_plan(plan):
    events = [event(0, 1, pool="cpu"), event(0, 1, rank=2), event(0, 1, pool="rollout"), event(0, 1, rank=1)]
    rows = measured(plan, events)["rows"]
    assert [(row["pool"], row["rank"]) for row in rows] == [("rollout", 0), ("learner", 1), ("learner", 2), ("cpu", 0)]


def test_steps_end_with_their_last_event_and_evaluations_are_none(plan):
    events = [event(1000, 10), event(1020, 5), event(1030, 10, step=2), event(990, 5, step=0)]
    track = measured(plan, events)
    assert (track["first_step"], track["ends"]) == (1, [35, 50])


def test_of_a_long_run_the_last_steps_are_shown(plan, monkeypatch):
    monkeypatch.setattr(timeline, "MAX_EVENTS", 25)
    shown, note = timeline.last_steps([event(100 * step + n, 1, step=step) for step in range(1, 9) for n in range(10)])
    assert sorted({event["step"] for event in shown}) == [7, 8]
    assert note == "80 events were recorded; shown are the 20 of steps 7 to 8"


def test_versions_and_ages_of_the_simulation(plan):
    (subject,) = gather(["examples/async_grpo.rlflow"], simulation=Simulation(6))
    simulated = subject.simulated
    labels = Labels(plan)
    track = timeline.simulated_track(plan, simulated, labels)
    checked = 0
    for label, step, version, age in zip(track["label"], track["step"], track["version"], track["age"], strict=True):
        row = labels.rows[label]
        if (row["kind"], row["stage"]) != ("run", "samples"):
            assert age == -1
            continue
        checked += 1
        assert age == step - 1 - version
        assert list(simulated.ages["samples"].get(step - 1, {age: 1})) == [age]
    assert checked >= 6
    assert track["ends"] == [round(end) for end in simulated.ends]


def test_the_critical_cycle_is_marked(plan):
    labels = Labels(plan)
    (subject,) = gather(["examples/async_grpo.rlflow"], simulation=Simulation(2))
    timeline.simulated_track(plan, subject.simulated, labels)
    assert plan.cadence is not None
    marked = {row["text"] for row in labels.rows if row["cycle"]}
    assert plan.cadence.cycle == ("samples", "reshard actor on rollout")
    assert marked == {"run samples", "reshard actor"}


def test_the_memory_table_knows_the_phases_of_the_bars(plan):
    (subject,) = gather(["examples/pangu_ultra_moe.rlflow"], simulation=Simulation(2))
    labels = Labels(subject.plan)
    timeline.simulated_track(subject.plan, subject.simulated, labels)
    phases = {phase.stage for memory in subject.plan.memory for phase in memory.phases}
    assert phases == {row["memory"] for row in labels.rows} & phases
    assert "reshard actor" in phases


def test_queues_and_ages_of_a_run(plan):
    events = []
    for step in (1, 2):
        put = {
            "instruction": "put:samples->learner",
            "kind": "put",
            "stage": "samples",
            "pool": "rollout",
            "step": step,
        }
        take = {"instruction": "take:samples", "kind": "take", "stage": "samples", "step": step}
        sample = {"instruction": "run:samples", "stage": "samples", "pool": "rollout", "step": step, "version": 0}
        events += [event(1000 + 100 * step, 10, **sample), event(1010 + 100 * step, 5, rank=1, **sample)]
        events += [event(1020 + 100 * step, 5, **put), event(1030 + 100 * step, 10, rank=1, **put)]
        events += [event(1000 + 150 * step, 20, **take)]
    (queue,) = flows.measured_queues(plan, events, 1000)
    assert (queue["id"], queue["capacity"]) == ("samples->learner", 2)
    assert queue["points"] == [(0, 0), (140, 1), (170, 0), (240, 1), (320, 0)]
    (ages,) = flows.measured_ages(plan, events, Labels(plan))
    assert (ages["promised"], ages["steps"]) == (1, [[1, [(0, 2)]], [2, [(1, 2)]]])


def test_a_queue_of_a_torn_run_is_left_out(plan):
    take = event(5, 5, instruction="take:samples", kind="take", stage="samples")
    assert flows.measured_queues(plan, [take], 0) == []
