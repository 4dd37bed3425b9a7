"""What a picture of a plan shows, before any drawing language: boxes, arrows and groups as values.

Three renderers (dot, Mermaid, own SVG) draw this one picture, so their content cannot drift apart.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from rlflow.backends.visualizers.palette import stroke
from rlflow.backends.visualizers.words import (
    describe_because,
    describe_instruction,
    describe_layout,
    describe_op,
    describe_pool,
    describe_source,
    describe_span,
    model_of,
)
from rlflow.ir.ops import DatasetScorer, FrozenModel, Generate, Score, Take, ValueModel
from rlflow.plan import Instruction, Plan

Shape = Literal["data", "model", "reward", "stage", "instruction"]
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


def build_picture(plan: Plan) -> Picture:
    """The picture of a plan; boxes, arrows and groups sorted, so that equal plans give equal pictures."""
    builder = _Builder(plan)
    builder.declarations()
    builder.stages()
    builder.instructions()
    builder.data_arrows()
    builder.weight_arrows()
    return builder.finish()


class _Builder:
    """Collects the parts of one picture."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.boxes: dict[str, Box] = {}
        self.arrows: set[Arrow] = set()
        self.members: dict[str, list[str]] = {}
        self.waits: dict[tuple[str, str, str], str] = {}
        """(phase, pool that waits, stage waited for) to the box of the wait."""
        self.publishes: dict[str, str] = {}
        self.puts: dict[tuple[str, str], str] = {}
        """(stage, pool that takes) to the box of the put."""

    def declarations(self) -> None:
        plan = self.plan
        for data in plan.data:
            lines = (data.name, describe_source(data.source))
            self._box(Box(f"data.{data.name}", "data", lines, stroke("data"), describe_span(data.span)))
        for model in plan.models:
            shared = isinstance(model.source, ValueModel) and model.source.shared
            state = "trained" if model.trainable else "shared" if shared else "frozen"
            words = (model.name, describe_source(model.source), f"weights, {state}")
            self._box(Box(f"model.{model.name}", "model", words, stroke("model"), describe_span(model.span)))
            if isinstance(model.source, FrozenModel | ValueModel):
                how = "one body" if shared else "copied at the start"
                self._arrow(f"model.{model.source.of}", f"model.{model.name}", "order", how)
        for reward in plan.rewards:
            lines = (reward.name, describe_source(reward.source))
            self._box(Box(f"reward.{reward.name}", "reward", lines, stroke("reward"), describe_span(reward.span)))
            if isinstance(reward.source, DatasetScorer):
                self._arrow(f"data.{reward.source.data}", f"reward.{reward.name}", "uses", "")
        for environment in plan.environments:
            lines = (environment.name, describe_source(environment.source))
            box_id = f"environment.{environment.name}"
            self._box(Box(box_id, "reward", lines, stroke("reward"), describe_span(environment.span)))

    def stages(self) -> None:
        for stage in self.plan.stages:
            words = [stage.id, describe_op(stage.op)]
            if stage.layout is not None:
                words.append(describe_layout(stage.layout))
            if stage.phase != "step":
                words.append(f"on {stage.pool}")
            because = stage.because
            box = Box(
                f"stage.{stage.id}",
                "stage",
                tuple(words),
                stroke(stage.op.kind),
                f"{describe_because(because)}; gives {stage.output}",
                because.inserted_by,
            )
            self._box(box)
            self._member(stage.phase, stage.pool, box.id)
            if isinstance(stage.op, Take):
                self._arrow(f"data.{stage.op.data}", box.id, "data", "prompts")
            if isinstance(stage.op, Generate) and stage.op.environment is not None:
                self._arrow(f"environment.{stage.op.environment}", box.id, "uses", "")
            if isinstance(stage.op, Score):
                self._arrow(f"reward.{stage.op.reward}", box.id, "uses", "")

    def instructions(self) -> None:
        for program in self.plan.programs:
            self._instruction_list("step", program.pool, program.step)
            for evaluation in program.evaluations:
                self._instruction_list(evaluation.name, program.pool, evaluation.instructions)

    def _instruction_list(self, phase: str, pool: str, instructions: tuple[Instruction, ...]) -> None:
        """Boxes for what is not a stage itself; the box before it points at it."""
        before = ""
        for instruction in instructions:
            if instruction.kind == "take" and instruction.queue:
                continue  # the put's arrow shows it
            if instruction.kind in ("run", "take"):
                before = f"stage.{instruction.stage}"
                continue
            box_id = f"instruction.{phase}.{pool}.{instruction.id}"
            because = instruction.because
            colour = stroke(instruction.kind)
            lines = (describe_instruction(instruction),)
            self._box(Box(box_id, "instruction", lines, colour, describe_because(because), because.inserted_by))
            self._member(phase, pool, box_id)
            if instruction.kind == "wait":
                self.waits[phase, pool, instruction.stage] = box_id
                self._arrow(f"stage.{instruction.stage}", box_id, "order", "asynchronous result")
            elif instruction.kind == "publish":
                self.publishes[instruction.model] = box_id
            elif instruction.kind == "put":
                queue = next(q for q in self.plan.queues if q.id == instruction.queue)
                self.puts[instruction.stage, queue.target] = box_id
                source = self.waits.get((phase, pool, instruction.stage), f"stage.{instruction.stage}")
                batches = f"{queue.capacity} batch{'es' * (queue.capacity != 1)}"
                self._arrow(source, box_id, "data", f"holds {batches}", f"{queue.reads} reads of a batch")
                continue
            elif before:
                self._arrow(before, box_id, "order", "then")
            before = box_id

    def data_arrows(self) -> None:
        for stage in self.plan.stages:
            for port, producer in stage.inputs.items():
                output = self.plan.stage(producer).output
                source = self.waits.get((stage.phase, stage.pool, producer), f"stage.{producer}")
                source = self.puts.get((producer, stage.pool), source)
                label = f"{port}: {_short(output)}"
                self._arrow(source, f"stage.{stage.id}", "data", label, f"{port}: {output}")

    def weight_arrows(self) -> None:
        channels = {channel.model: channel for channel in self.plan.channels}
        for stage in self.plan.stages:
            model = model_of(stage.op)
            if model is None:
                continue
            channel = channels.get(model)
            is_reader = channel is not None and stage.id in channel.readers
            label = "weights"
            if channel is not None and is_reader:
                apart = self.plan.stage(channel.source).pool != stage.pool
                label = f"staleness <= {channel.max_staleness if apart else 0}"
            tip = f"weights of {model}" + (f", {channel.transport}" if channel and is_reader else "")
            self._arrow(f"model.{model}", f"stage.{stage.id}", "weights", label, tip)
        for channel in self.plan.channels:
            source, target = f"stage.{channel.source}", f"model.{channel.model}"
            publish = self.publishes.get(channel.model)
            tip = f"{channel.source} raises the version of {channel.model} by one"
            if publish is not None:
                self._arrow(source, publish, "weights", "trained weights", tip)
                source = publish
            self._arrow(source, target, "weights", "version +1", tip, back=True)

    def finish(self) -> Picture:
        plan = self.plan
        groups: list[Group] = []
        for pool in sorted(plan.pools, key=lambda p: p.name):
            members = self.members.get(f"pool.{pool.name}", [])
            title = f"pool {pool.name}: {describe_pool(pool)}"
            groups.append(Group(f"pool.{pool.name}", title, "pool", tuple(sorted(set(members)))))
        for name in sorted({stage.phase for stage in plan.stages} - {"step"}):
            members = self.members.get(f"evaluation.{name}", [])
            title = f"evaluation {name}: {_every(plan, name)}"
            groups.append(Group(f"evaluation.{name}", title, "evaluation", tuple(sorted(set(members)))))
        order = sorted(self.arrows, key=lambda a: (a.source, a.target, a.kind, a.label))
        boxes = tuple(self.boxes[key] for key in sorted(self.boxes))
        known = tuple(a for a in order if a.source in self.boxes and a.target in self.boxes)
        return Picture(f"flow {plan.flow} on {plan.cluster}", LEGEND, boxes, known, tuple(groups))

    def _box(self, box: Box) -> None:
        self.boxes[box.id] = box

    def _member(self, phase: str, pool: str, box_id: str) -> None:
        group = f"pool.{pool}" if phase == "step" else f"evaluation.{phase}"
        self.members.setdefault(group, []).append(box_id)

    def _arrow(
        self, source: str, target: str, kind: EdgeKind, label: str, tooltip: str = "", back: bool = False
    ) -> None:
        self.arrows.add(Arrow(source, target, kind, label, tooltip or label, back))


def _every(plan: Plan, name: str) -> str:
    """When an evaluation runs, in words."""
    for program in plan.programs:
        for evaluation in program.evaluations:
            if evaluation.name == name:
                between = f", every {evaluation.every} steps" if evaluation.every else ""
                return f"before the first step{between}, at the end"
    return "not run by any pool"


def _short(text: str) -> str:
    """A rows type without its origin and without its fields, unless it has only one."""
    found = re.fullmatch(r"\w+<([^;>]*?)(?: of [^;>]*)?(?:; (.*))?>", text)
    if found is None:
        short = text
    elif found[2] is None or "," in found[2]:
        short = found[1]
    else:
        short = f"{found[1]}, {found[2]}"
    return short if len(short) <= MAX_TYPE else short[: MAX_TYPE - 1] + "…"
