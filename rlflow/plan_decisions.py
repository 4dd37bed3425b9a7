"""What a plan says about time, memory and traffic, and why it is as it is.

The numbers are those of the compiler's cost model: whole bytes and microseconds.
"""

from __future__ import annotations

from rlflow.plan_parts import PlanPart, SpanRef


class Reshard(PlanPart):
    """As `rlflow.ir.decisions.Reshard` explains it. Bytes of all devices together where nothing else is said."""

    id: str
    model: str
    trainer: str
    readers: tuple[str, ...]
    source: str
    target: str
    needed: int
    local: int
    received: int
    lower_bound: int
    busiest: int
    sent: int
    node_in: int
    node_out: int
    bucket_bytes: int
    split: tuple[tuple[str, int], ...] = ()
    padded_vocabulary: tuple[int, ...] = ()
    rounds: int
    mapping: tuple[int, ...] = ()
    traffic: tuple[tuple[str, str, int], ...] = ()
    all_to_all: bool
    adapters: bool = False
    in_place: bool = False
    order: tuple[tuple[str, str], ...] = ()
    bound_us: int
    us: int

    @property
    def redundancy(self) -> float:
        """Received bytes beyond the least that is possible, as a share of it."""
        return self.received / self.lower_bound - 1 if self.lower_bound else 0.0


class MemoryPhase(PlanPart):
    """The fullest moment of one device while a stage runs, or while weights are resharded or published."""

    stage: str
    us: int
    bytes: int
    contents: tuple[tuple[str, int], ...]
    host_bytes: int = 0


class PoolMemory(PlanPart):
    """The memory of one device of a pool over a step."""

    pool: str
    capacity: int
    reserved: int
    host_capacity: int
    peak: int
    peak_without_swaps: int
    phases: tuple[MemoryPhase, ...]


class EngineEstimate(PlanPart):
    """As `rlflow.ir.decisions.Engine` explains it."""

    replicas: int
    lock_step: int
    slots: int
    kv_tokens: int
    prompt_tokens: int
    max_new: int
    mean_new: float
    bands: tuple[tuple[int, float, float], ...]
    token_s: float
    prefill_token_s: float
    prefill_square_s: float
    prefill_context_s: float
    prefill_tokens: int
    sigma: float = 0.75
    prompt_share: float = 0.5


class StageEstimate(PlanPart):
    """Microseconds of a stage by the cost model or a profile, and where they go."""

    stage: str
    us: int
    parts: tuple[tuple[str, int], ...] = ()
    engine: EngineEstimate | None = None
    """Of a generate stage, by the cost model."""
    measured: str = ""
    """From the plan's profile: `measured`, and how it was scaled; empty = by the cost model."""


class Pinned(PlanPart):
    """Something that the schedule decides, in its own words."""

    what: str
    span: SpanRef


class Choice(PlanPart):
    """Something that the compiler chose, with the best plan in which it is different."""

    what: str
    chosen: str
    runner_up: str
    """Empty where nothing else is legal or fits."""
    reason: str
    loss_us: int = 0
    span: SpanRef


class Search(PlanPart):
    """How the placement was found; as `rlflow.ir.decisions.SearchSummary` explains it."""

    us: int
    lower_bound_us: int
    gap: float
    proven: bool
    stopped_early: bool
    partitions: int
    joint_choices: int
    runners_up: tuple[tuple[str, str], ...] = ()


class Cadence(PlanPart):
    """The steady state by the cost model: as `rlflow.ir.decisions.Cadence` explains it."""

    us: int
    cycle: tuple[str, ...]
    cycle_us: tuple[int, ...]
    tokens: int
    slack: tuple[tuple[str, int], ...] = ()
    one_more_token: tuple[tuple[str, int], ...] = ()
    without: tuple[tuple[str, int], ...] = ()
    useful_staleness: tuple[tuple[str, int], ...] = ()
