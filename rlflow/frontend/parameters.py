"""What a parameter of the language accepts, and what a signature is."""

from __future__ import annotations

from dataclasses import field

from rlflow.values import dataclass


class _Required:
    def __repr__(self) -> str:
        return "required"


REQUIRED = _Required()
MOST = 2**63 - 1
"""The largest whole number that a plan's readers can be expected to hold."""

# --- what a parameter accepts ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Text:
    """A string."""


@dataclass(frozen=True, slots=True)
class Flag:
    """true or false"""


@dataclass(frozen=True, slots=True)
class Whole:
    """A plain whole number within bounds."""

    least: int = 0
    most: int = MOST


@dataclass(frozen=True, slots=True)
class Real:
    """A plain number within bounds; `open_least` excludes the lower bound."""

    least: float | None = None
    most: float | None = None
    open_least: bool = False


@dataclass(frozen=True, slots=True)
class Count:
    """A whole number of something, written with its unit."""

    unit: str
    least: int = 1
    most: int = MOST


@dataclass(frozen=True, slots=True)
class Duration:
    """A time, above zero."""


@dataclass(frozen=True, slots=True)
class Word:
    """One of a few words."""

    choices: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Rows:
    """A value of the step: rows of prompts or of samples."""

    row: str


@dataclass(frozen=True, slots=True)
class PerRow:
    """A value of the step: one number per sample, such as a score."""


@dataclass(frozen=True, slots=True)
class Column:
    """A value of the step: one number per sample or one per response token."""


@dataclass(frozen=True, slots=True)
class PerToken:
    """A value of the step: one number per response token, such as log-probabilities."""


@dataclass(frozen=True, slots=True)
class Loss:
    """A sum of loss terms, each with an optional factor."""


@dataclass(frozen=True, slots=True)
class Optimizer:
    """A call of an optimizer."""


@dataclass(frozen=True, slots=True)
class OnError:
    """`fail`, `drop`, or `retry(times)` with what to do then."""


@dataclass(frozen=True, slots=True)
class Adapter:
    """A call of `lora`."""


@dataclass(frozen=True, slots=True)
class Modules:
    """`attention`, `all_linear`, or a list of module names such as `["q_proj", "v_proj"]`."""


@dataclass(frozen=True, slots=True)
class Reference:
    """The name of a declaration of this kind."""

    kind: str


Accepts = (
    Text
    | Flag
    | Whole
    | Real
    | Count
    | Duration
    | Word
    | Rows
    | PerRow
    | Column
    | PerToken
    | Loss
    | Optimizer
    | OnError
    | Adapter
    | Modules
    | Reference
)


@dataclass(frozen=True, slots=True)
class Parameter:
    """`default` is REQUIRED, or what stands when the argument is left out (in base units)."""

    name: str
    accepts: Accepts
    default: object
    doc: str
    optional: bool = False
    """Whether `none` is accepted."""


@dataclass(frozen=True, slots=True)
class Signature:
    name: str
    parameters: tuple[Parameter, ...]
    doc: str
    extra: bool = False
    """Whether further keyword arguments with constant values are passed on."""
    names: frozenset[str] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "names", frozenset(p.name for p in self.parameters))

    def parameter(self, name: str) -> Parameter | None:
        return next((p for p in self.parameters if p.name == name), None)
