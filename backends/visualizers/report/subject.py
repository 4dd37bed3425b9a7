"""What a report is about: a plan with what a simulation of it found, its sources, and perhaps a run of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rlflow.diagnostics import Diagnostic
from rlflow.plan import Plan
from rlflow.profile.table import Profile

Event = Mapping[str, Any]
"""As `rlflow.backends.visualizers.trace` reads them."""
Time = float
"""Microseconds; of a simulation exact where the simulator's are."""


@dataclass(frozen=True, slots=True)
class Simulated:
    """What a simulation found, in the simulator's own words and units: microseconds, shares, batches, samples."""

    events: Sequence[Event]
    """Of rank 0 of every pool, which stands for all its ranks."""
    ends: Sequence[Time]
    """End of every step, the warm-up included."""
    warm_up: int
    """Steps that are not measured."""
    period_us: Time
    bubble: float
    """Share of the device time in no stage, over the measured steps."""
    tokens_per_second: float
    """0 = not known."""
    sampled: bool
    """Whether lengths of responses were drawn."""
    uses: Mapping[str, tuple[float, float]]
    """Pool to its shares of time (in stages, in transfers that stages wait for)."""
    work: Mapping[str, Sequence[tuple[Time, Time, float]]]
    """Pool to (start, end, share of its devices)."""
    depths: Mapping[str, Sequence[tuple[Time, int]]]
    """Queue to (time, batches from then on)."""
    ages: Mapping[str, Mapping[int, Mapping[int, int]]]
    """Generate stage to step (from 0) to samples by age in steps."""
    promised: Mapping[str, int | None]
    """Generate stage to the worst age that the plan states; None = no bound."""
    uncounted: Sequence[str]
    """Python stages that took no time."""


@dataclass(frozen=True, slots=True)
class Ran:
    """A run folder: its records as they are."""

    folder: str
    facts: Mapping[str, Any]
    """run.json"""
    metrics: Sequence[Mapping[str, Any]]
    """Rows `{"step": n, "data": {name: value}}`."""
    events: Sequence[Event]
    """Of all ranks, in microseconds since the epoch."""


@dataclass(frozen=True, slots=True)
class Subject:
    """One column of the report."""

    name: str
    """As the user gave it."""
    plan: Plan
    texts: Mapping[str, str] = field(default_factory=dict)
    """Source file, as spans name it, to its text. Only files that are as they were when the plan was made."""
    gone: Mapping[str, str] = field(default_factory=dict)
    """Source file to why its text cannot be shown."""
    diagnostics: Sequence[Diagnostic] | None = None
    """Warnings of the compile; None where the plan was read from a file, which does not keep them."""
    simulated: Simulated | None = None
    why_not_simulated: str = ""
    profile: Profile | None = None
    """The measured table that the plan's estimates come from, where it is still there as it was."""
    ran: Ran | None = None
