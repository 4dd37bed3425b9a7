"""`if` decided at compile time: a flow with conditions to the flow that is left, before anything is lowered.

Conditions see the parameters of the flow and nothing else. Of a branch that is not taken only the units and the names
in its conditions are checked; what it would have defined or used is remembered, so that messages can say so.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields, is_dataclass, replace
from functools import cached_property
from typing import Any

from rlflow.diagnostics import Diagnostic, Label, SourceFile, Span
from rlflow.frontend.constants import Poison, Reporter, Value, truth
from rlflow.frontend.units import UNITS
from rlflow.grammar import nodes

_Defining = nodes.Declaration | nodes.Assign | nodes.Evaluate


@dataclass
class LeftOut:
    """What stands in branches that are not taken."""

    definitions: dict[str, Span] = field(default_factory=dict)
    """Where a name would have been defined; a call such as `actor.train` is its own name."""
    used: set[str] = field(default_factory=set)
    """Names that are used there."""

    def add(self, part: object) -> None:
        """Remember everything below a node."""
        for node in walk(part):
            if isinstance(node, _Defining):
                self.definitions.setdefault(node.name.text, node.name.span)
            elif isinstance(node, nodes.CallStatement):
                self.definitions.setdefault(".".join(callee(node.value)), node.span)
            elif isinstance(node, nodes.Name):
                self.used.add(node.id)

    def find(self, path: tuple[str, ...]) -> Span | None:
        """Where the value or call that a path starts with would have been, or None."""
        return self.definitions.get(path[0]) or self.definitions.get(".".join(path[:2]))

    def explain(self, diagnostics: list[Diagnostic]) -> list[Diagnostic]:
        """The diagnostics without warnings about what only a branch that is not taken uses, and with the place of
        names that only such a branch defines."""
        kept: list[Diagnostic] = []
        for found in diagnostics:
            name = found.span.text if found.span is not None else ""
            if found.code == "RLF1013" and name in self.used:
                continue
            if found.code == "RLF1001" and name in self.definitions:
                here = Label(self.definitions[name], "defined only here, in a branch that is not taken", primary=False)
                found = replace(found, labels=(*found.labels, here), help=(), notes=())
            kept.append(found)
        return kept


def callee(expr: nodes.Expr) -> tuple[str, ...]:
    """The words of what is called: `actor.train(...)` gives `actor`, `train`."""
    if isinstance(expr, nodes.Call):
        return callee(expr.function)
    if isinstance(expr, nodes.Attribute):
        return (*callee(expr.base), expr.name.text)
    return (expr.id,) if isinstance(expr, nodes.Name) else ()


def walk(part: object) -> Iterator[Any]:
    """Every node below a node or a tuple of nodes, from the outside in and in the order of the text."""
    stack = [part]
    while stack:
        node = stack.pop()
        if isinstance(node, tuple):
            stack.extend(reversed(node))
        elif (names := _parts(type(node))) is not None:
            yield node
            stack.extend([getattr(node, name) for name in names])


_PARTS: dict[type, tuple[str, ...] | None] = {}


def _parts(kind: type) -> tuple[str, ...] | None:
    """The fields of a class of nodes, the last first and without the place in the source; None for other classes."""
    if kind not in _PARTS:
        names = None
        if is_dataclass(kind) and not issubclass(kind, Span | SourceFile):
            names = tuple(field.name for field in reversed(fields(kind)) if field.name != "span")
        _PARTS[kind] = names
    return _PARTS[kind]


def plain_body(body: tuple[nodes.Statement | nodes.If, ...]) -> tuple[nodes.Statement, ...]:
    """The statements of a block whose conditions are decided."""
    return tuple(statement for statement in body if not isinstance(statement, nodes.If))


def select(flow: nodes.Flow, constants: Mapping[str, Value], left_out: LeftOut, report: Reporter) -> nodes.Flow:
    """The flow with every condition decided. Adds to `left_out`; raises Poison after reporting."""
    if not any(isinstance(node, nodes.If | nodes.Conditional) for node in walk(flow.items)):
        return flow
    selector = _Selector(flow, constants, left_out, report)
    items = selector.items(flow.items)
    if selector.failed:
        raise Poison()
    return replace(flow, items=items)


class _Selector:
    def __init__(self, flow: nodes.Flow, constants: Mapping[str, Value], left_out: LeftOut, report: Reporter) -> None:
        self._constants = constants
        self._left_out = left_out
        self._report = report
        self._flow = flow
        self.failed = False

    @cached_property
    def _defined(self) -> set[str]:
        """The names that the flow defines somewhere."""
        return {node.name.text for node in walk(self._flow.items) if isinstance(node, _Defining)}

    def items(self, parts: tuple[Any, ...]) -> tuple[Any, ...]:
        """The parts in order, an `if` replaced by the parts of the branch that is taken."""
        out: list[Any] = []
        same = True
        for part in parts:
            if isinstance(part, nodes.If):
                out.extend(self._branch(part))
                same = False
            else:
                new = self._rewrite(part)
                same = same and new is part
                out.append(new)
        return parts if same else tuple(out)

    def _branch(self, part: nodes.If) -> tuple[Any, ...]:
        other = (part.otherwise,) if isinstance(part.otherwise, nodes.If) else part.otherwise or ()
        taken = self._decide(part.condition)
        if taken is None:
            return ()
        self._leave(other if taken else part.then)
        return self.items(part.then if taken else other)

    def _rewrite(self, node: Any) -> Any:
        """The node with the conditional expressions in it decided."""
        if isinstance(node, tuple):
            return self.items(node)
        names = _parts(type(node))
        if names is None:
            return node
        if isinstance(node, nodes.Conditional):
            taken = self._decide(node.condition)
            if taken is None:
                return node
            self._leave(node.otherwise if taken else node.then)
            return self._rewrite(node.then if taken else node.otherwise)
        changed: dict[str, Any] = {}
        for name in reversed(names):
            old = getattr(node, name)
            new = self._rewrite(old)
            if new is not old:
                changed[name] = new
        return replace(node, **changed) if changed else node

    def _decide(self, condition: nodes.Expr) -> bool | None:
        """Whether the condition holds; None after reporting."""
        try:
            self._check_names(condition)
            return truth(condition, self._constants, self._report)
        except Poison:
            self.failed = True
            return None

    def _check_names(self, condition: nodes.Expr) -> None:
        for node in walk(condition):
            if isinstance(node, nodes.Call):
                raise self._run_only(node.span, "a call")
            if isinstance(node, nodes.Name) and node.id not in self._constants:
                if node.id in self._defined:
                    raise self._run_only(node.span, f"`{node.id}`")
                known = [*self._constants, "true", "false", "none"]
                raise self._report.unknown("parameter", node.id, Label(node.span), known)

    def _run_only(self, span: Span, what: str) -> Poison:
        return self._report.error(
            "RLF1007",
            f"{what} is known only in the run, and a condition is decided before it",
            Label(span),
            notes=("a condition is made of the flow's parameters and constants",),
        )

    def _leave(self, part: object) -> None:
        """Remember a branch that is not taken, and check what can be checked in it without consequences."""
        self._left_out.add(part)
        for node in walk(part):
            if isinstance(node, nodes.Quantity) and node.unit not in UNITS:
                self._report.unknown("unit", node.unit, Label(node.span), sorted(UNITS), code="RLF1006")
            elif isinstance(node, nodes.If | nodes.Conditional):
                try:
                    self._check_names(node.condition)
                except Poison:
                    self.failed = True
