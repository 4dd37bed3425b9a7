"""What a kernel refuses, with the words; and that it takes the nearest thing that is legal."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from rlflow.backends.ray_runtime.kernels.kernel import ALL, Kernel
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
from rlflow.diagnostics.diagnostic import RunFailure

BF16 = torch.bfloat16


def t(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Shapes and types are all that rules read."""
    return torch.empty(shape, dtype=dtype, device="meta")


def heads(q: tuple[int, ...], k: tuple[int, ...], v: tuple[int, ...] | None = None, dtype: Any = BF16) -> Any:
    return t(*q, dtype=dtype), t(*k, dtype=dtype), t(*(v or k), dtype=dtype)


def moments(**changed: Any) -> dict[str, Any]:
    return {"step": 1, "lr": 1e-3, "betas": (0.9, 0.99), "epsilon": 1e-8, "weight_decay": 0.0} | changed


LONG = tuple(range(1, 1026))
CACHE = t(8, 128, 2, 64, dtype=BF16)
BLOCKS = t(2, 3, dtype=torch.int32)

Case = tuple[Kernel[..., Any], tuple[Any, ...], dict[str, Any], str]

EVERYWHERE: list[Case] = [
    (rms_norm, (t(2, 16), t(8)), {}, "gamma has 8 elements, and the last axis of x 16"),
    (rms_norm, (t(2, 16), t(16, dtype=BF16)), {}, "gamma is bfloat16 beside x of float32"),
    (rms_norm, (t(2, 16), t(2, 16)), {}, "gamma [2, 16] has 2 dimensions, not 1"),
    (rms_norm, (t(2, 16), t(16), 0.0), {}, "epsilon is 0, not positive"),
    (rms_norm, (t(2, 16, dtype=torch.int64), t(16)), {}, "x is int64, not a floating type"),
    (add_rms_norm, (t(2, 16), t(2, 1), t(16)), {}, "x1 [2, 16] and x2 [2, 1] differ"),
    (rotary, (t(1, 2, 3, 7), t(1, 1, 3, 7), t(1, 1, 3, 7)), {}, "7 elements, an odd number"),
    (rotary, (t(1, 2, 3, 8), t(1, 1, 4, 8), t(1, 1, 4, 8)), {}, "cos [1, 1, 4, 8] does not broadcast to x [1, 2, 3, 8]"),
    (rotary, (t(1, 2, 3, 8), t(1, 1, 3, 8, dtype=BF16), t(1, 1, 3, 8)), {}, "x float32, cos bfloat16, sin float32"),
    (swiglu, (t(3, 9),), {}, "9 elements, an odd number"),
    (grouped_matmul, (t(6, 4), t(2, 5, 3), t(2, dtype=torch.int64)), {}, "rows of 4, and weight [2, 5, 3] takes 5"),
    (grouped_matmul, (t(6, 5), t(2, 5, 3), t(3, dtype=torch.int64)), {}, "3 counts for 2 experts"),
    (grouped_matmul, (t(6, 5), t(2, 5, 3), t(2, dtype=torch.int32)), {}, "counts is int32, not int64"),
    (format_cast, (t(32, dtype=BF16),), {}, "weight [32] has 1 dimensions, not 2 or 3"),
    (format_cast, (t(32, 16, dtype=BF16).requires_grad_(),), {}, "weight is trained"),
    (gating, (t(4, 10), 2), {"groups": 4, "score": "sigmoid"}, "10 experts do not divide into 4 groups"),
    (gating, (t(4, 16), 9), {"groups": 4, "kept_groups": 2, "score": "sigmoid"}, "9 experts per token, and 2 of 4 groups hold 8"),
    (gating, (t(4, 16), 2), {"bias": t(16)}, "a bias belong to the score `sigmoid`"),
    (gating, (t(4, 16), 2), {"bias": t(8), "score": "sigmoid"}, "bias [8] for 16 experts"),
    (route, (t(4, 8), t(5, 2, dtype=torch.int32), 8), {}, "4 tokens [4, 8], and experts of 5 [5, 2]"),
    (route, (t(4, 8), t(4, 2), 8), {}, "experts is float32, not int32, int64"),
    (unpermute, (t(7, 8), t(8, dtype=torch.int32), t(4, 2)), {}, "7 rows, 8 places and 8 weights"),
    (adamw, (t(3), t(4), t(3), t(3)), moments(), "grad [4] for a parameter [3]"),
    (adamw, (t(3), t(3), t(3, dtype=BF16), t(3)), moments(), "m bfloat16"),
    (adamw, (t(3), t(3), t(3), t(3)), moments(step=0), "step is 0, and the first is 1"),
    (adamw, (t(3), t(3), t(3), t(3)), moments(betas=(0.9, 1.0)), "betas are 0.9 and 1"),
    (attention, heads((2, 12, 5, 64), (2, 8, 5, 64)), {"scale": 1.0}, "12 query heads do not divide into 8 key heads"),
    (attention, heads((2, 8, 5, 64), (2, 8, 5, 32)), {"scale": 1.0}, "heads of size 64, and key of 32"),
    (attention, heads((2, 8, 5, 64), (2, 8, 5, 64), (2, 8, 5, 80)), {"scale": 1.0}, "size 80, more than key's 64"),
    (attention, heads((2, 8, 5, 64), (3, 8, 5, 64)), {"scale": 1.0}, "query has 2 rows, and key 3"),
    (attention, heads((2, 8, 5, 64), (2, 8, 5, 64)), {"scale": 0.0}, "scale is 0, not positive"),
    (attention, heads((2, 8, 5, 64), (2, 8, 5, 64)), {"scale": 1.0, "layout": "XYZ"}, "layout is `XYZ`"),
    (attention, heads((9, 8, 64), (9, 8, 64)), {"scale": 1.0, "layout": "TND"}, "layout `TND` needs `ends`"),
    (attention, heads((9, 8, 64), (9, 8, 64)), {"scale": 1.0, "layout": "TND", "ends": (4, 8)}, "is 8, and there are 9 tokens"),
    (attention, heads((9, 8, 64), (9, 8, 64)), {"scale": 1.0, "layout": "TND", "ends": (5, 4, 9)}, "ends do not rise"),
    (attention, heads((9, 8, 64), (9, 8, 64)), {"scale": 1.0, "layout": "TND", "ends": (5, 9), "key_ends": (9,)}, "different sequences"),
    (attention, heads((2, 8, 5, 64), (2, 8, 5, 64)), {"scale": 1.0, "mask": t(5, 5, dtype=torch.bool)}, "both a mask and causal"),
    (attention, heads((2, 8, 5, 64), (2, 8, 5, 64)), {"scale": 1.0, "causal": False, "mask": t(5, 6, dtype=torch.bool)}, "mask [5, 6] for 5 queries and 5 keys"),
    (attention, heads((2, 8, 5, 64), (2, 8, 5, 64)), {"scale": 1.0, "causal": False, "mask": t(5, 5)}, "not bool (True hides)"),
    (infer_attention, heads((2, 8, 1, 64), (2, 8, 9, 64)), {"scale": 1.0, "lengths": (9, 10)}, "lengths 9 to 10 of 9 keys"),
    (infer_attention, heads((2, 8, 1, 64), (2, 8, 9, 64)), {"scale": 1.0, "lengths": (9,)}, "1 lengths for 2 rows"),
    (infer_attention, (t(2, 8, 1, 64, dtype=BF16), CACHE, CACHE), {"scale": 1.0, "blocks": BLOCKS}, "a cache in blocks needs `lengths`"),
    (write_cache, (t(4, 2, 64, dtype=BF16), t(4, 2, 64, dtype=BF16), CACHE, CACHE, t(3, dtype=torch.int64)), {}, "4 tokens of key, and 3 slots"),
    (write_cache, (t(4, 3, 64, dtype=BF16), t(4, 3, 64, dtype=BF16), CACHE, CACHE, t(4, dtype=torch.int64)), {}, "key [4, 3, 64] does not fit its cache [8, 128, 2, 64]"),
]  # fmt: skip

ON_AN_NPU: list[Case] = [
    (rms_norm, (t(2, 16, dtype=torch.float64), t(16)), {}, "x is float64; supported: float16, bfloat16, float32"),
    (rotary, (t(1, 2, 3, 1024), t(1, 1, 3, 1024), t(1, 1, 3, 1024)), {}, "1024 elements, and 894 are the most"),
    (rotary, (t(1000, 2, 3, 8), t(1, 1, 3, 8), t(1, 1, 3, 8)), {}, "1000 rows, and 999 are the most"),
    (grouped_matmul, (t(6, 5), t(1025, 5, 3), t(1025, dtype=torch.int64)), {}, "1025 experts on one device"),
    (grouped_matmul, (t(6, 65536), t(2, 65536, 3), t(2, dtype=torch.int64)), {}, "is 65536; most is 65535"),
    (format_cast, (t(32, 16),), {}, "weight is float32; supported: float16, bfloat16"),
    (format_cast, (t(40, 16, dtype=BF16),), {}, "has 40 rows, not a multiple of 16; the nearest is 32"),
    (format_cast, (t(2, 16, 7, dtype=BF16),), {}, "has 7 columns, not a multiple of 16; the nearest is 16"),
    (gating, (t(4, 16), 2), {"score": "sigmoid", "renormalize": False}, "always renormalised"),
    (gating, (t(4, 16), 2), {"score": "sigmoid", "groups": 8, "kept_groups": 2}, "groups of 2 experts, and 3 are the least"),
    (gating, (t(4, 1024), 2), {"score": "sigmoid", "groups": 128, "kept_groups": 2}, "most is 2048"),
    (route, (t(4, 8), t(4, 2, dtype=torch.int32), 20_000), {}, "20000 experts, and 10240 are the most"),
    (attention, heads((2, 512, 5, 64), (2, 512, 5, 64)), {"scale": 1.0}, "512 heads, and 256 are the most"),
    (attention, heads((2, 8, 5, 1024), (2, 8, 5, 1024)), {"scale": 1.0}, "heads of size 1024, and 768 is the most"),
    (attention, heads((2, 8, 9, 64), (2, 8, 5, 64)), {"scale": 1.0}, "9 queries and 5 keys: the first see no key"),
    (attention, heads((1025, 8, 64), (1025, 8, 64)), {"scale": 1.0, "layout": "TND", "ends": LONG}, "1025 sequences in one call, and 1024 are the most"),
    (infer_attention, heads((2, 8, 1, 64), (2, 8, 9, 64), dtype=torch.float32), {"scale": 1.0}, "query is float32; supported: float16, bfloat16"),
    (infer_attention, heads((2, 8, 1, 40), (2, 8, 9, 40)), {"scale": 1.0}, "heads of size 40, not a multiple of 16"),
    (infer_attention, heads((2, 128, 1, 64), (2, 1, 9, 64)), {"scale": 1.0}, "128 query heads per key head, most is 64"),
    (infer_attention, (t(2, 8, 5, 64, dtype=BF16), t(8, 16, 2, 64, dtype=BF16), t(8, 16, 2, 64, dtype=BF16)), {"scale": 1.0, "blocks": BLOCKS, "lengths": (9, 9)}, "blocks of 16 tokens for 5 queries: a multiple of 128"),
]  # fmt: skip

LEGAL: list[tuple[Kernel[..., Any], tuple[Any, ...], dict[str, Any]]] = [
    (rms_norm, (t(2, 16, dtype=BF16), t(16)), {}),
    (add_rms_norm, (t(2, 16), t(2, 16), t(16)), {}),
    (rotary, (t(999, 2, 3, 894), t(1, 1, 3, 894), t(1, 1, 3, 894)), {}),
    (swiglu, (t(3, 8),), {}),
    (grouped_matmul, (t(6, 65535), t(1024, 65535, 3), t(1024, dtype=torch.int64)), {}),
    (format_cast, (t(32, 48, dtype=BF16),), {}),
    (format_cast, (t(8, 16, 48, dtype=torch.float16),), {}),
    (gating, (t(4, 256), 8), {"score": "sigmoid", "groups": 8, "kept_groups": 4, "bias": t(256), "scale": 2.5}),
    (gating, (t(4, 128), 8), {}),
    (route, (t(4, 8), t(4, 2, dtype=torch.int64), 128), {}),
    (unpermute, (t(8, 8), t(8, dtype=torch.int32), t(4, 2)), {}),
    (adamw, (t(3), t(3), t(3), t(3)), moments()),
    (attention, heads((2, 256, 5, 768), (2, 1, 5, 768)), {"scale": 1.0}),
    (attention, heads((2, 16, 5, 192), (2, 16, 5, 192), (2, 16, 5, 128)), {"scale": 1.0}),
    (attention, heads((1024, 8, 64), (1024, 8, 64)), {"scale": 1.0, "layout": "TND", "ends": LONG[:1024]}),
    (infer_attention, heads((2, 64, 1, 512), (2, 1, 9, 512)), {"scale": 1.0, "lengths": (9, 3)}),
    (infer_attention, (t(2, 8, 5, 64, dtype=BF16), CACHE, CACHE), {"scale": 1.0, "blocks": BLOCKS, "lengths": (384, 1)}),
    (write_cache, (t(4, 2, 64, dtype=BF16), t(4, 2, 64, dtype=BF16), CACHE, CACHE, t(4, dtype=torch.int32)), {}),
]  # fmt: skip


def refused(kernel: Kernel[..., Any], implementation: str, args: Any, kwargs: Any) -> RunFailure:
    with pytest.raises(RunFailure) as caught:
        kernel.check(implementation, *args, **kwargs)
    assert caught.value.code == "RLF5030"
    assert caught.value.message.startswith(f"kernel `{kernel.name}`: ")
    return caught.value


@pytest.mark.parametrize(("kernel", "args", "kwargs", "words"), EVERYWHERE, ids=lambda case: getattr(case, "name", ""))
def test_refused_on_every_device(kernel: Kernel[..., Any], args: Any, kwargs: Any, words: str) -> None:
    for implementation in ("torch", "npu"):
        assert words in refused(kernel, implementation, args, kwargs).message


@pytest.mark.parametrize(("kernel", "args", "kwargs", "words"), ON_AN_NPU, ids=lambda case: getattr(case, "name", ""))
def test_refused_on_an_npu_alone(kernel: Kernel[..., Any], args: Any, kwargs: Any, words: str) -> None:
    kernel.check("torch", *args, **kwargs)
    failure = refused(kernel, "npu", args, kwargs)
    assert words in failure.message
    assert "(on an NPU)" in failure.message
    assert failure.help[-1] == f"or run torch's: RLFLOW_KERNELS={kernel.name}=torch"


@pytest.mark.parametrize(("kernel", "args", "kwargs"), LEGAL, ids=lambda case: getattr(case, "name", ""))
def test_legal_on_an_npu(kernel: Kernel[..., Any], args: Any, kwargs: Any) -> None:
    kernel.check("npu", *args, **kwargs)


def test_every_kernel_is_in_both_tables() -> None:
    assert {case[0].name for case in EVERYWHERE} == {case[0].name for case in LEGAL} == set(ALL)


def test_the_message_names_both_numbers() -> None:
    with pytest.raises(RunFailure) as caught:
        attention(*heads((2, 12, 5, 64), (2, 8, 5, 64)), scale=1.0)
    assert (caught.value.code, caught.value.message) == (
        "RLF5030",
        "kernel `attention`: 12 query heads do not divide into 8 key heads",
    )


def with_gradient(call: Callable[..., Any]) -> RunFailure:
    with pytest.raises(RunFailure) as caught:
        call()
    return caught.value


def test_operators_without_a_derivative_refuse_gradients() -> None:
    x, gamma = torch.randn(2, 8, requires_grad=True), torch.ones(8)
    assert "no derivative" in with_gradient(lambda: add_rms_norm.check("npu", x, x, gamma)).message
    add_rms_norm.check("torch", x, x, gamma)
    q = torch.randn(1, 2, 1, 16, requires_grad=True)
    failure = with_gradient(lambda: infer_attention(q, q, q, scale=1.0))
    assert "use the kernel `attention`, or torch.no_grad()" in failure.help
    with torch.no_grad():
        infer_attention(q, q, q, scale=1.0)
