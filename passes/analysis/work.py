"""What a stage works on: which samples, how many, and how long they may be."""

from __future__ import annotations

from dataclasses import replace

from rlflow.cost.assumed_lengths import PROMPT_TOKENS, assumed_mean
from rlflow.ir.flow import EdgeKind, Flow, Node
from rlflow.ir.ops import Generate, Logprobs, ModelScore, Take, Train, Values
from rlflow.ir.typesystem import RowsType
from rlflow.values import dataclass

DEFAULT_MICROBATCH_TOKENS = 16384


@dataclass(frozen=True, slots=True)
class Work:
    """The batch of a stage. Lengths in tokens."""

    prompts: int
    samples: int
    """Of one prompt."""
    prompt_tokens: int
    max_new: int
    mean_new: float
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
    prompt, max_new = _prompt_tokens(flow, source), source.op.max_new
    room = prompt if context_tokens is None else max(1, min(prompt, context_tokens - max_new))
    mean = assumed_mean(source.op.mean_new, max_new)
    found = Work(count // group, group, room, max_new, mean)
    if isinstance(node.op, Train):
        op = node.op
        size = min(op.minibatch or count, count)
        found = replace(found, microbatch_tokens=op.microbatch_tokens, minibatch=size, epochs=op.epochs)
    return found


def _prompt_tokens(flow: Flow, stage: Node) -> int:
    """The mean that the data of a generate stage's prompts state, or the one that is assumed."""
    source = flow.nodes[flow.inputs(stage.id)["prompts"]].op
    stated = flow.data[source.data].source.prompt_tokens if isinstance(source, Take) else None
    return PROMPT_TOKENS if stated is None else stated


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
