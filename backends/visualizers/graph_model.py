"""What a picture of a plan shows, before any drawing language: boxes, arrows and groups as values."""

from __future__ import annotations

from rlflow.amounts import seconds, size
from rlflow.backends.visualizers.graph_parts import Arrow as Arrow
from rlflow.backends.visualizers.graph_parts import Box as Box
from rlflow.backends.visualizers.graph_parts import Collector, evaluation_title, group_of, short_type
from rlflow.backends.visualizers.graph_parts import Group as Group
from rlflow.backends.visualizers.graph_parts import Picture as Picture
from rlflow.backends.visualizers.palette import stroke
from rlflow.backends.visualizers.words import (
    describe_because,
    describe_instruction,
    describe_layout,
    describe_op,
    describe_pool,
    describe_span,
    model_of,
)
from rlflow.plan import Instruction, MoveObject, Plan, PutRows, ReshardWeights


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
        self.out = Collector()
        self.waits: dict[tuple[str, str, str], str] = {}
        """(phase, pool that waits, stage waited for) to the box of the wait."""
        self.moves: set[str] = set()
        """Boxes of what leaves the devices or comes back."""
        self.publishes: dict[str, str] = {}
        self.queued: dict[tuple[str, str], str] = {}
        """(stage, pool that takes) to the box of the queue."""
        self.resharded: dict[str, str] = {}
        """Stage to the box of the reshard that brings its weights."""

    def declarations(self) -> None:
        out = self.out
        for data in self.plan.data:
            out.data(data.name, data.source, describe_span(data.span))
        for model in self.plan.models:
            out.model(model.name, model.source, model.trainable, describe_span(model.span))
        for reward in self.plan.rewards:
            out.reward(reward.name, reward.source, describe_span(reward.span))
        for environment in self.plan.environments:
            out.environment(environment.name, environment.source, describe_span(environment.span))

    def stages(self) -> None:
        for stage in self.plan.stages:
            words = [stage.id, describe_op(stage.op)]
            if stage.layout is not None:
                words.append(describe_layout(stage.layout))
            if stage.phase != "step":
                words.append(f"on {stage.pool}")
            because = stage.because
            tooltip = f"{describe_because(because)}; gives {stage.output}"
            box = Box(f"stage.{stage.id}", "stage", tuple(words), stroke(stage.op.kind), tooltip, because.inserted_by)
            self.out.box(box)
            self.out.member(group_of(stage.phase, stage.pool), box.id)
            self.out.uses(box.id, stage.op)

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
                continue  # the queue's arrow shows it
            if instruction.kind in ("run", "take"):
                if before in self.moves:
                    self.out.arrow(before, f"stage.{instruction.stage}", "order", "before")
                before = f"stage.{instruction.stage}"
                continue
            if instruction.kind == "put":
                self._put(phase, pool, instruction)
                continue
            box_id = f"instruction.{phase}.{pool}.{instruction.id}"
            because = instruction.because
            self.out.member(group_of(phase, pool), box_id)
            if instruction.kind == "reshard":
                self._reshard(box_id, phase, instruction)
                continue
            colour = stroke(instruction.kind)
            lines = [describe_instruction(instruction)]
            if isinstance(instruction, MoveObject):
                copied = f", {seconds(instruction.us)}" if instruction.us else ""
                lines.append(f"{size(instruction.bytes)} a device{copied}")
                self.moves.add(box_id)
            self.out.box(
                Box(box_id, "instruction", tuple(lines), colour, describe_because(because), because.inserted_by)
            )
            if instruction.kind == "wait":
                self.waits[phase, pool, instruction.stage] = box_id
                self.out.arrow(f"stage.{instruction.stage}", box_id, "order", "asynchronous result")
            elif instruction.kind == "publish":
                self.publishes[instruction.model] = box_id
            elif before:
                self.out.arrow(before, box_id, "order", "then")
            before = box_id

    def _put(self, phase: str, pool: str, put: PutRows) -> None:
        queue = next(q for q in self.plan.queues if q.id == put.queue)
        where, by = describe_because(put.because), put.because.inserted_by
        box_id = self.out.queue(queue.id, queue.capacity, queue.partitions, queue.reads, where, by)
        self.queued[put.stage, queue.target] = box_id
        source = self.waits.get((phase, pool, put.stage), f"stage.{put.stage}")
        self.out.arrow(source, box_id, "data", short_type(self.plan.stage(put.stage).output))

    def _reshard(self, box_id: str, phase: str, reshard: ReshardWeights) -> None:
        readers = [reader for reader in reshard.readers if self.plan.stage(reader).phase == phase]
        moved = next((found for found in self.plan.reshards if set(found.readers) & set(reshard.readers)), None)
        because = reshard.because
        self.out.reshard(box_id, reshard.model, moved, describe_because(because), because.inserted_by)
        label = self._staleness(reshard.model, readers[0]) if readers else ""
        self.out.arrow(f"model.{reshard.model}", box_id, "weights", label, f"weights of {reshard.model}")
        for reader in readers:
            self.resharded[reader] = box_id

    def data_arrows(self) -> None:
        for stage in self.plan.stages:
            for port, producer in stage.inputs.items():
                output = self.plan.stage(producer).output
                source = self.waits.get((stage.phase, stage.pool, producer), f"stage.{producer}")
                source = self.queued.get((producer, stage.pool), source)
                label = f"{port}: {short_type(output)}"
                self.out.arrow(source, f"stage.{stage.id}", "data", label, f"{port}: {output}")

    def _staleness(self, model: str, reader: str) -> str:
        """What a weight arrow to a reader says; `weights` where it reads what never changes or trains itself."""
        channel = next((c for c in self.plan.channels if c.model == model and reader in c.readers), None)
        if channel is None:
            return "weights"
        apart = self.plan.stage(channel.source).pool != self.plan.stage(reader).pool
        return f"staleness <= {channel.max_staleness if apart else 0}"

    def weight_arrows(self) -> None:
        channels = {channel.model: channel for channel in self.plan.channels}
        for stage in self.plan.stages:
            model = model_of(stage.op)
            if model is None:
                continue
            if stage.id in self.resharded:
                label = describe_layout(stage.layout) if stage.layout is not None else "weights"
                tip = f"weights of {model}, resharded to {label}"
                self.out.arrow(self.resharded[stage.id], f"stage.{stage.id}", "weights", "", tip)
                continue
            channel = channels.get(model)
            is_reader = channel is not None and stage.id in channel.readers
            tip = f"weights of {model}" + (f", {channel.transport}" if channel and is_reader else "")
            self.out.arrow(f"model.{model}", f"stage.{stage.id}", "weights", self._staleness(model, stage.id), tip)
        for channel in self.plan.channels:
            source, target = f"stage.{channel.source}", f"model.{channel.model}"
            publish = self.publishes.get(channel.model)
            tip = f"{channel.source} raises the version of {channel.model} by one"
            if publish is not None:
                self.out.arrow(source, publish, "weights", "trained weights", tip)
                source = publish
            self.out.arrow(source, target, "weights", "version +1", tip, back=True)

    def finish(self) -> Picture:
        plan = self.plan
        pools = sorted(plan.pools, key=lambda p: p.name)
        evaluations = sorted({stage.phase for stage in plan.stages} - {"step"})
        return self.out.picture(
            f"flow {plan.flow} on {plan.cluster}",
            [
                *((f"pool.{pool.name}", f"pool {pool.name}: {describe_pool(pool)}", "pool") for pool in pools),
                *((f"evaluation.{name}", _every(plan, name), "evaluation") for name in evaluations),
            ],
        )


def _every(plan: Plan, name: str) -> str:
    """The title of an evaluation's frame."""
    for program in plan.programs:
        for evaluation in program.evaluations:
            if evaluation.name == name:
                return evaluation_title(name, evaluation.every)
    return f"evaluation {name}: not run by any pool"
