"""The loss terms of a train stage on one micro-batch: each gives a scalar and the sums that become its metrics.

Weights and totals are those of the whole mini-batch over all ranks, so a scalar is this micro-batch's part of the
mini-batch's number, and parts add up. All tensors hold counted response tokens only (see packing.py), so that nothing
here needs a mask.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from rlflow.backends.ray_runtime.algorithms import distill, imitation, policy, preference, sequence
from rlflow.backends.ray_runtime.algorithms.aggregate import aggregate, token_weights
from rlflow.backends.ray_runtime.algorithms.correction import correction_metrics, importance_weights
from rlflow.backends.ray_runtime.algorithms.kl import kl_estimate
from rlflow.backends.ray_runtime.algorithms.losses import ppo_clip
from rlflow.backends.ray_runtime.algorithms.rows import row_means, row_sums
from rlflow.backends.ray_runtime.algorithms.token_sum import row_weights, token_sum_weights
from rlflow.backends.ray_runtime.algorithms.value import value_clip
from rlflow.backends.ray_runtime.batch import Packed
from rlflow.backends.ray_runtime.packing import MicroBatch, Sequences
from rlflow.ir.losses import POLICY_TERMS
from rlflow.ir.ops import (
    Cispo,
    Distill,
    Dpo,
    Entropy,
    Gspo,
    Kl,
    LossTerm,
    Nll,
    PpoClip,
    Reinforce,
    Train,
    TruncatedIs,
    ValueClip,
)

Found = tuple[torch.Tensor, dict[str, torch.Tensor]]


@dataclass(frozen=True)
class Inputs:
    """One micro-batch as a loss sees it. [tokens] are the counted response tokens of the rows, one after another."""

    predicted: torch.Tensor
    """[tokens], carries the gradient: log-probabilities, or the values of a value model"""
    entropies: torch.Tensor
    """[tokens]; empty for a value model"""
    lengths: torch.Tensor
    """int64 [rows]: counted tokens"""
    weights: torch.Tensor
    """[tokens]: of each token in the aggregate"""
    row_factors: torch.Tensor | None
    """[rows]: the flow's own weight of each sample; already in `weights`"""
    columns: dict[str, torch.Tensor]
    """[tokens] each: advantages, old, behaviour, reference, teacher, returns, values"""
    total_tokens: float
    """counted tokens of the whole mini-batch"""
    total_rows: float
    """counted samples of the whole mini-batch"""
    estimates: torch.Tensor | None = None
    """[tokens], carries the gradient: those of a value model, or of a value head on the policy's body"""

    @property
    def before(self) -> torch.Tensor:
        """Log-probabilities the ratio is taken against: without `old` the current ones, so that it is 1."""
        found = self.columns.get("old")
        return self.predicted.detach() if found is None else found

    def column(self, name: str, term: LossTerm) -> torch.Tensor:
        if name not in self.columns:
            raise ValueError(f"the loss term {term.kind} needs the input `{name}`")
        return self.columns[name]

    def share(self, flags: torch.Tensor) -> torch.Tensor:
        """Part of the mean over the mini-batch's tokens."""
        return flags.sum() / self.total_tokens

    def per_row(self, values: torch.Tensor) -> torch.Tensor:
        """Part of the mean over the mini-batch's samples; `values` [rows]."""
        weights = row_weights(self.lengths, total_rows=self.total_rows).to(values.device)
        if self.row_factors is not None:
            weights = weights * self.row_factors
        return aggregate(values, weights)


class Source:
    """What micro-batches are cut from: the samples and the columns beside them."""

    def __init__(
        self,
        sequences: Sequences,
        columns: dict[str, Packed],
        advantages: np.ndarray | Packed | None,
        factors: torch.Tensor | None,
        *,
        unit: int,
    ) -> None:
        self.sequences = sequences
        self.factors = factors
        self.unit = unit
        self._columns = dict(columns)
        self._advantages = advantages
        if isinstance(advantages, Packed):
            self._columns["advantages"] = advantages
            self._advantages = None

    def gather(self, micro: MicroBatch, device: torch.device) -> dict[str, torch.Tensor]:
        """Every column at the micro-batch's counted tokens: float32 [tokens] each."""
        index = torch.from_numpy(micro.source)
        found = {name: column.values[index].to(device) for name, column in self._columns.items()}
        if isinstance(self._advantages, np.ndarray):
            per_sample = torch.from_numpy(self._advantages[micro.rows])
            found["advantages"] = torch.repeat_interleave(per_sample, micro.lengths).to(device)
        return found


def micro_weights(
    op: Train, lengths: torch.Tensor, row_factors: torch.Tensor | None, *, total_tokens: float, total_rows: float
) -> torch.Tensor:
    """Weight of every counted token in the aggregate: float32 [tokens]; `lengths`, `row_factors` [rows]."""
    if op.aggregate == "token_sum":
        weights = token_sum_weights(lengths, horizon=op.horizon, total_rows=total_rows)
    else:
        weights = token_weights(lengths, op.aggregate, total_tokens=total_tokens, total_rows=total_rows)
    return weights if row_factors is None else weights * torch.repeat_interleave(row_factors, lengths)


# --- policies -------------------------------------------------------------------------------------------------------


def _ppo_clip(term: PpoClip, m: Inputs) -> Found:
    advantages = m.column("advantages", term)
    if term.dual is None:
        found = ppo_clip(m.predicted, m.before, advantages, term.clip_low, term.clip_high)
        return _surrogate(m, found.loss, found.clipped, found.kl)
    dual = policy.ppo_dual_clip(m.predicted, m.before, advantages, term.clip_low, term.clip_high, term.dual)
    value, metrics = _surrogate(m, dual.loss, dual.clipped, dual.kl)
    return value, metrics | {"actor/pg_clipfrac_lower": m.share(dual.floored)}


def _surrogate(m: Inputs, loss: torch.Tensor, clipped: torch.Tensor, kl: torch.Tensor) -> Found:
    value = aggregate(loss, m.weights)
    return value, {"actor/pg_loss": value, "actor/pg_clipfrac": m.share(clipped), "actor/ppo_kl": m.share(kl)}


def _gspo(term: Gspo, m: Inputs) -> Found:
    """The mean over responses, whatever `aggregate` says: the ratio belongs to a response."""
    advantages = row_means(m.column("advantages", term), m.lengths)
    found = sequence.gspo(m.predicted, m.before, advantages, m.lengths, term.clip_low, term.clip_high)
    value = m.per_row(found.loss)
    return value, {
        "actor/pg_loss": value,
        "actor/pg_clipfrac_sequence": found.clipped[m.lengths > 0].sum() / m.total_rows,
        "actor/ppo_kl": m.share((m.before - m.predicted).detach()),
    }


def _cispo(term: Cispo, m: Inputs) -> Found:
    found = policy.cispo(m.predicted, m.before, m.column("advantages", term), term.clip_low, term.clip_high)
    return _surrogate(m, found.loss, found.clipped, found.kl)


def _reinforce(term: Reinforce, m: Inputs) -> Found:
    value = aggregate(policy.reinforce(m.predicted, m.column("advantages", term)), m.weights)
    return value, {"actor/pg_loss": value}


def _kl(term: Kl, m: Inputs) -> Found:
    value = aggregate(kl_estimate(m.predicted, m.column("reference", term), term.estimator), m.weights)
    return value, {"actor/kl_loss": value}


def _entropy(term: Entropy, m: Inputs) -> Found:
    return aggregate(m.entropies, m.weights), {}


def _nll(term: Nll, m: Inputs) -> Found:
    value = aggregate(imitation.nll(m.predicted), m.weights)
    return value, {"actor/nll_loss": value}


def _distill(term: Distill, m: Inputs) -> Found:
    advantages = distill.reverse_kl_advantages(m.predicted, [m.column("teacher", term)], [1.0])
    value = aggregate(policy.reinforce(m.predicted, advantages), m.weights)
    return value, {"actor/distill_kl": m.share(-advantages)}


def _dpo(term: Dpo, m: Inputs) -> Found:
    """The mean over pairs: rows 2i are the chosen, rows 2i + 1 the rejected responses of a micro-batch."""
    ours = row_sums(m.predicted, m.lengths).reshape(-1, 2)
    theirs = row_sums(m.column("reference", term), m.lengths).reshape(-1, 2)
    found = preference.dpo(
        ours[:, 0], ours[:, 1], theirs[:, 0], theirs[:, 1], beta=term.beta, label_smoothing=term.label_smoothing
    )
    pairs = m.total_rows / 2
    margin = found.chosen_reward - found.rejected_reward
    value = found.loss.sum() / pairs
    return value, {
        "actor/dpo_loss": value,
        "actor/dpo_accuracy": (margin > 0).to(margin.dtype).sum() / pairs,
        "actor/dpo_margin": margin.sum() / pairs,
    }


# --- value models ---------------------------------------------------------------------------------------------------


def _value_clip(term: ValueClip, m: Inputs) -> Found:
    old, values = m.columns.get("values"), m.predicted if m.estimates is None else m.estimates
    found = value_clip(values, values.detach() if old is None else old, m.column("returns", term), term.clip)
    value = aggregate(found.loss, m.weights)
    return value, {
        "critic/vf_loss": value,
        "critic/vf_clipfrac": m.share(found.clipped),
        "critic/vpred_mean": m.share(values.detach()),
    }


_TERMS: dict[str, tuple[Callable[[Any, Inputs], Found], tuple[str, ...]]] = {
    "ppo_clip": (_ppo_clip, ("actor/pg_loss", "actor/pg_clipfrac", "actor/pg_clipfrac_lower", "actor/ppo_kl")),
    "gspo": (_gspo, ("actor/pg_loss", "actor/pg_clipfrac_sequence", "actor/ppo_kl")),
    "cispo": (_cispo, ("actor/pg_loss", "actor/pg_clipfrac", "actor/ppo_kl")),
    "reinforce": (_reinforce, ("actor/pg_loss",)),
    "kl": (_kl, ("actor/kl_loss",)),
    "entropy": (_entropy, ()),
    "nll": (_nll, ("actor/nll_loss",)),
    "distill": (_distill, ("actor/distill_kl",)),
    "dpo": (_dpo, ("actor/dpo_loss", "actor/dpo_accuracy", "actor/dpo_margin")),
    "value_clip": (_value_clip, ("critic/vf_loss", "critic/vf_clipfrac", "critic/vpred_mean")),
}


def evaluate_terms(op: Train, m: Inputs) -> Found:
    """The weighted sum of the terms, and each term's metrics; names of equal terms add up.

    With a correction the terms that assume fresh samples are weighted for the policy that sampled.
    """
    loss = m.predicted.new_zeros(())
    metrics: dict[str, torch.Tensor] = {}
    corrected = m
    if isinstance(op.correction, TruncatedIs):
        corrected, metrics = _corrected(op.correction, m)
    for term in op.loss:
        value, found = _TERMS[term.kind][0](term, corrected if term.kind in POLICY_TERMS else m)
        loss = loss + term.weight * value
        for name, part in found.items():
            metrics[name] = metrics[name] + part if name in metrics else part
    return loss, metrics


def _corrected(by: TruncatedIs, m: Inputs) -> tuple[Inputs, dict[str, torch.Tensor]]:
    """The inputs with every token's weight times min(old / behaviour, cap), which carries no gradient."""
    if "behaviour" not in m.columns:
        raise ValueError("a correction needs the log-probabilities that the samples were drawn with")
    found = importance_weights(
        m.before, m.columns["behaviour"], m.lengths, level=by.level, cap=by.cap, outside=by.outside
    )
    factors = m.row_factors
    if by.level != "token":  # terms with one ratio for a response take the weight of the response
        bounded = found.raw if by.cap is None else found.raw.clamp(max=by.cap)
        kept = bounded if by.outside == "truncate" else torch.where(found.outside, 0.0, found.raw)
        factors = kept if factors is None else factors * kept
    measured = correction_metrics(
        found, m.lengths, level=by.level, total_tokens=m.total_tokens, total_rows=m.total_rows
    )
    metrics = {name: torch.tensor(value, dtype=torch.float64) for name, value in measured.items()}
    return replace(m, weights=m.weights * found.weights, row_factors=factors), metrics


def metric_names(op: Train, family: str) -> tuple[str, ...]:
    """Sums over tokens that become metrics of `op`, in the order in which they are reduced over ranks.

    The same on every rank, whether or not it holds samples of a mini-batch. `family` is actor or critic.
    """
    names = [f"{family}/loss"] + (["actor/entropy"] if family == "actor" else [])
    if isinstance(op.correction, TruncatedIs):
        names += [f"correction/{op.correction.level}_{what}" for what in ("weight_mean", "outside_share")]
    for term in op.loss:
        dual = isinstance(term, PpoClip) and term.dual is not None
        names += [name for name in _TERMS[term.kind][1] if dual or name != "actor/pg_clipfrac_lower"]
    return tuple(dict.fromkeys(names))
