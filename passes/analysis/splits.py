"""How the rows of a step divide over data-parallel ranks, and which batch sizes do where they do not.

A rank has an equal share of a step's samples, in the order of the prompts; a group may lie on two ranks or more. Stages
that compare the samples of a prompt exchange scores. A selection cannot: what it keeps is known only in the run.
"""

from __future__ import annotations

from math import gcd, lcm

from rlflow.diagnostics import Label
from rlflow.ir.flow import STEP, Flow, Node
from rlflow.ir.ops import BestOf, BestWorst, Generate, MixedGroups, Take, Train
from rlflow.ir.typesystem import RowsType
from rlflow.passes.base import PassContext
from rlflow.values import dataclass


@dataclass(frozen=True, slots=True)
class Split:
    """One rule: `prompts` x `each` rows must divide over the `dp` data-parallel ranks that hold them for `node`."""

    node: Node
    take: Node
    prompts: int
    each: int
    """Rows of one prompt; 1 where whole groups stay together."""
    dp: int
    maker: str = ""
    """The generate stage of which every sample is there; empty when `n` does not decide."""

    @property
    def broken(self) -> bool:
        return self.prompts * self.each % self.dp != 0


def check_split(flow: Flow, context: PassContext) -> None:
    """Report every rule that is broken: batches over ranks (each stage with its own), and mini-batches."""
    splits = [split for node in flow.nodes.values() if node.phase == STEP for split in _splits_of(flow, node)]
    reported: set[tuple[str, int, int, bool]] = set()
    for split in splits:
        key = (split.take.id, split.each, split.dp, _selects(split.node))
        if split.broken and key not in reported:
            reported.add(key)
            _report(split, [other for other in splits if other.take.id == split.take.id], context)
    broken = {split.node.id for split in splits if split.broken}
    for node in flow.nodes.values():
        if isinstance(node.op, Train) and node.phase == STEP:
            _check_minibatch(flow, node, node.id in broken, context)


def _splits_of(flow: Flow, node: Node) -> list[Split]:
    """The rule of a stage, if it has one. An evaluation counts every row once, on whichever rank has it: no rule."""
    chain = _chain(flow, node)
    take = chain[-1]
    if not isinstance(take.op, Take) or not take.op.count:
        return []
    prompts = take.op.count
    if isinstance(node.op, Generate) and node.op.part:
        prompts = node.op.part[1] - node.op.part[0]
    if _selects(node):
        return [Split(node, take, prompts, 1, _holders(flow, node, chain))]
    layout = None if node.placement is None else node.placement.layout
    rows = node.type if isinstance(node.op, Generate) else chain[1].type if len(chain) > 1 else None
    if layout is None or not isinstance(rows, RowsType) or rows.rows is None:
        return []
    source = node if isinstance(node.op, Generate) else chain[1]
    maker = source.id if isinstance(source.op, Generate) else ""
    return [Split(node, take, prompts, rows.rows // prompts, layout.dp, maker)]


def _chain(flow: Flow, node: Node) -> list[Node]:
    """The stage, where its rows come from, and so on up to the `take`."""
    chain = [node]
    while True:
        inputs = flow.inputs(chain[-1].id)
        above = inputs.get("samples") or inputs.get("prompts") or inputs.get("r0")  # the first part of joined rows
        if above is None:
            return chain
        chain.append(flow.nodes[above])


def _selects(node: Node) -> bool:
    return isinstance(node.op, BestOf | BestWorst | MixedGroups)


def _holders(flow: Flow, node: Node, chain: list[Node]) -> int:
    """Data-parallel ranks over which a selection's samples lie: those that made them, or those of its own pool."""
    made = next(other for other in chain if isinstance(other.op, Generate))
    placements = [other.placement for other in (made, *flow.nodes.values()) if other.placement is not None]
    pool = None if node.placement is None else node.placement.pool
    return next((p.layout.dp for p in placements if p.pool == pool and p.layout is not None), 1)


def _report(split: Split, rules: list[Split], context: PassContext) -> None:
    """`rules`: all of the same `take`, for sizes that satisfy every one."""
    node, prompts, each, dp = split.node, split.prompts, split.each, split.dp
    pool = node.placement.pool if node.placement is not None else ""
    takes = f"{prompts} prompt{'' if prompts == 1 else 's'}"
    notes: tuple[str, ...]
    if _selects(node):
        do = "does" if prompts == 1 else "do"
        message = (
            f"{takes} {do} not divide over {dp} data-parallel ranks of pool `{pool}`, and `{node.id}` needs whole "
            "groups on a rank"
        )
        notes = ("how many samples it keeps is known only in the run, so ranks cannot put a group together for it",)
    else:
        samples = prompts * each
        message = (
            f"{samples} sample{' does' if samples == 1 else 's do'} not divide over the {dp} data-parallel ranks "
            f"of `{node.id}`"
        )
        notes = (f"{takes} x {each} {'samples' if each > 1 else 'sample'}; pool `{pool}`",)
    context.error(
        "RLF2001",
        message,
        node.span,
        related=() if split.take.span is None else (Label(split.take.span, f"{takes} here", primary=False),),
        notes=notes,
        help=(f"nearest that divide: {_legal(split, rules)}",),
    )


def _legal(split: Split, rules: list[Split]) -> str:
    """`3 prompts; or n = 3 or 6`: prompts x rows is a multiple of dp when prompts are one of dp / gcd(dp, rows)."""
    prompts = _either(_nearest(split.prompts, lcm(*(rule.dp // gcd(rule.dp, rule.each) for rule in rules))))
    text = f"{prompts} prompt{'' if prompts == '1' else 's'}"
    maker = split.maker
    if maker and all(rule.maker == maker for rule in rules if rule.broken):
        mine = [rule for rule in rules if rule.maker == maker]
        text += f"; or n = {_either(_nearest(split.each, lcm(*(r.dp // gcd(r.dp, r.prompts) for r in mine))))}"
    return text


def _nearest(number: int, step: int) -> list[int]:
    """The multiples of `step` below and above `number`, from 1 on."""
    below = number // step * step
    return [size for size in (below, below + step) if size]


def _either(sizes: list[int]) -> str:
    return " or ".join(map(str, sizes))


def _check_minibatch(flow: Flow, node: Node, told: bool, context: PassContext) -> None:
    """`told`: that the batch does not divide has been reported, so the same of a mini-batch as large is no news."""
    op, layout = node.op, None if node.placement is None else node.placement.layout
    assert isinstance(op, Train)
    rows = flow.nodes[flow.inputs(node.id)["samples"]].type
    assert isinstance(rows, RowsType)
    if layout is None or op.minibatch % layout.dp == 0 or (told and op.minibatch == rows.rows):
        return
    nearest = _nearest_minibatches(rows.rows or 0, op.minibatch, layout.dp)
    context.error(
        "RLF2001",
        f"a mini-batch of {op.minibatch} sample{'s' if op.minibatch != 1 else ''} does not divide over {layout.dp} "
        "data-parallel ranks",
        node.span,
        help=(f"nearest that divide: {_either(nearest)} samples",) if nearest else (),
    )


def _nearest_minibatches(rows: int, size: int, dp: int) -> list[int]:
    """Up to two sizes, the nearest below and above, that divide the batch and split over the ranks."""
    if rows % dp:
        return []
    of, near, reach = rows // dp, size // dp, 1_000_000
    below = next((d for d in range(near, max(0, near - reach), -1) if of % d == 0), None)
    above = next((d for d in range(near + 1, min(of, near + reach) + 1) if of % d == 0), None)
    return [d * dp for d in (below, above) if d is not None]
