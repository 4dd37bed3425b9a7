"""Rows packed one after another compute what rectangles compute."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from rlflow.backends.ray_runtime.packing import MicroBatch, Sequences
from rlflow.backends.ray_runtime.parallel.executor import Executor, Forward
from rlflow.backends.ray_runtime.parallel.packed import allow_packed, can_pack
from rlflow.backends.ray_runtime.trainer import Trainer
from rlflow.ir.ops import AdamW, Entropy, PpoClip, Train
from tests.unit.ray_runtime.parallel import models

pytestmark = pytest.mark.usefixtures("one_thread")

ROWS = 17
BATCH = models.samples(ROWS, seed=4)


class AlwaysPacked(Executor):
    seen: list[MicroBatch]

    def cut(self, sequences: Sequences, rows: np.ndarray, budget: int, unit: int) -> list[MicroBatch]:
        self.seen = sequences.packed_micro_batches(rows, budget, unit, parts=2)
        return self.seen


def packed(trainer: Trainer) -> Trainer:
    allow_packed(trainer.loaded.model.get_decoder())
    trainer._parts.executor = AlwaysPacked(Forward(trainer.loaded.model, trainer.compute, None))
    return trainer


@pytest.mark.parametrize(
    ("kind", "attention"), [("llama", "rlflow"), ("qwen2", "sdpa"), ("qwen3", "rlflow"), ("qwen3_moe", "rlflow")]
)
def test_predictions_and_gradients_are_those_of_rectangles(kind: str, attention: str) -> None:
    found = []
    op = Train(
        model="actor",
        loss=(PpoClip(weight=1.0, clip_low=0.2, clip_high=0.2), Entropy(weight=-0.01)),
        optimizer=AdamW(lr=0.0),
        minibatch=0,
        microbatch_tokens=50,
        max_grad_norm=0.0,
    )
    for change in (lambda trainer: trainer, packed):
        loaded = models.make(kind)
        loaded.model.set_attn_implementation(attention)
        trainer = change(Trainer(loaded, "fp32"))
        logp = trainer.logprobs(BATCH, 0.8, 50).values
        trainer.train(BATCH, np.linspace(-1, 1, ROWS), op, seed=0, step=0)
        found.append((logp, [p.grad for p in loaded.model.parameters()]))
    executor = trainer._parts.executor
    assert isinstance(executor, AlwaysPacked)
    assert all(micro.segments for micro in executor.seen)
    torch.testing.assert_close(found[0], found[1], atol=2e-6, rtol=1e-4)


@pytest.mark.parametrize(("budget", "parts", "unit", "multiple"), [(1, 2, 1, 1), (60, 2, 1, 4), (10_000, 4, 1, 2)])
def test_every_row_is_packed_once_and_evenly(budget: int, parts: int, unit: int, multiple: int) -> None:
    sequences = Sequences(BATCH, 12)
    found = sequences.packed_micro_batches(np.arange(ROWS), budget, unit, parts=parts, multiple=multiple)
    assert sorted(np.concatenate([micro.rows for micro in found])) == list(range(ROWS))
    assert sorted(np.concatenate([micro.source for micro in found])) == list(range(int(sequences.counts.sum())))
    assert len(found) >= min(parts, ROWS)
    assert len({micro.ids.shape for micro in found}) == 1
    assert found[0].ids.shape[1] % multiple == 0
    loads = [sum(micro.segments or ()) for micro in found]
    # Graham's bound: the longest-first greedy is at most 4/3 of the best, which is at least the mean and the longest.
    best = max(sum(loads) / len(loads), int(sequences.lengths.max()) - 1)
    assert max(loads) <= 4 / 3 * best + 1
    assert found[0].ids.shape[1] < max(loads) + multiple


def test_pairs_stay_together() -> None:
    sequences = Sequences(models.samples(12), 12)
    found = sequences.packed_micro_batches(np.arange(12), 40, 2, parts=3)
    for micro in found:
        assert [int(row) for row in micro.rows[1::2]] == [int(row) + 1 for row in micro.rows[::2]]


def test_an_attention_that_needs_its_mask_is_not_packed() -> None:
    model = models.make("qwen3").model
    model.set_attn_implementation("eager")
    assert not can_pack(model.get_decoder())


def test_a_sliding_window_is_not_packed() -> None:
    window = {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 0}
    assert can_pack(models.make("qwen2").model.get_decoder())
    assert not can_pack(models.make("qwen2", **window).model.get_decoder())


def test_a_model_that_may_pack_is_saved_as_it_was() -> None:
    model = models.make("qwen3").model
    allow_packed(model.get_decoder())
    assert "packed" not in model.config.to_json_string()
