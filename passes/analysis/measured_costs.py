"""The cost model held to what was measured: one factor a stage, from the layout in which it was measured.

A profile knows a stage in one layout. Another layout is not measured, but the same model on the same devices: what the
cost model says of it is scaled by what it was off where both are known. So layouts of a stage compare fairly, and the
measured one takes what was measured.
"""

from __future__ import annotations

import json
import re
from dataclasses import fields
from typing import TYPE_CHECKING, Any

from rlflow.ir.flow import Layout
from rlflow.passes.analysis.conditions import size_of, work_conditions
from rlflow.passes.analysis.profiled import factor

if TYPE_CHECKING:
    from rlflow.cost.machine import Machine
    from rlflow.ir.flow import Node
    from rlflow.passes.analysis.costs import Costs
    from rlflow.profile.table import StageProfile

_DEVICES = {"ascend": "npu", "nvidia": "cuda"}
"""Hardware family to the word of a pool's devices."""
_SETTING = re.compile(r"(\w+) (\[[^\]]*\]|[^,]+)(?:, |$)")


def measured_factor(costs: Costs, node: Node, on: Machine, memory_bytes: int | None) -> float:
    """Measured over modelled seconds of a model stage; 1 where nothing was measured that could tell.

    `memory_bytes` is what an engine may take of a device.
    """
    from rlflow.cost.errors import CostError

    entry = None if costs.context.profile is None else costs.context.profile.find(node.id)
    layout = None if entry is None else _layout(entry)
    if entry is None or layout is None or not _same_work(costs, node, entry, on):
        return 1.0
    try:
        cost = costs.cost(node, layout, on, memory_bytes)
    except CostError:
        return 1.0
    measured = float(entry.us * factor(entry, size_of(costs.flow, node)) + entry.publish_us) / 1e6
    return measured / cost.seconds if cost is not None and cost.seconds and measured else 1.0


def layout_words(costs: Costs, node: Node) -> str:
    """The layout in which a stage was measured, as the profile has it."""
    entry = None if costs.context.profile is None else costs.context.profile.find(node.id)
    return "" if entry is None else entry.conditions.get("layout", "")


def _same_work(costs: Costs, node: Node, entry: StageProfile, on: Machine) -> bool:
    """Whether all is the same but the layout and the number of devices."""
    if len({host.device for host in costs.context.cluster.hosts}) > 1:
        return False  # the profile says no more of a device than `npu` or `cuda`
    size = size_of(costs.flow, node)
    if (size.rows is None) != (entry.rows is None):
        return False
    here = work_conditions(costs.flow, node) | {"device": _DEVICES.get(on.device.family, "")}
    measured = {name: words for name, words in entry.conditions.items() if name not in ("layout", "devices")}
    return here == measured


def _layout(entry: StageProfile) -> Layout | None:
    known = {field.name for field in fields(Layout)}
    found: dict[str, Any] = {}
    for name, value in _SETTING.findall(entry.conditions.get("layout", "")):
        if name not in known:
            return None
        try:
            read = json.loads(value)
        except ValueError:
            read = value
        found[name] = tuple(read) if isinstance(read, list) else read
    return Layout(**found) if found else None
