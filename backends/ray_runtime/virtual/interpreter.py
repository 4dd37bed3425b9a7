"""What the instructions of a plan do in a virtual run: stages sleep, everything between them is real."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from rlflow.backends.ray_runtime.deliveries import Reading
from rlflow.backends.ray_runtime.place import PlaceNote
from rlflow.backends.ray_runtime.row_stages import rows_root
from rlflow.backends.ray_runtime.run_logs import doing
from rlflow.backends.ray_runtime.virtual.clock import Clock
from rlflow.backends.ray_runtime.virtual.edges import Ends, Held
from rlflow.backends.ray_runtime.virtual.post import Post
from rlflow.backends.ray_runtime.virtual.rows import Rows, bounds, drawn, packed
from rlflow.backends.ray_runtime.virtual.settings import TOKEN_BYTES, engine_of, lengths_in, reshard_us
from rlflow.backends.ray_runtime.walk import Walk
from rlflow.cost.assumed_lengths import PROMPT_TOKENS, lengths_of
from rlflow.diagnostics.diagnostic import RunFailure
from rlflow.ir.flow import STEP
from rlflow.ir.ops import Generate, Score, Take, Train
from rlflow.plan import Instruction, MoveObject, Plan, PutRows, ReshardWeights, Stage, TakeRows
from rlflow.plan_decisions import Reshard
from rlflow.stage_rows import rows_of
from rlflow.stage_times import CHECKPOINT, Durations

if TYPE_CHECKING:
    from rlflow.backends.ray_runtime.measure import StepMetrics

_NUMBER_BYTES = 4
"""Of a number in a column: float32."""


@dataclass(frozen=True)
class Self:
    """Which worker this is. `member` counts in its pool."""

    pool: str
    ranks: range
    member: int
    members: dict[str, int]
    """Workers of every pool."""


@dataclass
class Weights:
    """Versions of the models on this worker's ranks."""

    trained: dict[str, int] = field(default_factory=dict)
    read: dict[str, int] = field(default_factory=dict)
    """By stages whose weights come by a reshard."""
    moved: dict[str, int] = field(default_factory=dict)
    """By reshard: the version that it brought last."""


class VirtualInterpreter(Walk):
    """Of one worker. `fabric` is the actor in place of process groups."""

    def __init__(
        self,
        plan: Plan,
        me: Self,
        durations: Durations,
        clock: Clock,
        ends: Ends,
        fabric: Any,
        seed: int,
        share: float,
        place: PlaceNote,
    ) -> None:
        """`share`: of a row's bytes that it carries."""
        super().__init__(plan, me.pool)
        self._place = place
        self._plan, self._me, self._durations, self._clock = plan, me, durations, clock
        self._ends, self._fabric, self._share = ends, fabric, share
        self.post: Post = ends.post
        self._size = ends.sizes[me.pool]
        self._lengths = {s.id: _lengths(plan, s, seed) for s in plan.stages if isinstance(s.op, Generate)}
        self._readings = {reshard.id: Reading.of(plan, reshard) for reshard in plan.reshards}
        self._worst = {stale.stage: stale.worst_age for channel in plan.channels for stale in channel.stale}
        self._weights = Weights()
        self._frame: dict[str, Held] = {}
        self._calls: dict[str, tuple[float, float]] = {}
        """Python stage to the start and the end of its call."""
        self._free_at: dict[str, float] = {}
        """Pool of functions to the end of its last call."""

    def run(self, instructions: Sequence[Instruction], step: int, metrics: StepMetrics) -> None:
        """One pass over the list. Raises RunFailure naming the stage; any other exception becomes RLF5006."""
        self._frame, self._calls = {}, {}
        self._execute(instructions, instructions, step, metrics)

    # --- around every instruction ------------------------------------------------------------------------------------

    def _now(self) -> float:
        return self._clock.now()

    def _before(self, instruction: Instruction, step: int) -> None:
        doing(f"step {step} {instruction.id}")
        self._place.at(step, instruction.id)

    def _after(self, instruction: Instruction, step: int, metrics: StepMetrics) -> None:
        return

    def _version(self, stage_id: str) -> int | None:
        model = getattr(self._stages[stage_id].op, "model", None) if stage_id in self._stages else None
        if model is None:
            return None
        return self._weights.read.get(stage_id, self._weights.trained.get(model, 0))

    def _drop(self, stage_id: str) -> None:
        self._frame.pop(stage_id, None)

    def _sleep(self, started: float, us: float) -> None:
        """Until so many microseconds of the plan after `started`: what was done meanwhile is a part of it."""
        self._clock.sleep_until(started + us / 1e6)

    # --- rows --------------------------------------------------------------------------------------------------------

    def _take(self, stage: Stage, step: int) -> int | None:
        started, op = self._now(), stage.op
        assert isinstance(op, Take)
        total = op.count or rows_of(stage)[0]
        # An evaluation sees the same first rows every time.
        base = (step - 1) * total if stage.phase == STEP else 0
        uid = base + np.arange(*self._mine(total))
        nothing = np.zeros(len(uid), np.int64)
        self._frame[stage.id] = Held(packed(uid, nothing - 1, nothing, nothing), total, base)
        self._sleep(started, float(self._durations.of(stage.id, step)))
        return None

    def _mine(self, total: int) -> tuple[int, int]:
        """The rows of this worker's ranks."""
        ranks = self._me.ranks
        return bounds(total, self._size, ranks.start)[0], bounds(total, self._size, ranks.stop - 1)[1]

    def _take_queue(self, instruction: TakeRows, metrics: StepMetrics) -> None:
        stage = self._stages[instruction.stage]
        root = rows_root(self._plan, stage.id)
        held, depth = self._ends.take(instruction.queue, self._made(root) if stage.phase == STEP else None)
        metrics.mean(f"queue/{instruction.queue}/depth", [depth])
        self._frame[stage.id] = held
        if root not in self._frame:
            self._frame[root] = held
        elif not np.array_equal(self._frame[root].rows.uid, held.rows.uid):
            raise RunFailure("RLF5058", f"`{stage.id}` came for other rows than those of `{root}` that are there")

    def _made(self, root: str) -> int | None:
        """Rows that a step makes where these come from: samples, or prompts; None where the plan does not know."""
        stage = self._stages[root]
        while not isinstance(stage.op, Take | Generate):
            stage = self._stages[next(iter(stage.inputs.values()))]
        if isinstance(stage.op, Generate):
            prompts = self._stages[stage.inputs["prompts"]].op
            count = prompts.count if isinstance(prompts, Take) else None
            return None if count is None else count * stage.op.n
        return stage.op.count

    def _put_queue(self, instruction: PutRows) -> None:
        held = self._frame[instruction.stage]
        if rows_root(self._plan, instruction.stage) != instruction.stage:
            held = self._column(self._stages[instruction.stage], held)
        self._ends.put(instruction.queue, held)

    def _column(self, stage: Stage, held: Held) -> Held:
        """A column of the rows: a number per row, or per token."""
        rows = held.rows
        per_token = stage.output.rstrip("> ").endswith("/token")
        scale = rows.lengths * self._share if per_token else np.ones(rows.count)
        sizes = np.ceil(scale * _NUMBER_BYTES).astype(np.int64)
        return Held(packed(rows.uid, rows.version, rows.lengths, sizes), held.total, held.base)

    # --- stages ------------------------------------------------------------------------------------------------------

    def _run(self, stage: Stage, whole: Sequence[Instruction], step: int, metrics: StepMetrics) -> int | None:
        started = self._now()
        us = float(self._durations.of(stage.id, step))
        inputs = [self._frame[source] for source in stage.inputs.values() if source in self._frame]
        if isinstance(stage.op, Score):
            self._start(stage, started, us)
        if isinstance(stage.op, Generate):
            held = self._generate(stage, stage.op, inputs[0], metrics)
        elif inputs and rows_root(self._plan, stage.id) == stage.id:
            held = self._select(stage, inputs[0])
        elif inputs:
            held = inputs[0]
        else:
            raise RunFailure("RLF5006", "none of its inputs is there", stage=stage.id)
        if isinstance(stage.op, Train):
            self._check_ages(stage, stage.op, step, metrics)
        else:
            self._frame[stage.id] = held
        if not isinstance(stage.op, Score):
            self._sleep(started, us)
        return int(held.rows.lengths.sum()) or None

    def _generate(self, stage: Stage, op: Generate, prompts: Held, metrics: StepMetrics) -> Held:
        total, base = prompts.total * op.n, prompts.base * op.n
        uid = base + np.arange(*self._mine(total))
        length, prompt_tokens = self._lengths[stage.id]
        version = self._version(stage.id) or 0
        rows = drawn(uid, op.n, version, length, self._share, TOKEN_BYTES)
        metrics.spread("response_length", rows.lengths)
        metrics.mean("response_length/clip_ratio", rows.lengths >= op.max_new)
        metrics.sums["perf/total_num_tokens"] += float(rows.lengths.sum() + prompt_tokens * rows.count)
        return Held(rows, total, base)

    def _select(self, stage: Stage, held: Held) -> Held:
        """Of every group the first samples, as many as the stage keeps."""
        source = self._stages[next(iter(stage.inputs.values()))]
        (out, _), (there, group) = rows_of(stage), rows_of(source)
        if out >= there:
            return held
        kept = max(1, group * out // there)
        rows: Rows = held.rows.where(held.rows.uid % group < kept)
        return Held(rows, held.total * out // there, held.base)

    def _check_ages(self, stage: Stage, op: Train, step: int, metrics: StepMetrics) -> None:
        """Of the samples that are trained on, in steps. RunFailure RLF5058 for one that is older than the plan says."""
        root = rows_root(self._plan, stage.inputs["samples"])
        maker = self._stages[root]
        while not isinstance(maker.op, Generate | Take):
            maker = self._stages[next(iter(maker.inputs.values()))]
        if not isinstance(maker.op, Generate) or maker.op.model != op.model:
            return
        rows = self._frame[stage.inputs["samples"]].rows
        ages = self._weights.trained.get(op.model, 0) - rows.version
        metrics.ages(maker.id, ages)
        worst = self._worst.get(maker.id, 0)
        if worst is not None and rows.count and int(ages.max()) > worst:
            raise RunFailure(
                "RLF5058",
                f"step {step} trains on a sample that is {int(ages.max())} steps old, and the plan promises {worst}",
                stage=stage.id,
                help=("report this: batches come in order, and weights at their versions",),
            )

    # --- Python functions --------------------------------------------------------------------------------------------

    def _start(self, stage: Stage, started: float, us: float) -> None:
        """The workers of a pool of functions serve one call at a time."""
        begin = max(started, self._free_at.get(stage.pool, 0.0))
        self._free_at[stage.pool] = begin + us / 1e6
        self._calls[stage.id] = (started, begin + us / 1e6)

    def _wait(self, stage: Stage, whole: Sequence[Instruction], step: int, metrics: StepMetrics) -> None:
        started, ends = self._calls.pop(stage.id)
        self._clock.sleep_until(ends)
        metrics.call(stage, step, started, self._now(), ends)

    # --- weights and memory ------------------------------------------------------------------------------------------

    def _publish(self, model: str, step: int) -> None:
        version = self._weights.trained[model] = self._weights.trained.get(model, 0) + 1
        channels = [r.id for r in self._plan.reshards if r.model == model and r.source == self._me.pool != r.target]
        self.post.ask([("announce", self._fabric, (id, self._me.member, version)) for id in channels])

    def _reshard(self, instruction: ReshardWeights, step: int, metrics: StepMetrics) -> None:
        reshard = next(
            r
            for r in self._plan.reshards
            if r.model == instruction.model and set(r.readers) == set(instruction.readers)
        )
        weights = self._weights
        between = reshard.source != reshard.target
        if between:
            wanted = step if metrics.evaluation else self._readings[reshard.id].of_step(step)
        else:
            wanted = weights.trained.get(reshard.model, 0)
        if wanted <= weights.moved.get(reshard.id, 0):
            return
        if between:
            began = self._now()
            self._await(reshard, wanted)
            metrics.waited(self._now() - began)
        self._sleep(self._now(), reshard_us(self._plan, instruction, self._durations))
        weights.moved[reshard.id] = wanted
        weights.read |= dict.fromkeys(reshard.readers, wanted)

    def _await(self, reshard: Reshard, wanted: int) -> None:
        senders = self._me.members[reshard.source]
        (answer,) = self.post.ask([("version", self._fabric, (reshard.id, senders, wanted))])
        if isinstance(answer, str):
            raise RunFailure(
                "RLF5019",
                f"pool `{self._me.pool}` waited {self._plan.collective_timeout_s:g} s for the weights of "
                f"`{reshard.model}`",
                notes=(answer,),
            )

    def _move(self, instruction: MoveObject, step: int) -> None:
        self._sleep(self._now(), float(instruction.exposed_us))

    def _checkpoint(self, step: int) -> None:
        self._sleep(self._now(), float(self._durations.of(CHECKPOINT, step)))


def _lengths(plan: Plan, stage: Stage, seed: int) -> tuple[Callable[[int, int], int], int]:
    """Lengths of a stage's responses, and tokens of a prompt."""
    facts = engine_of(plan, stage)
    prompt = PROMPT_TOKENS if facts is None else facts.prompt_tokens
    return lengths_of(lengths_in(plan, stage), seed, stage.id), prompt
