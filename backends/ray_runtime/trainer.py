"""Optimizer updates and log-probabilities of one model on packed samples.

All sums that cross micro-batches or ranks use denominators of the whole mini-batch (see algorithms/aggregate.py), so
how a mini-batch is cut changes the result by float rounding only.
"""

from __future__ import annotations

import contextlib
from typing import Any, Literal

import numpy as np
import torch
import torch.distributed as dist
from torch.utils.checkpoint import checkpoint

from rlflow.backends.ray_runtime.algorithms.aggregate import aggregate, token_weights
from rlflow.backends.ray_runtime.algorithms.kl import kl_estimate
from rlflow.backends.ray_runtime.algorithms.losses import entropy, ppo_clip
from rlflow.backends.ray_runtime.batch import Batch, Packed
from rlflow.backends.ray_runtime.models import LoadedModel
from rlflow.backends.ray_runtime.packing import MicroBatch, Sequences, minibatch_rows
from rlflow.diagnostics.diagnostic import RunFailure
from rlflow.ir.ops import AdamW, Entropy, Kl, PpoClip, Train

_LOGITS_LIMIT = 1 << 26
"""Logits computed at once. Beyond it the head runs in chunks, whose logits backward computes again."""
_DEFAULT_BUDGET = 16384

Spread = Literal["none", "value", "gradient"]
"""Entropy: not computed, computed as a metric, or computed as part of the loss."""

# Sums over tokens that become metrics, in the order they are reduced over ranks.
_SUMS = ("actor/loss", "actor/pg_loss", "actor/kl_loss", "actor/entropy", "actor/pg_clipfrac", "actor/ppo_kl")


class Trainer:
    """Trains `loaded.model` in place. compute "bf16" runs matrix products in bf16 over the fp32 weights."""

    def __init__(self, loaded: LoadedModel, compute: Literal["fp32", "bf16"]) -> None:
        self.loaded = loaded
        self.compute = compute
        self.updates = 0
        self._parameters = [p for p in loaded.model.parameters() if p.requires_grad]
        self._optimizer: torch.optim.AdamW | None = None
        self._pending_state: dict[str, Any] | None = None

    # --- log-probabilities ----------------------------------------------------------------------------------------

    def logprobs(self, samples: Batch, temperature: float, microbatch_tokens: int = _DEFAULT_BUDGET) -> Packed:
        """Log-probability of every response token under softmax(logits / temperature): float32 per token.

        Temperature 0 (greedy sampling) means 1, as in the rollout engine. Cut into the same micro-batches as a `train`
        whose mini-batch is these samples, so that there the ratio is exactly 1.
        """
        sequences = Sequences(samples, self.loaded.pad_id)
        out = torch.empty(len(sequences.responses.values), dtype=torch.float32)
        for micro in sequences.micro_batches(np.arange(samples.rows), microbatch_tokens):
            with torch.no_grad():
                logp, _ = self._forward(micro, temperature)
            out[torch.from_numpy(micro.source)] = logp.cpu()
        return Packed(out, sequences.responses.offsets)

    def _forward(
        self, micro: MicroBatch, temperature: float, spread: Spread = "none"
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Log-probability and entropy (nats) of the response tokens: float32 [tokens] each, the latter if asked for."""
        model = self.loaded.model
        device = model.device
        autocast = (
            torch.autocast(device.type, dtype=torch.bfloat16) if self.compute == "bf16" else contextlib.nullcontext()
        )
        with autocast:
            # Padding is on the right and attention is causal, so no mask is needed: no real token sees padding.
            hidden = model.get_decoder()(input_ids=micro.ids.to(device), use_cache=False).last_hidden_state
            hidden = hidden.flatten(0, 1)[micro.read.to(device)]
            targets = micro.targets.to(device)
            rows = max(1, _LOGITS_LIMIT // model.config.vocab_size)
            if len(hidden) <= rows:
                return self._head(hidden, targets, temperature, spread)
            parts = [
                checkpoint(self._head, h, t, temperature, spread, use_reentrant=False)
                for h, t in zip(hidden.split(rows), targets.split(rows), strict=True)
            ]
        return torch.cat([part[0] for part in parts]), torch.cat([part[1] for part in parts])

    def _head(
        self, hidden: torch.Tensor, targets: torch.Tensor, temperature: float, spread: Spread
    ) -> tuple[torch.Tensor, torch.Tensor]:
        logits = self.loaded.model.lm_head(hidden).float()
        if temperature not in (0.0, 1.0):
            logits = logits / temperature
        log_probs = torch.log_softmax(logits, -1)
        logp = log_probs.gather(1, targets[:, None])[:, 0]
        if spread == "none":
            return logp, logp.new_zeros(0)
        return logp, entropy(log_probs if spread == "gradient" else log_probs.detach())

    # --- updates --------------------------------------------------------------------------------------------------

    def train(
        self,
        samples: Batch,
        advantages: np.ndarray,
        op: Train,
        *,
        reference: Packed | None,
        old: Packed | None,
        seed: int,
        step: int,
        group: dist.ProcessGroup | None = None,
        rows: np.ndarray | None = None,
    ) -> dict[str, float]:
        """`op.epochs` passes over the samples in mini-batches, one AdamW update each; the metrics' means over them.

        Args:
            advantages: float [samples], the same for every token of a sample.
            reference: log-probabilities for the KL terms, `old`: those of the policy the ratio is taken against,
                float32 per response token. Without `old` the ratio is taken against the current weights: it is 1
                and only its gradient counts.
            group: data parallelism. Every rank calls with its own part of the batch; `rows` int64 [samples] are its
                samples' numbers in the whole batch (default: ranks hold consecutive parts). Mini-batches are those of
                the whole batch (`minibatch_rows`), so the result does not depend on the split; a rank may hold any
                number of a mini-batch's samples, none included.

        A mini-batch without a response token is skipped (`actor/skipped_updates` counts them).
        RunFailure: RLF5009 when a loss or a gradient is not finite; weights and optimizer are then untouched.
        """
        optimizer = self._make_optimizer(op.optimizer)
        sequences = Sequences(samples, self.loaded.pad_id)
        total, numbers = self._whole_batch(samples.rows, rows, group)
        local = np.full(total, -1, dtype=np.int64)
        local[numbers] = np.arange(samples.rows)
        parts = [
            (chosen, local[chosen][local[chosen] >= 0])
            for epoch in range(op.epochs)
            for chosen in minibatch_rows(total, op.minibatch, seed=seed, step=step, epoch=epoch)
        ]
        tokens = torch.tensor([float(sequences.response_lengths[mine].sum()) for _, mine in parts], dtype=torch.float64)
        if group is not None:
            dist.all_reduce(tokens, group=group)
        history: list[dict[str, float]] = []
        skipped = 0
        for (chosen, mine), total_tokens in zip(parts, tokens.tolist(), strict=True):
            if not total_tokens:
                skipped += 1
                continue
            sums = self._accumulate(
                sequences, mine, advantages, op, reference, old, total_tokens=total_tokens, total_rows=len(chosen)
            )
            history.append(self._update(optimizer, op, sums, step, group))
        metrics = {key: float(np.mean([entry[key] for entry in history])) for key in (history[0] if history else ())}
        if not history:
            metrics["actor/loss"] = 0.0
        if skipped:
            metrics["actor/skipped_updates"] = float(skipped)
        return metrics

    def _accumulate(
        self,
        sequences: Sequences,
        rows: np.ndarray,
        advantages: np.ndarray,
        op: Train,
        reference: Packed | None,
        old: Packed | None,
        *,
        total_tokens: float,
        total_rows: int,
    ) -> torch.Tensor:
        """Gradients of one mini-batch's samples on this rank; returns the metric sums, float64 [len(_SUMS)]."""
        sums = torch.zeros(len(_SUMS), dtype=torch.float64)
        device = self.loaded.model.device
        for parameter in self._parameters:
            parameter.grad = None
        spread: Spread = "gradient" if any(isinstance(term, Entropy) for term in op.loss) else "value"
        for micro in sequences.micro_batches(rows, op.microbatch_tokens):
            source = torch.from_numpy(micro.source)
            logp, entropies = self._forward(micro, op.temperature, spread)
            weights = token_weights(micro.lengths, op.aggregate, total_tokens=total_tokens, total_rows=total_rows)
            weights = weights.to(device)
            per_sample = torch.from_numpy(np.asarray(advantages, dtype=np.float32)[micro.rows])
            per_token = torch.repeat_interleave(per_sample, micro.lengths).to(device)
            before = logp.detach() if old is None else old.values[source].to(device)
            loss = logp.new_zeros(())
            found: dict[str, torch.Tensor] = {}
            for term in op.loss:
                if isinstance(term, PpoClip):
                    surrogate = ppo_clip(logp, before, per_token, term.clip_low, term.clip_high)
                    value = aggregate(surrogate.loss, weights)
                    found["actor/pg_loss"] = value
                    found["actor/pg_clipfrac"] = surrogate.clipped.sum() / total_tokens
                    found["actor/ppo_kl"] = surrogate.kl.sum() / total_tokens
                elif isinstance(term, Kl):
                    assert reference is not None, "a kl term needs the reference's log-probs"
                    value = aggregate(kl_estimate(logp, reference.values[source].to(device), term.estimator), weights)
                    found["actor/kl_loss"] = value
                else:
                    value = aggregate(entropies, weights)
                loss = loss + term.weight * value
            found["actor/entropy"] = entropies.detach().sum() / total_tokens
            found["actor/loss"] = loss
            loss.backward()
            for index, name in enumerate(_SUMS):
                if name in found:
                    sums[index] += float(found[name].detach())
        return sums

    def _update(
        self, optimizer: torch.optim.AdamW, op: Train, sums: torch.Tensor, step: int, group: dist.ProcessGroup | None
    ) -> dict[str, float]:
        """Reduce over ranks, check, clip, step. Nothing is changed when a number is not finite."""
        if group is not None:
            dist.all_reduce(sums, group=group)
            self._reduce_gradients(group)
        gradients = [p.grad for p in self._parameters if p.grad is not None]
        norm = torch.nn.utils.get_total_norm(gradients)
        values = dict(zip(_SUMS, sums.tolist(), strict=True))
        grad_norm = float(norm)
        for name, value in (("loss", values["actor/loss"]), ("gradient norm", grad_norm)):
            if not np.isfinite(value):
                raise RunFailure(
                    "RLF5009",
                    f"the {name} of update {self.updates + 1} (step {step}) is {value}",
                    notes=tuple(f"{key} = {number:.6g}" for key, number in values.items()),
                    help=("lower the learning rate", "look for extreme rewards or advantages in this step"),
                )
        if op.max_grad_norm:
            torch.nn.utils.clip_grads_with_norm_(self._parameters, op.max_grad_norm, norm)
        rate = op.optimizer.lr
        if self.updates < op.optimizer.warmup:
            rate *= (self.updates + 1) / op.optimizer.warmup
        for parameter_group in optimizer.param_groups:
            parameter_group["lr"] = rate
        optimizer.step()
        self.updates += 1
        if not any(isinstance(term, Kl) for term in op.loss):
            del values["actor/kl_loss"]
        return {**values, "actor/grad_norm": grad_norm, "actor/lr": rate}

    def _reduce_gradients(self, group: dist.ProcessGroup) -> None:
        """Sum gradients over ranks. A rank without samples in this mini-batch contributes zeros."""
        for parameter in self._parameters:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        flat = torch.cat([p.grad.reshape(-1) for p in self._parameters])
        dist.all_reduce(flat, group=group)
        for parameter, part in zip(self._parameters, flat.split([p.numel() for p in self._parameters]), strict=True):
            parameter.grad.copy_(part.view_as(parameter))

    def _whole_batch(
        self, count: int, rows: np.ndarray | None, group: dist.ProcessGroup | None
    ) -> tuple[int, np.ndarray]:
        """The whole batch's number of samples, and the numbers in it of this rank's samples."""
        if group is None:
            return count, np.arange(count) if rows is None else rows
        counts = torch.zeros(dist.get_world_size(group), dtype=torch.int64)
        rank = dist.get_rank(group)
        counts[rank] = count
        dist.all_reduce(counts, group=group)
        first = int(counts[:rank].sum())
        return int(counts.sum()), np.arange(first, first + count) if rows is None else rows

    # --- optimizer ------------------------------------------------------------------------------------------------

    def _make_optimizer(self, settings: AdamW) -> torch.optim.AdamW:
        """Made at the first update, from the flow's settings. Weight decay applies to every parameter, as in verl."""
        if self._optimizer is None:
            self._optimizer = torch.optim.AdamW(
                self._parameters,
                lr=settings.lr,
                betas=(settings.beta1, settings.beta2),
                eps=settings.epsilon,
                weight_decay=settings.weight_decay,
                fused=True,
            )
            if self._pending_state is not None:
                self._optimizer.load_state_dict(self._pending_state)
                self._pending_state = None
        return self._optimizer

    def state_dict(self) -> dict[str, Any]:
        """Everything but the weights: moments and the number of updates. Its tensors are the live ones."""
        moments = self._pending_state if self._optimizer is None else self._optimizer.state_dict()
        return {"updates": self.updates, "optimizer": moments}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.updates = int(state["updates"])
        self._pending_state = state["optimizer"]
        self._optimizer = None
