"""How many prompts of a batch each of several pools samples for, so that the pools end as early as they can."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from math import gcd, lcm

from rlflow.cluster.spec import PlaceRequest
from rlflow.cost.errors import CostError
from rlflow.ir.flow import STEP, Flow, Layout, Node, PoolSpec
from rlflow.ir.ops import Generate
from rlflow.ir.typesystem import RowsType
from rlflow.passes.analysis.costs import Costs
from rlflow.passes.analysis.layouts import Home, layout_of
from rlflow.passes.analysis.pools import allocate_pools
from rlflow.passes.base import PassContext
from rlflow.values import dataclass

Seconds = Callable[[int], float]
"""Of sampling for so many prompts."""
HALVINGS = 40
"""Of the interval that has the least time in it."""


@dataclass(frozen=True, slots=True)
class Share:
    """`alternative`: the runner-up, why it lost, and by how many microseconds, in words of a choice."""

    pool: str
    prompts: int
    alternative: tuple[str, str, int]


@dataclass(frozen=True, slots=True)
class Worker:
    """A pool as it is weighed. `busy`: seconds of a step that it has no time to sample in; `unit`: its prompts are a
    multiple of it."""

    pool: str
    unit: int
    busy: float
    seconds: Seconds

    def ends(self, prompts: int) -> float:
        return self.busy + (self.seconds(prompts) if prompts else 0.0)


def divide(workers: list[Worker], prompts: int, unit: int) -> list[int]:
    """Prompts of each worker, multiples of `unit` that sum to `prompts`, with the least time until the last has ended.

    Each worker's time grows with its prompts, so that a time suffices if all prompts find a place in it; the least such
    time is found by bisection. `prompts` is a multiple of `unit`.
    """
    whole = prompts // unit

    def most(worker: Worker, time: float) -> int:
        low, high = 0, whole
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if worker.ends(middle * unit) <= time else (low, middle - 1)
        return low

    low, high = 0.0, max(worker.ends(prompts) for worker in workers)
    for _ in range(HALVINGS):
        time = (low + high) / 2
        low, high = (low, time) if sum(most(worker, time) for worker in workers) >= whole else (time, high)
    found = [most(worker, high) for worker in workers]
    while sum(found) > whole:
        ends = [worker.ends(count * unit) if count else -1.0 for worker, count in zip(workers, found, strict=True)]
        found[ends.index(max(ends))] -= 1
    return [count * unit for count in found]


@dataclass(frozen=True)
class Lending:
    """Weighs pools on a flow in which every stage has a layout on the first of its pools."""

    flow: Flow
    context: PassContext

    def shares(self, node: Node, place: PlaceRequest, context: PassContext) -> list[Share]:
        """Of the pools of a `place`, in its order. An error where the prompts do not divide as the pools need it."""
        assert isinstance(node.op, Generate)
        assert isinstance(node.type, RowsType)
        assert node.type.rows is not None
        prompts, n = node.type.rows // node.op.n, node.op.n
        pools = allocate_pools(self.context)
        layouts = {name: self._layout(node, place, pools[name]) for name in (place.pool, *place.also)}
        units = {name: layout.dp // gcd(layout.dp, n) for name, layout in layouts.items()}
        unit = lcm(*units.values())
        if prompts % unit:
            _report(node, place, prompts, {name: layouts[name].dp for name in units}, unit, context)
            return []
        known = self._workers(node, layouts, pools)
        workers = known or [
            Worker(name, units[name], 0.0, _by_devices(len(pools[name].host_of_rank))) for name in layouts
        ]
        found = divide(workers, prompts, unit)
        alternative = _alternative(workers, found, prompts) if known else _unknown(workers, prompts)
        return [Share(worker.pool, count, alternative) for worker, count in zip(workers, found, strict=True)]

    def _layout(self, node: Node, place: PlaceRequest, pool: PoolSpec) -> Layout:
        assert isinstance(node.op, Generate)
        home = Home(
            pool.name,
            len(pool.host_of_rank),
            node.op.model,
            self.context.shapes.get(node.op.model),
            accelerator=pool.device != "cpu",
        )
        return layout_of(place, home)[0]  # what breaks a rule is reported with the layouts of all stages

    def _workers(self, node: Node, layouts: dict[str, Layout], pools: dict[str, PoolSpec]) -> list[Worker]:
        """The pools by the cost model; none where a fact is missing."""
        costs = Costs(self.flow, self.context)
        assert isinstance(node.op, Generate)
        ahead = any(s.steps and s.model == node.op.model for s in self.context.schedule.staleness)
        found = []
        try:
            for name, layout in layouts.items():
                seconds = self._seconds(node, layout, pools[name], costs)
                if seconds is None:
                    return []
                busy = 0.0
                for other in self.flow.phase_nodes(STEP):
                    beside = other.placement is not None and other.placement.pool == name and other.id != node.id
                    cost = costs.cost(other) if ahead and beside else None
                    busy += 0.0 if cost is None else cost.seconds
                found.append(Worker(name, layout.dp, busy, seconds))
        except CostError:
            return []
        return found

    def _seconds(self, node: Node, layout: Layout, pool: PoolSpec, costs: Costs) -> Seconds | None:
        machine = costs.machine(pool)
        if machine is None or costs.cost(node, layout, machine) is None:
            return None
        op, type_ = node.op, node.type
        assert isinstance(op, Generate)
        assert isinstance(type_, RowsType)
        known: dict[int, float] = {}

        def seconds(prompts: int) -> float:
            if prompts not in known:
                cost = costs.cost(replace(node, type=replace(type_, rows=prompts * op.n)), layout, machine)
                assert cost is not None
                known[prompts] = cost.seconds
            return known[prompts]

        return seconds


def _by_devices(devices: int) -> Seconds:
    return lambda prompts: prompts / devices


def _alternative(workers: list[Worker], found: list[int], prompts: int) -> tuple[str, str, int]:
    """All prompts on the first pool, or what the others would have done."""
    chosen = max(worker.ends(count) for worker, count in zip(workers, found, strict=True))
    first = workers[0]
    if found[0] == prompts:
        other = min(workers[1:], key=lambda worker: worker.busy)
        return (
            f"a part on {other.pool}",
            f"`{first.pool}` is done with all in {chosen:.3g} s, and `{other.pool}` is busy for {other.busy:.3g} s",
            0,
        )
    alone = max(first.ends(prompts), *(worker.busy for worker in workers[1:]))
    reason = f"`{first.pool}` alone would take {first.ends(prompts):.3g} s, together they take {chosen:.3g} s"
    return f"{first.pool} {prompts}", reason, max(0, round((alone - chosen) * 1e6))


def _unknown(workers: list[Worker], prompts: int) -> tuple[str, str, int]:
    return f"{workers[0].pool} {prompts}", "in proportion to devices, since how fast they are is not known", 0


def _report(
    node: Node, place: PlaceRequest, prompts: int, replicas: dict[str, int], unit: int, context: PassContext
) -> None:
    below = prompts // unit * unit
    nearest = " or ".join(str(count) for count in (below, below + unit) if count)
    needs = " and ".join(f"`{pool}` has {dp}" for pool, dp in replicas.items())
    context.error(
        "RLF2001",
        f"the {prompts} prompts of `{node.id}` do not divide into parts of {unit}, as whole groups on the "
        "data-parallel ranks of its pools need",
        place.span,
        notes=(f"{needs} replicas",),
        help=(f"nearest that divide: {nearest} prompts",),
    )
