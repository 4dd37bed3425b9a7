"""Estimates from a profile: measured seconds for the stages that it knows, scaled where their size is another."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction
from typing import TYPE_CHECKING

from rlflow.ir.decisions import Estimate
from rlflow.ir.flow import Flow, Node
from rlflow.ir.ops import Generate, Score
from rlflow.passes.analysis.conditions import Size, conditions_of, size_of
from rlflow.passes.analysis.measured_engine import engine_of
from rlflow.values import dataclass

if TYPE_CHECKING:
    from rlflow.profile.table import Profile, StageProfile

MEASURED = "run"
"""Part of an estimate: the stage itself. Its other parts are `publish` and `call REWARD_STAGE`."""


@dataclass(frozen=True, slots=True)
class Unknown:
    """A stage for which the profile has no number, and why."""

    stage: str
    why: str


def from_profile(flow: Flow, profile: Profile) -> tuple[list[Estimate], list[Unknown]]:
    """An estimate for every placed stage that was measured as it is here, and the other stages.

    What handing over samples to a Python function and fetching its result takes is a part of the stage that made the
    samples: they follow each other on its pool, and the function itself runs beside it.
    """
    found: dict[str, Estimate] = {}
    unknown: list[Unknown] = []
    calls: list[tuple[str, str, int]] = []
    for node in flow.nodes.values():
        entry = profile.find(node.id)
        why = "it was not measured" if entry is None else mismatch(flow, node, entry)
        if entry is None or why:
            unknown.append(Unknown(node.id, why))
            continue
        size = size_of(flow, node)
        found[node.id] = _estimate(node, entry, size)
        if isinstance(node.op, Score) and entry.call_us:
            calls.append((_caller(flow, node), node.id, round(entry.call_us * _rows_factor(entry, size))))
    for caller, stage, us in calls:
        if caller in found:
            known = found[caller]
            found[caller] = replace(known, us=known.us + us, parts=(*known.parts, (f"call {stage}", us)))
    return list(found.values()), unknown


def mismatch(flow: Flow, node: Node, entry: StageProfile) -> str:
    """Why a measured time does not hold for a stage, in words; empty where it does."""
    here = conditions_of(flow, node)
    for name in dict.fromkeys([*here, *entry.conditions]):
        measured, now = entry.conditions.get(name, "none"), here.get(name, "none")
        if measured != now:
            return f"{name}: {measured} was measured, here is {now}"
    size = size_of(flow, node)
    if (size.rows is None) != (entry.rows is None):
        words = ["known only while running" if rows is None else str(rows) for rows in (entry.rows, size.rows)]
        return f"rows: {words[0]} when measured, here {words[1]}"
    return ""


def factor(entry: StageProfile, size: Size) -> Fraction:
    """By how much a stage works more than when it was measured: rows, epochs, and tokens where it counts them.

    Prompts count as long as they were, responses as the same share of `max_new`.
    """
    found = _rows_factor(entry, size) * Fraction(size.epochs, entry.epochs)
    if entry.tokens is None or entry.rows is None or entry.max_new is None or size.max_new is None:
        return found
    row = Fraction(entry.tokens) / entry.rows
    prompt = min(row, Fraction(entry.prompt_tokens or 0))
    return found * (prompt + (row - prompt) * Fraction(size.max_new, entry.max_new)) / row


def _rows_factor(entry: StageProfile, size: Size) -> Fraction:
    return Fraction(1) if entry.rows is None or size.rows is None else Fraction(size.rows, entry.rows)


def _estimate(node: Node, entry: StageProfile, size: Size) -> Estimate:
    by = factor(entry, size)
    us = round(entry.us * by)
    parts = [(MEASURED, us)] + ([("publish", entry.publish_us)] if entry.publish_us else [])
    return Estimate(
        stage=node.id,
        us=us + entry.publish_us,
        parts=tuple(parts),
        engine=engine_of(node, entry, size) if isinstance(node.op, Generate) else None,
        measured=_words(entry, size, by),
        span=node.span,
    )


def _words(entry: StageProfile, size: Size, by: Fraction) -> str:
    """`measured`, and from what it is scaled where the sizes differ."""
    pairs = (
        ("rows", entry.rows, size.rows),
        ("new tokens at most", entry.max_new if entry.tokens is not None else size.max_new, size.max_new),
        ("epochs", entry.epochs, size.epochs),
    )
    other = [f"{then} {name}, here {now}" for name, then, now in pairs if then != now]
    return f"measured with {'; '.join(other)}: times {float(by):.4g}" if other else "measured"


def _caller(flow: Flow, node: Node) -> str:
    """The stage whose samples a Python function gets, and whose pool calls it."""
    while isinstance(node.op, Score):
        node = flow.nodes[flow.inputs(node.id)["samples"]]
    return node.id
