"""Flow to text. The text parses back (`rlflow.ir.parser`) and is what tests of passes compare.

One declaration, node or edge a line; attributes as JSON, sorted, those at their default left out; spans left out
unless asked for, since the text's own places would be stale after an edit.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import MISSING, fields, is_dataclass
from typing import Any

from rlflow.ir.flow import Edge, EdgeKind, Flow, Layout, Node
from rlflow.ir.typesystem import RowsType


def print_flow(flow: Flow) -> str:
    """Text of the flow, ending in a newline."""
    return "\n".join(_lines(flow)) + "\n"


def _lines(flow: Flow) -> Iterator[str]:
    settings: dict[str, Any] = {"seed": flow.seed, "save_every": flow.save_every}
    settings |= {"stop_steps": flow.stop_steps, "stop_epochs": flow.stop_epochs}
    yield f"flow @{flow.name} stage={flow.stage.name.lower()} {_attributes(settings)} {{"
    for data in flow.data.values():
        yield f"  data @{data.name} = {_payload(data.source)}"
    for model in flow.models.values():
        yield f"  model @{model.name} = {_payload(model.source)}" + (" trainable" if model.trainable else "")
    for reward in flow.rewards.values():
        yield f"  reward @{reward.name} = {_payload(reward.source)}"
    for environment in flow.environments.values():
        yield f"  environment @{environment.name} = {_payload(environment.source)}"
    for name, bound in flow.allowed_staleness.items():
        correction = flow.corrections.get(name)
        yield f"  allow @{name} staleness={bound}" + (f" with {_payload(correction)}" if correction else "")
    for evaluation in flow.evaluations:
        yield f"  evaluation @{evaluation.name} every={evaluation.every}"
    for pool in flow.pools.values():
        yield f"  pool @{pool.name} = {pool.device} {json.dumps(list(pool.host_of_rank))}"
    for node in flow.nodes.values():
        yield "  " + _node(flow, node)
    for edge in flow.edges:
        if edge.kind is not EdgeKind.DATA:
            yield "  " + _edge(edge)
    for decision in flow.decisions:
        yield "  " + _payload(decision)
    yield "}"


def _node(flow: Flow, node: Node) -> str:
    inputs = ", ".join(f"{port}=%{src}" for port, src in flow.inputs(node.id).items())
    text = f"%{node.id} = {node.op.kind}({inputs}) {_attributes(changed(node.op))} : {node.type}"
    if node.placement is not None:
        layout = node.placement.layout
        text += f" on {node.placement.pool}"
        if layout is not None:
            text += f"[{', '.join(_layout(layout))}]"
    if node.phase != "step":
        text += f" in @{node.phase}"
    if node.slot is not None:
        text += f" slot={node.slot}"
    if node.inserted_by:
        text += f" by={node.inserted_by}"
    return text


def _layout(layout: Layout) -> Iterator[str]:
    """The three main axes, and what else is not at its default."""
    for item in fields(layout):
        value = getattr(layout, item.name)
        if item.name in ("dp", "tp", "pp") or value != item.default:
            yield f"{item.name}={value if isinstance(value, str) else json.dumps(value)}"


def _edge(edge: Edge) -> str:
    text = f"{edge.kind.value} %{edge.src} -> %{edge.dst}"
    if edge.tokens:
        text += f" tokens={edge.tokens}"
    return text


def _payload(source: Any) -> str:
    return f"{source.kind} {_attributes(changed(source))}"


def _attributes(values: dict[str, Any]) -> str:
    inner = ", ".join(f"{key}={json.dumps(values[key], sort_keys=True)}" for key in sorted(values))
    return "{" + inner + "}"


def changed(value: Any) -> dict[str, Any]:
    """Fields of a dataclass that are not at their default, as JSON values; nested dataclasses keep their `kind`."""
    out: dict[str, Any] = {}
    for field in fields(value):
        if field.name in ("kind", "span"):
            continue
        item = getattr(value, field.name)
        if field.default is not MISSING and item == field.default:
            continue
        out[field.name] = _plain(item)
    return out


def _plain(item: Any) -> Any:
    if is_dataclass(item) and not isinstance(item, type):
        return {"kind": getattr(item, "kind", ""), **changed(item)}
    if isinstance(item, tuple):
        return [_plain(x) for x in item]
    return item


def describe_type(type_: Any) -> str:
    """A short form for people: `512 samples (64 x 8)`."""
    if not isinstance(type_, RowsType):
        return str(type_)
    if type_.rows is None:
        return f"{type_.row}s"
    if type_.group > 1:
        return f"{type_.rows} {type_.row}s ({type_.rows // type_.group} x {type_.group})"
    return f"{type_.rows} {type_.row}s"
