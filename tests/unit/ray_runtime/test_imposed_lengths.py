"""Lengths that are imposed on the real engine: the drawn ones, whatever else is in the batch, and honest log-probs."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from rlflow.backends.ray_runtime import rollout
from rlflow.backends.ray_runtime.batch import Batch
from rlflow.backends.ray_runtime.rollout import RolloutEngine
from rlflow.backends.ray_runtime.trainer import Trainer
from rlflow.cost.draws import LengthSampler
from rlflow.cost.lengths import Lognormal
from tests.unit.ray_runtime.rollout_jobs import TEXTS, model, op, prompts, rows

pytestmark = pytest.mark.usefixtures("one_thread")

MAX_NEW = 24
DRAWN = LengthSampler(Lognormal.of_mean(9, MAX_NEW, 1.0), 7, "samples")


def ends(uid: np.ndarray, sample: np.ndarray) -> np.ndarray:
    return np.array([DRAWN.tokens(0, u, s) for u, s in zip(uid.tolist(), sample.tolist(), strict=True)])


def by_key(samples: Batch) -> dict[tuple[int, int], list[int]]:
    keys = zip(samples.array("uid").tolist(), samples.array("sample").tolist(), strict=True)
    return dict(zip(keys, rows(samples), strict=True))


@pytest.mark.parametrize("temperature", [1.0, 0.7, 0.0])
def test_a_draw_ends_every_sample(temperature: float) -> None:
    loaded = model("qwen3")
    made = RolloutEngine(loaded, "fp32").generate(
        prompts(loaded), op(max_new=MAX_NEW, temperature=temperature), seed=3, step=5, ends=ends
    )
    wanted = ends(made.array("uid"), made.array("sample"))
    assert len(set(wanted.tolist())) > 5, "a test of many lengths"
    assert made.packed("response_ids").lengths.tolist() == wanted.tolist()
    assert made.array("truncated").tolist() == (wanted == MAX_NEW).tolist()
    assert made.array("truncated").any()
    for tokens, cut in zip(rows(made), made.array("truncated"), strict=True):
        assert not set(tokens[:-1]) & set(loaded.eos_ids)
        assert (tokens[-1] in loaded.eos_ids) == (not cut)
    # The end token has the log-probability that the model gives it, so that training corrects for what it sees.
    trained = Trainer(loaded, "fp32").logprobs(made, temperature or 1.0)
    torch.testing.assert_close(made.packed("logprobs").values, trained.values, atol=2e-5, rtol=0)


@pytest.mark.parametrize("most", [4, 256])
def test_lengths_and_tokens_do_not_depend_on_the_batch(most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """All at once; prompts one by one; interrupted after every few complete samples and gone on with, in waves."""
    engine = RolloutEngine(model("qwen3"), "fp32")
    monkeypatch.setattr(rollout, "_MAX_ROWS", most)
    how: dict[str, Any] = {"seed": 3, "step": 5, "ends": ends}
    whole = by_key(engine.generate(prompts(engine.loaded), op(max_new=MAX_NEW), **how))
    single: dict[tuple[int, int], list[int]] = {}
    for number, text in enumerate(TEXTS):
        single |= by_key(engine.generate(prompts(engine.loaded, [text], number), op(max_new=MAX_NEW), **how))
    assert single == whole
    parts: dict[tuple[int, int], list[int]] = {}
    begun: Batch | None = None
    for _ in range(len(whole)):
        got = engine.generate_partial(
            prompts(engine.loaded, [] if begun is not None else TEXTS),
            op(max_new=MAX_NEW),
            begun=begun,
            enough=lambda complete: complete.sum() >= 3,
            **how,
        )
        parts |= by_key(got.finished)
        begun = got.unfinished
        if not begun.rows:
            break
    assert parts == whole


class _Takes:
    """Takes what is complete at every token."""

    def __init__(self) -> None:
        self.taken: list[Batch] = []

    def wanted(self, waiting: np.ndarray) -> bool:
        return bool(waiting.any())

    def take(self, samples: Batch) -> None:
        self.taken.append(samples)


def test_contexts_are_read_once_when_samples_leave_early() -> None:
    engine = RolloutEngine(model("qwen3"), "fp32")
    takes = _Takes()
    engine.spells.clear()
    got = engine.generate_partial(
        prompts(engine.loaded), op(max_new=MAX_NEW), seed=3, step=5, ends=ends, handover=takes
    )
    assert [spell.steps == 0 for spell in engine.spells].count(True) == 1
    assert len(takes.taken) > 1, "not all at the end"
    assert sum(part.rows for part in takes.taken) + got.finished.rows == 4 * len(TEXTS)


def test_spells_say_what_was_decoded() -> None:
    engine = RolloutEngine(model("qwen3"), "fp32")
    engine.spells.clear()
    made = engine.generate(prompts(engine.loaded), op(max_new=MAX_NEW), seed=3, step=5, ends=ends)
    lengths, asked = made.packed("response_ids").lengths, made.packed("prompt_ids").lengths
    reading, *decoding = engine.spells
    assert (reading.steps, reading.samples) == (0, len(set(TEXTS))), "equal prompts are read once"
    assert reading.tokens == sum(len(engine.loaded.encode(text)) for text in set(TEXTS))
    assert sum(spell.steps for spell in decoding) == int(lengths.max())
    assert sum(spell.samples for spell in decoding) == int(lengths.sum())
    exact = sum(n * p + n * (n - 1) // 2 for n, p in zip(lengths.tolist(), asked.tolist(), strict=True))
    assert sum(spell.tokens for spell in decoding) == pytest.approx(exact, rel=0.15)
