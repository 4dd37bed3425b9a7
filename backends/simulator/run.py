"""Simulate a plan: the pools' instruction lists in virtual time."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from rlflow.backends.simulator.clock import Clock
from rlflow.backends.simulator.interpreter import Lane
from rlflow.backends.simulator.interpreter_edges import Edge
from rlflow.backends.simulator.interpreter_weights import WeightBook
from rlflow.backends.simulator.interpreter_world import World
from rlflow.backends.simulator.report import Result, result_of
from rlflow.backends.simulator.run_blocks import BlockServer
from rlflow.backends.simulator.run_calls import calls_of
from rlflow.backends.simulator.run_engines import EngineServer
from rlflow.backends.simulator.run_filters import filters_of
from rlflow.backends.simulator.run_migration import Migration, migrations_of
from rlflow.backends.simulator.run_turns import Turns, turns_of
from rlflow.cost.assumed_lengths import assumed_lengths, lengths_of
from rlflow.diagnostics import RunFailure
from rlflow.ir.flow import STEP
from rlflow.ir.ops import Generate
from rlflow.plan import Plan, SaveCheckpoint, Stage, StaleReader
from rlflow.protocol.controller import Controller
from rlflow.protocol.stale_settings import settings_of
from rlflow.stage_rows import rows_of
from rlflow.stage_times import CHECKPOINT, Draw, durations_of


@dataclass(frozen=True, slots=True)
class Options:
    """What to simulate."""

    steps: int = 20
    """That are measured."""
    warm_up: int | None = None
    """Steps before them; None: a few more than the plan lets samples lag."""
    seed: int | None = None
    """Generate stages run on engines, sample by sample, with lengths drawn from this seed; None: every stage takes the
    time of its estimate."""
    stated: Mapping[str, float] = field(default_factory=dict)
    """Stage, `reshard MODEL` or `checkpoint` to its seconds, in place of the estimate. A generate stage with a stated
    time is one block of it."""
    headroom: int | None = None
    """Tokens of a response for which engines keep room in the cache when they admit another; None: what
    `rlflow.cost.occupancy.headroom` says."""
    keep: Mapping[str, float] = field(default_factory=dict)
    """`mixed_groups` stage to the share of its groups that it keeps; the others are replaced by further prompts."""
    failing: Mapping[str, float] = field(default_factory=dict)
    """Reward stage to the share of the tries to score a sample that fail."""
    turns: Mapping[str, float] = field(default_factory=dict)
    """Generate stage to the mean seconds that its environment takes between two turns."""
    migrate: Mapping[str, float] = field(default_factory=dict)
    """Generate stage to the share of a batch: when no more are left, they move to as few engines as hold them."""
    evaluations: bool = False
    draw: Draw | None = None
    """Changes every time, stage by stage and step by step."""

    def __post_init__(self) -> None:
        if self.headroom is not None and self.headroom < 0:
            raise ValueError(f"a headroom of {self.headroom} tokens: at least 0")
        if self.steps < 1 or (self.warm_up is not None and self.warm_up < 0):
            raise ValueError(f"{self.steps} steps after {self.warm_up} to warm up: at least 1 and 0")


def simulate(plan: Plan, options: Options | None = None) -> Result:
    """One run of the plan.

    RunFailure RLF4004 where the time of a model stage is not known, RLF3007 where nothing can happen any more.
    """
    options = options or Options()
    phases = (STEP, *(_evaluations(plan) if options.evaluations else ()))
    durations = durations_of(plan, options.stated, phases=phases, draw=options.draw)
    lag = _lag(plan)
    warm_up = lag + 3 if options.warm_up is None else options.warm_up
    total = warm_up + options.steps + lag  # pools that are ahead go on to the end of the last measured step
    clock = Clock()
    edges: dict[str, Edge] = {}
    seed = plan.seed if options.seed is None else options.seed
    filters, calls = filters_of(plan, options.keep, seed), calls_of(plan, options.failing, seed)
    world = World(plan, clock, durations, phases, edges, {}, WeightBook(plan, clock), filters, calls)
    turns, migrations = turns_of(plan, options.turns, seed), migrations_of(plan, options.migrate)
    for stage in plan.stages:
        if isinstance(stage.op, Generate) and stage.phase == STEP:
            _serve(world, stage, options, turns.get(stage.id), migrations.get(stage.id))
    for program in plan.programs:
        clock.start(f"pool {program.pool}", Lane(world, program).run(total, options.evaluations))
    stuck = clock.run()
    if stuck:
        raise RunFailure(
            "RLF3007",
            "the simulation stands still",
            notes=tuple(f"{name} waits for {what or 'nothing'}" for name, what in stuck),
            help=("report this: a plan that was compiled without an error should run for ever",),
        )
    saves = any(isinstance(i, SaveCheckpoint) and i.every for program in plan.programs for i in program.step)
    saving = saves and bool(durations.us.get(CHECKPOINT))
    varies = options.draw is not None or options.evaluations or saving or bool(filters) or bool(calls)
    return result_of(world, warm_up, options.steps, repeats=not varies)


def seeds_of(plan: Plan, count: int) -> list[int | None]:
    """The plan's own seed and those after it; with none asked for, nothing is drawn."""
    return [plan.seed + number for number in range(count)] if count else [None]


def simulate_seeds(plan: Plan, options: Options, count: int) -> list[Result]:
    """One run for each of `seeds_of`; a single one where another seed would give the same."""
    results: list[Result] = []
    for seed in seeds_of(plan, count):
        results.append(simulate(plan, replace(options, seed=seed)))
        if not results[0].sampled and not options.keep and not options.failing:
            break
    return results


def _serve(world: World, stage: Stage, options: Options, turns: Turns | None, migration: Migration | None) -> None:
    """The edge of a generate stage, and what runs it."""
    assert isinstance(stage.op, Generate)
    channel = world.weights.channel(stage.op.model)
    stale = None if channel is None else _stale(channel.stale, stage.id)
    facts = next((estimate.engine for estimate in world.plan.estimates if estimate.stage == stage.id), None)
    rows, group = rows_of(stage)
    engine = options.seed is not None and facts is not None and stage.id not in options.stated
    settings = settings_of(stale, rows if engine else 1, group if engine else 1)
    edge = Edge(stage, stale, Controller(settings), world.clock, 1 if engine else rows, channel is not None)
    world.edges[stage.id] = edge
    if engine:
        assert facts is not None
        assert options.seed is not None
        lengths = lengths_of(assumed_lengths(facts), options.seed, stage.id)
        world.servers[stage.id] = EngineServer(world, edge, facts, lengths, options.headroom, turns, migration)
    else:
        world.servers[stage.id] = BlockServer(world, edge, turns)
        world.weights.loads[stage.id].append(edge.load)


def _stale(readers: tuple[StaleReader, ...], stage: str) -> StaleReader | None:
    return next((reader for reader in readers if reader.stage == stage), None)


def _lag(plan: Plan) -> int:
    """Steps until the first effects of the start are gone: batches that are under way at once, and one a pool."""
    ages = [reader.worst_age or reader.steps for channel in plan.channels for reader in channel.stale]
    return max(ages, default=0) + len(plan.programs)


def _evaluations(plan: Plan) -> tuple[str, ...]:
    return tuple(dict.fromkeys(e.name for program in plan.programs for e in program.evaluations))
