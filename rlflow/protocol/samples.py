"""One sample: where it is in its life, which versions made its tokens, how old it is."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any, Final

from rlflow.protocol.errors import ProtocolError


class Phase(StrEnum):
    """Life of a sample."""

    ADMITTED = "admitted"
    """Holds a credit, waits for a slot. It has segments if it was interrupted."""
    RUNNING = "running"
    FINISHED = "finished"
    CONSUMED = "consumed"
    """Some step trains on it, or has."""
    REJECTED = "rejected"
    """Filtered, timed out or failed."""
    ABORTED = "aborted"
    """Given up because it is too old, or because its group was."""


MOVES: Final[Mapping[Phase, frozenset[Phase]]] = {
    Phase.ADMITTED: frozenset({Phase.RUNNING, Phase.REJECTED, Phase.ABORTED}),
    Phase.RUNNING: frozenset({Phase.ADMITTED, Phase.FINISHED, Phase.REJECTED, Phase.ABORTED}),
    Phase.FINISHED: frozenset({Phase.CONSUMED, Phase.REJECTED, Phase.ABORTED}),
    Phase.CONSUMED: frozenset(),
    Phase.REJECTED: frozenset(),
    Phase.ABORTED: frozenset(),
}
"""The legal transitions. RUNNING to ADMITTED is an interruption (segments kept) or a retry (segments thrown away)."""


@dataclass(frozen=True, slots=True)
class Segment:
    """So many tokens in a row made by one version. 0 tokens: begun with this version, none reported yet."""

    version: int
    tokens: int


@dataclass(frozen=True, slots=True)
class Sample:
    """A sample, unchangeable: every transition gives a new one. Illegal transitions raise `ProtocolError`."""

    id: int
    group: int
    version: int
    """Published version at admission. No token of it may be made by an older one."""
    segments: tuple[Segment, ...] = ()
    phase: Phase = Phase.ADMITTED
    step: int | None = None
    """The step that trains on it."""
    reason: str = ""
    """Why it was rejected or aborted."""

    @property
    def birth(self) -> int | None:
        """Oldest version of any segment; None before the first token."""
        return min((segment.version for segment in self.segments), default=None)

    @property
    def tokens(self) -> int:
        return sum(segment.tokens for segment in self.segments)

    def age(self, step: int) -> int:
        """Versions between the birth and the step that trains on it; 0 for a sample without a token."""
        birth = self.birth
        return 0 if birth is None else step - birth

    def begin(self, version: int) -> Sample:
        """It gets a slot of an engine that runs `version`."""
        if version < self.version:
            raise ProtocolError(
                f"sample {self.id} was admitted at version {self.version} but its engine still runs version {version}: "
                "the gate must count the versions that the engines have loaded"
            )
        return replace(self._moved(Phase.RUNNING), segments=_longer(self.segments, version, 0))

    def extend(self, version: int, tokens: int) -> Sample:
        """`tokens` more tokens were made by `version`; 0 with a new version says that the engine has switched."""
        if self.phase is not Phase.RUNNING:
            raise ProtocolError(f"sample {self.id} is {self.phase}, not running: it cannot get tokens")
        if tokens < 0 or version < self.version:
            raise ProtocolError(f"sample {self.id}, admitted at {self.version}: {tokens} tokens of version {version}")
        return replace(self, segments=_longer(self.segments, version, tokens))

    def interrupt(self) -> Sample:
        """It loses its slot and keeps its tokens."""
        return replace(self._moved(Phase.ADMITTED), segments=tuple(part for part in self.segments if part.tokens))

    def restart(self) -> Sample:
        """It loses its slot and its tokens: a retry from the prompt."""
        return replace(self._moved(Phase.ADMITTED), segments=())

    def finish(self) -> Sample:
        return self._moved(Phase.FINISHED)

    def consume(self, step: int) -> Sample:
        return replace(self._moved(Phase.CONSUMED), step=step)

    def reject(self, reason: str) -> Sample:
        return replace(self._moved(Phase.REJECTED), reason=reason)

    def abort(self, reason: str) -> Sample:
        return replace(self._moved(Phase.ABORTED), reason=reason)

    def _moved(self, to: Phase) -> Sample:
        if to not in MOVES[self.phase]:
            raise ProtocolError(f"sample {self.id} is {self.phase}: it cannot become {to}")
        return replace(self, phase=to)

    def to_json(self) -> dict[str, Any]:
        return {
            "id": self.id,
            "group": self.group,
            "version": self.version,
            "segments": [[part.version, part.tokens] for part in self.segments],
            "phase": self.phase.value,
            "step": self.step,
            "reason": self.reason,
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Sample:
        parts = tuple(Segment(version, tokens) for version, tokens in data["segments"])
        return cls(**{**data, "segments": parts, "phase": Phase(data["phase"])})


def _longer(segments: tuple[Segment, ...], version: int, tokens: int) -> tuple[Segment, ...]:
    """The segments with `tokens` more; a neighbour of the same version is one segment with them."""
    if segments and segments[-1].version == version:
        return (*segments[:-1], Segment(version, segments[-1].tokens + tokens))
    # A segment that was opened but got no token before the engine switched made nothing.
    kept = segments[:-1] if segments and not segments[-1].tokens else segments
    return (*kept, Segment(version, tokens))
