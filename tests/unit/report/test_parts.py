"""Source listings, decisions, traffic, facts, and measurement against prediction."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rlflow import driver
from rlflow.backends.visualizers.report.choices import choice_rows
from rlflow.backends.visualizers.report.colours import FILLS, fills
from rlflow.backends.visualizers.report.facts import Fact, difference, facts_of
from rlflow.backends.visualizers.report.measured import compared, curves_of, profile_words
from rlflow.backends.visualizers.report.placement import placement_of
from rlflow.backends.visualizers.report.program import effects_of, listings
from rlflow.backends.visualizers.report.subject import Ran, Subject
from rlflow.backends.visualizers.report.traffic import matrices
from rlflow.driver import Options
from rlflow.profile.table import MachineFacts, Profile
from rlflow.reports import Simulation, gather, page

EXAMPLES = sorted(Path("examples").glob("*.rlflow"))


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_listings_keep_the_text_and_join_every_span_once(path):
    (subject,) = gather([path], simulation=Simulation(1))
    effects = effects_of(subject)
    found = listings(subject, effects)
    first = []
    for file in found:
        lines = ["".join(piece.text for piece in line) for line in file.lines]
        assert "\n".join(lines) == Path(file.name).read_text("utf-8")
        first += [piece.key for line in file.lines for piece in line if piece.first]
    assert len(first) == len(set(first))
    shown = {key for key, (span, _) in effects.items() if span.file in subject.texts}
    assert set(first) <= shown
    assert len(first) >= 0.7 * len(shown)  # a span that is wholly covered by smaller ones has no place of its own
    assert page([subject]).count("<script") == 2


def test_a_span_is_joined_to_stage_instruction_decision_and_warning(flow_file):
    (subject,) = gather([flow_file], simulation=Simulation(1))
    effects = effects_of(subject)
    by_line: dict[int, list[tuple[str, str]]] = {}
    for span, own in effects.values():
        by_line.setdefault(span.line, []).extend((effect.kind, effect.text) for effect in own)
    kinds = {line: {kind for kind, _ in own} for line, own in by_line.items()}
    assert kinds[4] == {"declares"}
    assert kinds[6] == {"declares", "warning"}
    assert any(text.startswith("warning[RLF1013]: model `spare`") for _, text in by_line[6])
    assert {"stage", "instruction"} <= kinds[11]
    assert any(text.startswith("rollout: reshard actor") for _, text in by_line[11])
    assert "staleness" in kinds[26]
    assert "pinned" in kinds[21]
    boxes = {effect.box for _, own in effects.values() for effect in own if effect.box}
    assert {"stage.samples", "model.actor", "instruction.step.rollout.reshard:actor"} <= boxes


def test_decisions_name_the_runner_up_and_why_it_lost():
    plan = driver.compile("examples/pangu_ultra_moe.rlflow")
    rows = choice_rows(plan)
    (choice,) = [row for row in rows if row.by == "compiler"]
    assert (choice.chosen, choice.runner_up) == ("recompute full, zero 1", "recompute none, zero 1")
    assert choice.why.startswith("does not fit:")
    assert [row.by for row in rows] == sorted(
        (row.by for row in rows), key=("compiler insert-old-logprobs schedule".split()).index
    )


def test_a_runner_up_that_is_faster_has_a_loss_below_zero():
    plan = driver.compile("examples/pangu_ultra_moe.rlflow")
    (choice,) = plan.choices
    for us, words in ((-43_800, "-43.8 ms a step"), (4_050_000, "+4.05 s a step"), (0, "")):
        (row, *_) = choice_rows(plan.model_copy(update={"choices": (choice.model_copy(update={"loss_us": us}),)}))
        assert row.loss == words


def test_without_nodes_the_matrix_is_of_pools():
    plan = driver.compile("examples/pangu_ultra_moe.rlflow")
    (reshard,) = plan.reshards
    (matrix,) = matrices(plan.model_copy(update={"reshards": (reshard.model_copy(update={"traffic": ()}),)}))
    assert (matrix.what, matrix.columns) == ("pool", ("learner", "rollout"))


def test_the_traffic_matrix_holds_all_that_is_received():
    plan = driver.compile("examples/pangu_ultra_moe.rlflow")
    (reshard,) = plan.reshards
    assert sum(count for _, _, count in reshard.traffic) == reshard.received
    entering = {}
    for start, end, count in reshard.traffic:
        if start != end:
            entering[end] = entering.get(end, 0) + count
    assert max(entering.values()) == reshard.node_in
    (matrix,) = matrices(plan)
    assert matrix.columns == ("cloudmatrix384-0", "cloudmatrix384-1")
    assert max(cell.share for _, cells in matrix.rows for cell in cells) == 1
    assert [[bool(cell.text) for cell in cells] for _, cells in matrix.rows] == [[True, False], [True, True]]


def test_hosts_hold_every_device_once():
    plan = driver.compile("examples/async_grpo.rlflow")
    found = [
        (host["name"], index + n, plan.pools[pool].name, rank + n)
        for host in placement_of(plan)
        for index, rank, count, pool in host["devices"]
        for n in range(count)
    ]
    assert sorted(found) == sorted(
        (r.host, r.index, pool.name, r.rank) for pool in plan.pools if pool.device != "functions" for r in pool.ranks
    )
    assert sum(count for host in placement_of(plan) for _, count in host["functions"]) == 8


def test_every_stage_has_a_fill_of_its_own():
    plans = [driver.compile(path) for path in EXAMPLES[:4]]
    found = fills(plans)
    assert set(found) == {stage.id for plan in plans for stage in plan.stages}
    assert len({(fill.colour, fill.texture) for fill in found.values()}) == len(found)
    assert {fill.colour for fill in found.values()} <= set(FILLS)


@pytest.mark.parametrize(
    ("before", "after", "better", "expected"),
    [
        (100.0, 90.0, "low", ("-10%", "better")),
        (100.0, 110.0, "low", ("+10%", "worse")),
        (100.0, 110.0, "high", ("+10%", "better")),
        (100.0, 110.0, "", ("+10%", "")),
        (0.0, 2.0, "low", ("+2", "worse")),
        (5.0, 5.0, "low", ("", "")),
        (None, 5.0, "low", ("", "")),
    ],
)
def test_differences_say_which_way(before, after, better, expected):
    assert difference(Fact("x", "", before, better), Fact("x", "", after, better)) == expected


# --- measured against predicted --------------------------------------------------------------------------------------


def run_of(tmp_path: Path, flow_file: Path, step_us: int) -> Subject:
    """A made-up run of the grpo_arithmetic example, with estimates of 10 ms for sampling and 30 ms for training."""
    plan = driver.compile("examples/grpo_arithmetic.rlflow")
    folder = tmp_path / "run"
    (folder / "trace").mkdir(parents=True)
    times = {"samples": 10_000, "actor.train": 30_000, "ref": 5_000}
    estimates = [
        {"stage": name, "us": us, "measured": "measured", "parts": [["run", us]]} for name, us in times.items()
    ]
    raw = json.loads(plan.to_json())
    raw["estimates"] = estimates
    raw["cadence"] = {"us": 45_000, "cycle": ["samples"], "cycle_us": [45_000], "tokens": 1}
    (folder / "plan.json").write_text(json.dumps(raw), "utf-8")
    (folder / "run.json").write_text(json.dumps({"status": "finished", "seconds": 1.5}), "utf-8")
    events: list[dict[str, Any]] = []
    for step in range(1, 9):
        start = 10**15 + step * step_us
        for name, us in (("samples", 20_000 if step > 2 else 90_000), ("actor.train", 30_000)):
            base = {"pool": "main", "instruction": f"run:{name}", "stage": name, "kind": "run", "version": step - 1}
            for rank in (0, 1):  # the slower rank counts
                events.append({**base, "rank": rank, "step": step, "start_us": start, "duration_us": us // (2 - rank)})
            start += us
    lines = [json.dumps(event) for event in events] + ['{"torn": ', '{"pool": 3}', "[]"]
    (folder / "trace" / "main-0.jsonl").write_text("\n".join(lines), "utf-8")
    rows = [
        {"step": step, "data": {"timing_s/step": step_us / 1e6, "critic/score/mean": step / 10}} for step in range(1, 9)
    ]
    rows.append({"step": 8, "data": {"val/all/score/mean": 0.5}})
    rows.append({"step": 9, "data": {"timing_s/step": float("nan"), "critic/score/mean": "torn"}})
    (folder / "metrics.jsonl").write_text("\n".join(json.dumps(row) for row in rows) + '\n{"step": 9, "da', "utf-8")
    (subject,) = gather([folder], Options(), Simulation(3))
    return subject


def test_errors_are_predicted_over_measured(tmp_path, flow_file):
    subject = run_of(tmp_path, flow_file, 60_000)
    assert subject.simulated is not None
    rows = {row.name: row for row in compared(subject)}
    assert list(rows) == ["step", "samples", "actor.train"]
    assert (rows["samples"].measured, rows["samples"].predicted, rows["samples"].steps) == (20_000, 10_000, 6)
    assert rows["samples"].error == pytest.approx(-0.5)
    assert rows["actor.train"].error == pytest.approx(0)
    assert rows["step"].measured == pytest.approx(60_000)
    assert rows["step"].predicted == pytest.approx(float(subject.simulated.period_us))
    words = {fact.label: fact for fact in facts_of(subject)}
    assert words["measured step"].text == "60 ms"
    assert words["run"].text == "finished"


def test_the_profile_tells_the_machine_from_the_model(tmp_path, flow_file):
    subject = run_of(tmp_path, flow_file, 60_000)
    assert profile_words(subject) == ""
    machine = MachineFacts(system="", architecture="", processor="", cpus=2, memory_bytes=0)
    profile = Profile(
        rlflow_version="0", flow="f", cluster="c", machine=machine, seed=0, steps=5, warm_up=2,
        step_us=50_000, step_low_us=50_000, step_high_us=50_000, stages=(),
    )  # fmt: skip
    words = profile_words(replace(subject, profile=profile))
    apart = float(subject.simulated.period_us) / 50_000 - 1
    assert words.startswith(
        f"Against the step of 50 ms that the profile itself measured, the prediction is at {apart:+.0%} and this run at +20%"
    )


def test_curves_of_a_run(tmp_path, flow_file):
    found = {chart["title"]: chart for chart in curves_of(run_of(tmp_path, flow_file, 60_000))}
    assert list(found) == ["time of a step", "mean reward", "held-out scores"]
    measured, predicted = found["time of a step"]["series"]
    assert measured["points"][0] == (1, 0.06)
    assert [x for x, _ in predicted["points"]] == [1, 8]
    assert found["mean reward"]["series"][0]["points"][-1] == [8, 0.8]
    assert found["held-out scores"]["series"][0] == {"name": "all/score/mean", "points": [[8, 0.5]], "dots": True}


def test_the_page_lays_the_run_over_the_prediction(tmp_path, flow_file, make):
    run_of(tmp_path, flow_file, 60_000)
    found, _ = make(tmp_path / "run")
    assert {"measured", "align"} <= found.ids
    (subject,) = found.data["subjects"]
    assert [track["title"] for track in subject["tracks"]] == ["simulated", "measured"]
    assert subject["tracks"][1]["ends"] == sorted(subject["tracks"][1]["ends"])
    assert "-50 %" in found.text


def test_a_run_that_recorded_nothing(tmp_path, make):
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "plan.json").write_text(driver.compile("examples/grpo_arithmetic.rlflow").to_json(), "utf-8")
    found, _ = make(folder)
    assert "The run recorded no step." in found.text
    assert compared(Subject("x", driver.compile("examples/grpo_arithmetic.rlflow"), ran=Ran("x", {}, [], []))) == []
