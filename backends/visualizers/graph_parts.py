"""Parts that pictures of a flow and of a plan are made of, and what both draw alike.

Renderers (dot, Mermaid, own SVG) draw these values, so their content cannot drift apart.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, Protocol

from rlflow.amounts import seconds, size
from rlflow.backends.visualizers.palette import stroke
from rlflow.backends.visualizers.words import describe_source
from rlflow.ir.ops import (
    DatasetScorer,
    DataSource,
    EnvironmentSource,
    FrozenModel,
    Generate,
    ModelSource,
    Op,
    RewardSource,
    Score,
    Take,
    ValueModel,
)

Shape = Literal["data", "model", "reward", "stage", "instruction", "queue"]
EdgeKind = Literal["data", "weights", "order", "uses"]

MAX_TYPE = 28
"""Characters of a type on an arrow; the whole text is in the tooltip."""


@dataclass(frozen=True, slots=True)
class Box:
    """One node of the picture. `lines[0]` is its name."""

    id: str
    shape: Shape
    lines: tuple[str, ...]
    colour: str
    tooltip: str
    inserted_by: str = ""
    """The pass that put it there; empty when the user wrote it."""


@dataclass(frozen=True, slots=True)
class Arrow:
    source: str
    target: str
    kind: EdgeKind
    label: str
    tooltip: str
    back: bool = False
    """Leads to the next step: it closes a cycle and is left out when boxes are put in rows."""


@dataclass(frozen=True, slots=True)
class Group:
    """A frame around boxes: a pool, or an evaluation."""

    id: str
    title: str
    kind: Literal["pool", "evaluation"]
    members: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Picture:
    title: str
    legend: str
    boxes: tuple[Box, ...]
    arrows: tuple[Arrow, ...]
    groups: tuple[Group, ...]


LEGEND = (
    "solid: data · dashed: weights · dotted: order or wait · thin grey: used by · orange dashed box: put in by a pass"
)


class _Moved(Protocol):
    """A reshard, of a flow or of a plan."""

    @property
    def received(self) -> int: ...
    @property
    def us(self) -> int: ...


class Collector:
    """Collects the parts of one picture. `where` texts are places in the source."""

    def __init__(self) -> None:
        self.boxes: dict[str, Box] = {}
        self.arrows: set[Arrow] = set()
        self.members: dict[str, list[str]] = {}

    def box(self, box: Box) -> None:
        self.boxes[box.id] = box

    def member(self, group: str, box_id: str) -> None:
        self.members.setdefault(group, []).append(box_id)

    def arrow(
        self, source: str, target: str, kind: EdgeKind, label: str, tooltip: str = "", back: bool = False
    ) -> None:
        self.arrows.add(Arrow(source, target, kind, label, tooltip or label, back))

    def data(self, name: str, source: DataSource, where: str) -> None:
        self.box(Box(f"data.{name}", "data", (name, describe_source(source)), stroke("data"), where))

    def model(self, name: str, source: ModelSource, trainable: bool, where: str) -> None:
        shared = isinstance(source, ValueModel) and source.shared
        state = "trained" if trainable else "shared" if shared else "frozen"
        words = (name, describe_source(source), f"weights, {state}")
        self.box(Box(f"model.{name}", "model", words, stroke("model"), where))
        if isinstance(source, FrozenModel | ValueModel):
            how = "one body" if shared else "copied at the start"
            self.arrow(f"model.{source.of}", f"model.{name}", "order", how)

    def reward(self, name: str, source: RewardSource, where: str) -> None:
        self.box(Box(f"reward.{name}", "reward", (name, describe_source(source)), stroke("reward"), where))
        if isinstance(source, DatasetScorer):
            self.arrow(f"data.{source.data}", f"reward.{name}", "uses", "")

    def environment(self, name: str, source: EnvironmentSource, where: str) -> None:
        self.box(Box(f"environment.{name}", "reward", (name, describe_source(source)), stroke("reward"), where))

    def uses(self, box_id: str, op: Op) -> None:
        """Arrows from what is declared to the stage that uses it; weights apart."""
        if isinstance(op, Take):
            self.arrow(f"data.{op.data}", box_id, "data", "prompts")
        if isinstance(op, Generate) and op.environment is not None:
            self.arrow(f"environment.{op.environment}", box_id, "uses", "")
        if isinstance(op, Score):
            self.arrow(f"reward.{op.reward}", box_id, "uses", "")

    def queue(self, name: str, capacity: int, partitions: int, reads: int, where: str, inserted_by: str) -> str:
        """The box of a queue, outside of all pools; its id."""
        parts = f", {partitions} partitions" if partitions > 1 else ""
        lines = (f"queue {name}", f"{capacity} batch{'es' * (capacity != 1)}{parts}")
        tooltip = f"{where}; {reads} read{'s' * (reads != 1)} of a batch"
        box_id = f"queue.{name}"
        self.box(Box(box_id, "queue", lines, stroke("queue"), tooltip, inserted_by))
        return box_id

    def reshard(self, box_id: str, name: str, moved: _Moved | None, where: str, inserted_by: str) -> None:
        lines = [f"reshard {name}"]
        if moved is not None:
            lines.append(f"{size(moved.received)} received, {seconds(moved.us)}")
        self.box(Box(box_id, "instruction", tuple(lines), stroke("reshard"), where, inserted_by))

    def picture(self, title: str, groups: Iterable[tuple[str, str, Literal["pool", "evaluation"]]]) -> Picture:
        """The finished picture, everything sorted; groups as (id, title, kind)."""
        framed = tuple(
            Group(group, words, kind, tuple(sorted(set(self.members.get(group, ()))))) for group, words, kind in groups
        )
        order = sorted(self.arrows, key=lambda a: (a.source, a.target, a.kind, a.label))
        boxes = tuple(self.boxes[key] for key in sorted(self.boxes))
        known = tuple(a for a in order if a.source in self.boxes and a.target in self.boxes)
        return Picture(title, LEGEND, boxes, known, framed)


def group_of(phase: str, pool: str) -> str:
    """The id of the frame around a stage: its pool, or its evaluation."""
    return f"pool.{pool}" if phase == "step" else f"evaluation.{phase}"


def evaluation_title(name: str, every: int) -> str:
    """When an evaluation runs, in words."""
    between = f", every {every} steps" if every else ""
    return f"evaluation {name}: before the first step{between}, at the end"


def short_type(text: str) -> str:
    """A rows type without its origin and without its fields, unless it has only one."""
    found = re.fullmatch(r"\w+<([^;>]*?)(?: of [^;>]*)?(?:; (.*))?>", text)
    if found is None:
        short = text
    elif found[2] is None or "," in found[2]:
        short = found[1]
    else:
        short = f"{found[1]}, {found[2]}"
    return short if len(short) <= MAX_TYPE else short[: MAX_TYPE - 1] + "…"
