"""Graphs: every renderer shows the same content, whole names survive hostile text, equal plans give equal bytes."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

from rlflow.backends.visualizers import graph
from rlflow.backends.visualizers.graph import GraphFormat, render_graph, render_svg
from rlflow.backends.visualizers.graph_model import build_picture
from rlflow.backends.visualizers.mermaid import escape
from rlflow.plan import Plan

FORMATS: tuple[GraphFormat, ...] = ("dot", "mmd", "svg")
needs_dot = pytest.mark.skipif(shutil.which("dot") is None, reason="Graphviz is not installed")


def svg_words(svg: str) -> str:
    return " ".join(text.strip() for text in ET.fromstring(svg).itertext())


def hostile(plan: Plan) -> Plan:
    """The plan with a data set whose path contains every sign that a drawing language reads."""
    bad = 'a"b\\c\n<d> &amp; `e` {f}[g] #quot; |h| %% 数据 -->'
    first = plan.data[0]
    source = type(first.source)(path=bad, format="jsonl")  # type: ignore[call-arg]
    data = (first.model_copy(update={"source": source}), *plan.data[1:])
    return plan.model_copy(update={"data": data, "flow": 'f"; }'})


class TestPicture:
    def test_inserted_boxes_name_their_pass(self, plan: Plan) -> None:
        marks = {box.lines[0]: box.inserted_by for box in build_picture(plan).boxes if box.inserted_by}
        assert marks == {
            "wait score": "insert-waits",
            "wait grade": "insert-waits",
            "publish actor": "insert-weight-edges",
            "checkpoint every 50 steps": "schedule",
        }

    def test_written_stages_carry_no_mark(self, plan: Plan) -> None:
        assert not any(box.inserted_by for box in build_picture(plan).boxes if box.shape == "stage")

    def test_data_comes_through_the_wait(self, plan: Plan) -> None:
        arrows = {(a.source, a.target): a.kind for a in build_picture(plan).arrows}
        wait = "instruction.step.main.wait.score"
        assert arrows["stage.score", wait] == "order"
        assert arrows[wait, "stage.adv"] == "data"
        assert ("stage.score", "stage.adv") not in arrows

    def test_weights_go_round(self, plan: Plan) -> None:
        arrows = {(a.source, a.target): (a.kind, a.label) for a in build_picture(plan).arrows}
        publish = "instruction.step.main.publish.actor"
        assert arrows["stage.train", publish][0] == "weights"
        assert arrows[publish, "model.actor"] == ("weights", "version +1")
        assert arrows["model.actor", "stage.samples"] == ("weights", "staleness <= 0")

    def test_arrows_name_port_and_rows(self, plan: Plan) -> None:
        labels = {(a.source, a.target): a.label for a in build_picture(plan).arrows if a.kind == "data"}
        assert labels["stage.batch", "stage.samples"] == "prompts: prompt 64"
        assert labels["stage.samples", "stage.train"] == "samples: sample 512/8"
        assert labels["stage.ref", "stage.train"] == "reference: sample 512/8, logprobs:f32"

    def test_pools_and_evaluations_are_groups(self, plan: Plan) -> None:
        groups = {group.id: group for group in build_picture(plan).groups}
        assert set(groups) == {"pool.main", "pool.cpu", "evaluation.heldout"}
        assert groups["pool.cpu"].members == ("stage.score",)
        assert "stage.grade" in groups["evaluation.heldout"].members

    def test_tooltips_name_the_source(self, plan: Plan) -> None:
        assert all("examples/grpo.rlflow:" in box.tooltip for box in build_picture(plan).boxes)


@pytest.mark.parametrize("format", FORMATS)
def test_same_bytes_for_the_same_plan(plan: Plan, format: GraphFormat) -> None:
    again = Plan.from_json(plan.to_json())
    assert render_graph(plan, format) == render_graph(again, format)


@pytest.mark.parametrize("format", FORMATS)
def test_no_trace_of_hash_order_or_tool_version(plan: Plan, format: GraphFormat, tmp_path: Path) -> None:
    file = tmp_path / "plan.json"
    file.write_text(plan.to_json(), encoding="utf-8")
    code = (
        "import sys; from rlflow.plan import Plan; from rlflow.backends.visualizers.graph import render_graph;"
        "plan = Plan.from_json(open(sys.argv[1], encoding='utf-8').read());"
        "sys.stdout.buffer.write(render_graph(plan, sys.argv[2]).encode())"
    )
    outputs = {
        subprocess.run(
            [sys.executable, "-c", code, str(file), format],
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    }
    assert outputs == {render_graph(plan, format).encode()}
    assert b"graphviz version" not in next(iter(outputs)).lower()


@pytest.mark.parametrize("engine", [pytest.param("dot", marks=needs_dot), "built-in"])
def test_svg_shows_every_box_and_label(plan: Plan, engine: graph.SvgEngine) -> None:
    svg, used = render_svg(plan, engine)
    assert used == engine
    words = svg_words(svg)
    picture = build_picture(plan)
    for box in picture.boxes:
        assert all(line in words for line in box.lines)
        assert not box.inserted_by or f"+ {box.inserted_by}" in words
    assert all(arrow.label in words for arrow in picture.arrows)
    assert all(group.title in words for group in picture.groups)
    assert "<!--" not in svg


def test_svg_without_dot(plan: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    svg, used = render_svg(plan)
    assert used == "built-in"
    assert "without Graphviz" in svg
    with pytest.raises(graph.NoDot, match="dot"):
        render_svg(plan, "dot")


def test_svg_with_a_broken_dot(plan: Plan, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    broken = tmp_path / "dot"
    broken.write_text("#!/bin/sh\nexit 3\n")
    broken.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert render_svg(plan)[1] == "built-in"


@needs_dot
def test_dot_accepts_hostile_text(plan: Plan) -> None:
    svg, used = render_svg(hostile(plan))
    assert used == "dot"
    assert "数据" in svg_words(svg)


def test_own_svg_is_well_formed_with_hostile_text(plan: Plan) -> None:
    assert "{f}[g]" in svg_words(render_svg(hostile(plan), "built-in")[0])


class TestMermaid:
    def test_ids_are_plain_and_distinct(self, plan: Plan) -> None:
        text = render_graph(plan, "mmd")
        ids = re.findall(r"^\s+(\S+?)[\[(>]", text, re.MULTILINE)
        assert all(re.fullmatch(r"[A-Za-z0-9_]+", name) for name in ids)
        assert len(set(ids)) == len(ids)

    def test_labels_hold_no_sign_of_the_language(self, plan: Plan) -> None:
        lines = render_graph(hostile(plan), "mmd").splitlines()
        labels = re.findall(r'"([^"]*)"', "\n".join(line for line in lines if not line.startswith("%%")))
        assert labels
        assert not any(re.search(r"[\[\]{}|`<>\\&%]", label.replace("<br/>", "")) for label in labels)

    def test_escape(self) -> None:
        assert escape('a"b\n<c>') == "a#34;b<br/>#60;c#62;"
        assert escape("plain n=8 (x)") == "plain n=8 (x)"

    def test_every_arrow_has_its_line_style(self, plan: Plan) -> None:
        text = render_graph(plan, "mmd")
        styled = [n for part in re.findall(r"linkStyle ([\d,]+)", text) for n in part.split(",")]
        assert sorted(map(int, styled)) == list(range(len(build_picture(plan).arrows)))


def test_own_layout_puts_no_box_on_another(plan: Plan) -> None:
    from rlflow.backends.visualizers.svg_fallback import _place

    rects = list(_place(build_picture(plan))[0].values())
    for i, a in enumerate(rects):
        for b in rects[i + 1 :]:
            apart = a.x + a.width <= b.x or b.x + b.width <= a.x or a.bottom <= b.y or b.bottom <= a.y
            assert apart
