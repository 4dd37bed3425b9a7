"""The Python interface: each step takes a file or what the one before gave, and refuses what it cannot use."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest

import rlflow

ROOT = Path(__file__).parents[3]
PANGU = ROOT / "examples" / "pangu_ultra_moe.rlflow"
SMALL = ROOT / "examples" / "grpo_arithmetic.rlflow"


@cache
def pangu() -> rlflow.Plan:
    return rlflow.compile(PANGU)


def test_every_name_is_there() -> None:
    assert {name for name in rlflow.__all__ if getattr(rlflow, name) is None} == set()
    assert set(rlflow.__all__) <= set(dir(rlflow))
    with pytest.raises(AttributeError, match="no attribute 'simulat'"):
        rlflow.simulat  # type: ignore[attr-defined]  # noqa: B018


def test_check_then_compile_is_compile() -> None:
    program = rlflow.check(PANGU)
    assert isinstance(program, rlflow.Program)
    assert "7 stages on cluster `supernodes`" in repr(program)
    assert rlflow.compile(program) == pangu()


def test_a_plan_file(tmp_path: Path) -> None:
    (tmp_path / "plan.json").write_text(pangu().to_json(), "utf-8")
    assert rlflow.compile(tmp_path / "plan.json") == pangu()


@pytest.mark.parametrize(
    "how",
    [
        {"overrides": {"batch.count": 8, "group": 4}},
        {"overrides": ["batch.count=8", "group=4"]},
        {"options": rlflow.Options(overrides=("batch.count=8", "group=4"))},
        {"options": rlflow.Options(overrides=("batch.count=8",)), "overrides": {"group": 4}},
    ],
)
def test_overrides(how: dict[str, Any]) -> None:
    plan = rlflow.compile(SMALL, **how)
    op = plan.stage("samples").op
    assert op.kind == "generate"
    assert op.n == 4
    assert plan.overrides == ("batch.count=8", "group=4")


def test_values_of_overrides_are_written_as_the_language_does() -> None:
    from rlflow.api import _value

    assert [_value(v) for v in (True, 0.5, [1, 2], "adamw(lr = 1e-3)")] == ["true", "0.5", "[1, 2]", "adamw(lr = 1e-3)"]


def test_options_of_what_is_compiled_already(tmp_path: Path) -> None:
    (tmp_path / "plan.json").write_text(pangu().to_json(), "utf-8")
    for source in (pangu(), rlflow.check(PANGU), tmp_path / "plan.json"):
        with pytest.raises(TypeError):
            rlflow.simulate(source, overrides={"group": 4})
    with pytest.raises(TypeError, match="is one text"):
        rlflow.compile(SMALL, overrides="group=4")


def test_errors_are_values(tmp_path: Path) -> None:
    (tmp_path / "f.rlflow").write_text(PANGU.read_text("utf-8").replace("tp = 4, ep", "tp = 3, ep"), "utf-8")
    with pytest.raises(rlflow.CompileError) as caught:
        rlflow.compile(tmp_path / "f.rlflow")
    assert all(isinstance(found, rlflow.Diagnostic) for found in caught.value.diagnostics)
    (tmp_path / "plan.json").write_text("{}", "utf-8")
    with pytest.raises(rlflow.RunFailure) as failed:
        rlflow.compile(tmp_path / "plan.json")
    assert failed.value.code == "RLF4001"
    with pytest.raises(FileNotFoundError):
        rlflow.check(tmp_path / "nowhere.rlflow")


# --- schedules ---------------------------------------------------------------------------------------------------------


def test_schedule(tmp_path: Path) -> None:
    schedule = rlflow.simulate(pangu(), steps=6)
    assert pangu().cadence is not None
    assert schedule.step_s == pytest.approx(pangu().cadence.us / 1e6)  # type: ignore[union-attr]
    assert schedule.worst_age == 1
    assert schedule.idle["learner"] == pytest.approx(0, abs=1e-6)
    assert 0.2 < schedule.idle["rollout"] < 0.4
    assert schedule.to_json()["steps"] == 6
    assert schedule.text().startswith("flow pangu_ultra_moe on cluster supernodes: 6 steps")
    schedule.write_trace(tmp_path / "t.json")
    assert json.loads((tmp_path / "t.json").read_text("utf-8"))["traceEvents"]


def test_seeds_draw_lengths() -> None:
    schedule = rlflow.simulate(ROOT / "examples" / "async_grpo.rlflow", steps=2, seeds=2)
    assert schedule.to_json()["seeds"] == 2
    assert len(schedule.study.results) == 2


def test_times_that_are_not_known() -> None:
    with pytest.raises(rlflow.RunFailure) as failed:
        rlflow.simulate(SMALL)
    assert failed.value.code == "RLF4004"
    stated = {"samples": 2.0, "ref": 1.0, "actor.train": 3.0}
    assert rlflow.simulate(SMALL, stage=stated, steps=3).step_s == pytest.approx(6.0)


@pytest.mark.parametrize("wrong", [{"steps": 0}, {"seeds": -1}])
def test_numbers_that_make_no_sense(wrong: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="at least 1 and 0"):
        rlflow.simulate(pangu(), **wrong)  # type: ignore[arg-type]


# --- runs --------------------------------------------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "plan.json").write_text(pangu().to_json(), "utf-8")
    (tmp_path / "run.json").write_text('{"flow": "pangu_ultra_moe", "status": "running", "steps": 9}', "utf-8")
    rows = [
        {"step": 0, "data": {"val/held/mean": 0.25}},
        {"step": 1, "data": {"training/global_step": 1.0, "critic/score/mean": 0.5, "timing_s/step": 2.0}},
        {"step": 2, "data": {"training/global_step": 2.0, "critic/score/mean": 0.75, "timing_s/step": 2.0}},
    ]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows) + '{"torn', "utf-8")
    for step in (2, 10):
        (tmp_path / "checkpoints" / f"global_step_{step}").mkdir(parents=True)
    (tmp_path / "checkpoints" / "global_step_11.partial").mkdir()
    return tmp_path


def test_a_run_folder(folder: Path) -> None:
    run = rlflow.Run(folder)
    assert (run.flow, run.status, run.step) == ("pangu_ultra_moe", "running", 2)
    assert run.series("critic/score/mean") == [(1, 0.5), (2, 0.75)]
    assert run.checkpoint == folder / "checkpoints" / "global_step_10"
    assert run.plan == pangu()
    text = run.text()
    assert "flow pangu_ultra_moe: running, step 2 of 9" in text
    assert "mean reward: 0.500 in the first step, 0.625 over the last 2" in text
    assert "held out held: 0.250 first" in text
    (folder / "metrics.jsonl").write_text("", "utf-8")
    assert run.step == 0, "read when asked for"


def test_no_run_folder(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"not a run folder: no plan\.json in it"):
        rlflow.Run(tmp_path)


def test_run_refuses_a_folder_in_use(folder: Path) -> None:
    with pytest.raises(Exception, match="is not empty"):
        rlflow.run(SMALL, run_dir=folder)


# --- notebooks ---------------------------------------------------------------------------------------------------------


def test_everything_is_shown(folder: Path) -> None:
    shown = {
        "program": rlflow.check(PANGU),
        "plan": pangu(),
        "schedule": rlflow.simulate(pangu(), steps=3),
        "run": rlflow.Run(folder),
    }
    for value in shown.values():
        bundle = value._repr_mimebundle_()
        assert set(bundle) == {"text/plain", "text/html"}
        assert "pangu_ultra_moe" in bundle["text/plain"]
        html = bundle["text/html"]
        assert html.count("<img ") == 1
        assert 'src="data:image/svg+xml;base64,' in html
        assert "<script" not in html
        assert "http" not in html.replace("http://www.w3.org", "")


def test_what_a_notebook_includes_and_excludes() -> None:
    assert set(pangu()._repr_mimebundle_(include=["text/plain"])) == {"text/plain"}
    assert set(pangu()._repr_mimebundle_(exclude={"text/html"})) == {"text/plain"}


def test_a_run_before_its_first_step(folder: Path) -> None:
    (folder / "metrics.jsonl").unlink()
    (folder / "run.json").unlink()
    bundle = rlflow.Run(folder)._repr_mimebundle_()
    assert "not started" in bundle["text/plain"]
    assert "<img" not in bundle["text/html"]


def test_values_that_cannot_be_shown_say_so(folder: Path) -> None:
    """No traceback in place of a value, whatever is wrong with it."""
    broken: list[Any] = [rlflow.Plan.model_construct(flow="f"), pangu().model_copy(update={"stages": (None,)})]
    (folder / "metrics.jsonl").write_text('{"step": 1}\n', "utf-8")
    broken.append(rlflow.Run(folder))
    broken.append(rlflow.Schedule(pangu(), None))  # type: ignore[arg-type]
    for value in broken:
        bundle = value._repr_mimebundle_()
        assert set(bundle) == {"text/plain"}
        assert "cannot be shown" in bundle["text/plain"]


def test_hostile_text_stays_text(tmp_path: Path) -> None:
    hostile = "<script>alert('&')</script>"
    bundle = pangu().model_copy(update={"flow": hostile})._repr_mimebundle_()
    assert "<script" not in bundle["text/html"]
    assert hostile in bundle["text/plain"]


def test_bars_of_a_schedule() -> None:
    from xml.etree import ElementTree

    from rlflow.backends.visualizers.gantt import gantt_svg

    events = rlflow.simulate(pangu(), steps=5).events
    svg = gantt_svg(pangu(), events)
    texts = [text.strip() for text in ElementTree.fromstring(svg).itertext() if text.strip()]
    assert "rollout" in texts
    assert "cpu" not in texts, "a pool in which nothing takes time has no row"
    last = max(e["step"] for e in events if e["stage"] == "actor.train" and e["kind"] == "run")
    assert [t for t in texts if t.startswith("end of step")] == [f"end of step {n}" for n in range(last - 3, last + 1)]
    assert sum(t.startswith("actor.train, step") for t in texts) == 4
    assert "no step" in gantt_svg(pangu(), [])
