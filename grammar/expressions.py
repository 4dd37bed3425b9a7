"""The part of the syntax tree that is expressions; use it through `nodes`."""

from __future__ import annotations

from rlflow.diagnostics import Span
from rlflow.values import dataclass


@dataclass(frozen=True, slots=True)
class Ident:
    """A word in a naming position."""

    text: str
    span: Span


@dataclass(frozen=True, slots=True)
class Number:
    value: int | float
    span: Span


@dataclass(frozen=True, slots=True)
class Quantity:
    """A number with a unit as written, such as `64 prompts` or `75%`."""

    value: int | float
    unit: str
    span: Span


@dataclass(frozen=True, slots=True)
class String:
    value: str
    span: Span


@dataclass(frozen=True, slots=True)
class Constant:
    """true, false or none"""

    value: bool | None
    span: Span


@dataclass(frozen=True, slots=True)
class Name:
    id: str
    span: Span


@dataclass(frozen=True, slots=True)
class ListOf:
    items: tuple[Expr, ...]
    span: Span


@dataclass(frozen=True, slots=True)
class Attribute:
    base: Expr
    name: Ident
    span: Span


@dataclass(frozen=True, slots=True)
class Argument:
    """`value` or `name = value`"""

    name: Ident | None
    value: Expr
    span: Span


@dataclass(frozen=True, slots=True)
class Call:
    function: Expr
    arguments: tuple[Argument, ...]
    span: Span


@dataclass(frozen=True, slots=True)
class Binary:
    """`operator` is one of + - * /"""

    operator: str
    left: Expr
    right: Expr
    span: Span


@dataclass(frozen=True, slots=True)
class Negate:
    operand: Expr
    span: Span


@dataclass(frozen=True, slots=True)
class Compare:
    """`operator` is one of == != < <= > >="""

    operator: str
    left: Expr
    right: Expr
    span: Span


@dataclass(frozen=True, slots=True)
class Logic:
    """`operator` is `and` or `or`"""

    operator: str
    left: Expr
    right: Expr
    span: Span


@dataclass(frozen=True, slots=True)
class Not:
    operand: Expr
    span: Span


@dataclass(frozen=True, slots=True)
class Conditional:
    """`then if condition else otherwise`"""

    then: Expr
    condition: Expr
    otherwise: Expr
    span: Span


Expr = (
    Number
    | Quantity
    | String
    | Constant
    | Name
    | ListOf
    | Attribute
    | Call
    | Binary
    | Negate
    | Compare
    | Logic
    | Not
    | Conditional
)
