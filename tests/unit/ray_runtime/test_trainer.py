from __future__ import annotations

import copy
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from rlflow.backends.ray_runtime import attention
from rlflow.backends.ray_runtime import trainer as trainer_module
from rlflow.backends.ray_runtime.algorithms.aggregate import Aggregate
from rlflow.backends.ray_runtime.batch import Batch, Packed
from rlflow.backends.ray_runtime.models import LoadedModel, load_model
from rlflow.backends.ray_runtime.packing import Sequences, minibatch_rows, ranges
from rlflow.backends.ray_runtime.trainer import Trainer
from rlflow.diagnostics.diagnostic import RunFailure
from rlflow.ir.ops import AdamW, Entropy, Kl, LossTerm, PpoClip, TinyModel, Train

pytestmark = pytest.mark.usefixtures("one_thread")

CLIP = PpoClip(weight=1.0, clip_low=0.2, clip_high=0.2)
AGGREGATES: list[Aggregate] = ["token_mean", "seq_mean_token_mean", "seq_mean_token_sum"]


def tiny(architecture: Literal["qwen3", "llama"] = "qwen3") -> LoadedModel:
    loaded = load_model(TinyModel(architecture=architecture, alphabet="0123456789+=", hidden=32), Path())
    with torch.no_grad():
        for parameter in loaded.model.parameters():
            parameter.mul_(3.0)
    return loaded


def samples_of(rows: list[tuple[int, int]]) -> Batch:
    """Random samples with (prompt tokens, response tokens)."""
    rng = np.random.default_rng(1)
    return Batch(
        len(rows),
        {
            "prompt_ids": Packed.from_rows([rng.integers(0, 12, p).tolist() for p, _ in rows], torch.int64),
            "response_ids": Packed.from_rows([rng.integers(0, 14, r).tolist() for _, r in rows], torch.int64),
        },
    )


SAMPLES = samples_of([(4, 3), (1, 9), (7, 1), (3, 5), (4, 8), (2, 2), (5, 6), (6, 4)])
ADVANTAGES = np.array([1.0, -0.5, 0.3, -1.2, 0.8, 0.0, -0.7, 0.4])


def op(*terms: LossTerm, **options: Any) -> Train:
    base: dict[str, Any] = {"optimizer": AdamW(lr=1e-2), "minibatch": 0}
    return Train(model="actor", loss=terms or (CLIP,), **{**base, **options})


def train(loaded: LoadedModel, train_op: Train, compute: Literal["fp32", "bf16"] = "fp32", **options: Any) -> Any:
    given: dict[str, Any] = {"reference": None, "old": None, "seed": 0, "step": 0, **options}
    advantages = given.pop("advantages", ADVANTAGES)
    return Trainer(loaded, compute).train(given.pop("samples", SAMPLES), advantages, train_op, **given)


def weights(loaded: LoadedModel) -> torch.Tensor:
    return torch.cat([p.detach().reshape(-1) for p in loaded.model.parameters()])


# --- log-probabilities ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("architecture", ["qwen3", "llama"])
@pytest.mark.parametrize("temperature", [1.0, 0.5])
def test_logprobs_belong_to_their_own_token(architecture: Literal["qwen3", "llama"], temperature: float) -> None:  # G5
    loaded = tiny(architecture)
    got = Trainer(loaded, "fp32").logprobs(SAMPLES, temperature)
    for index in range(SAMPLES.rows):
        prompt, response = SAMPLES.packed("prompt_ids").row(index), SAMPLES.packed("response_ids").row(index)
        logits = loaded.model(torch.cat([prompt, response])[None]).logits[0, len(prompt) - 1 : -1] / temperature
        expected = torch.log_softmax(logits, -1).gather(1, response[:, None])[:, 0]
        torch.testing.assert_close(got.row(index), expected.detach(), atol=1e-5, rtol=0)


@pytest.mark.parametrize("prompt", [1, 3])
def test_logprobs_of_a_model_that_prefers_tokens_by_id(prompt: int) -> None:  # G5
    loaded = tiny()
    vocabulary = loaded.model.config.vocab_size
    loaded.model.lm_head = torch.nn.Linear(32, vocabulary)
    with torch.no_grad():
        loaded.model.lm_head.weight.zero_()
        loaded.model.lm_head.bias.copy_(torch.arange(vocabulary) * 0.1)
    samples = samples_of([(prompt, 6)])
    expected = torch.log_softmax(torch.arange(vocabulary) * 0.1, -1)[samples.packed("response_ids").values]
    torch.testing.assert_close(Trainer(loaded, "fp32").logprobs(samples, 1.0).values, expected, atol=1e-6, rtol=0)


def test_micro_batches_and_head_chunks_change_rounding_only(monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = Trainer(tiny(), "fp32")
    whole = trainer.logprobs(SAMPLES, 1.0).values
    torch.testing.assert_close(trainer.logprobs(SAMPLES, 1.0, microbatch_tokens=1).values, whole, atol=1e-6, rtol=0)
    monkeypatch.setattr(trainer_module, "_LOGITS_LIMIT", 50)
    torch.testing.assert_close(trainer.logprobs(SAMPLES, 1.0).values, whole, atol=1e-6, rtol=0)


def test_micro_batches_hold_every_row_once_under_the_budget() -> None:
    sequences = Sequences(SAMPLES, 12)
    for budget in (1, 12, 24, 1000):
        found = sequences.micro_batches(np.arange(8), budget)
        assert sorted(np.concatenate([micro.rows for micro in found])) == list(range(8))
        assert sorted(np.concatenate([micro.source for micro in found])) == list(range(38))
        assert all(micro.ids.numel() <= budget or len(micro.rows) == 1 for micro in found)
    assert ranges(np.array([5, 9, 0]), np.array([2, 0, 3])).tolist() == [5, 6, 0, 1, 2]


@pytest.mark.parametrize("architecture", ["qwen3", "llama"])
@pytest.mark.parametrize("limit", [64, 0])
def test_short_attention_is_torchs_attention(
    architecture: Literal["qwen3", "llama"], limit: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention, "_SHORT", limit)
    found = []
    for implementation in ("rlflow", "sdpa"):
        loaded = tiny(architecture)
        assert loaded.model.config._attn_implementation == "rlflow"
        loaded.model.set_attn_implementation(implementation)
        train(loaded, op(max_grad_norm=0.0, optimizer=AdamW(lr=0.0)))
        found.append((Trainer(loaded, "fp32").logprobs(SAMPLES, 1.0).values, gradient(loaded)))
    torch.testing.assert_close(found[0], found[1], atol=1e-5, rtol=1e-3)


# --- the first ratio ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("temperature", [0.5, 0.6, 1.0, 1.3])
@pytest.mark.parametrize("budget", [16384, 24])
@pytest.mark.parametrize("compute", ["fp32", "bf16"])
def test_first_ratio_is_exactly_one(  # T16, G4
    temperature: float, budget: int, compute: Literal["fp32", "bf16"]
) -> None:
    loaded = tiny()
    trainer = Trainer(loaded, compute)
    old = trainer.logprobs(SAMPLES, temperature, microbatch_tokens=budget)
    train_op = op(CLIP, Kl(weight=1.0, estimator="k2"), temperature=temperature, microbatch_tokens=budget)
    metrics = trainer.train(SAMPLES, ADVANTAGES, train_op, reference=old, old=old, seed=0, step=0)
    assert metrics["actor/ppo_kl"] == 0
    assert metrics["actor/kl_loss"] == 0  # the reference is the policy
    assert metrics["actor/pg_clipfrac"] == 0
    lengths = SAMPLES.packed("response_ids").lengths.numpy()
    assert metrics["actor/pg_loss"] == pytest.approx(-(ADVANTAGES * lengths).sum() / lengths.sum(), abs=1e-6)


def test_without_old_the_gradient_is_that_of_ratio_one() -> None:
    first, second = tiny(), tiny()
    old = Trainer(first, "fp32").logprobs(SAMPLES, 1.0)
    given = train(first, op(), old=old)
    absent = train(second, op())
    assert given == absent
    assert torch.equal(weights(first), weights(second))


# --- losses ---------------------------------------------------------------------------------------------------------


def test_terms_add_up_with_their_weights() -> None:  # I2
    loaded = tiny()
    reference = Trainer(loaded, "fp32").logprobs(SAMPLES, 1.0)
    reference = Packed(reference.values - 0.5, reference.offsets)
    terms: tuple[LossTerm, ...] = (CLIP, Kl(weight=0.1, estimator="k3"), Entropy(weight=-0.01))
    metrics = train(loaded, op(*terms), reference=reference)
    assert metrics["actor/kl_loss"] == pytest.approx(0.106531, abs=1e-5)  # I3, of every token
    assert metrics["actor/entropy"] > 0
    expected = metrics["actor/pg_loss"] + 0.1 * metrics["actor/kl_loss"] - 0.01 * metrics["actor/entropy"]
    assert metrics["actor/loss"] == pytest.approx(expected, abs=1e-6)
    assert "actor/kl_loss" not in train(tiny(), op())


@pytest.mark.parametrize("estimator", ["k2", "k3"])
def test_a_kl_step_lowers_kl(estimator: Literal["k2", "k3"]) -> None:  # I2
    loaded = tiny()
    other = load_model(TinyModel(architecture="qwen3", alphabet="0123456789+=", hidden=32, init_seed=4), Path())
    reference = Trainer(other, "fp32").logprobs(SAMPLES, 1.0)
    trainer = Trainer(loaded, "fp32")
    kl_op = op(Kl(weight=1.0, estimator=estimator), optimizer=AdamW(lr=1e-3))
    history = [
        trainer.train(SAMPLES, ADVANTAGES, kl_op, reference=reference, old=None, seed=0, step=step)["actor/kl_loss"]
        for step in range(3)
    ]
    assert history[0] > history[1] > history[2]


def test_an_entropy_bonus_raises_entropy() -> None:
    trainer = Trainer(tiny(), "fp32")
    bonus = op(Entropy(weight=-1.0))
    history = [
        trainer.train(SAMPLES, ADVANTAGES, bonus, reference=None, old=None, seed=0, step=step)["actor/entropy"]
        for step in range(3)
    ]
    assert history[0] < history[1] < history[2]


def test_training_makes_good_responses_likelier() -> None:
    loaded = tiny()
    trainer = Trainer(loaded, "fp32")
    before = trainer.logprobs(SAMPLES, 1.0)
    for step in range(5):
        trainer.train(SAMPLES, ADVANTAGES, op(), reference=None, old=None, seed=0, step=step)
    change = (trainer.logprobs(SAMPLES, 1.0).values - before.values).numpy()
    weight = np.repeat(ADVANTAGES, SAMPLES.packed("response_ids").lengths.numpy())
    assert (change * weight).sum() > 0
    assert trainer.updates == 5


def test_no_response_tokens_is_a_skipped_update() -> None:  # I6
    loaded = tiny()
    before = weights(loaded)
    trainer = Trainer(loaded, "fp32")
    empty = samples_of([(3, 0), (2, 0)])
    metrics = trainer.train(empty, np.ones(2), op(), reference=None, old=None, seed=0, step=0)
    assert metrics == {"actor/loss": 0.0, "actor/skipped_updates": 1.0}
    assert torch.equal(weights(loaded), before)
    assert trainer.updates == 0


# --- cutting ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("aggregate", AGGREGATES)
@pytest.mark.parametrize("budget", [1, 20, 40])
def test_micro_batches_do_not_change_loss_or_gradient(  # T18, I10
    aggregate: Aggregate, budget: int
) -> None:
    found = []
    for tokens in (16384, budget):
        loaded = tiny()
        metrics = train(loaded, op(aggregate=aggregate, microbatch_tokens=tokens, max_grad_norm=0.0))
        found.append((metrics, gradient(loaded)))
    torch.testing.assert_close(found[0][1], found[1][1], atol=1e-5, rtol=1e-3)
    assert found[1][0] == pytest.approx(found[0][0], rel=1e-5, abs=1e-5)


def test_mini_batches_are_shuffled_only_when_there_are_several() -> None:
    assert [part.tolist() for part in minibatch_rows(5, 0, seed=0, step=0, epoch=0)] == [[0, 1, 2, 3, 4]]
    assert [part.tolist() for part in minibatch_rows(5, 5, seed=0, step=0, epoch=0)] == [[0, 1, 2, 3, 4]]
    several = minibatch_rows(20, 8, seed=0, step=0, epoch=0)
    assert [len(part) for part in several] == [8, 8, 4]
    assert sorted(np.concatenate(several)) == list(range(20))
    assert np.concatenate(several).tolist() != list(range(20))
    assert np.concatenate(minibatch_rows(20, 8, seed=0, step=0, epoch=1)).tolist() != np.concatenate(several).tolist()


def test_epochs_and_mini_batches_count_updates_and_clip_later_ones() -> None:
    loaded = tiny()
    trainer = Trainer(loaded, "fp32")
    old = trainer.logprobs(SAMPLES, 1.0)
    several = op(minibatch=3, epochs=4, optimizer=AdamW(lr=3e-2))
    metrics = trainer.train(SAMPLES, ADVANTAGES, several, reference=None, old=old, seed=0, step=0)
    assert trainer.updates == 12
    assert metrics["actor/pg_clipfrac"] > 0


def _cut(aggregate: Aggregate) -> Train:
    # A small rate: Adam divides by the gradient's own size, so at a large one rounding grows from update to update.
    optimizer = AdamW(lr=1e-6)
    return op(CLIP, Entropy(weight=-0.1), aggregate=aggregate, minibatch=3, max_grad_norm=0.0, optimizer=optimizer)


def gradient(loaded: LoadedModel) -> torch.Tensor:
    return torch.cat([p.grad.reshape(-1) for p in loaded.model.parameters() if p.grad is not None])


def _rank(rank: int, store: str) -> list[tuple[dict[str, float], torch.Tensor]]:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    mine = np.arange(0, 3) if rank == 0 else np.arange(3, 8)  # mini-batches fall on the ranks unevenly
    found = []
    for aggregate in AGGREGATES:
        loaded = tiny()
        options = {"samples": SAMPLES.select(mine), "advantages": ADVANTAGES[mine], "group": dist.group.WORLD}
        found.append((train(loaded, _cut(aggregate), **options), gradient(loaded)))
    dist.destroy_process_group()
    return found


def test_data_parallel_ranks_learn_what_one_rank_learns(tmp_path: Path) -> None:  # T13, I10
    other = mp.get_context("spawn").Process(target=_rank, args=(1, str(tmp_path / "store")))
    other.start()
    found = _rank(0, str(tmp_path / "store"))
    other.join(60)
    assert other.exitcode == 0
    for (metrics, got), aggregate in zip(found, AGGREGATES, strict=True):
        loaded = tiny()
        expected = train(loaded, _cut(aggregate))
        assert metrics == pytest.approx(expected, rel=1e-4, abs=1e-5)
        torch.testing.assert_close(got, gradient(loaded), atol=1e-5, rtol=1e-3)


# --- optimizer ----------------------------------------------------------------------------------------------------


def test_the_same_seed_repeats_bit_for_bit() -> None:
    found = []
    for _ in range(2):
        loaded = tiny()
        found.append((train(loaded, op(minibatch=3, epochs=2)), weights(loaded)))
    assert found[0][0] == found[1][0]
    assert torch.equal(found[0][1], found[1][1])


def test_warmup_rises_linearly() -> None:
    trainer = Trainer(tiny(), "fp32")
    warm = op(optimizer=AdamW(lr=4e-3, warmup=4))
    rates = [
        trainer.train(SAMPLES, ADVANTAGES, warm, reference=None, old=None, seed=0, step=step)["actor/lr"]
        for step in range(6)
    ]
    assert rates == pytest.approx([1e-3, 2e-3, 3e-3, 4e-3, 4e-3, 4e-3])


def test_gradients_are_clipped_to_the_norm() -> None:
    loaded = tiny()
    metrics = train(loaded, op(max_grad_norm=0.01))
    norm = gradient(loaded).norm()
    assert metrics["actor/grad_norm"] > 0.01
    assert norm.item() == pytest.approx(0.01, rel=1e-3)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_number_that_is_not_finite_stops_before_the_step(bad: float) -> None:
    loaded = tiny()
    trainer = Trainer(loaded, "fp32")
    trainer.train(SAMPLES, ADVANTAGES, op(), reference=None, old=None, seed=0, step=0)
    before, state = weights(loaded), copy.deepcopy(trainer.state_dict())
    advantages = ADVANTAGES.copy()
    advantages[3] = bad
    with pytest.raises(RunFailure, match="loss of update 2") as failure:
        trainer.train(SAMPLES, advantages, op(), reference=None, old=None, seed=0, step=1)
    assert failure.value.code == "RLF5009"
    assert torch.equal(weights(loaded), before)
    assert trainer.state_dict()["updates"] == state["updates"] == 1


def test_state_comes_back() -> None:
    straight, resumed = tiny(), tiny()
    trainer = Trainer(straight, "fp32")
    for step in range(4):
        trainer.train(SAMPLES, ADVANTAGES, op(), reference=None, old=None, seed=0, step=step)
    first = Trainer(resumed, "fp32")
    for step in range(2):
        first.train(SAMPLES, ADVANTAGES, op(), reference=None, old=None, seed=0, step=step)
    saved = copy.deepcopy(first.state_dict())
    second = Trainer(resumed, "fp32")
    second.load_state_dict(saved)
    assert second.state_dict()["optimizer"] == saved["optimizer"]
    for step in range(2, 4):
        second.train(SAMPLES, ADVANTAGES, op(), reference=None, old=None, seed=0, step=step)
    assert second.updates == 4
    assert torch.equal(weights(straight), weights(resumed))


def test_bf16_keeps_fp32_master_weights() -> None:  # I11
    loaded = tiny()
    exact = Trainer(loaded, "fp32").logprobs(SAMPLES, 1.0).values
    rough = Trainer(loaded, "bf16").logprobs(SAMPLES, 1.0).values
    assert rough.dtype == torch.float32
    assert 0 < (exact - rough).abs().max() < 0.2
    train(loaded, op(optimizer=AdamW(lr=1e-6)), compute="bf16")
    assert all(p.dtype == torch.float32 for p in loaded.model.parameters())
    assert not torch.equal(Trainer(loaded, "fp32").logprobs(SAMPLES, 1.0).values, exact)
    assert torch.tensor(1.0 - 0.0006, dtype=torch.bfloat16).item() == 1.0
