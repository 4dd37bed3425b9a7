"""`schedule` and `cluster` blocks to what the passes read. Names, units and permitted staleness are checked here."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rlflow.cluster.spec import (
    LOCAL,
    Cluster,
    PlaceRequest,
    PoolRequest,
    Schedule,
    StalenessRequest,
    TriggerRequest,
    local_cluster,
)
from rlflow.diagnostics import Label, Span, one_of
from rlflow.frontend.bind import Scope, bind, convert
from rlflow.frontend.clusters import MAX_DEVICES, find_cluster, memory, once, preset_clusters
from rlflow.frontend.constants import Poison, Qty, Reporter, describe, evaluate
from rlflow.frontend.layout_settings import LAYOUT_SETTINGS, layout_setting
from rlflow.frontend.parameters import Count, Flag, Parameter, Whole
from rlflow.frontend.signatures import CORRECTIONS
from rlflow.grammar import nodes
from rlflow.ir import ops
from rlflow.ir.flow import STEP, Flow, reads_model
from rlflow.ir.ops import Correction, Generate, Take

ADMISSIONS = ("in_order", "wait", "slack_edf", "evict", "count")
CARRIES = ("partial", "finish", "nothing")
"""What becomes of the samples that are not ready when a trigger fires: they are interrupted and go on with the new
weights, they are finished with the old ones, or nothing is carried: training starts early and waits for the rest."""
POOL_SETTINGS = ("device", "memory", "swap")
FUNCTIONS = "cpu"
"""The pool of Python stages, which every cluster has."""
MAX_WORKERS = 10_000


def choose(
    program: nodes.Program, flow: nodes.Flow, scope: Scope, report: Reporter, lowered: Flow, wanted: str | None
) -> tuple[Schedule, Cluster]:
    """The schedule of this flow and its cluster; none written = everything open, on this machine.

    `wanted` picks among several schedules by cluster name. Raises Poison after reporting.
    """
    clusters: dict[str, nodes.Cluster] = {}
    for cluster in program.clusters:
        name = cluster.name.text
        if name == LOCAL:
            report.error("RLF1002", f"`{LOCAL}` is this machine and cannot be defined", Label(cluster.name.span))
        elif name in clusters:
            report.error(
                "RLF1002",
                f"cluster `{name}` is defined twice",
                Label(cluster.name.span, "again here"),
                Label(clusters[name].name.span, "first here", primary=False),
            )
        clusters.setdefault(name, cluster)
    found = [s for s in program.schedules if s.flow.text == flow.name.text]
    for schedule in program.schedules:
        if schedule.flow.text not in {f.name.text for f in program.flows}:
            report.unknown("flow", schedule.flow.text, Label(schedule.flow.span), [f.name.text for f in program.flows])
        if schedule.cluster is not None and schedule.cluster.text not in (*clusters, LOCAL, *preset_clusters()):
            known = [*clusters, LOCAL, *preset_clusters()]
            report.unknown("cluster", schedule.cluster.text, Label(schedule.cluster.span), known)
    if report.has_errors:
        raise Poison()
    if wanted is not None:
        names = [s.cluster.text if s.cluster else LOCAL for s in found]
        if wanted not in (*names, LOCAL):
            raise report.unknown("cluster of a schedule", wanted, Label(flow.name.span), [*names, LOCAL])
        found = [s for s, name in zip(found, names, strict=True) if name == wanted]
    if not found:
        return Schedule(), local_cluster()
    if len(found) > 1:
        raise report.error(
            "RLF1002",
            f"`{flow.name.text}` has {len(found)} schedules",
            *(Label(s.flow.span, "", primary=i == 0) for i, s in enumerate(found)),
            help=("choose one with `--cluster NAME`",) if wanted is None else (),
        )
    schedule = found[0]
    name = schedule.cluster.text if schedule.cluster else LOCAL
    machines = find_cluster(name, clusters, scope, report)
    return _Lower(schedule, lowered, machines, scope, report).run(), machines


class _Lower:
    """One schedule block against the flow it is for."""

    def __init__(self, schedule: nodes.Schedule, flow: Flow, cluster: Cluster, scope: Scope, report: Reporter) -> None:
        self._schedule = schedule
        self._flow = flow
        self._cluster = cluster
        self._scope = scope
        self._report = report
        self._pools: dict[str, PoolRequest] = {}
        self._poisoned: set[str] = set()
        """Pools with errors; using them is not reported again."""
        self._places: list[PlaceRequest] = []
        self._placed: dict[str, Span] = {}
        self._staleness: dict[str, StalenessRequest] = {}
        self._triggers: list[TriggerRequest] = []

    def run(self) -> Schedule:
        items = sorted(self._schedule.items, key=lambda item: not isinstance(item, nodes.Pool))
        for item in items:
            try:
                match item:
                    case nodes.Pool():
                        self._pool(item)
                    case nodes.Place():
                        self._place(item)
                    case nodes.Staleness():
                        self._bound(item)
                    case nodes.Trigger():
                        self._trigger(item)
            except Poison:
                continue
        return Schedule(
            tuple(self._pools.values()),
            tuple(self._places),
            tuple(self._staleness.values()),
            tuple(self._triggers),
            self._schedule.span,
            any(isinstance(item, nodes.Auto) for item in items) or not (self._pools or self._places),
        )

    def _pool(self, pool: nodes.Pool) -> None:
        name = pool.name.text
        if name in self._pools:
            first = self._pools[name].span
            raise self._report.error(
                "RLF1002",
                f"pool `{name}` is defined twice",
                Label(pool.name.span, "again here"),
                *([Label(first, "first here", primary=False)] if first else []),
            )
        if name == FUNCTIONS:
            raise self._report.error(
                "RLF1002",
                f"`{FUNCTIONS}` is the pool of Python stages",
                Label(pool.name.span, "choose another name"),
                help=(f"its size is `place REWARD on {FUNCTIONS} with workers = N`",),
            )
        self._poisoned.add(name)
        value = evaluate(pool.size, self._scope.constants, self._report)
        accepts = Count("devices", most=MAX_DEVICES)
        size = convert(f"pool {name}", accepts, value, pool.size.span, self._scope, self._report)
        self._poisoned.discard(name)
        self._pools[name] = PoolRequest(name, size, pool.span, **self._pool_settings(pool))

    def _pool_settings(self, pool: nodes.Pool) -> dict[str, Any]:
        """`device` of a cluster with several kinds, `memory` that stages may use of a device, `swap`."""
        found: dict[str, Any] = {}
        for setting in once(pool.settings, self._report):
            name = setting.name.text
            if name not in POOL_SETTINGS:
                self._report.unknown("pool setting", name, Label(setting.name.span), list(POOL_SETTINGS), "RLF1003")
                continue
            try:
                if name == "device":
                    found[name] = self._pool_device(setting)
                elif name == "swap":
                    value = evaluate(setting.value, self._scope.constants, self._report)
                    found[name] = convert(name, Flag(), value, setting.value.span, self._scope, self._report)
                else:
                    found["memory_bytes"] = memory(setting, self._scope, self._report)
            except Poison:
                continue
        return found

    def _pool_device(self, setting: nodes.Setting) -> str:
        kinds = sorted({host.device for host in self._cluster.hosts})
        word = setting.value.id if isinstance(setting.value, nodes.Name) else ""
        if word not in kinds:
            raise self._report.unknown(
                f"device of cluster `{self._cluster.name}`:",
                word or setting.value.span.text,
                Label(setting.value.span),
                kinds,
            )
        return word

    def _place(self, place: nodes.Place) -> None:
        ids: list[str] = []
        functions = False
        for ref in place.stages:
            chosen = self._stages(ref)
            here = ref.owner.text in self._flow.rewards
            if ref is not place.stages[0] and here != functions:
                raise self._report.error(
                    "RLF1007",
                    "Python stages and model stages are placed apart",
                    Label(ref.span, f"this is a {'reward' if here else 'model'}"),
                    Label(place.stages[0].span, f"this is a {'model' if here else 'reward'}", primary=False),
                    help=("write two `place` lines",),
                )
            functions = here
            ids.extend(chosen)
        allowed = [FUNCTIONS] if functions else list(self._pools)
        for pool in place.pools:
            if pool.text in self._poisoned and not functions:
                raise Poison()
            if pool.text not in allowed:
                raise self._report.unknown("pool", pool.text, Label(pool.span), allowed)
        if len(place.pools) > 1:
            ids = self._sampling(place, ids)
        sizes: dict[str, Any] = {}
        spans: dict[str, Span] = {}
        keys = ("workers",) if functions else (*LAYOUT_SETTINGS, "split")
        for setting in once(place.settings, self._report):
            key = setting.name.text
            if key not in keys:
                raise self._report.unknown("setting of `place`:", key, Label(setting.name.span), list(keys), "RLF1003")
            if functions:
                value = evaluate(setting.value, self._scope.constants, self._report)
                sizes[key] = convert(key, Whole(1, MAX_WORKERS), value, setting.value.span, self._scope, self._report)
            else:
                sizes[key] = layout_setting(setting, self._scope, self._report)
            spans[key] = setting.span
        for node_id in ids:
            if node_id in self._placed:
                raise self._report.error(
                    "RLF1002",
                    f"`{node_id}` is placed twice",
                    Label(place.span, "again here"),
                    Label(self._placed[node_id], "first here", primary=False),
                )
            self._placed[node_id] = place.span
        pools = [pool.text for pool in place.pools]
        found = PlaceRequest(tuple(ids), pools[0], tuple(pools[1:]), span=place.span, settings=spans, **sizes)
        self._places.append(found)

    def _sampling(self, place: nodes.Place, ids: list[str]) -> list[str]:
        """Only stages that sample may be on several pools, each of which is named once."""
        names = [pool.text for pool in place.pools]
        again = next((pool for at, pool in enumerate(place.pools) if pool.text in names[:at]), None)
        if again is not None:
            raise self._report.error("RLF1002", f"pool `{again.text}` is named twice", Label(again.span))
        others = [i for i in ids if not isinstance(self._flow.nodes[i].op, Generate)]
        if others:
            owner = place.stages[0].owner.text
            fix = f"`place {owner}.generate on {', '.join(names)}`" if owner in self._flow.models else ""
            raise self._report.error(
                "RLF1007",
                f"`{others[0]}` cannot be on {len(names)} pools: only stages that sample can",
                Label(place.span),
                help=(f"{fix}, and the others on one pool",) if fix else ("name one pool",),
            )
        return ids

    def _stages(self, ref: nodes.StageRef) -> list[str]:
        """Ids of the step's stages that `actor.generate`, `reference` or `exact` mean."""
        owner = ref.owner.text
        kinds = {
            node.id: node.op.kind
            for node in self._flow.nodes.values()
            if owner in (reads_model(node.op), getattr(node.op, "reward", None), getattr(node.op, "data", None))
        }
        if owner in self._flow.data:
            raise self._report.error("RLF1007", "data is read where it is used and is not placed", Label(ref.span))
        if owner not in self._flow.models and owner not in self._flow.rewards:
            known = [*self._flow.models, *self._flow.rewards]
            raise self._report.unknown("model or reward", owner, Label(ref.owner.span), known)
        if ref.stage is None:
            return list(kinds)
        found = [i for i, kind in kinds.items() if kind == ref.stage.text]
        if not found:
            raise self._report.unknown(
                f"stage of `{owner}`:", ref.stage.text, Label(ref.stage.span), sorted(set(kinds.values()))
            )
        return found

    def _bound(self, item: nodes.Staleness) -> None:
        model = item.model.text
        if model not in self._flow.models:
            raise self._report.unknown("model", model, Label(item.model.span), list(self._flow.models))
        value = evaluate(item.bound, self._scope.constants, self._report)
        steps = convert("staleness", Count("steps", 0), value, item.bound.span, self._scope, self._report)
        admit = "in_order" if item.admit is None else item.admit.text
        if item.admit is not None and admit not in ADMISSIONS:
            raise self._report.unknown("admission rule", admit, Label(item.admit.span), list(ADMISSIONS))
        permitted = self._flow.allowed_staleness.get(model, 0)
        if steps > permitted:
            most = f"{permitted} step{'s' * (permitted != 1)}"
            fix = f"use at most `staleness {model} = {most}`, or permit it in the flow: "
            raise self._report.error(
                "RLF3001",
                f"the schedule lets samples be {steps} step{'s' * (steps != 1)} old, and the flow permits "
                f"{permitted} for `{model}`",
                Label(item.span),
                help=(fix + f"`allow {model} staleness <= {steps} step{'s' * (steps != 1)}`",),
            )
        extra = self._bound_settings(item, steps, admit)
        self._staleness[model] = StalenessRequest(model, steps, admit, item.span, **extra)

    def _bound_settings(self, item: nodes.Staleness, steps: int, admit: str) -> dict[str, Any]:
        """`burst` and `depth`, in steps."""
        found: dict[str, Any] = {}
        for setting in once(item.settings, self._report):
            name = setting.name.text
            if name not in ("burst", "depth"):
                self._report.unknown(
                    "setting of `staleness`:", name, Label(setting.name.span), ["burst", "depth"], "RLF1003"
                )
                continue
            value = evaluate(setting.value, self._scope.constants, self._report)
            accepts = Count("steps", 1)
            found[name] = convert(name, accepts, value, setting.value.span, self._scope, self._report)
            if found[name] > steps + 1:
                raise self._report.error(
                    "RLF3003",
                    f"`{name} = {found[name]} steps` is more than the {steps + 1} batches that `staleness = {steps}` "
                    "lets be under way",
                    Label(setting.span),
                    help=(f"at most `{name} = {steps + 1} steps`, or a larger staleness",),
                )
        return found

    def _trigger(self, item: nodes.Trigger) -> None:
        node = self._flow.nodes.get(item.value.text)
        names = [n.id for n in self._flow.nodes.values() if n.phase == STEP and not isinstance(n.op, Take)]
        if node is None:
            raise self._report.unknown("value", item.value.text, Label(item.value.span), names)
        value = evaluate(item.share, self._scope.constants, self._report)
        if not (isinstance(value, Qty) and value.dimension == "share" and 0 < value.number <= 1):
            raise self._report.error(
                "RLF1005",
                "a trigger is a share above 0% and at most 100%",
                Label(item.share.span, f"this is {describe(value)}"),
            )
        carry = "finish" if item.carry is None else item.carry.text
        if carry not in CARRIES:
            assert item.carry is not None
            raise self._report.error("RLF1001", f"`carry` is {one_of(CARRIES)}", Label(item.carry.span))
        self._triggers.append(TriggerRequest(node.id, float(value.number), carry, item.span))


def permitted_staleness(
    items: Mapping[str, nodes.Allow], models: list[str], scope: Scope, report: Reporter
) -> tuple[dict[str, int], dict[str, Correction]]:
    """Bounds and corrections of the flow's `allow` lines, by model."""
    out: dict[str, int] = {}
    corrections: dict[str, Correction] = {}
    for model, item in items.items():
        if model not in models:
            report.unknown("model", model, Label(item.model.span), models)
            continue
        try:
            value = evaluate(item.bound, scope.constants, report)
            out[model] = convert("staleness", Count("steps", 0), value, item.bound.span, scope, report)
            if item.correction is not None:
                corrections[model] = _correction(item.correction, scope, report)
        except Poison:
            continue
    return out, corrections


def _correction(expr: nodes.Expr, scope: Scope, report: Reporter) -> Correction:
    if not (isinstance(expr, nodes.Call) and isinstance(expr.function, nodes.Name)):
        raise report.error("RLF1007", "a correction is a call such as `truncated_is(2.0)`", Label(expr.span))
    word = expr.function.id
    if word not in CORRECTIONS:
        raise report.unknown("correction", word, Label(expr.function.span), sorted(CORRECTIONS))
    return ops.CORRECTIONS[word](**bind(expr, CORRECTIONS[word], scope, report, _nothing_special).values)


def _nothing_special(parameter: Parameter, expr: nodes.Expr) -> Any:
    raise AssertionError(f"{parameter.name} takes a constant")
