"""A token graph: stages that take time, edges that carry tokens.

A stage starts when each of its incoming edges holds the tokens that it consumes; it takes them at its start and puts
tokens on its outgoing edges at its end. Queues, weight edges, bounded buffers, the order of a pool and "one run at a
time" are all edges (Commoner, Holt, Even, Pnueli 1971; Lee, Messerschmitt 1987 for rates).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import field, replace
from enum import StrEnum
from fractions import Fraction
from math import isfinite

from rlflow.values import dataclass

Seconds = Fraction | float


class TokenEdgeKind(StrEnum):
    """What a token of the edge stands for. Only `data` and `weights` carry something that was made from a version."""

    DATA = "data"
    WEIGHTS = "weights"
    CREDIT = "credit"
    ORDER = "order"
    SERIAL = "serial"


@dataclass(frozen=True, slots=True)
class TokenStage:
    """A stage and its seconds per firing. `serial`: a firing starts after the one before has ended.

    A float is taken for exactly the number that it is. Raises ValueError for a duration that is negative or not finite.
    """

    name: str
    duration: Seconds
    serial: bool = True
    tag: object = field(default=None, compare=False)

    def __post_init__(self) -> None:
        if not isfinite(self.duration) or self.duration < 0:
            raise ValueError(f"stage `{self.name}` takes {self.duration} s; a duration is finite and not negative")

    @property
    def exact(self) -> Fraction:
        return Fraction(self.duration)


@dataclass(frozen=True, slots=True)
class TokenEdge:
    """`produces` tokens at every end of `src`, `consumes` at every start of `dst`, `tokens` at the beginning.

    `tag` is the caller's (a source span, say) and does not count in comparisons. Raises ValueError for a negative
    number of tokens or a rate below one.
    """

    src: str
    dst: str
    tokens: int = 0
    label: str = ""
    produces: int = 1
    consumes: int = 1
    kind: TokenEdgeKind = TokenEdgeKind.DATA
    tag: object = field(default=None, compare=False)

    def __post_init__(self) -> None:
        if self.tokens < 0:
            raise ValueError(f"{self.text} has {self.tokens} tokens")
        if self.produces < 1 or self.consumes < 1:
            raise ValueError(f"{self.text} produces {self.produces} and consumes {self.consumes}; both are at least 1")

    @property
    def text(self) -> str:
        """``rollout -> train (samples)``."""
        return f"{self.src} -> {self.dst}" + (f" ({self.label})" if self.label else "")

    @property
    def single_rate(self) -> bool:
        return self.produces == self.consumes == 1


@dataclass(frozen=True, slots=True)
class TokenGraph:
    """Stages and edges. `closed` are the edges with the self-loops of serial stages; the analyses work on these.

    The order of stages and edges breaks ties, so equal graphs give equal answers. Raises ValueError for two stages of
    one name and for an edge between stages that do not exist.
    """

    stages: tuple[TokenStage, ...]
    edges: tuple[TokenEdge, ...] = ()
    closed: tuple[TokenEdge, ...] = field(init=False, repr=False, compare=False)
    index: Mapping[str, int] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        index = {stage.name: i for i, stage in enumerate(self.stages)}
        if len(index) < len(self.stages):
            names = [stage.name for stage in self.stages]
            raise ValueError(f"two stages are called `{next(n for n in names if names.count(n) > 1)}`")
        for edge in self.edges:
            for name in (edge.src, edge.dst):
                if name not in index:
                    raise ValueError(f"{edge.text}: there is no stage `{name}`")
        loops = tuple(
            TokenEdge(stage.name, stage.name, 1, "one at a time", kind=TokenEdgeKind.SERIAL, tag=stage.tag)
            for stage in self.stages
            if stage.serial
        )
        object.__setattr__(self, "closed", self.edges + loops)
        object.__setattr__(self, "index", index)

    @classmethod
    def of(cls, durations: Mapping[str, Seconds], edges: Iterable[TokenEdge] = ()) -> TokenGraph:
        """Serial stages with these seconds, in this order."""
        return cls(tuple(TokenStage(name, seconds) for name, seconds in durations.items()), tuple(edges))

    @property
    def single_rate(self) -> bool:
        """Whether it is a marked graph: every rate is one."""
        return all(edge.single_rate for edge in self.edges)

    def stage(self, name: str) -> TokenStage:
        """Raises KeyError where there is none."""
        return self.stages[self.index[name]]

    def with_edges(self, *edges: TokenEdge) -> TokenGraph:
        return replace(self, edges=self.edges + edges)

    def without(self, edge: TokenEdge) -> TokenGraph:
        """Without the first edge equal to this one. Raises ValueError where there is none."""
        at = self.edges.index(edge)
        return replace(self, edges=self.edges[:at] + self.edges[at + 1 :])

    def closed_of(self) -> tuple[dict[str, list[int]], dict[str, list[int]]]:
        """Stage to the numbers of the closed edges into it, and out of it."""
        into: dict[str, list[int]] = {stage.name: [] for stage in self.stages}
        out: dict[str, list[int]] = {stage.name: [] for stage in self.stages}
        for number, edge in enumerate(self.closed):
            into[edge.dst].append(number)
            out[edge.src].append(number)
        return into, out

    def with_tokens(self, edge: TokenEdge, tokens: int) -> TokenGraph:
        """The first edge equal to this one with so many initial tokens. Raises ValueError where there is none."""
        at = self.edges.index(edge)
        return replace(self, edges=(*self.edges[:at], replace(edge, tokens=tokens), *self.edges[at + 1 :]))

    def with_durations(self, durations: Mapping[str, Seconds]) -> TokenGraph:
        """Other seconds for the stages named. Raises KeyError for a stage that does not exist."""
        for name in durations:
            self.stage(name)
        return replace(
            self,
            stages=tuple(replace(stage, duration=durations.get(stage.name, stage.duration)) for stage in self.stages),
        )

    def with_credit(self, src: str, dst: str, capacity: int, label: str | None = None) -> TokenGraph:
        """Bound the edge from `src` to `dst` to `capacity` tokens by a reverse edge that carries the free places.

        A place is taken when the producer starts and freed when the consumer ends. `label` chooses among parallel
        edges. Raises ValueError where no edge or more than one fits, and where the capacity is below the initial
        tokens.
        """
        fits = [
            edge
            for edge in self.edges
            if (edge.src, edge.dst) == (src, dst)
            and edge.kind in (TokenEdgeKind.DATA, TokenEdgeKind.WEIGHTS)
            and label in (None, edge.label)
        ]
        if len(fits) != 1:
            raise ValueError(f"{len(fits)} edges lead from `{src}` to `{dst}`; one is needed")
        return self.with_edges(credit_of(fits[0], capacity))

    def with_order(self, stages: Sequence[str], label: str = "order") -> TokenGraph:
        """One after the other in this order, then from the start: the stages that share a pool's devices.

        A cycle with one token, on the edge into the first stage. Raises ValueError for no stage or one named twice.
        """
        if not stages or len(set(stages)) < len(stages):
            raise ValueError(f"an order needs stages, each once: {', '.join(stages) or 'none'}")
        last = len(stages) - 1
        return self.with_edges(
            *(
                TokenEdge(src, stages[(i + 1) % (last + 1)], int(i == last), label, kind=TokenEdgeKind.ORDER)
                for i, src in enumerate(stages)
            )
        )


def credit_of(edge: TokenEdge, capacity: int) -> TokenEdge:
    """The reverse edge with the free places of a buffer. Raises ValueError where the initial tokens do not fit."""
    if capacity < edge.tokens:
        raise ValueError(f"{edge.text} starts with {edge.tokens} tokens, more than its capacity of {capacity}")
    return TokenEdge(
        edge.dst,
        edge.src,
        capacity - edge.tokens,
        f"room for {edge.label}" if edge.label else "room",
        produces=edge.consumes,
        consumes=edge.produces,
        kind=TokenEdgeKind.CREDIT,
        tag=edge.tag,
    )


def cycle_text(cycle: Sequence[TokenEdge]) -> str:
    """``train -> rollout -> train``: the stages of a cycle, the first again at the end."""
    return " -> ".join([*(edge.src for edge in cycle), cycle[0].src]) if cycle else ""


def from_first_stage(graph: TokenGraph, cycle: Sequence[TokenEdge]) -> tuple[TokenEdge, ...]:
    """The same cycle, from the stage on it that comes first in the graph."""
    if not cycle:
        return ()
    at = min(range(len(cycle)), key=lambda i: graph.index[cycle[i].src])
    return (*cycle[at:], *cycle[:at])


def require_single_rate(graph: TokenGraph) -> None:
    """Raises ValueError where an edge has rates."""
    for edge in graph.edges:
        if not edge.single_rate:
            rates = f"produces {edge.produces} and consumes {edge.consumes}"
            raise ValueError(f"{edge.text} {rates}: expand the graph to single rates first")
