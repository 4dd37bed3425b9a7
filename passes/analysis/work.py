"""What a stage works on: which samples, how many, and how long they may be."""

from __future__ import annotations

from rlflow.ir.flow import EdgeKind, Flow, Node
from rlflow.ir.ops import Generate, Logprobs, ModelScore, Take, Train, Values
from rlflow.ir.typesystem import RowsType
from rlflow.values import dataclass

PROMPT_TOKENS = 256
"""Assumed length of a prompt, where the context leaves room for it: what data hold is known only when they are read."""
MEAN_SHARE = 0.25
"""Assumed mean of a response as a share of `max_new`."""
DEFAULT_MICROBATCH_TOKENS = 16384


@dataclass(frozen=True, slots=True)
class Work:
    """The batch of a stage. Lengths in tokens."""

    prompts: int
    samples: int
    """Of one prompt."""
    prompt_tokens: int
    max_new: int
    microbatch_tokens: int = DEFAULT_MICROBATCH_TOKENS
    minibatch: int = 0
    """Samples; 0 = the whole batch."""
    epochs: int = 1

    @property
    def longest(self) -> int:
        return self.prompt_tokens + self.max_new


def work_of(flow: Flow, node: Node, context_tokens: int | None) -> Work | None:
    """The work of a model stage; None for other stages, and where the number of rows is known only while running.

    `context_tokens` is the longest sequence of the stage's model, if known.
    """
    if not isinstance(node.op, Generate | Logprobs | Values | ModelScore | Train):
        return None
    rows = node.type
    if isinstance(node.op, Train):
        rows = flow.nodes[flow.inputs(node.id)["samples"]].type
    source = node if isinstance(node.op, Generate) else generated_by(flow, node.id)
    if source is None or not isinstance(rows, RowsType):
        return None
    made = source.type
    assert isinstance(made, RowsType)
    assert isinstance(source.op, Generate)
    count = rows.rows if rows.rows is not None else made.rows
    if count is None:
        return None
    group = source.op.n if count % source.op.n == 0 else 1
    room = PROMPT_TOKENS if context_tokens is None else max(1, min(PROMPT_TOKENS, context_tokens - source.op.max_new))
    found = Work(count // group, group, room, source.op.max_new)
    if isinstance(node.op, Train):
        found = Work(
            count // group,
            group,
            room,
            source.op.max_new,
            node.op.microbatch_tokens,
            min(node.op.minibatch or count, count),
            node.op.epochs,
        )
    return found


def generated_by(flow: Flow, node_id: str) -> Node | None:
    """The generate stage whose samples a stage reads, directly or through other stages; the nearest."""
    sources: dict[str, list[str]] = {}
    for edge in flow.edges:
        if edge.kind is EdgeKind.DATA:
            sources.setdefault(edge.dst, []).append(edge.src)
    seen, front = {node_id}, [node_id]
    while front:
        following: list[str] = []
        for reader in front:
            for source in sources.get(reader, []):
                if isinstance(flow.nodes[source].op, Generate):
                    return flow.nodes[source]
                if source not in seen and not isinstance(flow.nodes[source].op, Take):
                    seen.add(source)
                    following.append(source)
        front = following
    return None
