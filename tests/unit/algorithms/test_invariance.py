"""What every loss must keep: row order, the cut into micro-batches and ranks, masks, and its own derivative."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch

from rlflow.backends.ray_runtime.algorithms.aggregate import Aggregate, aggregate, token_weights
from rlflow.backends.ray_runtime.algorithms.correction import correction_metrics, importance_weights
from rlflow.backends.ray_runtime.algorithms.imitation import nll
from rlflow.backends.ray_runtime.algorithms.policy import cispo, decoupled_ppo, ppo_dual_clip, reinforce
from rlflow.backends.ray_runtime.algorithms.rows import blank, row_ids
from rlflow.backends.ray_runtime.algorithms.sequence import gspo, gspo_token, sequence_ppo_clip
from rlflow.backends.ray_runtime.algorithms.token_sum import row_weights, token_sum_weights
from rlflow.backends.ray_runtime.algorithms.value import value_clip

T = torch.Tensor
Loss = Callable[[T, T, T, T, T], T]
"""(current, old, advantages per row, lengths, mask) -> scalar, with the denominators of the whole batch of `rows`."""

ROWS, TOKENS = 6, 29
LENGTHS = torch.tensor([4, 1, 9, 0, 8, 7])


def spread(advantages: T, lengths: T) -> T:
    return torch.repeat_interleave(advantages, lengths)


def with_weights(loss: T, lengths: T, mask: T, how: Aggregate | None) -> T:
    if how is None:
        return aggregate(loss, token_sum_weights(lengths, horizon=16, total_rows=ROWS, mask=mask))
    return aggregate(loss, token_weights(lengths, how, total_tokens=20, total_rows=ROWS, mask=mask))


def per_token(loss: Callable[[T, T, T], T], how: Aggregate | None) -> Loss:
    def run(logp: T, old: T, advantages: T, lengths: T, mask: T) -> T:
        return with_weights(loss(logp, blank(old, mask), spread(advantages, lengths)), lengths, mask, how)

    return run


def per_row(loss: Callable[..., object]) -> Loss:
    def run(logp: T, old: T, advantages: T, lengths: T, mask: T) -> T:
        found = loss(logp, old, advantages, lengths, 0.2, 0.28, mask=mask)
        return aggregate(found.loss, row_weights(lengths, total_rows=ROWS, mask=mask))  # type: ignore[attr-defined]

    return run


def token_gspo(logp: T, old: T, advantages: T, lengths: T, mask: T) -> T:
    found = gspo_token(logp, old, spread(advantages, lengths), lengths, 0.2, 0.28, mask=mask)
    return with_weights(found.loss, lengths, mask, "seq_mean_token_mean")


def corrected(logp: T, old: T, advantages: T, lengths: T, mask: T) -> T:
    weights = importance_weights(old * 0.9, old, lengths, level="sequence", cap=2.0, mask=mask).weights
    loss = decoupled_ppo(logp, blank(old, mask) * 0.9, spread(advantages, lengths), 0.2, 0.28, weights).loss
    return with_weights(loss, lengths, mask, "token_mean")


LOSSES: dict[str, Loss] = {
    "reinforce": per_token(lambda new, old, adv: reinforce(new, adv), "token_mean"),
    "dual": per_token(lambda new, old, adv: ppo_dual_clip(new, old, adv, 0.2, 0.28, 3.0).loss, "seq_mean_token_mean"),
    "cispo": per_token(lambda new, old, adv: cispo(new, old, adv, None, 0.28).loss, "token_mean"),
    "dr_grpo": per_token(lambda new, old, adv: ppo_dual_clip(new, old, adv, 0.2, 0.2, 3.0).loss, None),
    "value": per_token(lambda new, old, adv: value_clip(new, old, adv, 0.2).loss, "token_mean"),
    "nll": per_token(lambda new, old, adv: nll(new), "token_mean"),
    "gspo": per_row(gspo),
    "sequence_ppo": per_row(sequence_ppo_clip),
    "gspo_token": token_gspo,
    "corrected": corrected,
}
# The others stop the gradient of a weight on purpose, so finite differences of their value are another function's.
PLAIN = ["reinforce", "dual", "dr_grpo", "value", "nll", "gspo", "sequence_ppo", "corrected"]


def batch() -> tuple[T, T, T, T]:
    torch.manual_seed(11)
    old = -torch.rand(TOKENS).double() - 0.1
    return old + 0.3 * torch.randn(TOKENS), old, torch.randn(ROWS).double(), (torch.rand(TOKENS) < 0.7).double()


def with_gradient(loss: Loss, logp: T, *rest: T) -> tuple[T, T]:
    point = logp.clone().requires_grad_()
    value = loss(point, *rest)
    (slope,) = torch.autograd.grad(value, point)
    return value.detach(), slope


@pytest.mark.parametrize("name", LOSSES)
def test_row_order_and_split_do_not_matter(name: str) -> None:  # T18, H8
    logp, old, advantages, mask = batch()
    value, slope = with_gradient(LOSSES[name], logp, old, advantages, LENGTHS, mask)
    assert value.item() != 0
    rows = row_ids(LENGTHS).numpy()
    rng = np.random.default_rng(0)
    for pieces in ([6], [3, 3], [1, 2, 3], [1] * 6):
        order = rng.permutation(ROWS)
        total, slopes = 0.0, torch.zeros(TOKENS).double()
        for part in np.split(order, np.cumsum(pieces)[:-1]):
            at = torch.from_numpy(np.concatenate([np.flatnonzero(rows == row) for row in part]).astype(np.int64))
            found, found_slope = with_gradient(
                LOSSES[name], logp[at], old[at], advantages[part], LENGTHS[part], mask[at]
            )
            total += float(found)
            slopes[at] = found_slope
        assert total == pytest.approx(float(value), rel=1e-6)  # weights are float32
        torch.testing.assert_close(slopes, slope, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("hidden", [0.0, float("nan"), 1e4])
def test_masked_tokens_have_no_loss_and_no_gradient(name: str, hidden: float) -> None:  # I6, J5
    logp, old, advantages, mask = batch()
    value, slope = with_gradient(LOSSES[name], logp, old, advantages, LENGTHS, mask)
    other = torch.where(mask > 0, old, hidden)
    value_hidden, slope_hidden = with_gradient(LOSSES[name], logp, other, advantages, LENGTHS, mask)
    assert torch.equal(value, value_hidden)
    assert torch.equal(slope, slope_hidden)
    assert not slope[mask == 0].any()
    nothing, no_slope = with_gradient(LOSSES[name], logp, other, advantages, LENGTHS, torch.zeros_like(mask))
    assert nothing.item() == 0
    assert not no_slope.any()


@pytest.mark.parametrize("name", PLAIN)
def test_derivative_is_that_of_finite_differences(name: str) -> None:
    logp, old, advantages, mask = batch()
    _, slope = with_gradient(LOSSES[name], logp, old, advantages, LENGTHS, mask)
    step = 1e-6
    for index in range(TOKENS):
        nudge = torch.zeros(TOKENS).double()
        nudge[index] = step
        rise = LOSSES[name](logp + nudge, old, advantages, LENGTHS, mask) - LOSSES[name](
            logp - nudge, old, advantages, LENGTHS, mask
        )
        assert float(rise) / (2 * step) == pytest.approx(float(slope[index]), abs=1e-7)


def test_metrics_of_parts_add_up() -> None:
    logp, old, _, mask = batch()
    for level in ("token", "sequence", "sequence_mean"):

        def measure(first: int, last: int, level: str = level) -> dict[str, float]:
            start, stop = int(LENGTHS[:first].sum()), int(LENGTHS[:last].sum())
            part, own = slice(start, stop), LENGTHS[first:last]
            found = importance_weights(logp[part], old[part], own, level=level, cap=1.1, mask=mask[part])
            return correction_metrics(found, own, level=level, total_tokens=20, total_rows=5, mask=mask[part])

        whole, parts = measure(0, 6), [measure(0, 2), measure(2, 6)]
        for key, value in whole.items():
            assert sum(part[key] for part in parts) == pytest.approx(value)
