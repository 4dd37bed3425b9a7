"""Micro-batches in which samples of one prompt share its tokens: the model reads a prompt once for all of its samples.

Attention is causal, so what a model computes for a prompt's tokens does not depend on the response behind them; in
backward the gradients of all responses meet there. A family is a prompt and its samples:

    prompt | response 1, response 2, ... (a rectangle) | ... (rectangles of shorter responses)

The tokens of all families lie one after another in one row. A response's first token is predicted at the end of the
prompt, which it shares; so a rectangle holds responses without their last token.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from rlflow.backends.ray_runtime.packing import Family, MicroBatch

if TYPE_CHECKING:
    from rlflow.backends.ray_runtime.packing import Sequences

SLACK = 0.8
"""A response shorter than this part of a rectangle's width begins a rectangle of its own."""
MUCH = 0.2
"""Part of the tokens, padding included, that sharing must save."""
WORTH = 1 << 16
"""Tokens x hidden size that sharing must save per call of the attention. Where rows are as many as prompts, or the
model is tiny, few large calls are faster than computing less."""


def shared_micro_batches(sequences: Sequences, rows: np.ndarray, budget: int) -> list[MicroBatch]:
    """`rows` in families, at most `budget` tokens of a micro-batch with padding, but at least one sample."""
    families: dict[bytes, list[int]] = {}
    for row in rows.tolist():
        start = sequences.starts[row]
        prompt = sequences.ids[start : start + sequences.prompt_lengths[row]]
        families.setdefault(prompt.tobytes(), []).append(row)
    found: list[MicroBatch] = []
    chosen: list[tuple[Family, np.ndarray]] = []
    free = budget
    for members in families.values():
        waiting = np.array(members)
        waiting = waiting[np.argsort(-sequences.response_lengths[waiting], kind="stable")]
        while len(waiting):
            family = _family(sequences, waiting, free)
            if family.area > free and chosen:
                found.append(_micro_batch(sequences, chosen))
                chosen, free = [], budget
                continue
            chosen.append((family, waiting[: family.rows]))
            waiting, free = waiting[family.rows :], free - family.area
    if chosen:
        found.append(_micro_batch(sequences, chosen))
    return found


def worth_sharing(rectangles: list[MicroBatch], shared: list[MicroBatch], hidden: int) -> bool:
    """Whether reading prompts once saves more than its additional calls of the attention cost."""
    before, after = (sum(micro.ids.numel() for micro in micros) for micros in (rectangles, shared))
    calls = sum(1 + len(family.blocks) for micro in shared for family in micro.families or ())
    saved = before - after
    return bool(saved > MUCH * before and saved * hidden > WORTH * calls)


def _family(sequences: Sequences, rows: np.ndarray, budget: int) -> Family:
    """A prompt with the first of its `rows` that fit into `budget` tokens, at least one; longest first."""
    prompt = int(sequences.prompt_lengths[rows[0]])
    widths = np.maximum(sequences.response_lengths[rows] - 1, 0).tolist()
    blocks: list[tuple[int, int]] = []
    area, taken = prompt, 0
    for width in widths:
        fits = bool(blocks) and width >= SLACK * blocks[-1][1]
        wide = blocks[-1][1] if fits else width
        if taken and area + wide > budget:
            break
        area, taken = area + wide, taken + 1
        if fits:
            blocks[-1] = (blocks[-1][0] + 1, wide)
        else:
            blocks.append((1, wide))
    return Family(prompt, tuple(blocks))


def _micro_batch(sequences: Sequences, chosen: list[tuple[Family, np.ndarray]]) -> MicroBatch:
    parts: list[np.ndarray] = []
    own: list[int] = []
    heads: list[int] = []
    at = 0
    for family, rows in chosen:
        start = int(sequences.starts[rows[0]])
        parts.append(sequences.ids[start : start + family.prompt])
        at += family.prompt
        heads += [at - 1] * len(rows)
        first = 0
        for count, width in family.blocks:
            block = np.full((count, width), sequences.pad_id, dtype=np.int64)
            for line, row in zip(block, rows[first : first + count], strict=True):
                length = max(int(sequences.response_lengths[row]) - 1, 0)
                start = int(sequences.starts[row] + sequences.prompt_lengths[row])
                line[:length] = sequences.ids[start : start + length]
                own.append(at)
                at += width
            parts.append(block.reshape(-1))
            first += count
    rows = np.concatenate([rows for _, rows in chosen])
    firsts = np.array(own, dtype=np.int64) - sequences.prompt_lengths[rows]
    ids = torch.from_numpy(np.concatenate(parts))[None]
    families = tuple(family for family, _ in chosen)
    return sequences.micro_batch(rows, ids, firsts, heads=np.array(heads, dtype=np.int64), families=families)
