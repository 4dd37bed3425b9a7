"""Optimizer updates and predictions (log-probabilities or values) of one model on packed samples.

All sums that cross micro-batches or ranks use denominators of the whole mini-batch (see algorithms/aggregate.py), so
how a mini-batch is cut changes the result by float rounding only.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Literal

import numpy as np
import torch
import torch.distributed as dist

from rlflow.backends.ray_runtime.batch import Batch, Packed
from rlflow.backends.ray_runtime.devices.swap import own_memory
from rlflow.backends.ray_runtime.forward import Spread
from rlflow.backends.ray_runtime.heads import ValueHeadModel
from rlflow.backends.ray_runtime.kernels.adamw import make_adamw
from rlflow.backends.ray_runtime.models import LoadedModel
from rlflow.backends.ray_runtime.packing import MicroBatch, Sequences, minibatch_pairs, minibatch_rows
from rlflow.backends.ray_runtime.parallel.build import Parts, build
from rlflow.backends.ray_runtime.parallel.executor import Prediction
from rlflow.backends.ray_runtime.parallel.mesh import Mesh
from rlflow.backends.ray_runtime.parallel.regions import Region
from rlflow.backends.ray_runtime.parallel.sharded import ShardedModel
from rlflow.backends.ray_runtime.terms import Inputs, Source, evaluate_terms, metric_names, micro_weights
from rlflow.diagnostics.diagnostic import RunFailure
from rlflow.ir.ops import AdamW, Behaviour, Dpo, Entropy, Train, TruncatedIs, ValueClip

_LOGITS_LIMIT = 1 << 27
"""Logits computed at once. Beyond it the head runs in chunks, whose logits backward computes again."""
_DEFAULT_BUDGET = 16384


class Trainer:
    """Trains `loaded.model` in place: a policy, or a value model. compute "bf16" runs matrix products in bf16 over the
    fp32 weights.

    With a mesh every rank of it makes one, which cuts the model as the layout says (RLF4003 where that is not
    possible) and holds its own part. All ranks of a replica call with the same rows, and get the same answers.
    """

    def __init__(self, loaded: LoadedModel, compute: Literal["fp32", "bf16"], mesh: Mesh | None = None) -> None:
        self.loaded = loaded
        self.compute = compute
        self.updates = 0
        self.family = "critic" if isinstance(loaded.model, ValueHeadModel) else "actor"
        """Which family of metrics, verl's word."""
        self.moved = False
        """Whether an update with a gradient and a learning rate came since the last publish."""
        self._mesh = mesh
        self._parts: Parts = build(loaded, compute, mesh)
        self._optimizer: torch.optim.Optimizer | None = None
        self._pending_state: dict[str, Any] | None = None

    # --- predictions ----------------------------------------------------------------------------------------------

    def logprobs(self, samples: Batch, temperature: float, microbatch_tokens: int = _DEFAULT_BUDGET) -> Packed:
        """Log-probability of every response token under softmax(logits / temperature): float32 per token.

        Temperature 0 (greedy sampling) means 1, as in the rollout engine. Cut into the same micro-batches as a `train`
        whose mini-batch is these samples, so that there the ratio is exactly 1. Tokens of an environment get 0.
        """
        return self._predict(samples, temperature, microbatch_tokens)

    def values(self, samples: Batch, microbatch_tokens: int = _DEFAULT_BUDGET) -> Packed:
        """A value model's estimate before every response token: float32 per token. Tokens of an environment get 0."""
        return self._predict(samples, 1.0, microbatch_tokens)

    def _predict(self, samples: Batch, temperature: float, budget: int) -> Packed:
        sequences = Sequences(samples, self.loaded.pad_id)
        tokens = len(sequences.responses.values)
        out = torch.empty(tokens) if sequences.counted is None else torch.zeros(tokens)
        micros = self._parts.executor.cut(sequences, np.arange(samples.rows), budget, 1)
        for micro, predicted in self._parts.executor.predict(micros, temperature, _LOGITS_LIMIT):
            out[torch.from_numpy(micro.source)] = predicted
        return Packed(out, sequences.responses.offsets)

    # --- updates --------------------------------------------------------------------------------------------------

    def train(
        self,
        samples: Batch,
        advantages: np.ndarray | Packed | None,
        op: Train,
        *,
        seed: int,
        step: int,
        reference: Packed | None = None,
        old: Packed | None = None,
        teacher: Packed | None = None,
        returns: Packed | None = None,
        values: Packed | None = None,
        row_weights: np.ndarray | None = None,
        counted: np.ndarray | None = None,
        group: dist.ProcessGroup | None = None,
        rows: np.ndarray | None = None,
    ) -> dict[str, float]:
        """`op.epochs` passes over the samples in mini-batches, one AdamW update each; the metrics' means over them.

        What a loss term does not read may be None. Tokens whose `mask` in the samples is 0 are an environment's: the
        model reads them, no loss, metric or denominator does.

        Args:
            advantages: float [samples], the same for every token of a sample, or float32 per response token.
            reference: log-probabilities for the KL and DPO terms, `teacher`: for distillation, `old`: those of the
                policy the ratio is taken against, float32 per response token. Without `old` the ratio is taken
                against the current weights: it is 1 and only its gradient counts.
            returns, values: what a value model is to say, and what it said before the update; float32 per token.
            row_weights: float [samples], the flow's own factor of every sample's loss; denominators do not change.
            counted: bool [samples], False = the sample is in no loss, metric or denominator. Default: all.
            group: data parallelism. Every rank calls with its own part of the batch; `rows` int64 [samples] are its
                samples' numbers in the whole batch (default: ranks hold consecutive parts). Mini-batches are those of
                the whole batch (`minibatch_rows`), so the result does not depend on the split; a rank may hold any
                number of a mini-batch's samples, none included. A trainer with a mesh takes the mesh's.

        With a DPO term rows 2i and 2i + 1 are a pair, which is never divided. A mini-batch without a response token is
        skipped (`actor/skipped_updates` counts them).
        RunFailure: RLF5009 when a loss or a gradient is not finite; weights and optimizer are then untouched.
        """
        optimizer = self._make_optimizer(op.optimizer)
        if self._mesh is not None:
            group = self._mesh.dp
        sequences = Sequences(samples, self.loaded.pad_id)
        total, numbers = self._whole_batch(samples.rows, rows, group)
        local = np.full(total, -1, dtype=np.int64)
        local[numbers] = np.arange(samples.rows)
        paired = any(isinstance(term, Dpo) for term in op.loss)
        cut = minibatch_pairs if paired else minibatch_rows
        parts = [
            local[chosen][local[chosen] >= 0]
            for epoch in range(op.epochs)
            for chosen in cut(total, op.minibatch, seed=seed, step=step, epoch=epoch)
        ]
        if counted is not None:
            kept = counted.reshape(-1, 2).all(1).repeat(2) if paired else counted
            parts = [mine[kept[mine]] for mine in parts]
        totals = torch.tensor(
            [[float(sequences.counts[mine].sum()) for mine in parts], [float(len(mine)) for mine in parts]],
            dtype=torch.float64,
        )
        if group is not None:
            dist.all_reduce(totals, group=group)
        columns = {"reference": reference, "old": old, "teacher": teacher, "returns": returns, "values": values}
        if isinstance(op.correction, TruncatedIs):
            columns["behaviour"] = samples.packed("logprobs")
        elif isinstance(op.correction, Behaviour):
            columns["old"] = samples.packed("logprobs")
        source = Source(
            sequences,
            {name: column for name, column in columns.items() if column is not None},
            advantages if advantages is None or isinstance(advantages, Packed) else np.asarray(advantages, np.float32),
            None if row_weights is None else torch.from_numpy(np.asarray(row_weights, dtype=np.float32)),
            unit=2 if paired else 1,
        )
        names = metric_names(op, self.family)
        history: list[dict[str, float]] = []
        skipped = 0
        for mine, (total_tokens, total_rows) in zip(parts, totals.T.tolist(), strict=True):
            if not total_tokens:
                skipped += 1
                continue
            sums = self._accumulate(source, mine, op, names, total_tokens=total_tokens, total_rows=total_rows)
            history.append(self._update(optimizer, op, names, sums, step, group))
        metrics = {key: float(np.mean([entry[key] for entry in history])) for key in (history[0] if history else ())}
        if not history:
            metrics[f"{self.family}/loss"] = 0.0
        if skipped:
            metrics[f"{self.family}/skipped_updates"] = float(skipped)
        return metrics

    def _accumulate(
        self,
        source: Source,
        rows: np.ndarray,
        op: Train,
        names: tuple[str, ...],
        *,
        total_tokens: float,
        total_rows: float,
    ) -> torch.Tensor:
        """Gradients of one mini-batch's samples on this rank; returns the metric sums, float64 [len(names)]."""
        sums = torch.zeros(len(names), dtype=torch.float64)
        device = self.loaded.model.device
        spread: Spread = "gradient" if any(isinstance(term, Entropy) for term in op.loss) else "value"
        with_critic = any(isinstance(term, ValueClip) for term in op.loss)

        def loss_of(micro: MicroBatch, prediction: Prediction) -> torch.Tensor:
            predicted, entropies, estimates = prediction
            lengths = micro.lengths.to(device)
            factors = None if source.factors is None else source.factors[torch.from_numpy(micro.rows)].to(device)
            weights = micro_weights(op, lengths, factors, total_tokens=total_tokens, total_rows=total_rows)
            columns = source.gather(micro, device)
            inputs = Inputs(
                predicted, entropies, lengths, weights, factors, columns, total_tokens, total_rows, estimates
            )
            loss, found = evaluate_terms(op, inputs)
            if self.family == "actor":
                found["actor/entropy"] = entropies.detach().sum() / total_tokens
            found[f"{self.family}/loss"] = loss
            for index, name in enumerate(names):
                sums[index] += float(found[name].detach())
            return loss

        parts = self._parts
        parts.updates.begin()
        parts.executor.accumulate(
            parts.executor.cut(source.sequences, rows, op.microbatch_tokens, source.unit),
            op.temperature,
            spread,
            with_critic,
            _LOGITS_LIMIT,
            loss_of,
            parts.updates.after_backward,
        )
        return parts.executor.shared(sums)

    def _update(
        self,
        optimizer: torch.optim.Optimizer,
        op: Train,
        names: tuple[str, ...],
        sums: torch.Tensor,
        step: int,
        group: dist.ProcessGroup | None,
    ) -> dict[str, float]:
        """Reduce over ranks, check, clip, step. Nothing is changed when a number is not finite."""
        if group is not None:
            dist.all_reduce(sums, group=group)
        norm = self._parts.updates.reduce(group)
        values = dict(zip(names, sums.tolist(), strict=True))
        grad_norm = float(norm)
        for name, value in (("loss", values[f"{self.family}/loss"]), ("gradient norm", grad_norm)):
            if not np.isfinite(value):
                raise RunFailure(
                    "RLF5009",
                    f"the {name} of update {self.updates + 1} (step {step}) is {value}",
                    notes=tuple(f"{key} = {number:.6g}" for key, number in values.items()),
                    help=("lower the learning rate", "look for extreme rewards or advantages in this step"),
                )
        if op.max_grad_norm:
            torch.nn.utils.clip_grads_with_norm_(self._parts.updates.moved, op.max_grad_norm, norm)
        rate = op.optimizer.lr
        if self.updates < op.optimizer.warmup:
            rate *= (self.updates + 1) / op.optimizer.warmup
        for parameter_group in optimizer.param_groups:
            parameter_group["lr"] = rate
        optimizer.step()
        self._parts.updates.after_step()
        self.updates += 1
        self.moved |= grad_norm > 0 and rate > 0
        return {**values, f"{self.family}/grad_norm": grad_norm, f"{self.family}/lr": rate}

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

    def _make_optimizer(self, settings: AdamW) -> torch.optim.Optimizer:
        """Made at the first update, from the flow's settings. Weight decay applies to every parameter, as in verl."""
        if self._optimizer is None:
            self._optimizer = make_adamw(
                self._parts.updates.moved,
                lr=settings.lr,
                betas=(settings.beta1, settings.beta2),
                eps=settings.epsilon,
                weight_decay=settings.weight_decay,
            )
            if self._pending_state is not None:
                # A state that was put together from a checkpoint has no settings: they are the flow's.
                own = {"param_groups": self._optimizer.state_dict()["param_groups"]}
                self._optimizer.load_state_dict(own | self._pending_state)
                own_memory(self.moments())  # what torch.load read lies in memory that swapping cannot give back
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

    # --- memory ---------------------------------------------------------------------------------------------------

    def moments(self) -> list[torch.Tensor]:
        """AdamW's, live; none before the first update."""
        states = {} if self._optimizer is None else self._optimizer.state
        return [tensor for state in states.values() for tensor in state.values() if tensor.dim()]

    def moved_tensors(self) -> list[torch.Tensor]:
        """What the optimizer moves: the weights, or with ZeRO parts of copies of them."""
        return list(self._parts.updates.moved)

    def regions(self) -> list[list[Region]]:
        """For each of `moved_tensors`: what it has of the weights of the whole model."""
        return self._parts.updates.regions()

    def gradients(self) -> list[torch.Tensor]:
        """Those that there are now."""
        updates = self._parts.updates
        every = (*updates.leaves, *updates.moved)
        return [parameter.grad for parameter in every if parameter.grad is not None]

    def drop_gradients(self) -> None:
        """Free them; the next update makes its own."""
        self._parts.updates.begin()

    # --- weights --------------------------------------------------------------------------------------------------

    @property
    def sharded(self) -> ShardedModel:
        """This rank's part of the model."""
        return self._parts.sharded

    def local_tensors(self) -> dict[str, torch.Tensor]:
        """Live views of this rank's part of every weight, or of the adapters that are trained instead, with the names
        and shapes that `rlflow.reshard.shards.Sharding` gives for the layout, the vocabulary padded to a multiple of
        tp."""
        return self.sharded.local_tensors()

    def full_tensors(self, frozen: bool = True) -> Iterator[tuple[str, torch.Tensor | None]]:
        """Every weight of the whole model under its name in the transformers state dict, one at a time: float32 on
        the CPU of the mesh's first rank, None on the others. Collective over the mesh. Without `frozen` those of a
        model with adapters are left out."""
        return self.sharded.full_tensors(frozen)

    def load_full(self, state: Mapping[str, torch.Tensor]) -> None:
        """Take this rank's part of the whole model's weights, by the names of `full_tensors`."""
        self.sharded.load_full(state)
