"""What notebooks show of a program, a plan, a schedule and a run: words, and a picture of them.

Pictures are embedded as images, so that a cell's styles and ids do not meet those of another cell. Nothing is loaded
from anywhere.
"""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any, Protocol

from rlflow.backends.visualizers.curves import learning_curve_svg
from rlflow.backends.visualizers.gantt import gantt_svg
from rlflow.backends.visualizers.graph import render_svg
from rlflow.backends.visualizers.summary import summary_text
from rlflow.diagnostics import Diagnostic
from rlflow.diagnostics.render import render
from rlflow.ir.flow import Flow
from rlflow.plan import Plan

Bundle = dict[str, str]
"""MIME type to text."""


class Program(Protocol):
    """A checked file."""

    @property
    def path(self) -> Path: ...
    @property
    def written(self) -> Flow: ...
    @property
    def warnings(self) -> Sequence[Diagnostic]: ...
    def sentence(self) -> str: ...


class Schedule(Protocol):
    """A plan laid out in time."""

    @property
    def plan(self) -> Plan: ...
    @property
    def events(self) -> Sequence[Mapping[str, Any]]: ...
    def text(self) -> str: ...


class Run(Protocol):
    """A run folder."""

    @property
    def folder(self) -> Path: ...
    @property
    def flow(self) -> str: ...
    @property
    def metrics(self) -> Sequence[Mapping[str, Any]]: ...
    def text(self) -> str: ...


def program_bundle(program: Program) -> Bundle:
    """The dataflow as it was written, and warnings."""
    words = [program.sentence()]
    if program.warnings:
        words.append(render(list(program.warnings), "full"))
    return _bundle(words, _svg(render_svg(program.written)[0]), f"dataflow of {program.path}")


def plan_bundle(plan: Plan) -> Bundle:
    """The graph and the summary."""
    return _bundle([summary_text(plan)], _svg(render_svg(plan)[0]), f"plan of flow {plan.flow}")


def schedule_bundle(schedule: Schedule) -> Bundle:
    """A few steps in time, and what was found over all of them."""
    picture = _svg(gantt_svg(schedule.plan, schedule.events))
    return _bundle([schedule.text()], picture, f"schedule of flow {schedule.plan.flow}")


def run_bundle(run: Run) -> Bundle:
    """The learning curve, where a step has ended, and how the run stands."""
    picture = _svg(learning_curve_svg(run.metrics, run.flow)) if run.metrics else ""
    return _bundle([run.text()], picture, f"learning curve of {run.flow}")


def _svg(text: str) -> str:
    return "data:image/svg+xml;base64," + b64encode(text.encode()).decode("ascii")


def _bundle(words: Sequence[str], picture: str, title: str) -> Bundle:
    text = "\n".join(part.rstrip("\n") for part in words)
    image = f'<img src="{picture}" alt="{escape(title, quote=True)}" style="max-width:100%"/>' if picture else ""
    return {"text/plain": text, "text/html": f"<div>{image}<pre>{escape(text)}</pre></div>"}
