"""Text of the intermediate form back to a Flow; the inverse of `rlflow.ir.printer`, used by tests and `rlflow opt`."""

from __future__ import annotations

import json
import re
from typing import Any, get_args

from rlflow.ir import ops
from rlflow.ir.decisions import DECISIONS, PARTS, Decision
from rlflow.ir.flow import (
    Data,
    Edge,
    EdgeKind,
    Environment,
    Evaluation,
    Flow,
    Layout,
    Model,
    Node,
    Placement,
    PoolSpec,
    Reward,
    Stage,
)
from rlflow.ir.typesystem import Field, RowsType, WeightsType


def _by_kind(*classes: Any) -> dict[str, Any]:
    return {cls.__dataclass_fields__["kind"].default: cls for cls in classes}


_SOURCES = _by_kind(
    *get_args(ops.DataSource), *get_args(ops.ModelSource), *get_args(ops.RewardSource), ops.PythonEnvironment
)
_PARTS = {**ops.LOSSES, **ops.CORRECTIONS, **PARTS, **_by_kind(ops.AdamW, ops.Lora)}


class FlowSyntaxError(ValueError):
    """The text is not a flow; the message starts with the line number."""


class _Line:
    """A cursor over one line."""

    def __init__(self, text: str, number: int) -> None:
        self.text = text
        self.number = number
        self.at = 0

    def skip(self) -> None:
        while self.at < len(self.text) and self.text[self.at] == " ":
            self.at += 1

    def accept(self, literal: str) -> bool:
        self.skip()
        if self.text.startswith(literal, self.at):
            self.at += len(literal)
            return True
        return False

    def expect(self, literal: str) -> None:
        if not self.accept(literal):
            raise FlowSyntaxError(f"line {self.number}: expected {literal!r} at column {self.at + 1}: {self.text!r}")

    def match(self, pattern: str) -> str:
        self.skip()
        found = re.compile(pattern).match(self.text, self.at)
        if found is None:
            raise FlowSyntaxError(f"line {self.number}: expected {pattern} at column {self.at + 1}: {self.text!r}")
        self.at = found.end()
        return found.group(0)

    def word(self) -> str:
        return self.match(r"[A-Za-z_][\w.-]*")

    def json(self) -> Any:
        self.skip()
        try:
            value, self.at = json.JSONDecoder().raw_decode(self.text, self.at)
        except (ValueError, RecursionError) as error:
            raise FlowSyntaxError(f"line {self.number}: {error}") from None
        return value

    def attributes(self) -> dict[str, Any]:
        self.expect("{")
        out: dict[str, Any] = {}
        while not self.accept("}"):
            key = self.word()
            self.expect("=")
            out[key] = self.json()
            self.accept(",")
        return out

    @property
    def done(self) -> bool:
        self.skip()
        return self.at >= len(self.text)


def parse_flow(text: str) -> Flow:
    """The flow that the text describes. Spans are None. Raises FlowSyntaxError with the line."""
    lines = [
        _Line(raw, number)
        for number, raw in enumerate(text.splitlines(), start=1)
        if raw.strip() and not raw.lstrip().startswith("//")
    ]
    if not lines:
        raise FlowSyntaxError("line 1: no flow here")
    head, *body = lines
    head.expect("flow @")
    name = head.word()
    head.expect("stage=")
    stage_word = head.word()
    if stage_word.upper() not in Stage.__members__:
        raise FlowSyntaxError(f"line {head.number}: unknown stage {stage_word}")
    settings = head.attributes()
    head.expect("{")
    state = _State()
    closed = False
    for line in body:
        if line.accept("}"):
            closed = True
            break
        state.read(line)
    if not closed:
        raise FlowSyntaxError(f"line {lines[-1].number}: the flow is not closed with '}}'")
    unknown = set(settings) - {"seed", "save_every", "stop_steps", "stop_epochs"}
    if unknown:
        raise FlowSyntaxError(f"line {head.number}: unknown setting {min(unknown)}")
    return Flow(
        name=name,
        stage=Stage[stage_word.upper()],
        data=state.data,
        models=state.models,
        rewards=state.rewards,
        environments=state.environments,
        nodes=state.nodes,
        edges=tuple(state.data_edges + state.other_edges),
        evaluations=tuple(state.evaluations),
        allowed_staleness=state.allowed,
        corrections=state.corrections,
        decisions=tuple(state.decisions),
        pools=state.pools,
        **settings,
    )


class _State:
    """What has been read so far."""

    def __init__(self) -> None:
        self.data: dict[str, Data] = {}
        self.models: dict[str, Model] = {}
        self.rewards: dict[str, Reward] = {}
        self.environments: dict[str, Environment] = {}
        self.nodes: dict[str, Node] = {}
        self.data_edges: list[Edge] = []
        self.other_edges: list[Edge] = []
        self.evaluations: list[Evaluation] = []
        self.allowed: dict[str, int] = {}
        self.corrections: dict[str, ops.Correction] = {}
        self.decisions: list[Decision] = []
        self.pools: dict[str, PoolSpec] = {}

    def read(self, line: _Line) -> None:
        if line.accept("%"):
            self._node(line)
            return
        keyword = line.word()
        if keyword in ("data", "model", "reward", "environment"):
            line.expect("@")
            name = line.word()
            line.expect("=")
            source = _build(_SOURCES, line.word(), line.attributes(), line)
            if keyword == "data":
                self.data[name] = Data(name, source)
            elif keyword == "model":
                self.models[name] = Model(name, source, line.accept("trainable"))
            elif keyword == "reward":
                self.rewards[name] = Reward(name, source)
            else:
                self.environments[name] = Environment(name, source)
        elif keyword == "allow":
            line.expect("@")
            name = line.word()
            line.expect("staleness=")
            self.allowed[name] = line.json()
            if line.accept("with "):
                self.corrections[name] = _build(ops.CORRECTIONS, line.word(), line.attributes(), line)
        elif keyword == "evaluation":
            line.expect("@")
            name = line.word()
            line.expect("every=")
            self.evaluations.append(Evaluation(name, line.json()))
        elif keyword == "pool":
            line.expect("@")
            name = line.word()
            line.expect("=")
            self.pools[name] = PoolSpec(name, line.word(), tuple(line.json()))
        elif keyword in ("weights", "order"):
            line.expect("%")
            src = line.word()
            line.expect("-> %")
            dst = line.word()
            tokens = line.json() if line.accept("tokens=") else 0
            self.other_edges.append(Edge(src, dst, EdgeKind(keyword), tokens=tokens))
        elif keyword in DECISIONS:
            self.decisions.append(_build(DECISIONS, keyword, line.attributes(), line))
        else:
            raise FlowSyntaxError(f"line {line.number}: unknown word {keyword}")
        if not line.done:
            raise FlowSyntaxError(f"line {line.number}: unexpected {line.text[line.at :]!r}")

    def _node(self, line: _Line) -> None:
        node_id = line.word()
        line.expect("=")
        kind = line.word()
        line.expect("(")
        while not line.accept(")"):
            port = line.word()
            line.expect("=%")
            self.data_edges.append(Edge(line.word(), node_id, EdgeKind.DATA, port))
            line.accept(",")
        op = _build(ops.OPS, kind, line.attributes(), line)
        line.expect(":")
        type_ = _type(line)
        placement = None
        if line.accept("on "):
            pool = line.word()
            layout = None
            if line.accept("["):
                sizes: dict[str, Any] = {}
                while not line.accept("]"):
                    axis = line.word()
                    line.expect("=")
                    value = line.word() if axis == "recompute" else line.json()
                    sizes[axis] = tuple(value) if isinstance(value, list) else value
                    line.accept(",")
                try:
                    layout = Layout(**sizes)
                except TypeError as error:
                    raise FlowSyntaxError(f"line {line.number}: {error}") from None
            placement = Placement(pool, layout)
        phase = line.word() if line.accept("in @") else "step"
        slot = int(line.match(r"\d+")) if line.accept("slot=") else None
        inserted_by = line.word() if line.accept("by=") else ""
        if not line.done:
            raise FlowSyntaxError(f"line {line.number}: unexpected {line.text[line.at :]!r}")
        self.nodes[node_id] = Node(node_id, op, type_, None, phase, inserted_by, placement, slot)


def _build(table: dict[str, Any], kind: str, values: dict[str, Any], line: _Line) -> Any:
    if kind not in table:
        raise FlowSyntaxError(f"line {line.number}: unknown kind {kind}")
    try:
        return table[kind](**{key: _revive(value, line) for key, value in values.items()})
    except TypeError as error:
        raise FlowSyntaxError(f"line {line.number}: {error}") from None


def _revive(value: Any, line: _Line) -> Any:
    if isinstance(value, dict) and value.get("kind") in _PARTS:
        inner = {key: item for key, item in value.items() if key != "kind"}
        return _build(_PARTS, value["kind"], inner, line)
    if isinstance(value, list):
        return tuple(_revive(item, line) for item in value)
    return value


def _type(line: _Line) -> RowsType | WeightsType:
    if line.accept("weights<"):
        model = line.word()
        line.expect(">")
        return WeightsType(model)
    line.expect("rows<")
    row = line.word()
    count = line.match(r"\?|\d+")
    group = int(line.match(r"\d+")) if line.accept("/") else 1
    line.expect("of ")
    origin = line.word()
    line.expect(";")
    fields: list[Field] = []
    while not line.accept(">"):
        name = line.word()
        line.expect(":")
        dtype = line.word()
        fields.append(Field(name, dtype, "token" if line.accept("/token") else "row"))
        line.accept(",")
    if row not in ("prompt", "sample"):
        raise FlowSyntaxError(f"line {line.number}: unknown row kind {row}")
    return RowsType(row, origin, None if count == "?" else int(count), group, tuple(fields))  # type: ignore[arg-type]
