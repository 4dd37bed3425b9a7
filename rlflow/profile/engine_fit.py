"""An engine's step time from what its spells took."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from rlflow.profile.table import EngineProfile


class Spell(NamedTuple):
    """As a trace has it; sums over the steps. `steps` 0: contexts were read, `samples` of them."""

    steps: int
    samples: int
    tokens: int
    us: int


def fitted(spells: Sequence[Spell]) -> EngineProfile | None:
    """None where nothing was decoded, as by engines that record no spells.

    Least squares with coefficients of at least 0, every spell weighted by 1 / its time as for noise that adds up over
    it; then scaled, so that all spells together take what they took. Reading contexts has a part by the call and one
    by the token. The first is left out: a simulated engine reads contexts within a step, whose fixed part it pays.
    """
    decoding = [spell for spell in spells if spell.steps and spell.us]
    if not decoding:
        return None
    step, sample, token = _coefficients([(s.steps, s.samples, s.tokens) for s in decoding], [s.us for s in decoding])
    reading = [spell for spell in spells if not spell.steps and spell.tokens and spell.us]
    prefill = _coefficients([(1, s.tokens) for s in reading], [s.us for s in reading])[1] if reading else 0.0
    return EngineProfile(step_us=step, sample_us=sample, token_us=token, prefill_token_us=prefill)


def _coefficients(rows: Sequence[tuple[int, ...]], us: Sequence[int]) -> list[float]:
    import numpy as np
    from scipy.optimize import nnls

    matrix, taken = np.array(rows, dtype=np.float64), np.array(us, dtype=np.float64)
    weight = 1 / np.sqrt(taken)
    # Columns differ by orders of magnitude.
    norm = np.maximum(np.linalg.norm(matrix * weight[:, None], axis=0), 1e-300)
    found = nnls(matrix * weight[:, None] / norm, taken * weight)[0] / norm
    predicted = float((matrix @ found).sum())
    scale = float(taken.sum()) / predicted if predicted else 0.0
    return [float(f"{value * scale:.6g}") for value in found]
