"""Under which conditions a measured time holds for a stage, and how large the stage's work is."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any

from rlflow.ir.flow import Flow, Node, reads_model
from rlflow.ir.ops import Combine, FieldOf, FrozenModel, Generate, Score, Train, ValueModel
from rlflow.ir.typesystem import RowsType
from rlflow.passes.analysis.work import generated_by
from rlflow.values import dataclass

_NO_TIME = ("timeout_us", "retries", "on_error", "init_seed", "kind")
"""Settings of a source that do not change how long it takes."""
_SAMPLE_PORTS = ("samples", "rows")


@dataclass(frozen=True, slots=True)
class Size:
    """The work of a stage in one step."""

    rows: int | None
    """On all ranks; None = known only while running."""
    max_new: int | None
    """Longest response of the rows; None where they are not generated."""
    epochs: int = 1


def size_of(flow: Flow, node: Node) -> Size:
    """Of the rows that a stage reads, or makes where it reads none."""
    inputs = flow.inputs(node.id)
    port = next((port for port in _SAMPLE_PORTS if port in inputs), "")
    rows = flow.nodes[inputs[port]].type if port else node.type
    source = node if isinstance(node.op, Generate) else generated_by(flow, node.id)
    return Size(
        rows=rows.rows if isinstance(rows, RowsType) else None,
        max_new=source.op.max_new if source is not None and isinstance(source.op, Generate) else None,
        epochs=node.op.epochs if isinstance(node.op, Train) else 1,
    )


def conditions_of(flow: Flow, node: Node) -> dict[str, str]:
    """Name to value, in words, of everything but the size that decides how long a placed stage takes."""
    assert node.placement is not None
    pool, layout = flow.pools[node.placement.pool], node.placement.layout
    found = {"device": pool.device, "devices": str(len(pool.host_of_rank))}
    if layout is not None:
        found["layout"] = _words(layout)
    return found | work_conditions(flow, node)


def work_conditions(flow: Flow, node: Node) -> dict[str, str]:
    """Those that do not depend on where the stage is placed."""
    op = node.op
    found: dict[str, str] = {"operation": op.kind}
    model = reads_model(op)
    if model is not None:
        found["model"] = _model(flow, model)
    if isinstance(op, Score):
        found["reward"] = _words(flow.rewards[op.reward].source)
    if isinstance(op, Generate) and op.environment is not None:
        found["environment"] = f"{_words(flow.environments[op.environment].source)}, {op.turns} turns"
    if isinstance(op, Train):
        rows = size_of(flow, node).rows
        whole = not op.minibatch or (rows is not None and op.minibatch >= rows)
        found["minibatch"] = "the whole batch" if whole else f"{op.minibatch} samples"
        found["microbatch"] = f"{op.microbatch_tokens} tokens"
    if isinstance(op, Combine):
        found["columns"] = str(len(op.weights))
    if isinstance(op, FieldOf):
        found["field"] = op.field
    return found


def _model(flow: Flow, name: str) -> str:
    """A model by what it is made of, through frozen copies and value heads; not by its name."""
    source = flow.models[name].source
    around = []
    while isinstance(source, FrozenModel | ValueModel):
        around.append(source.kind)
        source = flow.models[source.of].source
    return " of ".join([*around, _words(source)])


def _words(value: Any) -> str:
    """The fields of a dataclass that are not empty: `tiny: hidden 64, layers 2`."""
    fields = {name: entry for name, entry in asdict(value).items() if name not in _NO_TIME and entry not in (None, "")}
    kind = getattr(value, "kind", "")
    listed = ", ".join(
        f"{name} {entry if isinstance(entry, str) else json.dumps(entry)}" for name, entry in fields.items()
    )
    return f"{kind}: {listed}" if kind else listed
