"""The engines of a generate stage as a profile measured them: what a simulation of single samples needs."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from rlflow.ir.decisions import Engine
from rlflow.ir.flow import Node
from rlflow.ir.ops import Generate

if TYPE_CHECKING:
    from rlflow.passes.analysis.conditions import Size
    from rlflow.profile.table import StageProfile

SLOTS = 256
"""Samples that the embedded engine decodes together."""


def engine_of(node: Node, entry: StageProfile, size: Size) -> Engine | None:
    """None where the profile has no engine, as an older one; where experts join engines; for several turns.

    Without imposed lengths the mean is the measured one, and keeps its share of `max_new` as `profiled.factor` has it.
    """
    op, found = node.op, entry.engine
    layout = None if node.placement is None else node.placement.layout
    if found is None or layout is None or layout.ep > 1 or not isinstance(op, Generate) or op.environment is not None:
        return None
    if entry.rows is None or entry.tokens is None or entry.prompt_tokens is None or not entry.max_new:
        return None
    prompt = max(1, round(entry.prompt_tokens))
    stated = entry.lengths
    if stated is None:
        measured = max(1.0, entry.tokens / entry.rows - entry.prompt_tokens)
        mean = min(measured * op.max_new / entry.max_new, op.max_new)
    else:
        mean = min(stated.mean, op.max_new)
    engine = Engine(
        replicas=layout.dp * layout.cp,
        slots=SLOTS,
        kv_tokens=SLOTS * (prompt + op.max_new),
        prompt_tokens=prompt,
        max_new=op.max_new,
        mean_new=mean,
        bands=((SLOTS, found.step_us / 1e6, found.sample_us / 1e6),),
        token_s=found.token_us / 1e6,
        prefill_token_s=found.prefill_token_us / 1e6,
        prefill_square_s=0.0,
        prefill_context_s=0.0,
        prefill_tokens=SLOTS * (prompt + op.max_new),
    )
    return engine if stated is None else replace(engine, sigma=stated.sigma, prompt_share=stated.prompt_share)
