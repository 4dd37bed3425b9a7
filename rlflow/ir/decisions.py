"""What passes decide beside placements and edges: values that the plan repeats for backends, reports and explanations.

Every decision is a frozen dataclass with a `kind`, which is also its word in the text form; `span` is the source place
that caused it and is not part of the text. Sizes are bytes, times microseconds, both whole numbers.
"""

from __future__ import annotations

from typing import Any, Literal, get_args

from rlflow.diagnostics import Span
from rlflow.values import dataclass

Admission = Literal["in_order", "wait", "slack_edf", "evict", "count"]
Carry = Literal["partial", "finish", "nothing"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Stale:
    """The samples of a model that may be older than its newest version, and what is promised about their age."""

    model: str
    stage: str
    """The generate stage."""
    steps: int
    """Bound that the schedule asks for."""
    permitted: int
    """Bound that the flow allows."""
    admit: Admission = "in_order"
    burst: int = 1
    """Admission only at every so many versions."""
    trigger: float = 1.0
    """Share of a batch at which training starts."""
    carry: Carry = "finish"
    guarantee: Literal["per_sample", "aggregate"] = "per_sample"
    worst_age: int | None = None
    """steps; None = no sample has a bound."""
    drops_data: bool = False
    updates: int = 1
    """Optimizer updates of the model in one step, at most. The last of them is `updates` - 1 further from the weights
    that sampled than the first."""
    span: Span | None = None
    kind: Literal["stale"] = "stale"


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueSpec:
    """A data edge between pools."""

    id: str
    stage: str
    """Whose rows it carries."""
    source: str
    target: str
    """Pools."""
    capacity: int
    """Batches: one being filled, and one for every step of staleness."""
    reads: int
    """Reads of one batch: one per model-parallel replica of the target pool, which hands it on inside."""
    partitions: int = 1
    """Parts of a batch that are written and read independently, one per data-parallel replica that writes."""
    trigger: float = 1.0
    carry: Carry = "finish"
    span: Span | None = None
    kind: Literal["queue"] = "queue"


@dataclass(frozen=True, slots=True, kw_only=True)
class Reshard:
    """Weights of a model from the layout that trains to one that reads, every step. Bytes are of all devices together
    where nothing else is said."""

    id: str
    """The model; with a number where the pool has it in a further layout."""
    model: str
    trainer: str
    """The training stage."""
    readers: tuple[str, ...]
    """The stages that read in the target layout."""
    source: str
    target: str
    """Pools."""
    needed: int
    """What the devices of the target must hold."""
    local: int
    """Of it, what they hold already and keep or copy in place."""
    received: int
    """What crosses links; equal to the lower bound."""
    lower_bound: int
    busiest: int
    """Received by the device that receives the most."""
    sent: int = 0
    """Sent by the device that sends the most."""
    node_in: int = 0
    """Enters the node that gets the most from others; a node is a host, or a supernode."""
    node_out: int = 0
    """Leaves the node that sends the most to others."""
    bucket_bytes: int = 0
    """On a device beside both layouts, at most."""
    split: tuple[tuple[str, int], ...] = ()
    """Tensors of which a device receives more than a bucket holds, `*` for the layer, and into how many pieces they are
    cut."""
    padded_vocabulary: tuple[int, ...] = ()
    """Rows of the embedding where it trains and where it is read, padded to multiples of tp; empty = as they are."""
    rounds: int = 1
    mapping: tuple[int, ...] = ()
    """The device of the pool that gets every rank of the target layout, so that the most is already there; empty = in
    order."""
    traffic: tuple[tuple[str, str, int], ...] = ()
    """(from node, to node, bytes) of all that crosses links, inside a node too; empty where there are many nodes."""
    all_to_all: bool = False
    """Whether it is an exchange of experts among the devices that hold them."""
    adapters: bool = False
    """Whether only adapters are sent, in 32 bits, which the readers add to the frozen weights that they keep."""
    in_place: bool = False
    """Whether the new parts take over the memory of those that are trained, which the host keeps until they train
    again. Beside the larger of the two layouts a device then has the buckets only."""
    order: tuple[tuple[str, str], ...] = ()
    """In place: (act, tensor), one after the other on all devices. `move` lays a tensor out anew; `stage` reads it into
    the buckets, `unstage` writes it from there."""
    bound_us: int = 0
    """What the links allow at best."""
    us: int = 0
    """With the share of the links that synchronisations reach."""
    span: Span | None = None
    kind: Literal["reshard"] = "reshard"


@dataclass(frozen=True, slots=True, kw_only=True)
class KvCopies:
    """A model stage that cuts attention over more ranks than there are key-value heads."""

    stage: str
    kv_heads: int
    copies: int
    """Ranks that hold every key-value head."""
    span: Span | None = None
    kind: Literal["kv_copies"] = "kv_copies"


@dataclass(frozen=True, slots=True, kw_only=True)
class Engine:
    """The generation engines of a stage, as a simulation of single samples needs them. Times are seconds."""

    replicas: int
    """Data-parallel engines."""
    lock_step: int = 1
    """So many of them share experts and take every step together."""
    slots: int
    """Requests that run at once in one engine."""
    kv_tokens: int
    """Tokens that the cache of one engine holds."""
    prompt_tokens: int
    """Assumed length of a prompt."""
    max_new: int
    mean_new: float
    """Assumed mean of a response."""
    bands: tuple[tuple[int, float, float], ...]
    """Largest number b of running requests, and c, d: a step takes c + d b + token_s K with K tokens in the cache."""
    token_s: float
    prefill_token_s: float
    """Of a token of a prompt."""
    prefill_square_s: float
    """Of the square of its length."""
    prefill_context_s: float
    """Of a prompt."""
    prefill_tokens: int
    """Tokens of a step: one for each running request, the rest is for prompts."""
    sigma: float = 0.75
    """Of the logarithm of a response's length, before the cut at `max_new`."""
    prompt_share: float = 0.5
    """Of its variance, what the samples of a prompt have in common."""
    kind: Literal["engine"] = "engine"


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """What a stage takes where it is placed: a model stage by the cost model, any stage by a profile."""

    stage: str
    us: int
    parts: tuple[tuple[str, int], ...] = ()
    """Where the time goes, in the order in which it is spent."""
    engine: Engine | None = None
    """Of a generate stage, by the cost model."""
    measured: str = ""
    """From a profile: `measured`, and how it was scaled; empty = by the cost model."""
    span: Span | None = None
    kind: Literal["estimate"] = "estimate"


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryPhase:
    """The fullest moment of one device while a stage runs."""

    stage: str
    us: int
    bytes: int
    contents: tuple[tuple[str, int], ...]
    """Object and bytes, largest first."""
    host_bytes: int = 0
    kind: Literal["memory_phase"] = "memory_phase"


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """The memory of one device of a pool over a step."""

    pool: str
    capacity: int
    """Bytes that stages may use; what is reserved is taken off."""
    reserved: int
    host_capacity: int
    """Bytes of the host's memory for one device; 0 = not stated, and no limit."""
    peak: int
    peak_without_swaps: int
    phases: tuple[MemoryPhase, ...]
    span: Span | None = None
    kind: Literal["memory"] = "memory"


@dataclass(frozen=True, slots=True, kw_only=True)
class Swap:
    """One object that leaves or comes back, on every device of a pool."""

    pool: str
    action: Literal["offload", "onload", "drop", "rebuild", "save"]
    """`save` copies to the host and leaves the memory to the reshard that follows."""
    object: str
    bytes: int
    before: str
    """The stage in front of which it is given (offload, drop) or complete (onload, rebuild, save)."""
    us: int = 0
    exposed_us: int = 0
    """The part that no stage hides."""
    span: Span | None = None
    """The stage that needs the room."""
    kind: Literal["swap"] = "swap"


@dataclass(frozen=True, slots=True, kw_only=True)
class Cadence:
    """The steady state: a step's period, and what sets it."""

    us: int
    """Of one step."""
    cycle: tuple[str, ...]
    """The stages of the critical cycle, in order."""
    cycle_us: tuple[int, ...]
    """What each of them takes."""
    tokens: int
    """On the cycle; the period is the sum of its times over this."""
    slack: tuple[tuple[str, int], ...] = ()
    """How much longer a stage may take without changing the period."""
    one_more_token: tuple[tuple[str, int], ...] = ()
    """The period with one token more on an edge of the cycle, where that is shorter."""
    without: tuple[tuple[str, int], ...] = ()
    """The period if a stage of the cycle took no time, where that is shorter."""
    useful_staleness: tuple[tuple[str, int], ...] = ()
    """Model to the staleness beyond which the period stays the same."""
    span: Span | None = None
    kind: Literal["cadence"] = "cadence"


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """One decision of the placement search against the best plan in which it is different."""

    what: str
    chosen: str
    runner_up: str
    """Empty where nothing else is legal or fits."""
    reason: str
    """Why the runner-up lost, with numbers."""
    loss_us: int = 0
    """How much longer its step is."""
    span: Span | None = None
    kind: Literal["choice"] = "choice"


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchSummary:
    """How the placement was found."""

    us: int
    """Period of a step by the search's tables."""
    lower_bound_us: int
    """No placement has a shorter one."""
    gap: float
    """Period over the bound, minus 1."""
    proven: bool
    """Whether nothing in the tables is better."""
    stopped_early: bool
    """Whether the time for searching ran out."""
    partitions: int
    joint_choices: int
    runners_up: tuple[tuple[str, str], ...] = ()
    """Other sets of pools, best first, with what they lose."""
    span: Span | None = None
    kind: Literal["search"] = "search"


Decision = Choice | SearchSummary | Stale | KvCopies | Reshard | QueueSpec | Estimate | Memory | Swap | Cadence

DECISIONS: dict[str, Any] = {d.__dataclass_fields__["kind"].default: d for d in get_args(Decision)}
PARTS: dict[str, Any] = {"memory_phase": MemoryPhase, "engine": Engine}
"""Kinds of values inside decisions."""
