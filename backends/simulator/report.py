"""What a simulation found: step times, use of devices, ages, depths of queues, traffic, memory."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from rlflow.backends.simulator.clock import Time
from rlflow.backends.simulator.interpreter_world import World
from rlflow.backends.simulator.run_calls import Calls
from rlflow.backends.simulator.run_engines import EngineServer
from rlflow.backends.simulator.run_filters import Filter
from rlflow.stage_times import uncounted

MOVES = frozenset({"reshard", "offload", "onload", "drop", "save"})


@dataclass(frozen=True, slots=True)
class PoolUse:
    """Shares of the measured time. `busy`: in stages. `moving`: in transfers that stages wait for. Each at most 1."""

    devices: int
    busy: float
    moving: float


@dataclass(frozen=True, slots=True)
class QueueUse:
    """Batches in a queue, from the start of the stage that makes one to the end of its last reader."""

    capacity: int
    most: int
    mean: float


@dataclass(frozen=True, slots=True)
class LinkUse:
    """One direction of a link of the busiest device, over one step."""

    bytes: float
    busy: float
    """Share of the measured time."""


@dataclass(frozen=True, slots=True)
class ThrownOut:
    """Samples that a full cache threw out of the engines of a stage, over one step."""

    samples: float
    """Each as often as it was thrown out."""
    tokens: float
    """Of their contexts, which are computed again."""


@dataclass(frozen=True, slots=True)
class Refills:
    """Of a stage that drops groups and samples further prompts, over the measured steps."""

    rounds: float
    """Of a step, on average; 1 = no refill."""
    most: int
    short: float
    """Share of the steps that have too few groups after the last round."""


@dataclass(frozen=True, slots=True)
class FailedCalls:
    """Of a reward stage whose calls fail now and then, over the measured steps."""

    tries: float
    """Of a sample, on average."""
    lost: float
    """Share of the samples without a score after the last try."""
    stops: float
    """Share of the steps at which the run would stop, by its rule; it is simulated as if it went on."""


@dataclass(frozen=True, slots=True)
class Result:
    """Of one simulation. Times in microseconds; shares, ages and depths are over the measured steps only."""

    ends: tuple[Time, ...]
    """Ends of the steps that warmed up, and of those measured."""
    warm_up: int
    sampled: bool
    """Whether some generate stage ran sample by sample."""
    period: Time
    """Of a step."""
    pools: Mapping[str, PoolUse]
    ages: Mapping[str, Mapping[int, int]]
    """Generate stage to the number of its samples by age in steps, over all steps: a bound holds from the first on."""
    promised: Mapping[str, int | None]
    """Generate stage to the worst age that the plan states."""
    tokens_per_step: float
    """Prompt and response tokens that a step trains on: drawn ones, or the assumed mean. 0 = not known."""
    tokens_drawn: bool
    moved: Mapping[str, float]
    """Generate stages whose last samples gather on few engines, to the samples that moved in a step."""
    thrown_out: Mapping[str, ThrownOut]
    """Generate stages that ran sample by sample."""
    failed_calls: Mapping[str, FailedCalls]
    refills: Mapping[str, Refills]
    queues: Mapping[str, QueueUse]
    links: Mapping[str, LinkUse]
    peak_bytes: Mapping[str, tuple[int, int]]
    """Pool to (peak, capacity) of the memory of one device, by the plan."""
    uncounted: tuple[str, ...]
    """Python stages simulated as if they took no time."""
    events: tuple[Mapping[str, Any], ...]
    """For `rlflow.backends.visualizers.trace.write_trace`: one rank stands for its pool."""
    work: Mapping[str, tuple[tuple[Time, Time, float], ...]]
    """Pool to (start, end, share of its devices) of its stages, over all steps."""
    depths: Mapping[str, tuple[tuple[Time, int], ...]]
    """Queue to (time, batches in it from then on), over all steps."""
    ages_by_step: Mapping[str, Mapping[int, Mapping[int, int]]]
    """Generate stage to step (from 0) to the number of its samples by age."""

    @property
    def bubble(self) -> float:
        """Share of the device time in no stage."""
        devices = sum(pool.devices for pool in self.pools.values())
        return 1 - sum(pool.devices * pool.busy for pool in self.pools.values()) / devices if devices else 0.0

    @property
    def tokens_per_second(self) -> float:
        return self.tokens_per_step / float(self.period) * 1e6 if self.period else 0.0

    @property
    def worst_age(self) -> int:
        return max((age for ages in self.ages.values() for age in ages), default=0)


def result_of(world: World, warm_up: int, steps: int, *, repeats: bool) -> Result:
    """The measures of a simulation that has ended. `repeats`: every step does the same, in the same time."""
    ends = [world.record.ends[step] for step in range(warm_up + steps)]
    start, end = (ends[warm_up - 1] if warm_up else 0), ends[warm_up + steps - 1]
    plan = world.plan
    moves: dict[str, list[tuple[Time, Time, float]]] = {}
    for event in world.record.events:
        if event["kind"] in MOVES:
            begin = event["start_us"]
            moves.setdefault(event["pool"], []).append((begin, begin + event["duration_us"], 1.0))
    tokens, drawn = _tokens(world, range(warm_up, warm_up + steps))
    return Result(
        ends=tuple(ends),
        warm_up=warm_up,
        sampled=any(isinstance(server, EngineServer) for server in world.servers.values()),
        period=period_of(ends, warm_up, repeats),
        pools={
            pool.name: PoolUse(
                len(pool.ranks),
                _share(world.record.work[pool.name], start, end),
                _share(moves.get(pool.name, ()), start, end),
            )
            for pool in plan.pools
            if pool.device != "functions"
        },
        ages={
            name: dict(sorted(sum(edge.ages.values(), Counter()).items()))
            for name, edge in world.edges.items()
            if edge.trained_elsewhere
        },
        promised={
            name: edge.stale.worst_age if edge.stale is not None else 0
            for name, edge in world.edges.items()
            if edge.trained_elsewhere
        },
        tokens_per_step=tokens,
        tokens_drawn=drawn,
        moved={
            name: sum(count for when, count in server.moved if start < when <= end) / steps
            for name, server in world.servers.items()
            if isinstance(server, EngineServer) and server.migrates
        },
        thrown_out={
            name: _thrown_out([tokens for when, tokens in server.thrown_out if start < when <= end], steps)
            for name, server in world.servers.items()
            if isinstance(server, EngineServer)
        },
        failed_calls={
            name: _failed_calls(calls, range(warm_up, warm_up + steps)) for name, calls in world.calls.items()
        },
        refills={name: _refills(filter, range(warm_up, warm_up + steps)) for name, filter in world.filters.items()},
        queues={
            name: QueueUse(queue.spec.capacity, *_depth(queue.depths, start, end))
            for name, queue in world.queues.items()
            if len(queue.depths) > 1
        },
        links={
            link.name: LinkUse(
                sum(size for began, _, size in link.used if start <= began < end) / steps,
                _share([(began, began + us, 1.0) for began, us, _ in link.used], start, end),
            )
            for links in world.links.values()
            for link in links.all
            if link.bytes
        },
        peak_bytes={memory.pool: (memory.peak, memory.capacity) for memory in plan.memory},
        uncounted=tuple(uncounted(plan, world.durations)),
        events=tuple(world.record.events),
        work={pool: tuple(stretches) for pool, stretches in world.record.work.items()},
        depths={name: tuple(queue.depths) for name, queue in world.queues.items() if len(queue.depths) > 1},
        ages_by_step={
            name: {step: dict(sorted(ages.items())) for step, ages in sorted(edge.ages.items())}
            for name, edge in world.edges.items()
            if edge.trained_elsewhere
        },
    )


def _thrown_out(tokens: Sequence[int], steps: int) -> ThrownOut:
    return ThrownOut(len(tokens) / steps, sum(tokens) / steps)


def _failed_calls(calls: Calls, steps: range) -> FailedCalls:
    samples = calls.rows * len(steps)
    lost = [calls.lost.get(step, 0) for step in steps]
    stops = 0 if calls.drops else sum(count > 0 for count in lost)
    return FailedCalls(
        sum(calls.tries.get(step, calls.rows) for step in steps) / samples, sum(lost) / samples, stops / len(steps)
    )


def _refills(filter: Filter, steps: range) -> Refills:
    rounds = [filter.rounds.get(step, 1) for step in steps]
    return Refills(sum(rounds) / len(rounds), max(rounds), len(filter.short & set(steps)) / len(rounds))


def period_of(ends: Sequence[Time], warm_up: int, repeats: bool) -> Time:
    """Microseconds of a step in the long run.

    Where all steps are alike the times between them repeat in the end (Cohen, Dubois, Quadrat, Viot 1985); once they do
    so three times, their mean over one repetition is exact. Otherwise the mean after the warm-up.
    """
    gaps = [after - before for before, after in pairwise(ends)]
    first = max(0, warm_up - 1)
    if repeats and all(isinstance(gap, int) for gap in gaps):
        for cycle in range(1, len(gaps) // 3 + 1):
            tail = gaps[-3 * cycle :]
            if tail[:cycle] == tail[cycle : 2 * cycle] == tail[2 * cycle :]:
                total = sum(tail[:cycle])
                return total // cycle if total % cycle == 0 else total / cycle
    measured = gaps[first:] or gaps
    return sum(measured) / len(measured) if measured else ends[-1]


def _share(stretches: Sequence[tuple[Time, Time, float]], start: Time, end: Time) -> float:
    """How much of the time between `start` and `end` the stretches fill."""
    if end <= start:
        return 0.0
    filled = sum(
        float(min(to, end) - max(since, start)) * part for since, to, part in stretches if to > start and since < end
    )
    return filled / float(end - start)


def _depth(depths: Sequence[tuple[Time, int]], start: Time, end: Time) -> tuple[int, float]:
    """(most, mean over time) between `start` and `end`."""
    until = [time for time, _ in depths[1:]] + [end]
    inside = [
        (since, to, depth) for (since, depth), to in zip(depths, until, strict=True) if to > start and since < end
    ]
    if end <= start or not inside:
        return 0, 0.0
    area = sum(float(min(to, end) - max(since, start)) * depth for since, to, depth in inside)
    return max(depth for _, _, depth in inside), area / float(end - start)


def _tokens(world: World, steps: range) -> tuple[float, bool]:
    """Tokens of a measured step, and whether they were drawn."""
    total, drawn = 0.0, False
    facts = {estimate.stage: estimate.engine for estimate in world.plan.estimates}
    for name, edge in world.edges.items():
        engine = facts.get(name)
        if engine is None:
            return 0.0, False
        measured = [step for step in edge.ages if step in steps]
        if edge.rows > 1 or not any(edge.tokens.values()):
            total += edge.rows * (engine.prompt_tokens + engine.mean_new)
        elif measured:
            rows = sum(sum(edge.ages[step].values()) for step in measured)
            total += (sum(edge.tokens[step] for step in measured) + rows * engine.prompt_tokens) / len(measured)
            drawn = True
    return total, drawn
