"""Statements of a `step` or `evaluate` block to nodes and edges, with types, units and fields checked."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from rlflow.diagnostics import Label, Span
from rlflow.frontend.bind import Scope, bind
from rlflow.frontend.constants import Poison, Reporter, is_constant
from rlflow.frontend.declarations import Declarations
from rlflow.frontend.losses import loss_terms, optimizer, plain_number
from rlflow.frontend.parameters import (
    Column,
    Loss,
    Optimizer,
    Parameter,
    PerRow,
    PerToken,
    Reference,
    Rows,
    Signature,
)
from rlflow.frontend.signatures import FUNCTIONS, METHODS, REWARD_CALL
from rlflow.frontend.stages import STAGES, Stage, StageContext, check_stage_of_model, column, in_words, wanted
from rlflow.frontend.training import train
from rlflow.grammar import nodes
from rlflow.ir import ops
from rlflow.ir.flow import STEP, Edge, EdgeKind, Node
from rlflow.ir.typesystem import RowsType

_STAGES: dict[str, Stage] = {**STAGES, "train": train}


@dataclass
class _Value:
    """What a name of the block stands for; node None = its definition had errors."""

    node: Node | None
    defined: nodes.Ident
    used: bool = False


class Block:
    """Lowers one block; `nodes` and `edges` hold the result."""

    def __init__(self, declarations: Declarations, scope: Scope, report: Reporter, phase: str) -> None:
        self._declared = declarations
        self._scope = scope
        self._report = report
        self._phase = phase
        self._values: dict[str, _Value] = {}
        self.nodes: dict[str, Node] = {}
        self.edges: list[Edge] = []

    def lower(self, body: tuple[nodes.Statement, ...]) -> None:
        for statement in body:
            name = statement.name if isinstance(statement, nodes.Assign) else None
            node: Node | None
            try:
                node = self._value(statement.value, name)
            except Poison:
                node = None
            if name is not None:
                self._define(name, node)
            elif node is not None and not isinstance(node.op, ops.Train):
                self._report.warning(
                    "RLF1013", "the result of this call is not used", Label(statement.span, "give it a name")
                )
        if self._report.has_errors:
            return  # what an error left out may have been the use
        for value in self._values.values():
            if not value.used and value.node is not None and not self._ends(value.node.op):
                self._report.warning(
                    "RLF1013",
                    f"`{value.defined.text}` is never used",
                    Label(value.defined.span, "computed for nothing"),
                )

    def _ends(self, op: ops.Op) -> bool:
        """Whether the block may end in this stage: its result needs no reader."""
        scores = isinstance(op, ops.Score | ops.ModelScore | ops.Combine)
        return isinstance(op, ops.Train) or (scores and self._phase != STEP)

    def _define(self, name: nodes.Ident, node: Node | None) -> None:
        if name.text in self._values:
            self._report.error(
                "RLF1002",
                f"`{name.text}` is assigned twice",
                Label(name.span, "again here"),
                Label(self._values[name.text].defined.span, "first here", primary=False),
                help=("a value is assigned once; choose another name",),
            )
            return
        if name.text in self._scope.constants:
            self._report.error("RLF1002", f"`{name.text}` is already a parameter of the flow", Label(name.span))
        if self._declared.kind_of(name.text) is not None:
            self._report.error(
                "RLF1002",
                f"`{name.text}` is already a {self._declared.kind_of(name.text)}",
                Label(name.span),
                Label(self._declared.declared_at(name.text).span, "declared here", primary=False),
            )
        self._values[name.text] = _Value(node, name)

    @property
    def names(self) -> set[str]:
        """What the block assigns."""
        return set(self._values)

    # --- calls -----------------------------------------------------------------------------------------------------

    def _value(self, expr: nodes.Expr, name: nodes.Ident | None) -> Node:
        """The node an expression of the block stands for: a call, a name, a field, or a sum of columns."""
        match expr:
            case nodes.Call():
                return self._call(expr, name)
            case nodes.Name():
                return self._look_up(expr)
            case nodes.Attribute(base=nodes.Name() as base) if base.id in self._values:
                return self._field(expr, self._look_up(base), name)
            case nodes.Binary() | nodes.Negate() if not is_constant(expr, self._scope.constants):
                return self._sum(expr, name)
        raise self._report.error("RLF1007", "a step is made of calls such as `actor.generate(...)`", Label(expr.span))

    def _call(self, expr: nodes.Call, name: nodes.Ident | None) -> Node:
        function = expr.function
        if isinstance(function, nodes.Attribute) and isinstance(function.base, nodes.Name):
            return self._method(expr, function.base, function.name, name)
        if not isinstance(function, nodes.Name):
            raise self._report.error("RLF1007", "this cannot be called", Label(function.span))
        kind = self._declared.kind_of(function.id)
        if kind == "reward":
            if function.id in self._declared.poisoned:
                raise Poison()
            return self._build(expr, REWARD_CALL, name, function.id, function.id)
        if function.id in FUNCTIONS:
            return self._build(expr, FUNCTIONS[function.id], name, function.id, "")
        if kind is not None:
            methods = " or ".join(f"`{function.id}.{m}(...)`" for m in METHODS.get(kind, ()))
            raise self._report.error(
                "RLF1007",
                f"`{function.id}` is a {kind} and cannot be called",
                Label(function.span),
                help=(methods,) if methods else (),
            )
        candidates = sorted(FUNCTIONS) + self._declared.names("reward")
        raise self._report.unknown("function", function.id, Label(function.span), candidates)

    def _method(self, call: nodes.Call, base: nodes.Name, method: nodes.Ident, name: nodes.Ident | None) -> Node:
        owner = base.id
        kind = self._declared.kind_of(owner)
        if kind is None:
            candidates = self._declared.names("data") + self._declared.names("model")
            raise self._report.unknown("name", owner, Label(base.span), candidates)
        table = METHODS.get(kind, {})
        if method.text not in table:
            raise self._report.unknown(f"stage of {kind} `{owner}`:", method.text, Label(method.span), sorted(table))
        if owner in self._declared.poisoned:
            raise Poison()
        if kind == "model":
            check_stage_of_model(self._declared.models[owner], method, self._report)
        return self._build(call, table[method.text], name, f"{owner}.{method.text}", owner)

    def _build(
        self, call: nodes.Call, signature: Signature, name: nodes.Ident | None, fallback: str, owner: str
    ) -> Node:
        bound = bind(call, signature, self._scope, self._report, self._special)
        node_id = self._new_id(name, fallback)
        op, type_ = _STAGES[signature.name](self._stage_context(call, owner), bound, node_id)
        node = self._add(Node(node_id, op, type_, call.span, self._phase))
        for parameter in signature.parameters:
            value = bound.values.get(parameter.name)
            if isinstance(value, Node):
                self._connect(value, node_id, parameter.name, bound.spans[parameter.name])
        return node

    def _stage_context(self, call: nodes.Call, owner: str) -> StageContext:
        owner_span = call.function.base.span if isinstance(call.function, nodes.Attribute) else call.function.span
        return StageContext(self._declared, self._report, self.nodes, self.edges, self._phase, owner, owner_span)

    def _new_id(self, name: nodes.Ident | None, fallback: str) -> str:
        prefix = "" if self._phase == STEP else f"{self._phase}."
        node_id = prefix + (name.text if name is not None else fallback)
        number = 2
        while node_id in self.nodes:
            node_id = f"{prefix}{fallback}.{number}"
            number += 1
        return node_id

    def _add(self, node: Node) -> Node:
        self.nodes[node.id] = node
        return node

    def _connect(self, source: Node, target: str, port: str, span: Span) -> None:
        self.edges.append(Edge(source.id, target, EdgeKind.DATA, port, span=span))

    def _field(self, expr: nodes.Attribute, rows: Node, name: nodes.Ident | None) -> Node:
        """`rows.field`"""
        if not isinstance(rows.type, RowsType) or rows.type.is_column:
            raise self._report.error(
                "RLF1007", f"only rows have fields, and this is {in_words(rows.type)}", Label(expr.span)
            )
        field = rows.type.field(expr.name.text)
        if field is None:
            known = [f.name for f in rows.type.fields]
            raise self._report.unknown("field", expr.name.text, Label(expr.name.span), known, code="RLF1008")
        if field.dtype != "f32":
            raise self._report.error(
                "RLF1007",
                f"`{field.name}` holds {field.dtype} values and is no column to compute with",
                Label(expr.span),
            )
        node_id = self._new_id(name, f"{rows.id}.{field.name}")
        node = Node(node_id, ops.FieldOf(field=field.name), column(rows, field), expr.span, self._phase)
        self._connect(rows, node_id, "rows", expr.span)
        return self._add(node)

    def _sum(self, expr: nodes.Expr, name: nodes.Ident | None) -> Node:
        """`0.8 * exact(samples) + 0.2 * format(samples)`: a weighted sum of columns of the same rows."""
        parts, constant = self._linear(expr, 1.0)
        first, first_span = parts[0][1], parts[0][2]
        for _, part, span in parts:
            if not (isinstance(part.type, RowsType) and part.type.is_column):
                raise self._report.error(
                    "RLF1007", f"only columns can be added, and this is {in_words(part.type)}", Label(span)
                )
            assert isinstance(first.type, RowsType)
            if part.type.fields[0].per != first.type.fields[0].per:
                raise self._report.error(
                    "RLF1007",
                    f"cannot add {in_words(first.type)} and {in_words(part.type)}",
                    Label(span),
                    Label(first_span, "the first", primary=False),
                )
            if part.type.origin != first.type.origin:
                raise self._report.error(
                    "RLF1009",
                    "these columns were computed on different rows",
                    Label(span, f"from `{part.type.origin}`"),
                    Label(first_span, f"from `{first.type.origin}`", primary=False),
                )
        assert isinstance(first.type, RowsType)
        node_id = self._new_id(name, "sum")
        op = ops.Combine(weights=tuple(weight for weight, _, _ in parts), constant=constant)
        node = Node(node_id, op, column(first, first.type.fields[0]), expr.span, self._phase)
        for index, (_, part, span) in enumerate(parts):
            self._connect(part, node_id, f"c{index}", span)
        return self._add(node)

    def _linear(self, expr: nodes.Expr, weight: float) -> tuple[list[tuple[float, Node, Span]], float]:
        """The (weight, column, place) terms of a sum and its constant. The walk keeps its own stack."""
        parts: list[tuple[float, Node, Span]] = []
        constant = 0.0
        stack = [(expr, weight)]
        while stack:
            item, factor = stack.pop()
            if is_constant(item, self._scope.constants):
                constant += factor * plain_number(item, self._scope, self._report)
                continue
            match item:
                case nodes.Negate():
                    stack.append((item.operand, -factor))
                case nodes.Binary(operator="+" | "-"):
                    stack.append((item.right, factor if item.operator == "+" else -factor))
                    stack.append((item.left, factor))
                case nodes.Binary(operator="*") if is_constant(item.left, self._scope.constants):
                    stack.append((item.right, factor * plain_number(item.left, self._scope, self._report)))
                case nodes.Binary(operator="*" | "/") if is_constant(item.right, self._scope.constants):
                    number = plain_number(item.right, self._scope, self._report)
                    if item.operator == "/" and number == 0:
                        raise self._report.error("RLF1010", "division by zero", Label(item.right.span))
                    stack.append((item.left, factor * number if item.operator == "*" else factor / number))
                case nodes.Binary():
                    raise self._report.error(
                        "RLF1007", "columns can be added, and multiplied by numbers", Label(item.span)
                    )
                case _:
                    parts.append((factor, self._value(item, None), item.span))
        return parts, constant

    # --- arguments that are values of the block -----------------------------------------------------------------------

    def _look_up(self, expr: nodes.Name) -> Node:
        found = self._values.get(expr.id)
        if found is None:
            kind = self._declared.kind_of(expr.id)
            if kind is not None:
                raise self._report.error(
                    "RLF1007", f"`{expr.id}` is a {kind}, not a value of this block", Label(expr.span)
                )
            raise self._report.unknown("name", expr.id, Label(expr.span), sorted(self._values))
        found.used = True
        if found.node is None:
            raise Poison()
        return found.node

    def _special(self, parameter: Parameter, expr: nodes.Expr) -> Any:
        accepts = parameter.accepts
        if isinstance(accepts, Loss):
            return loss_terms(expr, self._scope, self._report)
        if isinstance(accepts, Optimizer):
            return optimizer(expr, self._scope, self._report)
        if isinstance(expr, nodes.Constant) and expr.value is None and parameter.optional:
            return None
        if isinstance(accepts, Reference):
            return self._declared.reference(parameter, expr)
        is_value = isinstance(expr, nodes.Name) and expr.id in self._values
        if not is_value and is_constant(expr, self._scope.constants):
            raise self._report.error("RLF1007", f"`{parameter.name}` is {wanted(parameter)}", Label(expr.span))
        node = self._value(expr, None)
        type_ = node.type
        fits = isinstance(type_, RowsType) and (
            (isinstance(accepts, Rows) and not type_.is_column and type_.row == accepts.row)
            or (isinstance(accepts, PerRow | Column) and type_.is_column and type_.fields[0].per == "row")
            or (isinstance(accepts, PerToken | Column) and type_.is_column and type_.fields[0].per == "token")
        )
        if not fits:
            raise self._report.error(
                "RLF1007", f"`{parameter.name}` is {wanted(parameter)}", Label(expr.span, f"this is {in_words(type_)}")
            )
        return node
