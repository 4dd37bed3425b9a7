"""Samples that share their prompt's tokens compute what rectangles compute."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from rlflow.backends.ray_runtime import shared_prompts
from rlflow.backends.ray_runtime.adapters import Adapters
from rlflow.backends.ray_runtime.batch import Batch, Packed
from rlflow.backends.ray_runtime.packing import MicroBatch, Sequences
from rlflow.backends.ray_runtime.parallel.executor import Executor
from rlflow.backends.ray_runtime.shared_prompts import shared_micro_batches, worth_sharing
from rlflow.backends.ray_runtime.trainer import Trainer
from rlflow.ir.ops import AdamW, Entropy, Lora, PpoClip, Train
from tests.unit.ray_runtime.parallel import models

pytestmark = pytest.mark.usefixtures("one_thread")

GROUPS, N = 4, 5


def groups(seed: int = 0, *, mask: bool = False, longest: int = 9) -> Batch:
    """GROUPS x N samples in a mixed order, responses of 1 to `longest` tokens."""
    rng = np.random.default_rng(seed)
    prompts = [rng.integers(0, 12, size).tolist() for size in (6, 1, 11, 6)]
    order = rng.permutation(GROUPS * N) // N
    lengths = rng.integers(1, longest + 1, GROUPS * N)
    columns = {
        "prompt_ids": Packed.from_rows([prompts[group] for group in order], torch.int64),
        "response_ids": Packed.from_rows([rng.integers(0, 14, size).tolist() for size in lengths], torch.int64),
    }
    if mask:
        flags = [[float(flag) for flag in rng.integers(0, 2, size)] for size in lengths]
        columns["mask"] = Packed.from_rows(flags, torch.float32)
    return Batch(GROUPS * N, columns)


class Watched(Executor):
    seen: list[MicroBatch]

    def cut(self, sequences: Sequences, rows: np.ndarray, budget: int, unit: int) -> list[MicroBatch]:
        self.seen = super().cut(sequences, rows, budget, unit)
        return self.seen


@pytest.mark.parametrize(
    ("kind", "attention", "budget", "mask", "lora"),
    [
        ("llama", "rlflow", 1000, False, False),
        ("qwen2", "sdpa", 40, False, False),
        ("qwen3", "rlflow", 40, True, False),
        ("qwen3", "rlflow", 1000, False, True),
        ("qwen3_moe", "rlflow", 1000, False, False),
    ],
)
def test_predictions_and_gradients_are_those_of_rectangles(
    kind: str, attention: str, budget: int, mask: bool, lora: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch = groups(mask=mask)
    op = Train(
        model="actor",
        loss=(PpoClip(weight=1.0, clip_low=0.2, clip_high=0.2), Entropy(weight=-0.01)),
        optimizer=AdamW(lr=0.0),
        minibatch=0,
        microbatch_tokens=budget,
        max_grad_norm=0.0,
    )
    found = []
    for worth in (1 << 60, 0):
        monkeypatch.setattr(shared_prompts, "WORTH", worth)
        loaded = models.make(kind)
        loaded.model.set_attn_implementation(attention)
        if lora:
            loaded.adapters = Adapters(loaded.model, Lora(rank=4, alpha=8.0, targets="all_linear"))
            for number, tensor in enumerate(loaded.adapters.tensors().values()):
                tensor.normal_(0.0, 0.2, generator=torch.Generator().manual_seed(number))
        trainer = Trainer(loaded, "fp32")
        watched = Watched(trainer._parts.executor._forward, shares=True)
        trainer._parts.executor = watched
        logp = trainer.logprobs(batch, 0.8, budget).values
        trainer.train(batch, np.linspace(-1, 1, batch.rows), op, seed=0, step=0)
        assert all((micro.families is not None) is (worth == 0) for micro in watched.seen)
        found.append((logp, [p.grad for p in loaded.model.parameters() if p.requires_grad]))
    torch.testing.assert_close(found[0], found[1], atol=2e-6, rtol=1e-4)


@pytest.mark.parametrize("budget", [1, 30, 60, 10_000])
def test_every_token_is_read_once_within_the_budget(budget: int) -> None:
    sequences = Sequences(groups(1), 12)
    found = shared_micro_batches(sequences, np.arange(GROUPS * N), budget)
    assert sorted(np.concatenate([micro.rows for micro in found])) == list(range(GROUPS * N))
    assert sorted(np.concatenate([micro.source for micro in found])) == list(range(int(sequences.counts.sum())))
    for micro in found:
        families = micro.families or ()
        assert micro.ids.shape == (1, sum(family.area for family in families))
        assert micro.ids.shape[1] <= budget or len(micro.rows) == 1
        assert len(micro.targets) == int(micro.lengths.sum())
    if budget == 10_000:
        prompts = {
            tuple(sequences.ids[s : s + p]) for s, p in zip(sequences.starts, sequences.prompt_lengths, strict=True)
        }
        assert len(found[0].families or ()) == len(prompts)


def test_a_tiny_model_and_samples_of_different_prompts_do_not_share() -> None:
    batch = groups(2, longest=60)
    sequences, rows = Sequences(batch, 12), np.arange(batch.rows)
    shared, plain = shared_micro_batches(sequences, rows, 10_000), sequences.micro_batches(rows, 10_000)
    assert worth_sharing(plain, shared, 1 << 16)
    assert not worth_sharing(plain, shared, 16)
    one_each = np.array([int(np.flatnonzero(sequences.prompt_lengths == size)[0]) for size in (1, 6, 11)])
    shared = shared_micro_batches(sequences, one_each, 10_000)
    same = sequences.micro_batches(one_each[2:], 10_000), shared_micro_batches(sequences, one_each[2:], 10_000)
    assert not worth_sharing(*same, 1 << 30)
    assert all(len(family.blocks) == 1 for micro in shared for family in micro.families or ())


def test_a_sample_without_a_response_token_is_in_no_sum() -> None:
    batch = groups(3)
    empty = [[] if row == 2 else batch.packed("response_ids").row(row).tolist() for row in range(batch.rows)]
    batch = batch.with_columns(response_ids=Packed.from_rows(empty, torch.int64))
    sequences = Sequences(batch, 12)
    (micro,) = shared_micro_batches(sequences, np.arange(batch.rows), 10_000)
    assert int(micro.lengths[micro.rows.tolist().index(2)]) == 0
    assert len(micro.read) == int(sequences.counts.sum())
