"""Pictures of a flow on its way to a plan, queues and reshards in them, and images with and without Graphviz."""

from __future__ import annotations

import re
import shutil
from functools import cache
from pathlib import Path

import pytest

from rlflow import driver
from rlflow.backends.visualizers.graph import NoDot, picture_of, render_graph, render_image, render_svg
from rlflow.backends.visualizers.graph_parts import Picture
from rlflow.backends.visualizers.svg_fallback import _curves, _place, _runs_through
from rlflow.cli import main
from rlflow.ir.flow import Flow, Stage
from rlflow.plan import Plan

ROOT = Path(__file__).parents[3]
PANGU = ROOT / "examples" / "pangu_ultra_moe.rlflow"
needs_dot = pytest.mark.skipif(shutil.which("dot") is None, reason="Graphviz is not installed")


@cache
def flow(stage: Stage) -> Flow:
    return driver.flow_at(PANGU, stage)


@cache
def pangu() -> Plan:
    return driver.compile(PANGU)


def kinds(picture: Picture) -> dict[tuple[str, str], tuple[str, str]]:
    return {(a.source, a.target): (a.kind, a.label) for a in picture.arrows}


def test_logical_is_what_was_written() -> None:
    picture = picture_of(flow(Stage.LOGICAL))
    assert picture.groups == ()
    assert {box.id: box.inserted_by for box in picture.boxes if box.inserted_by} == {
        "stage.actor.train.old": "insert-old-logprobs"
    }
    samples = next(box for box in picture.boxes if box.id == "stage.samples")
    assert samples.lines == ("samples", "generate n=16 max_new=16384 temperature=1")
    assert kinds(picture)["model.actor", "stage.samples"] == ("weights", "weights")


def test_placed_has_pools_and_layouts() -> None:
    picture = picture_of(flow(Stage.PLACED))
    groups = {group.id: group for group in picture.groups}
    assert groups["pool.rollout"].title == "pool rollout: 1024 x npu on 64 hosts"
    assert groups["pool.rollout"].members == ("stage.batch", "stage.samples")
    samples = next(box for box in picture.boxes if box.id == "stage.samples")
    assert samples.lines[2] == "dp=256 tp=4 pp=1 ep=256"
    assert not any(box.shape in ("queue", "instruction") for box in picture.boxes)


@pytest.mark.parametrize("drawn", ["flow", "plan"])
def test_physical_and_plan_have_queues_reshards_and_staleness(drawn: str) -> None:
    picture = picture_of(flow(Stage.PHYSICAL) if drawn == "flow" else pangu())
    boxes = {box.id: box for box in picture.boxes}
    arrows = kinds(picture)
    reshard = "reshard.actor" if drawn == "flow" else "instruction.step.rollout.reshard:actor"
    assert boxes[reshard].lines == ("reshard actor", "15.2 TiB received, 1.09 s")
    assert boxes[reshard].inserted_by == "insert-reshards"
    assert arrows["model.actor", reshard] == ("weights", "staleness <= 1")
    assert arrows[reshard, "stage.samples"][0] == "weights"
    assert ("model.actor", "stage.samples") not in arrows
    assert arrows["model.actor", "stage.actor.train.old"] == ("weights", "staleness <= 0")
    queue = boxes["queue.samples->learner"]
    assert queue.lines == ("queue samples->learner", "2 batches, 256 partitions")
    assert queue.inserted_by
    assert arrows["stage.samples", queue.id][0] == "data"
    assert arrows[queue.id, "stage.actor.train"] == ("data", "samples: sample 8192/16")
    assert ("stage.samples", "stage.actor.train") not in arrows
    assert not any(queue.id in group.members for group in picture.groups), "a queue is between pools"


def test_the_plan_shows_its_swaps() -> None:
    plan = driver.compile(ROOT / "tests" / "filecheck" / "passes" / "insert_swaps" / "positive.rlflow")
    moves = [i for p in plan.programs for i in p.step if i.kind in ("offload", "onload", "drop")]
    assert moves, "the file no longer swaps: choose another"
    shown = {box.lines[0] for box in picture_of(plan).boxes if box.inserted_by == "insert-swaps"}
    assert {f"{i.kind} {i.object}" for i in moves} == shown  # type: ignore[union-attr]


def test_stage_does_not_ask_for_more_than_it_shows(tmp_path: Path) -> None:
    """A flow whose placement is impossible still has a logical picture."""
    source = tmp_path / "f.rlflow"
    source.write_text(PANGU.read_text("utf-8").replace("tp = 4, ep = 256", "tp = 3, ep = 256"), "utf-8")
    assert picture_of(driver.flow_at(source, Stage.LOGICAL)).boxes
    with pytest.raises(driver.CompileError):
        driver.flow_at(source, Stage.PLACED)


@pytest.mark.parametrize("stage", ["logical", "placed", "physical", "scheduled"])
def test_command(stage: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["graph", str(PANGU), "--stage", stage, "--format", "dot"])
    assert caught.value.code == 0
    drawn = pangu() if stage == "scheduled" else flow(Stage[stage.upper()])
    assert _without_places(capsys.readouterr().out) == _without_places(render_graph(drawn, "dot"))


def _without_places(text: str) -> list[str]:
    return [line.split("tooltip=")[0] for line in text.splitlines()]


def test_a_plan_has_no_earlier_stage(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "plan.json").write_text(pangu().to_json(), "utf-8")
    with pytest.raises(SystemExit) as caught:
        main(["graph", str(tmp_path / "plan.json"), "--stage", "placed"])
    assert caught.value.code == 2
    assert "--stage placed: a plan is what comes last; give the .rlflow file" in capsys.readouterr().err


@needs_dot
@pytest.mark.parametrize(("name", "start"), [("a.png", b"\x89PNG\r\n\x1a\n"), ("a.pdf", b"%PDF-")])
def test_images(name: str, start: bytes, tmp_path: Path) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["graph", str(PANGU), "-o", str(tmp_path / name)])
    assert caught.value.code == 0
    assert (tmp_path / name).read_bytes().startswith(start)


def test_images_without_dot(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", "")
    with pytest.raises(NoDot):
        render_image(pangu(), "png")
    with pytest.raises(SystemExit) as caught:
        main(["graph", str(PANGU), "-o", str(tmp_path / "a.png")])
    assert caught.value.code == 2
    assert "png needs Graphviz" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_a_failing_dot_says_what_it_said(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    broken = tmp_path / "dot"
    broken.write_text("#!/bin/sh\necho 'no layout engine' >&2\nexit 3\n")
    broken.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(NoDot, match="no layout engine"):
        render_image(pangu(), "pdf")
    assert render_svg(pangu())[1] == "built-in"


@pytest.mark.parametrize("stage", [Stage.LOGICAL, Stage.PLACED, Stage.PHYSICAL])
def test_own_layout_of_every_stage(stage: Stage) -> None:
    rects = list(_place(picture_of(flow(stage)))[0].values())
    for number, a in enumerate(rects):
        for b in rects[number + 1 :]:
            assert a.x + a.width <= b.x or b.x + b.width <= a.x or a.bottom <= b.y or b.bottom <= a.y


def test_own_layout_reads_from_left_to_right() -> None:
    frames = {title.split(":")[0]: frame for title, frame, _ in _place(picture_of(pangu()))[1]}
    assert frames["pool rollout"].x < frames["pool cpu"].x < frames["pool learner"].x


@pytest.mark.parametrize("name", ["pangu", "swaps", "logical"])
def test_own_layout_stays_on_its_paper_and_off_its_boxes(name: str) -> None:
    swaps = ROOT / "tests" / "filecheck" / "passes" / "insert_swaps" / "positive.rlflow"
    drawn = {"pangu": pangu, "swaps": lambda: driver.compile(swaps), "logical": lambda: flow(Stage.LOGICAL)}[name]()
    picture = picture_of(drawn)
    rects, _, _, _ = _place(picture)
    svg = render_svg(drawn, "built-in")[0]
    width = float(re.search(r'viewBox="0 0 (\d+)', svg)[1])  # type: ignore[index]
    curves = _curves(picture.arrows, rects)
    assert all(0 <= x <= width for curve in curves for x, _ in curve)
    hidden = [
        (arrow.source, arrow.target)
        for arrow, curve in zip(picture.arrows, curves, strict=True)
        if not arrow.back
        and rects[arrow.target].y > rects[arrow.source].bottom
        and any(_runs_through(curve, box) > 3 for key, box in rects.items() if key not in (arrow.source, arrow.target))
    ]
    assert len(hidden) <= len(curves) // 10, hidden
