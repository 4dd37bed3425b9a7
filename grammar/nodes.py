"""The syntax tree: what the user wrote, each node with its span. No meaning yet."""

from __future__ import annotations

from typing import Any

from rlflow.diagnostics import SourceFile, Span
from rlflow.grammar.expressions import Argument as Argument
from rlflow.grammar.expressions import Attribute as Attribute
from rlflow.grammar.expressions import Binary as Binary
from rlflow.grammar.expressions import Call as Call
from rlflow.grammar.expressions import Compare as Compare
from rlflow.grammar.expressions import Conditional as Conditional
from rlflow.grammar.expressions import Constant as Constant
from rlflow.grammar.expressions import Expr as Expr
from rlflow.grammar.expressions import Ident as Ident
from rlflow.grammar.expressions import ListOf as ListOf
from rlflow.grammar.expressions import Logic as Logic
from rlflow.grammar.expressions import Name as Name
from rlflow.grammar.expressions import Negate as Negate
from rlflow.grammar.expressions import Not as Not
from rlflow.grammar.expressions import Number as Number
from rlflow.grammar.expressions import Quantity as Quantity
from rlflow.grammar.expressions import String as String
from rlflow.values import dataclass

# --- flow ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Param:
    name: Ident
    default: Expr | None
    span: Span


@dataclass(frozen=True, slots=True)
class Declaration:
    """`data|model|reward|environment name = value`"""

    kind: str
    name: Ident
    value: Expr
    span: Span


@dataclass(frozen=True, slots=True)
class Assign:
    name: Ident
    value: Expr
    span: Span


@dataclass(frozen=True, slots=True)
class CallStatement:
    value: Expr
    span: Span


@dataclass(frozen=True, slots=True)
class If:
    """`if condition { ... } else { ... }` or `else if ...`, of statements or of a flow's items."""

    condition: Expr
    then: tuple[Any, ...]
    otherwise: tuple[Any, ...] | If | None
    span: Span


Statement = Assign | CallStatement


@dataclass(frozen=True, slots=True)
class Step:
    body: tuple[Statement | If, ...]
    span: Span


@dataclass(frozen=True, slots=True)
class Evaluate:
    name: Ident
    every: Expr | None
    body: tuple[Statement | If, ...]
    span: Span


@dataclass(frozen=True, slots=True)
class Allow:
    """`allow model staleness <= bound with correction`"""

    model: Ident
    bound: Expr
    correction: Expr | None
    span: Span


@dataclass(frozen=True, slots=True)
class Stop:
    after: Expr
    span: Span


@dataclass(frozen=True, slots=True)
class Save:
    every: Expr
    span: Span


@dataclass(frozen=True, slots=True)
class Seed:
    value: Expr
    span: Span


FlowItem = Declaration | Step | Evaluate | Allow | Stop | Save | Seed


@dataclass(frozen=True, slots=True)
class Flow:
    name: Ident
    params: tuple[Param, ...]
    items: tuple[FlowItem | If, ...]
    span: Span


# --- schedule and cluster ------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Setting:
    name: Ident
    value: Expr
    span: Span


@dataclass(frozen=True, slots=True)
class Pool:
    name: Ident
    size: Expr
    settings: tuple[Setting, ...]
    span: Span


@dataclass(frozen=True, slots=True)
class StageRef:
    """`model.stage`, or a whole role such as `reference` or `exact`"""

    owner: Ident
    stage: Ident | None
    span: Span


@dataclass(frozen=True, slots=True)
class Place:
    stages: tuple[StageRef, ...]
    pools: tuple[Ident, ...]
    settings: tuple[Setting, ...]
    span: Span


@dataclass(frozen=True, slots=True)
class Staleness:
    model: Ident
    bound: Expr
    admit: Ident | None
    settings: tuple[Setting, ...]
    span: Span


@dataclass(frozen=True, slots=True)
class Trigger:
    value: Ident
    share: Expr
    carry: Ident | None
    span: Span


@dataclass(frozen=True, slots=True)
class Auto:
    span: Span


ScheduleItem = Pool | Place | Staleness | Trigger | Auto


@dataclass(frozen=True, slots=True)
class Schedule:
    flow: Ident
    cluster: Ident | None
    items: tuple[ScheduleItem, ...]
    span: Span


@dataclass(frozen=True, slots=True)
class Entry:
    name: Ident
    value: Expr
    settings: tuple[Setting, ...]
    span: Span


@dataclass(frozen=True, slots=True)
class Cluster:
    name: Ident
    entries: tuple[Entry, ...]
    span: Span


@dataclass(frozen=True, slots=True)
class Import:
    """`import "path"`"""

    path: String
    span: Span


@dataclass(frozen=True, slots=True)
class Program:
    """One file."""

    file: SourceFile
    items: tuple[Import | Flow | Schedule | Cluster, ...]

    @property
    def imports(self) -> tuple[Import, ...]:
        return tuple(item for item in self.items if isinstance(item, Import))

    @property
    def flows(self) -> tuple[Flow, ...]:
        return tuple(item for item in self.items if isinstance(item, Flow))

    @property
    def schedules(self) -> tuple[Schedule, ...]:
        return tuple(item for item in self.items if isinstance(item, Schedule))

    @property
    def clusters(self) -> tuple[Cluster, ...]:
        return tuple(item for item in self.items if isinstance(item, Cluster))
