"""Every kernel through the real dispatcher on fake npu tensors: which operators it reaches, forward and backward, and
that shapes and dtypes are the reference's."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from rlflow.backends.ray_runtime.kernels.kernel import ALL
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

BF16, F32, I32, I64 = torch.bfloat16, torch.float32, torch.int32, torch.int64
Maker = Any
"""Makes a tensor of a shape and dtype, on the device that is tried."""

EXPERTS = [[0, 1], [1, 2], [2, 0], [0, 2], [1, 0], [2, 1]]


def attention_case(layout: str, q: tuple[int, ...], k: tuple[int, ...], v: tuple[int, ...], **more: Any) -> Any:
    return lambda t: attention(t(*q, grad=True), t(*k, grad=True), t(*v, grad=True), scale=0.1, layout=layout, **more)


def masked(t: Maker) -> Any:
    mask = t(2, 1, 48, 64, dtype=torch.bool)
    shapes = ((2, 8, 48, 64), (2, 2, 64, 64), (2, 2, 64, 64))
    return attention(*(t(*s, grad=True) for s in shapes), scale=0.1, causal=False, mask=mask)


def infer_case(q: tuple[int, ...], k: tuple[int, ...], v: tuple[int, ...], **more: Any) -> Any:
    return lambda t: infer_attention(t(*q), t(*k), t(*v), scale=0.1, **more)


def in_blocks(queries: int) -> Any:
    return lambda t: infer_attention(
        t(2, 16, queries, 128),
        t(8, 128, 4, 128),
        t(8, 128, 4, 128),
        scale=0.1,
        lengths=(130, 64),
        blocks=t(2, 2, dtype=I32),
    )


def infer_masked(queries: int) -> Any:
    return lambda t: infer_attention(
        t(2, 16, queries, 128),
        t(2, 4, 64, 128),
        t(2, 4, 64, 128),
        scale=0.1,
        causal=False,
        mask=t(2, 1, queries, 64, dtype=torch.bool),
    )


def experts_and_back(t: Maker) -> Any:
    rows, order, counts = route(t(6, 64, grad=True), t(6, 2, dtype=I32, values=EXPERTS), 3)
    return unpermute(rows, order, t(6, 2, grad=True)), counts


def update(t: Maker) -> Any:
    tensors = [t(16, 8, dtype=F32) for _ in range(4)]
    adamw(*tensors, step=3, lr=1e-3, betas=(0.9, 0.95), epsilon=1e-8, weight_decay=0.1)
    return tensors[0]


def write(t: Maker) -> Any:
    caches = t(8, 128, 4, 128), t(8, 128, 4, 128)
    write_cache(t(5, 4, 128), t(5, 4, 128), *caches, t(5, dtype=I64, values=[0, 1, 130, 131, 900]))
    return caches


def matmul(experts: int) -> Any:
    values = [6] if experts == 1 else [4, 0, 2]
    return lambda t: grouped_matmul(
        t(6, 32, grad=True), t(experts, 32, 48, grad=True), t(experts, dtype=I64, values=values)
    )


CASES: dict[str, tuple[Any, list[str], list[str]]] = {
    "attention, grouped heads": (attention_case("BNSD", (2, 8, 64, 128), (2, 2, 64, 128), (2, 2, 64, 128)), ["npu_fusion_attention"], ["npu_fusion_attention_grad"]),
    "attention, BSND": (attention_case("BSND", (2, 64, 8, 128), (2, 64, 8, 128), (2, 64, 8, 128)), ["npu_fusion_attention"], ["npu_fusion_attention_grad"]),
    "attention, latent": (attention_case("BNSD", (2, 8, 64, 192), (2, 8, 64, 192), (2, 8, 64, 128)), ["npu_fusion_attention"], ["npu_fusion_attention_grad"]),
    "attention, packed": (attention_case("TND", (64, 8, 128), (64, 2, 128), (64, 2, 128), ends=(10, 40, 64)), ["npu_fusion_attention"], ["npu_fusion_attention_grad"]),
    "attention, mask": (masked, ["npu_fusion_attention"], ["npu_fusion_attention_grad"]),
    "infer_attention, prompt": (infer_case((2, 16, 33, 128), (2, 4, 33, 128), (2, 4, 33, 128)), ["npu_fused_infer_attention_score"], []),
    "infer_attention, step": (infer_case((2, 16, 1, 128), (2, 4, 64, 128), (2, 4, 64, 128), lengths=(3, 64)), ["npu_fused_infer_attention_score"], []),
    "infer_attention, latent": (infer_case((2, 16, 1, 192), (2, 16, 64, 192), (2, 16, 64, 128)), ["npu_fused_infer_attention_score"], []),
    "infer_attention, prompt in blocks": (in_blocks(5), ["npu_fused_infer_attention_score"], []),
    "infer_attention, step in blocks": (in_blocks(1), ["npu_fused_infer_attention_score"], []),
    "infer_attention, masked prompt": (infer_masked(7), ["npu_fused_infer_attention_score"], []),
    "infer_attention, masked step": (infer_masked(1), ["npu_fused_infer_attention_score"], []),
    "write_cache": (write, ["npu_scatter_pa_kv_cache"], []),
    "rms_norm": (lambda t: rms_norm(t(2, 5, 64, grad=True), t(64, grad=True), 1e-6), ["npu_rms_norm"], ["npu_rms_norm_backward"]),
    "rms_norm, fp32 gamma": (lambda t: rms_norm(t(2, 5, 64, grad=True), t(64, dtype=F32, grad=True), 1e-6), ["npu_rms_norm"], ["npu_rms_norm_backward"]),
    "add_rms_norm": (lambda t: add_rms_norm(t(2, 5, 64), t(2, 5, 64), t(64), 1e-6), ["npu_add_rms_norm"], []),
    "rotary": (lambda t: rotary(t(2, 8, 64, 128, grad=True), t(1, 1, 64, 128), t(1, 1, 64, 128)), ["npu_rotary_mul"], ["npu_rotary_mul_backward"]),
    "rotary, positions per row": (lambda t: rotary(t(2, 8, 64, 128, grad=True), t(2, 1, 64, 128), t(2, 1, 64, 128)), ["npu_rotary_mul"], ["npu_rotary_mul_backward"]),
    "swiglu": (lambda t: swiglu(t(2, 5, 64, grad=True)), ["npu_swiglu"], ["npu_swiglu_backward"]),
    "grouped_matmul": (matmul(3), ["npu_grouped_matmul"], ["npu_grouped_matmul", "npu_grouped_matmul"]),
    "grouped_matmul, one expert": (matmul(1), [], []),
    "gating, softmax": (lambda t: gating(t(6, 128), 8), ["npu_moe_gating_top_k_softmax"], []),
    "gating, softmax, trained": (lambda t: gating(t(6, 128, grad=True), 8), ["npu_moe_gating_top_k_softmax"], ["npu_gather_backward"]),
    "gating, sigmoid": (lambda t: gating(t(6, 256, dtype=F32), 8, score="sigmoid", groups=8, kept_groups=4, bias=t(256, dtype=F32), scale=2.5), ["npu_moe_gating_top_k"], []),
    "gating, sigmoid, trained": (lambda t: gating(t(6, 256, dtype=F32, grad=True), 8, score="sigmoid", groups=8, kept_groups=4, bias=t(256, dtype=F32), scale=2.5), ["npu_moe_gating_top_k"], ["npu_gather_backward"]),
    "route": (lambda t: route(t(6, 64), t(6, 2, dtype=I64, values=EXPERTS), 3), ["npu_moe_init_routing_v2"], []),
    "route and back, trained": (experts_and_back, ["npu_moe_token_permute", "_npu_moe_token_unpermute"], ["npu_moe_token_unpermute_grad", "npu_moe_token_permute_grad"]),
    "adamw": (update, ["npu_apply_adam_w"], []),
}  # fmt: skip
"""Name, call, operators of the forward, operators of the backward."""


class On:
    """Makes tensors on one device and keeps those that want a gradient."""

    def __init__(self, device: str) -> None:
        self.device = device
        self.leaves: list[torch.Tensor] = []

    def __call__(self, *shape: int, dtype: torch.dtype = BF16, grad: bool = False, values: Any = None) -> torch.Tensor:
        if values is not None and self.device == "cpu":
            return torch.tensor(values, dtype=dtype)
        tensor = torch.zeros(shape, dtype=dtype, device=self.device)
        if grad:
            self.leaves.append(tensor.requires_grad_())
        return tensor


def flat(out: Any) -> list[torch.Tensor]:
    return [out] if isinstance(out, torch.Tensor) else [each for part in out for each in flat(part)]


def looks(tensors: list[torch.Tensor]) -> list[tuple[torch.Size, torch.dtype]]:
    return [(tensor.shape, tensor.dtype) for tensor in tensors]


def differentiate(out: list[torch.Tensor], leaves: list[torch.Tensor]) -> list[torch.Tensor]:
    total = sum(tensor.float().sum() for tensor in out if tensor.requires_grad)
    return list(torch.autograd.grad(total, leaves)) if leaves else []


@pytest.mark.parametrize("case", CASES)
def test_kernel_reaches_its_operators(case: str, calls: Any) -> None:
    call, forward, backward = CASES[case]
    host = On("cpu")
    wanted = flat(call(host))
    gradients = differentiate(wanted, host.leaves)
    device = On("npu")
    with calls() as seen:
        found = flat(call(device))
        assert seen == forward
        found_gradients = differentiate(found, device.leaves)
        reached = [name.removesuffix("_v2") for name in seen[len(forward) :]]
    assert reached == backward
    assert looks(found) == looks(wanted)
    assert looks(found_gradients) == looks(gradients) == looks(host.leaves)
    assert {tensor.device.type for tensor in (*found, *found_gradients)} == {"npu"}


def test_every_kernel_has_a_case() -> None:
    assert {case.partition(",")[0].split(" and ")[0] for case in CASES} | {"unpermute", "format_cast"} == set(ALL)


def format_of(tensor: torch.Tensor, torch_npu: Any) -> str:
    return str(torch_npu.get_npu_format(tensor)).rpartition(".")[2]


@pytest.mark.parametrize("shape", [(32, 48), (3, 32, 48)])
def test_the_format_cast_gives_the_blocked_format(shape: tuple[int, ...], calls: Any, real_torch_npu: Any) -> None:
    """On the stand-ins' memory: torch_npu has no shape function for this operator."""
    weight = torch.empty(shape, dtype=BF16, device="npu")
    with calls(fake=False) as seen:
        cast = format_cast(weight)
    assert seen == ["npu_format_cast"]
    assert looks([cast]) == looks([weight])
    assert [format_of(tensor, real_torch_npu) for tensor in (weight, cast)] == ["ND", "FRACTAL_NZ"]


def test_without_its_option_torch_npu_casts_nothing(real_torch_npu: Any) -> None:
    """Why the kernel sets the option; and that the kernel leaves it as it was."""
    weight = torch.empty(32, 48, dtype=BF16, device="npu")
    assert format_of(format_cast(weight), real_torch_npu) == "FRACTAL_NZ"
    assert format_of(real_torch_npu.npu_format_cast(weight, 29), real_torch_npu) == "ND"


def test_the_incremental_operator_is_an_implementation_by_name(calls: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RLFLOW_KERNELS", "infer_attention=npu_incremental")
    for case, operator in (
        ("infer_attention, step", "npu_incre_flash_attention"),
        ("infer_attention, step in blocks", "npu_incre_flash_attention"),
        ("infer_attention, prompt", "npu_fused_infer_attention_score"),
    ):
        with calls() as seen:
            CASES[case][0](On("npu"))
        assert seen == [operator]


def test_torch_can_be_chosen_instead(calls: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RLFLOW_KERNELS", "all=torch")
    with calls() as seen:
        CASES["rms_norm"][0](On("npu"))
    assert seen == []
