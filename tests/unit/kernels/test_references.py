"""Each torch reference against its definition, written out in float64 with numpy; and its gradient."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch.autograd import gradcheck

from rlflow.backends.ray_runtime.kernels.attention import triangle
from rlflow.backends.ray_runtime.kernels.rotary import halves
from rlflow.backends.ray_runtime.kernels.table import (
    adamw,
    add_rms_norm,
    attention,
    format_cast,
    gating,
    grouped_matmul,
    infer_attention,
    rms_norm,
    rotary,
    route,
    swiglu,
    unpermute,
    write_cache,
)

Array = np.ndarray[Any, np.dtype[np.float64]]


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def close(found: torch.Tensor, wanted: Array, tolerance: float = 2e-6) -> None:
    """Relative to the largest element."""
    assert found.shape == wanted.shape
    scale = max(1.0, float(np.abs(wanted).max()))
    assert float(np.abs(found.detach().double().numpy() - wanted).max()) <= tolerance * scale


def f64(tensor: torch.Tensor) -> Array:
    return tensor.detach().double().numpy()


# --- norms, rotary, swiglu -------------------------------------------------------------------------------------------


def norm_definition(x: Array, gamma: Array, epsilon: float) -> Array:
    out = np.empty_like(x)
    for index in np.ndindex(x.shape[:-1]):
        row = x[index]
        out[index] = row / np.sqrt(sum(value * value for value in row) / len(row) + epsilon) * gamma
    return out


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 2e-6), (torch.bfloat16, 1.6e-2)])
def test_rms_norm(dtype: torch.dtype, tolerance: float) -> None:
    x, gamma = normal(2, 3, 16, dtype=dtype), normal(16, seed=1, dtype=dtype)
    found = rms_norm(x, gamma, 1e-5)
    assert found.dtype == dtype
    close(found, norm_definition(f64(x), f64(gamma), 1e-5), tolerance)


def test_a_large_row_of_half_precision_does_not_overflow_in_the_norm() -> None:
    x = torch.full((1, 8), 3e4, dtype=torch.float16)
    assert rms_norm(x, torch.ones(8, dtype=torch.float16), 1e-6).tolist() == [[1.0] * 8]


def test_add_rms_norm_gives_the_norm_and_the_sum() -> None:
    x1, x2, gamma = normal(2, 5, 8), normal(2, 5, 8, seed=1), normal(8, seed=2)
    y, total = add_rms_norm(x1, x2, gamma, 1e-6)
    close(total, f64(x1) + f64(x2))
    close(y, norm_definition(f64(x1) + f64(x2), f64(gamma), 1e-6))


def test_rotary_turns_each_pair_by_its_angle() -> None:
    batch, heads, length, size = 2, 3, 5, 8
    x = normal(batch, heads, length, size)
    angles = normal(length, size // 2, seed=1)
    table = torch.cat((angles, angles), -1)[None, None]
    found = rotary(x, table.cos(), table.sin())
    pairs = f64(x)[..., : size // 2] + 1j * f64(x)[..., size // 2 :]
    turned = pairs * np.exp(1j * f64(angles))
    close(found, np.concatenate((turned.real, turned.imag), -1))


def test_pairs_side_by_side_are_brought_into_halves() -> None:
    assert halves(torch.arange(6.0)).tolist() == [0.0, 2.0, 4.0, 1.0, 3.0, 5.0]


def test_swiglu() -> None:
    x = normal(3, 4, 10)
    gate, up = f64(x)[..., :5], f64(x)[..., 5:]
    close(swiglu(x), gate / (1 + np.exp(-gate)) * up)


# --- attention -------------------------------------------------------------------------------------------------------


def attention_definition(q: Array, k: Array, v: Array, scale: float, seen: Any) -> Array:
    """q [heads, queries, size]; `seen(query, key)` says whether a query reads a key."""
    group = q.shape[0] // k.shape[0]
    out = np.zeros((*q.shape[:2], v.shape[-1]))
    for head in range(q.shape[0]):
        for query in range(q.shape[1]):
            keys = [key for key in range(k.shape[1]) if seen(query, key)]
            if keys:
                scores = np.array([scale * q[head, query] @ k[head // group, key] for key in keys])
                weights = np.exp(scores - scores.max())
                weights /= weights.sum()
                out[head, query] = sum(w * v[head // group, key] for w, key in zip(weights, keys, strict=True))
    return out


def qkv(
    batch: int = 2, heads: int = 4, kv_heads: int = 2, queries: int = 5, keys: int = 5, size: int = 8, value: int = 8
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return (
        normal(batch, heads, queries, size),
        normal(batch, kv_heads, keys, size, seed=1),
        normal(batch, kv_heads, keys, value, seed=2),
    )


@pytest.mark.parametrize("layout", ["BNSD", "BSND"])
@pytest.mark.parametrize(("causal", "keys", "value"), [(True, 5, 8), (True, 7, 8), (False, 7, 8), (True, 5, 6)])
def test_attention(layout: Any, causal: bool, keys: int, value: int) -> None:
    q, k, v = qkv(keys=keys, value=value)
    turned = (q, k, v) if layout == "BNSD" else tuple(t.transpose(1, 2) for t in (q, k, v))
    found = attention(*turned, scale=0.3, causal=causal, layout=layout)
    found = found if layout == "BNSD" else found.transpose(1, 2)
    late = keys - 5
    wanted = [
        attention_definition(*(f64(t[row]) for t in (q, k, v)), 0.3, lambda i, j: not causal or j <= i + late)
        for row in range(2)
    ]
    close(found, np.stack(wanted))


def test_a_mask_hides_where_it_is_true_and_a_blind_query_gives_zero() -> None:
    q, k, v = qkv()
    mask = torch.zeros(2, 1, 5, 5, dtype=torch.bool)
    mask[0, 0, :, 3:] = True
    mask[1, 0, 2] = True
    q.requires_grad_()
    found = attention(q, k, v, scale=0.3, causal=False, mask=mask)
    wanted = [
        attention_definition(*(f64(t[row]) for t in (q, k, v)), 0.3, lambda i, j: not mask[row, 0, i, j])  # noqa: B023
        for row in range(2)
    ]
    close(found, np.stack(wanted))
    assert not found[1, :, 2].any()
    (gradient,) = torch.autograd.grad(found.sum(), q)
    assert gradient.isfinite().all()
    assert not gradient[1, :, 2].any()


def test_packed_sequences_do_not_see_each_other() -> None:
    ends = (3, 4, 9)
    q, k, v = normal(9, 4, 8), normal(9, 2, 8, seed=1), normal(9, 2, 8, seed=2)
    found = attention(q, k, v, scale=0.3, layout="TND", ends=ends)
    for start, end in zip((0, *ends), ends, strict=False):
        part = (f64(t[start:end]).swapaxes(0, 1) for t in (q, k, v))
        wanted = attention_definition(*part, 0.3, lambda i, j: j <= i)
        close(found[start:end], wanted.swapaxes(0, 1))


def test_the_triangle_of_sampling_can_be_trained_with() -> None:
    with torch.inference_mode():
        made = triangle(torch.device("cpu"))
    assert not made.is_inference()
    assert triangle(torch.device("cpu")) is made
    assert made[5].tolist() == [column > 5 for column in range(2048)]


def test_infer_attention_of_a_prompt_and_of_a_step() -> None:
    q, k, v = qkv(value=6)
    close(infer_attention(q, k, v, scale=0.3), f64(attention(q, k, v, scale=0.3)))
    step = infer_attention(q[:, :, -1:], k, v, scale=0.3, lengths=(5, 2))
    wanted = [
        attention_definition(f64(q[row, :, -1:]), f64(k[row]), f64(v[row]), 0.3, lambda i, j: j < length)  # noqa: B023
        for row, length in enumerate((5, 2))
    ]
    close(step, np.stack(wanted))


def test_a_cache_in_blocks_reads_as_the_whole_one() -> None:
    """Written token by token into scattered blocks, then read through the table."""
    batch, length, block = 2, 11, 4
    q, k, v = qkv(batch=batch, queries=1, keys=length)
    blocks = torch.tensor([[5, 0, 3], [1, 4, 2]], dtype=torch.int32)
    caches = [torch.full((6, block, 2, 8), float("nan")) for _ in range(2)]
    for place in range(length):
        slots = blocks[:, place // block] * block + place % block
        write_cache(k[:, :, place], v[:, :, place], *caches, slots)
    caches = [cache.nan_to_num(1e3) for cache in caches]  # what lies beyond the length must not be read
    found = infer_attention(q, *caches, scale=0.3, lengths=(length, 7), blocks=blocks)
    close(found, f64(infer_attention(q, k, v, scale=0.3, lengths=(length, 7))))


# --- mixture of experts ----------------------------------------------------------------------------------------------


def test_grouped_matmul_and_an_expert_without_rows() -> None:
    x, weight, counts = normal(7, 4), normal(3, 4, 5, seed=1), torch.tensor([4, 0, 3])
    wanted = [f64(x)[row] @ f64(weight)[0 if row < 4 else 2] for row in range(7)]
    close(grouped_matmul(x, weight, counts), np.stack(wanted))


@pytest.mark.parametrize("renormalize", [True, False])
def test_softmax_gating(renormalize: bool) -> None:
    logits = normal(6, 8)
    weights, experts = gating(logits, 3, renormalize=renormalize)
    for row in range(6):
        exact = np.exp(f64(logits)[row]) / np.exp(f64(logits)[row]).sum()
        best = sorted(range(8), key=lambda e: -exact[e])[:3]
        assert experts[row].tolist() == best
        close(weights[row], exact[best] / (exact[best].sum() if renormalize else 1.0))


def test_grouped_sigmoid_gating() -> None:
    """DeepSeek-V3: two of four groups by their two best, weights without the bias."""
    logits, bias = normal(20, 16), 0.3 * normal(16, seed=1)
    weights, experts = gating(
        logits, 4, score="sigmoid", groups=4, kept_groups=2, bias=bias, scale=2.5, renormalize=True
    )
    changed_by_bias = 0
    for row in range(20):
        scores = 1 / (1 + np.exp(-f64(logits)[row]))
        ranked = scores + f64(bias)
        group = [sum(sorted(ranked[4 * g : 4 * g + 4])[-2:]) for g in range(4)]
        kept = sorted(range(4), key=lambda g: -group[g])[:2]
        best = sorted((e for e in range(16) if e // 4 in kept), key=lambda e: -ranked[e])[:4]
        changed_by_bias += set(best) != set(np.argsort(-scores)[:4])
        assert sorted(experts[row].tolist()) == sorted(best)
        exact = {e: scores[e] for e in best}
        close(weights[row], np.array([2.5 * exact[e] / sum(exact.values()) for e in experts[row].tolist()]))
    assert changed_by_bias > 0, "the case tests nothing that plain scores would not"


def test_route_and_back() -> None:
    tokens, experts = normal(5, 3), torch.tensor([[2, 0], [0, 1], [2, 1], [0, 2], [1, 0]])
    rows, order, counts = route(tokens, experts, 4)
    assert counts.tolist() == [4, 3, 3, 0]
    flat = experts.flatten().tolist()
    assert order.tolist() == [sorted(range(10), key=lambda s: (flat[s], s)).index(slot) for slot in range(10)]
    for slot in range(10):
        assert rows[order[slot]].tolist() == tokens[slot // 2].tolist()
    weights = normal(5, 2, seed=3)
    close(unpermute(rows, order, weights), f64(tokens) * f64(weights).sum(1, keepdims=True))


# --- gradients -------------------------------------------------------------------------------------------------------


def test_gradients_are_those_of_the_forward() -> None:
    """By finite differences, in float64."""

    def leaf(*shape: int, seed: int = 0) -> torch.Tensor:
        return normal(*shape, seed=seed, dtype=torch.float64).requires_grad_()

    q, k, v = leaf(1, 2, 3, 4), leaf(1, 1, 3, 4, seed=1), leaf(1, 1, 3, 4, seed=2)
    assert gradcheck(lambda *t: attention(*t, scale=0.5), (q, k, v))
    assert gradcheck(lambda *t: rms_norm(*t, 1e-6), (leaf(2, 6), leaf(6, seed=1)))
    assert gradcheck(lambda x: rotary(x, q.detach().cos(), q.detach().sin()), (leaf(1, 2, 3, 4, seed=3),))
    assert gradcheck(lambda x: swiglu(x), (leaf(3, 8),))
    counts = torch.tensor([1, 0, 3])
    assert gradcheck(lambda x, w: grouped_matmul(x, w, counts), (leaf(4, 3), leaf(3, 3, 2, seed=1)))
    assert gradcheck(lambda x: gating(x, 2)[0], (leaf(3, 5),))
    assert gradcheck(lambda x: gating(x, 2, score="sigmoid", groups=2, kept_groups=1)[0], (leaf(3, 8),))
    order = torch.tensor([1, 3, 0, 2], dtype=torch.int32)
    assert gradcheck(lambda r, w: unpermute(r, order, w), (leaf(4, 3), leaf(2, 2, seed=1)))


# --- layout ----------------------------------------------------------------------------------------------------------


def test_format_cast_gives_the_same_tensor() -> None:
    weight = normal(32, 16, dtype=torch.bfloat16)
    assert format_cast(weight) is weight


# --- the optimizer ---------------------------------------------------------------------------------------------------


def test_adamw_over_some_steps() -> None:
    p, m, v = normal(6), torch.zeros(6), torch.zeros(6)
    exact = f64(p).copy()
    first, second = np.zeros(6), np.zeros(6)
    for step in range(1, 6):
        grad = normal(6, seed=step)
        adamw(p, grad, m, v, step=step, lr=0.01, betas=(0.9, 0.95), epsilon=1e-8, weight_decay=0.1)
        g = f64(grad)
        first, second = 0.9 * first + 0.1 * g, 0.95 * second + 0.05 * g * g
        corrected = (first / (1 - 0.9**step)) / (np.sqrt(second / (1 - 0.95**step)) + 1e-8)
        exact = exact - 0.01 * 0.1 * exact - 0.01 * corrected
    close(p, exact)
    close(m, first)
    close(v, second)
