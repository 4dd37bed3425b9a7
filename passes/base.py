"""What a pass is, and what it may look at beside the flow."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import field
from typing import TYPE_CHECKING, ClassVar

from rlflow.cluster.presets.architecture import Architecture
from rlflow.cluster.shape import ModelShape
from rlflow.cluster.spec import Cluster, PlaceRequest, Schedule, local_cluster
from rlflow.diagnostics import Diagnostic, Label, Severity, Span
from rlflow.ir.flow import Flow, Stage
from rlflow.values import dataclass

if TYPE_CHECKING:
    from rlflow.profile.table import Profile


@dataclass
class PassContext:
    """The schedule the user pinned, the cluster, and where findings go."""

    schedule: Schedule = field(default_factory=Schedule)
    cluster: Cluster = field(default_factory=local_cluster)
    diagnostics: list[Diagnostic] = field(default_factory=list)
    shapes: Mapping[str, ModelShape] = field(default_factory=dict)
    """Model to what sharding must divide, where known."""
    architectures: Mapping[str, Architecture] = field(default_factory=dict)
    """Model to its architecture, where known: what memory, time and reshards are worked out from."""
    profile: Profile | None = None
    """What the flow's stages were measured to take; before the cost model."""

    def pins(self, flow: Flow) -> dict[str, PlaceRequest]:
        """Stage to the `place` that names it; a stage that the flow does not need is not there any more."""
        return {node_id: place for place in self.schedule.places for node_id in place.nodes if node_id in flow.nodes}

    def error(
        self,
        code: str,
        message: str,
        span: Span | None = None,
        *,
        related: tuple[Label, ...] = (),
        notes: tuple[str, ...] = (),
        help: tuple[str, ...] = (),
    ) -> None:
        """Report an error; the pipeline stops after the pass that reported it."""
        labels = () if span is None else (Label(span),)
        self.diagnostics.append(Diagnostic(code, message, labels + related, notes, help))

    def warn(
        self,
        code: str,
        message: str,
        span: Span | None = None,
        *,
        notes: tuple[str, ...] = (),
        help: tuple[str, ...] = (),
    ) -> None:
        """Report a warning; the pipeline goes on."""
        labels = () if span is None else (Label(span),)
        self.diagnostics.append(Diagnostic(code, message, labels, notes, help, Severity.WARNING))

    @property
    def has_errors(self) -> bool:
        return any(d.severity is Severity.ERROR for d in self.diagnostics)


@dataclass(frozen=True, slots=True)
class Pass(ABC):
    """One rewrite of the flow. Its fields are its options."""

    name: ClassVar[str]
    requires: ClassVar[Stage]
    ensures: ClassVar[Stage]

    @abstractmethod
    def run(self, flow: Flow, context: PassContext) -> Flow:
        """The rewritten flow. The input is a sound flow of stage `requires`, the output one of stage `ensures`."""
