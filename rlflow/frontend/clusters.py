"""`cluster` blocks to hosts and their devices, and the clusters that ship with rlflow."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import cache

from rlflow.cluster import presets
from rlflow.cluster.spec import LOCAL, Cluster, Host, local_cluster
from rlflow.diagnostics import Label
from rlflow.frontend.bind import Scope, convert
from rlflow.frontend.constants import Poison, Qty, Reporter, describe, evaluate
from rlflow.frontend.imports import SHIPPED, shipped
from rlflow.frontend.parameters import Whole
from rlflow.frontend.units import EXAMPLES
from rlflow.grammar import nodes
from rlflow.grammar.parse import parse

MAX_DEVICES = 100_000
"""Of a pool, of a host, of a cluster; also hosts. A plan names every one of them."""


@cache
def preset_clusters() -> Mapping[str, nodes.Cluster]:
    """The clusters that ship with rlflow, by name."""
    return {cluster.name.text: cluster for cluster in parse(shipped("clusters")).clusters}


@cache
def preset(name: str) -> Cluster:
    """A cluster that ships with rlflow. KeyError for an unknown name."""
    found = lower_cluster(preset_clusters()[name], Scope({}), Reporter())
    if name not in presets.supernodes():
        return found
    return replace(found, hosts=tuple(replace(host, supernode=name) for host in found.hosts))


def find_cluster(name: str, defined: Mapping[str, nodes.Cluster], scope: Scope, report: Reporter) -> Cluster:
    """The machines that a name of a cluster means: defined in the program, this machine, or shipped with rlflow."""
    if name in defined and not defined[name].span.file.name.startswith(SHIPPED):
        return lower_cluster(defined[name], scope, report)
    return local_cluster() if name == LOCAL else preset(name)


def _copies(name: str, number: int, report: Reporter, label: Label) -> list[Host]:
    """The hosts of so many clusters that ship with rlflow; every supernode has a name of its own."""
    machines = preset(name)
    if number * machines.num_devices > MAX_DEVICES:
        raise report.error(
            "RLF1010",
            f"these are {number * machines.num_devices} devices, and rlflow plans for {MAX_DEVICES} at most",
            label,
        )
    one = len(machines.hosts) == 1
    return [
        replace(
            host,
            name=f"{name}-{i}" if one else f"{name}-{i}-{host.name}",
            supernode=None if host.supernode is None else f"{name}-{i}",
        )
        for i in range(number)
        for host in machines.hosts
    ]


def lower_cluster(cluster: nodes.Cluster, scope: Scope, report: Reporter) -> Cluster:
    """Hosts of a cluster block.

    `name = 8 * device {...}` defines a host, `name = 4 * host` a number of them, `name = 4 * preset` a number of
    clusters that ship with rlflow.
    """
    defined: dict[str, Host] = {}
    used: set[str] = set()
    hosts: list[Host] = []
    names: set[str] = set()
    for entry in cluster.entries:
        name = entry.name.text
        if name in presets.device_names():
            report.error("RLF1002", f"`{name}` is a device already", Label(entry.name.span, "choose another name"))
            continue
        if name in names:
            report.error(
                "RLF1002", f"`{name}` is defined twice in cluster `{cluster.name.text}`", Label(entry.name.span)
            )
            continue
        names.add(name)
        try:
            number, of = _times(entry.value, scope, report)
            if of.id in presets.device_names():
                memory, cpus = _host_settings(entry, scope, report)
                defined[name] = Host(name, of.id, number, memory, cpus)
            elif of.id in defined:
                _only_counts(entry, of, report)
                used.add(of.id)
                template = defined[of.id]
                start = len(hosts)
                hosts.extend(replace(template, name=f"{template.name}-{start + i}") for i in range(number))
            elif of.id in preset_clusters() and (of.id not in names or of.id == name):
                _only_counts(entry, of, report)
                hosts.extend(_copies(of.id, number, report, Label(entry.value.span)))
            elif of.id not in names or of.id == name:  # else its definition has errors of its own
                report.unknown(
                    "device or host",
                    of.id,
                    Label(of.span),
                    [*presets.device_names(), *defined, *preset_clusters()],
                )
        except Poison:
            continue
    hosts.extend(host for name, host in defined.items() if name not in used)
    if not hosts and not report.has_errors:
        report.error("RLF2003", f"cluster `{cluster.name.text}` has no hosts", Label(cluster.name.span))
    devices = sum(host.devices for host in hosts)
    if devices > MAX_DEVICES:
        report.error(
            "RLF1010",
            f"cluster `{cluster.name.text}` has {devices} devices, and rlflow plans for {MAX_DEVICES} at most",
            Label(cluster.name.span),
        )
    return Cluster(cluster.name.text, tuple(hosts), cluster.span)


def _only_counts(entry: nodes.Entry, of: nodes.Name, report: Reporter) -> None:
    for setting in entry.settings:
        report.error(
            "RLF1003",
            f"`{entry.name.text}` only counts hosts",
            Label(setting.span, "not here"),
            help=(f"write it where `{of.id}` is defined",),
        )


def _times(expr: nodes.Expr, scope: Scope, report: Reporter) -> tuple[int, nodes.Name]:
    if isinstance(expr, nodes.Name):
        return 1, expr
    if isinstance(expr, nodes.Binary) and expr.operator == "*" and isinstance(expr.right, nodes.Name):
        value = evaluate(expr.left, scope.constants, report)
        return convert("count", Whole(1, MAX_DEVICES), value, expr.left.span, scope, report), expr.right
    raise report.error("RLF1007", "expected a number of devices or hosts, such as `8 * ascend_910b`", Label(expr.span))


def _host_settings(entry: nodes.Entry, scope: Scope, report: Reporter) -> tuple[int | None, int | None]:
    size: int | None = None
    cpus: int | None = None
    for setting in once(entry.settings, report):
        if setting.name.text == "memory":
            size = memory(setting, scope, report)
        elif setting.name.text == "cpus":
            value = evaluate(setting.value, scope.constants, report)
            cpus = convert("cpus", Whole(1), value, setting.value.span, scope, report)
        else:
            raise report.unknown(
                "host setting", setting.name.text, Label(setting.name.span), ["memory", "cpus"], "RLF1003"
            )
    return size, cpus


def memory(setting: nodes.Setting, scope: Scope, report: Reporter) -> int:
    """The bytes that a setting gives; raises Poison after reporting."""
    value = evaluate(setting.value, scope.constants, report)
    if not (isinstance(value, Qty) and value.dimension == "memory"):
        raise report.error(
            "RLF1005",
            f"`{setting.name.text}` is a size such as `{EXAMPLES['memory']}`",
            Label(setting.value.span, f"this is {describe(value)}"),
        )
    if value.number < 1:
        raise report.error("RLF1010", f"`{setting.name.text}` must be above 0", Label(setting.value.span))
    return int(value.number)


def once(settings: tuple[nodes.Setting, ...], report: Reporter) -> tuple[nodes.Setting, ...]:
    """The settings; Poison after reporting when one stands there twice."""
    seen: dict[str, nodes.Setting] = {}
    for setting in settings:
        first = seen.setdefault(setting.name.text, setting)
        if first is not setting:
            raise report.error(
                "RLF1002",
                f"`{setting.name.text}` is given twice",
                Label(setting.span, "again here"),
                Label(first.span, "first here", primary=False),
            )
    return settings
