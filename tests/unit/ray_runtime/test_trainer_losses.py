"""Every loss term against the plain formula by autograd, and against how the batch is cut."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from rlflow.backends.ray_runtime.batch import Batch, Packed
from rlflow.backends.ray_runtime.models import LoadedModel, derive, load_model
from rlflow.backends.ray_runtime.packing import Sequences, minibatch_pairs
from rlflow.backends.ray_runtime.trainer import Trainer
from rlflow.ir.ops import (
    AdamW,
    Cispo,
    Distill,
    Dpo,
    Gspo,
    Kl,
    LossTerm,
    Nll,
    PpoClip,
    Reinforce,
    TinyModel,
    Train,
    ValueClip,
)

pytestmark = pytest.mark.usefixtures("one_thread")


ROWS = [(4, 3), (1, 9), (7, 1), (3, 5), (4, 8), (2, 2), (5, 6), (6, 4)]
RNG = np.random.default_rng(3)
SAMPLES = Batch(
    len(ROWS),
    {
        "prompt_ids": Packed.from_rows([RNG.integers(0, 12, p).tolist() for p, _ in ROWS], torch.int64),
        "response_ids": Packed.from_rows([RNG.integers(0, 14, r).tolist() for _, r in ROWS], torch.int64),
    },
)
LENGTHS = SAMPLES.packed("response_ids").lengths
ADVANTAGES = np.array([1.0, -0.5, 0.3, -1.2, 0.8, 0.0, -0.7, 0.4])


def tiny(seed: int = 0) -> LoadedModel:
    source = TinyModel(architecture="qwen3", alphabet="0123456789+=", hidden=32, layers=1, init_seed=seed)
    loaded = load_model(source, Path())
    with torch.no_grad():
        for parameter in loaded.model.parameters():
            parameter.mul_(3.0)
    return loaded


def critic() -> LoadedModel:
    loaded = derive(tiny(), "value")
    with torch.no_grad():
        loaded.model.head.weight.copy_(torch.linspace(-0.3, 0.3, 32)[None])
        loaded.model.head.bias.fill_(0.1)
    return loaded


def op(*terms: LossTerm, **options: Any) -> Train:
    # A rate so small that weights stay where they are: the gradient is what counts.
    base: dict[str, Any] = {"optimizer": AdamW(lr=1e-12), "minibatch": 0, "max_grad_norm": 0.0, "horizon": 10}
    return Train(model="actor", loss=terms, **{**base, **options})


def like(shift: float, spread: float, seed: int) -> Packed:
    """A column of random numbers, one per response token."""
    values = torch.randn(int(LENGTHS.sum()), generator=torch.Generator().manual_seed(seed)) * spread + shift
    return Packed(values, SAMPLES.packed("response_ids").offsets)


def columns(loaded: LoadedModel) -> dict[str, Packed]:
    """old, reference and teacher near the model's own log-probabilities, so that some ratios are clipped."""
    now = Trainer(loaded, "fp32").logprobs(SAMPLES, 1.0)
    return {
        name: Packed(now.values + like(0.0, 0.4, seed).values, now.offsets)
        for seed, name in enumerate(("old", "reference", "teacher"))
    }


def gradient(loaded: LoadedModel) -> torch.Tensor:
    return torch.cat(
        [(torch.zeros_like(p) if p.grad is None else p.grad).reshape(-1) for p in loaded.model.parameters()]
    )


def straight_log_probs(loaded: LoadedModel) -> torch.Tensor:
    """[tokens], with gradient, one sample after the other."""
    parts = []
    for index in range(SAMPLES.rows):
        prompt, response = SAMPLES.packed("prompt_ids").row(index), SAMPLES.packed("response_ids").row(index)
        logits = loaded.model(torch.cat([prompt, response])[None]).logits[0, len(prompt) - 1 : -1]
        parts.append(torch.log_softmax(logits, -1).gather(1, response[:, None])[:, 0])
    return torch.cat(parts)


def rows_of(values: torch.Tensor) -> list[torch.Tensor]:
    return list(values.split(LENGTHS.tolist()))


A = torch.repeat_interleave(torch.tensor(ADVANTAGES, dtype=torch.float32), LENGTHS)


def _ppo(logp: torch.Tensor, c: dict[str, torch.Tensor]) -> torch.Tensor:
    ratio = (logp - c["old"]).exp()
    return -torch.minimum(ratio * c["A"], ratio.clamp(0.8, 1.3) * c["A"]).mean()


def _dual(logp: torch.Tensor, c: dict[str, torch.Tensor]) -> torch.Tensor:
    ratio = (logp - c["old"]).exp()
    base = torch.minimum(ratio * c["A"], ratio.clamp(0.8, 1.2) * c["A"])
    return -torch.where(c["A"] < 0, torch.maximum(base, 1.5 * c["A"]), base).mean()


def _gspo(logp: torch.Tensor, c: dict[str, torch.Tensor]) -> torch.Tensor:
    parts = []
    for now, old, advantage in zip(rows_of(logp), rows_of(c["old"]), ADVANTAGES.tolist(), strict=True):
        ratio = (now - old).mean().exp()
        parts.append(-torch.minimum(ratio * advantage, ratio.clamp(0.9, 1.1) * advantage))
    return torch.stack(parts).mean()


def _cispo(logp: torch.Tensor, c: dict[str, torch.Tensor]) -> torch.Tensor:
    return -((logp - c["old"]).exp().clamp(max=1.2).detach() * c["A"] * logp).mean()


def _reinforce(logp: torch.Tensor, c: dict[str, torch.Tensor]) -> torch.Tensor:
    return -(c["A"] * logp).mean()


def _kl3(logp: torch.Tensor, c: dict[str, torch.Tensor]) -> torch.Tensor:
    gap = c["reference"] - logp
    return 0.5 * (gap.exp() - 1 - gap).mean()


def _nll(logp: torch.Tensor, c: dict[str, torch.Tensor]) -> torch.Tensor:
    return -logp.mean()


def _distill(logp: torch.Tensor, c: dict[str, torch.Tensor]) -> torch.Tensor:
    return -((c["teacher"] - logp).detach() * logp).mean()


def _dpo(logp: torch.Tensor, c: dict[str, torch.Tensor]) -> torch.Tensor:
    gaps = [(now - old).sum() for now, old in zip(rows_of(logp), rows_of(c["reference"]), strict=True)]
    margins = torch.stack([0.1 * (gaps[i] - gaps[i + 1]) for i in range(0, len(gaps), 2)])
    return -(0.9 * torch.log(torch.sigmoid(margins)) + 0.1 * torch.log(torch.sigmoid(-margins))).mean()


Formula = Callable[[torch.Tensor, dict[str, torch.Tensor]], torch.Tensor]
TERMS: dict[str, tuple[LossTerm, Formula]] = {
    "ppo": (PpoClip(weight=1.0, clip_low=0.2, clip_high=0.3), _ppo),
    "dual": (PpoClip(weight=1.0, clip_low=0.2, clip_high=0.2, dual=1.5), _dual),
    "gspo": (Gspo(weight=1.0, clip_low=0.1, clip_high=0.1), _gspo),
    "cispo": (Cispo(weight=1.0, clip_low=None, clip_high=0.2), _cispo),
    "reinforce": (Reinforce(weight=1.0), _reinforce),
    "kl": (Kl(weight=0.5, estimator="k3"), _kl3),
    "nll": (Nll(weight=1.0), _nll),
    "distill": (Distill(weight=1.0), _distill),
    "dpo": (Dpo(weight=1.0, beta=0.1, label_smoothing=0.1), _dpo),
}


def run(loaded: LoadedModel, train_op: Train, **options: Any) -> dict[str, float]:
    given: dict[str, Any] = {"samples": SAMPLES, "advantages": ADVANTAGES, "seed": 0, "step": 0, **options}
    return Trainer(loaded, "fp32").train(given.pop("samples"), given.pop("advantages"), train_op, **given)


@pytest.mark.parametrize("name", TERMS)
@pytest.mark.parametrize("budget", [16384, 20])
def test_loss_and_gradient_are_the_formulas(name: str, budget: int) -> None:
    term, formula = TERMS[name]
    loaded = tiny()
    given = columns(loaded)
    advantages = None if name in ("nll", "distill", "dpo", "kl") else ADVANTAGES
    metrics = run(loaded, op(term, microbatch_tokens=budget), advantages=advantages, **given)
    expected = tiny()
    loss = formula(straight_log_probs(expected), {"A": A} | {key: column.values for key, column in given.items()})
    loss.backward()
    assert metrics["actor/loss"] == pytest.approx(loss.item(), rel=1e-4, abs=1e-6)
    torch.testing.assert_close(gradient(loaded), gradient(expected), atol=1e-5, rtol=2e-3)


def test_some_of_every_clip_is_taken() -> None:
    loaded = tiny()
    given = columns(loaded)
    for name, metric in (
        ("ppo", "actor/pg_clipfrac"),
        ("dual", "actor/pg_clipfrac_lower"),
        ("gspo", "actor/pg_clipfrac_sequence"),
        ("cispo", "actor/pg_clipfrac"),
    ):
        metrics = run(loaded, op(TERMS[name][0]), **given)
        assert 0 < metrics[metric] < 1, name
    assert "actor/pg_clipfrac_lower" not in run(loaded, op(TERMS["ppo"][0]), **given)
    assert "actor/pg_clipfrac" not in run(loaded, op(TERMS["gspo"][0]), **given)


@pytest.mark.parametrize("clip", [0.2, None])
def test_value_clip_is_the_formula(clip: float | None) -> None:
    loaded = critic()
    old, returns = like(0.0, 1.0, 7), like(0.5, 1.0, 8)
    metrics = run(
        loaded,
        op(ValueClip(weight=0.5, clip=clip), microbatch_tokens=20),
        advantages=None,
        values=old,
        returns=returns,
    )
    expected = critic()
    parts = []
    for index in range(SAMPLES.rows):
        prompt, response = SAMPLES.packed("prompt_ids").row(index), SAMPLES.packed("response_ids").row(index)
        hidden = expected.model.body(input_ids=torch.cat([prompt, response])[None]).last_hidden_state[0]
        parts.append(expected.model.head(hidden[len(prompt) - 1 : -1])[:, 0])
    values = torch.cat(parts)
    square = (values - returns.values).square()
    if clip is not None:
        bounded = old.values + (values - old.values).clamp(-clip, clip)
        square = torch.maximum(square, (bounded - returns.values).square())
    loss = 0.5 * 0.5 * square.mean()
    loss.backward()
    assert metrics["critic/loss"] == pytest.approx(loss.item(), rel=1e-5)
    assert metrics["critic/vf_loss"] == pytest.approx(2 * loss.item(), rel=1e-5)
    assert (metrics["critic/vf_clipfrac"] > 0) == (clip is not None)
    assert metrics["critic/vpred_mean"] == pytest.approx(values.mean().item(), abs=1e-5)
    assert not any(name.startswith("actor/") for name in metrics)
    torch.testing.assert_close(gradient(loaded), gradient(expected), atol=1e-5, rtol=2e-3)


def test_advantages_per_token() -> None:
    loaded, other = tiny(), tiny()
    run(loaded, op(TERMS["reinforce"][0]), advantages=Packed(A, SAMPLES.packed("response_ids").offsets))
    run(other, op(TERMS["reinforce"][0]))
    assert torch.equal(gradient(loaded), gradient(other))
    weights = like(0.0, 1.0, 9)
    run(loaded, op(TERMS["reinforce"][0]), advantages=weights)
    expected = tiny()
    (-(weights.values * straight_log_probs(expected)).mean()).backward()
    torch.testing.assert_close(gradient(loaded), gradient(expected), atol=1e-5, rtol=2e-3)


def test_token_sum_divides_by_samples_and_horizon() -> None:
    loaded, expected = tiny(), tiny()
    metrics = run(loaded, op(TERMS["reinforce"][0], aggregate="token_sum", horizon=12))
    loss = -(A * straight_log_probs(expected)).sum() / (8 * 12)
    loss.backward()
    assert metrics["actor/loss"] == pytest.approx(loss.item(), rel=1e-4)
    torch.testing.assert_close(gradient(loaded), gradient(expected), atol=1e-5, rtol=2e-3)


def test_row_weights_scale_samples_and_leave_denominators() -> None:
    loaded, other = tiny(), tiny()
    factors = np.array([0.0, 2.0, 1.0, 0.5, 1.0, 1.0, 0.0, 3.0])
    run(loaded, op(TERMS["reinforce"][0]), row_weights=factors)
    run(other, op(TERMS["reinforce"][0]), advantages=ADVANTAGES * factors)
    torch.testing.assert_close(gradient(loaded), gradient(other), atol=1e-6, rtol=1e-4)


# --- what is not counted ----------------------------------------------------------------------------------------------

MASK = torch.ones(int(LENGTHS.sum()), dtype=torch.int64)
MASK[3:8] = 0  # in the second sample
MASK[13:18] = 0  # all of the fourth
MASKED = SAMPLES.with_columns(mask=Packed(MASK, SAMPLES.packed("response_ids").offsets))


@pytest.mark.parametrize("name", [name for name in TERMS if name != "gspo"])
def test_tokens_of_an_environment_are_in_nothing(name: str) -> None:
    """Not even when a column holds NaN there: the gradient of a masked NaN would be NaN."""
    term, _ = TERMS[name]
    loaded, other = tiny(), tiny()
    given = columns(loaded)
    poisoned = {
        key: Packed(torch.where(MASK > 0, column.values, float("nan")), column.offsets) for key, column in given.items()
    }
    metrics = run(loaded, op(term), samples=MASKED, **poisoned)
    # The straight way: the same responses, whose masked tokens' log-probabilities are constants.
    logp = straight_log_probs(other)
    counted = MASK > 0
    fixed = {"A": A} | {key: column.values for key, column in given.items()}
    if name == "dpo":
        zeroed = {key: torch.where(counted, value, 0.0) for key, value in fixed.items()}
        loss = _dpo(torch.where(counted, logp, 0.0), zeroed)
    else:
        loss = TERMS[name][1](logp[counted], {key: value[counted] for key, value in fixed.items()})
    loss.backward()
    assert metrics["actor/loss"] == pytest.approx(loss.item(), rel=1e-4, abs=1e-6)
    torch.testing.assert_close(gradient(loaded), gradient(other), atol=1e-5, rtol=2e-3)
    assert all(np.isfinite(value) for value in metrics.values())


def test_entropy_counts_the_models_own_tokens_only() -> None:
    loaded = tiny()
    whole = run(loaded, op(TERMS["nll"][0]), advantages=None)["actor/entropy"]
    masked = run(loaded, op(TERMS["nll"][0]), advantages=None, samples=MASKED)["actor/entropy"]
    kept = MASKED.with_columns(mask=Packed(1 - MASK, MASKED.packed("mask").offsets))
    rest = run(loaded, op(TERMS["nll"][0]), advantages=None, samples=kept)["actor/entropy"]
    share = float(MASK.sum()) / len(MASK)
    assert whole == pytest.approx(share * masked + (1 - share) * rest, rel=1e-5)


def test_gspo_takes_the_mean_over_counted_tokens() -> None:
    loaded = tiny()
    given = columns(loaded)
    metrics = run(loaded, op(TERMS["gspo"][0]), samples=MASKED, **given)
    logp = Trainer(tiny(), "fp32").logprobs(SAMPLES, 1.0)
    total = 0.0
    for index, advantage in enumerate(ADVANTAGES.tolist()):
        counted = MASKED.packed("mask").row(index) > 0
        if not counted.any():
            continue
        ratio = (logp.row(index) - given["old"].row(index))[counted].mean().exp()
        total += float(-torch.minimum(ratio * advantage, ratio.clamp(0.9, 1.1) * advantage))
    assert metrics["actor/loss"] == pytest.approx(total / 8, rel=1e-4)


@pytest.mark.parametrize("aggregate", ["token_mean", "seq_mean_token_mean", "seq_mean_token_sum", "token_sum"])
def test_samples_without_a_reward_are_as_if_they_were_not_there(aggregate: Any) -> None:  # K5
    loaded, other = tiny(), tiny()
    given = columns(loaded)
    counted = np.array([1, 0, 1, 1, 0, 1, 1, 1], dtype=bool)
    terms = (TERMS["ppo"][0], TERMS["kl"][0])
    metrics = run(loaded, op(*terms, aggregate=aggregate), counted=counted, **given)
    kept = np.flatnonzero(counted)
    few = {key: column.select(kept) for key, column in given.items()}
    expected = run(
        other, op(*terms, aggregate=aggregate), samples=SAMPLES.select(kept), advantages=ADVANTAGES[kept], **few
    )
    assert metrics == pytest.approx(expected, rel=1e-5, abs=1e-7)
    torch.testing.assert_close(gradient(loaded), gradient(other), atol=1e-6, rtol=1e-4)


def test_a_batch_without_a_counted_sample_is_a_skipped_update() -> None:
    metrics = run(tiny(), op(TERMS["ppo"][0]), counted=np.zeros(8, dtype=bool))
    assert metrics == {"actor/loss": 0.0, "actor/skipped_updates": 1.0}
    empty = SAMPLES.select([])
    metrics = run(tiny(), op(TERMS["ppo"][0]), samples=empty, advantages=np.zeros(0))
    assert metrics == {"actor/loss": 0.0, "actor/skipped_updates": 1.0}
    metrics = run(critic(), op(ValueClip(weight=1.0, clip=None)), samples=empty, advantages=None)
    assert metrics == {"critic/loss": 0.0, "critic/skipped_updates": 1.0}


# --- pairs ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("budget", [1, 16, 40, 10_000])
def test_pairs_stay_side_by_side(budget: int) -> None:
    sequences = Sequences(SAMPLES, 12)
    rows = minibatch_pairs(8, 4, seed=1, step=2, epoch=0)
    assert sorted(np.concatenate(rows)) == list(range(8))
    assert [len(part) for part in rows] == [4, 4]
    for part in (*rows, np.arange(8)):
        found = [micro.rows for micro in sequences.micro_batches(part, budget, 2)]
        for chosen in (part, *found):
            assert (chosen[::2] % 2 == 0).all()
            assert (chosen[1::2] == chosen[::2] + 1).all()
        assert sorted(np.concatenate(found)) == sorted(part)
    with pytest.raises(ValueError, match="not pairs"):
        minibatch_pairs(3, 2, seed=0, step=0, epoch=0)


def test_dpo_says_how_well_it_tells_pairs_apart() -> None:
    loaded = tiny()
    given = columns(loaded)
    metrics = run(loaded, op(TERMS["dpo"][0]), advantages=None, reference=given["reference"])
    now = Trainer(tiny(), "fp32").logprobs(SAMPLES, 1.0)
    gaps = [0.1 * float((now.row(i) - given["reference"].row(i)).sum()) for i in range(8)]
    margins = np.array([gaps[i] - gaps[i + 1] for i in range(0, 8, 2)])
    assert metrics["actor/dpo_margin"] == pytest.approx(margins.mean(), abs=1e-5)
    assert metrics["actor/dpo_accuracy"] == pytest.approx((margins > 0).mean())


def test_a_pair_without_one_half_is_left_out_whole() -> None:
    loaded, other = tiny(), tiny()
    reference = columns(loaded)["reference"]
    counted = np.ones(8, dtype=bool)
    counted[3] = False
    kept = np.array([0, 1, 4, 5, 6, 7])
    term = op(TERMS["dpo"][0])
    first = run(loaded, term, advantages=None, reference=reference, counted=counted)
    second = run(other, term, samples=SAMPLES.select(kept), advantages=None, reference=reference.select(kept))
    assert first == pytest.approx(second, rel=1e-5)


# --- cutting ----------------------------------------------------------------------------------------------------------

CUT = ("ppo", "gspo", "cispo", "dpo", "distill", "value")


def _cut(name: str, **options: Any) -> tuple[dict[str, float], torch.Tensor]:
    """One training on `rows` of the samples, some of them without a reward and some tokens masked."""
    rows = options.pop("mine", np.arange(8))
    loaded = critic() if name == "value" else tiny()
    given = columns(tiny())
    if name == "value":
        given = {"values": like(0.0, 1.0, 7), "returns": like(0.5, 1.0, 8)}
    term = ValueClip(weight=1.0, clip=0.2) if name == "value" else TERMS[name][0]
    counted = np.array([1, 1, 1, 1, 0, 0, 1, 1], dtype=bool)[rows]
    metrics = run(
        loaded,
        op(term, minibatch=4, microbatch_tokens=options.pop("budget", 16384), aggregate="seq_mean_token_mean"),
        samples=MASKED.select(rows),
        advantages=ADVANTAGES[rows],
        counted=counted,
        **{key: column.select(rows) for key, column in given.items()},
        **options,
    )
    return metrics, gradient(loaded)


def _rank(rank: int, store: str) -> list[tuple[dict[str, float], torch.Tensor]]:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    mine = np.arange(0, 2) if rank == 0 else np.arange(2, 8)
    found = [_cut(name, mine=mine, group=dist.group.WORLD) for name in CUT]
    dist.destroy_process_group()
    return found


def test_ranks_and_micro_batches_change_rounding_only(tmp_path: Path) -> None:
    other = mp.get_context("spawn").Process(target=_rank, args=(1, str(tmp_path / "store")))
    other.start()
    found = _rank(0, str(tmp_path / "store"))
    other.join(60)
    assert other.exitcode == 0
    for name, (metrics, got) in zip(CUT, found, strict=True):
        expected, gradients = _cut(name)
        small, same = _cut(name, budget=24)
        assert metrics == pytest.approx(expected, rel=1e-4, abs=1e-5), name
        assert small == pytest.approx(expected, rel=1e-4, abs=1e-5), name
        torch.testing.assert_close(got, gradients, atol=1e-5, rtol=2e-3)
        torch.testing.assert_close(same, gradients, atol=1e-5, rtol=2e-3)
