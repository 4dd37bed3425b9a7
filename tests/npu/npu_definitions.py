"""What torch_npu's own operators mean, for the software NPU: rlflow's references where there is one, else torch.

Functions take CPU tensors under the names of the operators' schemas. Backward operators differentiate the forward's
definition once more.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
import torch.nn.functional as F

from rlflow.backends.ray_runtime.kernels import adamw as adamw_file
from rlflow.backends.ray_runtime.kernels import attention as attention_file
from rlflow.backends.ray_runtime.kernels import gating as gating_file
from rlflow.backends.ray_runtime.kernels import grouped_matmul as grouped_matmul_file
from rlflow.backends.ray_runtime.kernels import rms_norm as rms_norm_file
from rlflow.backends.ray_runtime.kernels import rotary as rotary_file
from rlflow.backends.ray_runtime.kernels import routing as routing_file
from rlflow.backends.ray_runtime.kernels import swiglu as swiglu_file

T = torch.Tensor

_threads = ThreadPoolExecutor(1)


def differentiated(function: Callable[..., T], grad: T, *inputs: T) -> tuple[T, ...]:
    """Gradients of `function(*inputs)`. In another thread, whose dispatcher knows nothing of the backward it is part of."""

    def run() -> tuple[T, ...]:
        with torch.enable_grad():
            leaves = [tensor.detach().requires_grad_() for tensor in inputs]
            return torch.autograd.grad(function(*leaves), leaves, grad.to(grad.dtype))

    return _threads.submit(run).result()


# --- operators of aten that torch_npu defines otherwise ------------------------------------------------------------------


def matmul_backward(grad: T, self: T, other: T, mask: list[bool]) -> tuple[T, T]:
    return differentiated(torch.matmul, grad, self, other)  # type: ignore[return-value]


def histc(self: T, bins: int = 100, min: float = 0, max: float = 0) -> T:
    """Of integers too, which the CPU's kernel does not count."""
    return torch.histc(self.double(), bins, min, max).to(self.dtype)


ATEN: dict[str, Callable[..., Any]] = {"matmul_backward": matmul_backward, "histc": histc}


# --- torch_npu's own -----------------------------------------------------------------------------------------------------


def fusion_attention_of(kwargs: dict[str, Any]) -> Callable[[T, T, T], T]:
    """The forward as a function of query, key and value."""
    layout, mode = kwargs["input_layout"], kwargs.get("sparse_mode", 0)
    assert mode in (0, 3), f"sparse_mode {mode}"
    ends, key_ends = kwargs.get("actual_seq_qlen"), kwargs.get("actual_seq_kvlen")
    scale = kwargs.get("scale", kwargs.get("scale_value", 1.0))
    settings = {
        "scale": scale,
        "layout": layout,
        "causal": mode == 3,
        "mask": None if mode == 3 else kwargs.get("atten_mask"),
        "ends": None if ends is None else tuple(ends),
        "key_ends": None if key_ends is None else tuple(key_ends),
    }
    return lambda q, k, v: attention_file.reference(q, k, v, **settings)


def npu_fusion_attention(query: T, key: T, value: T, **kwargs: Any) -> tuple[Any, ...]:
    out = fusion_attention_of(kwargs)(query, key, value)
    nothing = torch.empty(0)
    return out, nothing, nothing, torch.empty(0, dtype=query.dtype), 0, 0, 0


def npu_fusion_attention_grad(query: T, key: T, value: T, dy: T, **kwargs: Any) -> tuple[Any, ...]:
    grads = differentiated(fusion_attention_of(kwargs), dy, query, key, value)
    return *grads, torch.empty(0, dtype=query.dtype), torch.empty(0)


def npu_fused_infer_attention_score(query: T, key: T, value: T, **kwargs: Any) -> tuple[T, T]:
    from rlflow.backends.ray_runtime.kernels import infer_attention as file

    assert kwargs["input_layout"] == "BNSD"
    mode, blocks, lengths = kwargs.get("sparse_mode", 0), kwargs.get("block_table"), kwargs.get("actual_seq_lengths_kv")
    if blocks is not None:
        shape = (*key.shape[:2], kwargs["num_key_value_heads"], -1)
        key, value = key.view(shape), value.view(shape)
    out = file.reference(
        query,
        key,
        value,
        scale=kwargs["scale"],
        causal=mode == 3,
        mask=None if mode == 3 else kwargs.get("atten_mask"),
        lengths=None if lengths is None else tuple(lengths),
        blocks=blocks,
    )
    return out, torch.empty(0)


def npu_rms_norm(input: T, gamma: T, epsilon: float = 1e-6) -> tuple[T, T]:
    wide = input.float()
    return rms_norm_file.reference(input, gamma, epsilon), torch.rsqrt(wide.square().mean(-1, keepdim=True) + epsilon)


def npu_rms_norm_backward(dy: T, input: T, gamma: T, rstd: T) -> tuple[T, T]:
    """With the forward's own rstd: x_hat = x rstd, dx = rstd (g dy - x_hat mean(g dy x_hat))."""
    x, weighted = input.float(), dy.float() * gamma.float()
    hat = x * rstd
    dx = rstd * (weighted - hat * (weighted * hat).mean(-1, keepdim=True))
    return dx.to(input.dtype), (dy.float() * hat).flatten(0, -2).sum(0)


def npu_add_rms_norm(x1: T, x2: T, gamma: T, epsilon: float = 1e-6) -> tuple[T, T, T]:
    total = x1 + x2
    return *npu_rms_norm(total, gamma, epsilon), total


def npu_rotary_mul(input: T, r1: T, r2: T, rotary_mode: str = "half", rotate: Any = None) -> T:
    assert rotary_mode == "half"
    return rotary_file.reference(input, r1, r2)


def npu_rotary_mul_backward(grad: T, input: T, r1: T, r2: T, rotary_mode: str = "half") -> tuple[T, T, T]:
    return differentiated(rotary_file.reference, grad, input, r1, r2)  # type: ignore[return-value]


def npu_swiglu(input: T, dim: int = -1) -> T:
    return swiglu_file.reference(input)


def npu_swiglu_backward(grad_output: T, input: T, dim: int = -1) -> T:
    return differentiated(swiglu_file.reference, grad_output, input)[0]


def npu_grouped_matmul(x: list[T], weight: list[T], *, group_list: T, group_type: int, **kwargs: Any) -> list[T]:
    assert kwargs["group_list_type"] == 1
    if group_type == 0:
        return [grouped_matmul_file.reference(x[0], weight[0], group_list)]
    counts = group_list.tolist()
    parts = zip(x[0].split(counts, 1), weight[0].split(counts), strict=True)
    return [torch.stack([a @ b for a, b in parts])]


def npu_moe_token_permute(tokens: T, indices: T, **kwargs: Any) -> tuple[T, T]:
    rows, order, _ = routing_file.reference(tokens, indices, int(indices.max()) + 1)
    return rows, order


def npu_moe_token_permute_grad_v2(
    grad_permuted_tokens: T, sorted_indices: T, tokens_size_0: int, tokens_dtype: Any, num_topK: int, **kwargs: Any
) -> T:
    return grad_permuted_tokens[sorted_indices.long()].unflatten(0, (tokens_size_0, num_topK)).sum(1)


def npu_moe_token_permute_grad(tokens: T, grad_permuted_tokens: T, indices: T, sorted_indices: T, **kwargs: Any) -> T:
    return npu_moe_token_permute_grad_v2(grad_permuted_tokens, sorted_indices, len(tokens), None, indices.shape[1])


def npu_moe_token_unpermute(permuted_tokens: T, sorted_indices: T, probs: T, **kwargs: Any) -> T:
    return routing_file.unpermute_reference(permuted_tokens, sorted_indices, probs)


def _npu_moe_token_unpermute(permuted_tokens: T, sorted_indices: T, probs: T, **kwargs: Any) -> tuple[T, T]:
    return npu_moe_token_unpermute(permuted_tokens, sorted_indices, probs), permuted_tokens.clone()


def npu_moe_token_unpermute_grad(
    permuted_tokens: T, grad_unpermuted_tokens: T, sorted_indices: T, probs: T, **kwargs: Any
) -> tuple[T, T]:
    def forward(rows: T, weights: T) -> T:
        return routing_file.unpermute_reference(rows, sorted_indices, weights)

    return differentiated(forward, grad_unpermuted_tokens, permuted_tokens, probs)  # type: ignore[return-value]


def npu_moe_token_unpermute_grad_v2(
    grad_unpermuted_tokens: T, sorted_indices: T, permuted_tokens_size_0: int, permuted_tokens_dtype: Any, probs: T,
    padded_mode: bool = False, restore_shape: Any = None, permuted_tokens: Any = None,
) -> tuple[T, T]:  # fmt: skip
    return npu_moe_token_unpermute_grad(permuted_tokens, grad_unpermuted_tokens, sorted_indices, probs)


def npu_moe_init_routing_v2(x: T, expert_idx: T, **kwargs: Any) -> tuple[T, T, T, T]:
    assert kwargs["expert_tokens_num_type"] == 1
    assert kwargs["active_expert_range"] == [0, kwargs["expert_num"]]
    return *routing_file.reference(x, expert_idx, kwargs["expert_num"]), torch.empty(0)


def npu_moe_gating_top_k_softmax(x: T, finished: Any = None, k: int = 1) -> tuple[T, T, T]:
    weights, experts = gating_file.reference(x, k, renormalize=False)
    return weights, experts.int(), experts.int()


def npu_moe_gating_top_k(x: T, k: int, **kwargs: Any) -> tuple[T, T, T]:
    assert (kwargs["norm_type"], kwargs["renorm"], kwargs["group_select_mode"]) == (1, 0, 1)
    weights, experts = gating_file.reference(
        x,
        k,
        score="sigmoid",
        groups=kwargs["group_count"],
        kept_groups=kwargs["k_group"],
        bias=kwargs["bias"],
        scale=kwargs["routed_scaling_factor"],
    )
    return weights, experts.int(), torch.empty(0)


def npu_apply_adam_w_out(
    beta1_power: float, beta2_power: float, lr: float, weight_decay: float, beta1: float, beta2: float, epsilon: float,
    grad: T, max_grad_norm: Any, amsgrad: Any, maximize: Any, out: list[T],
) -> tuple[T, T, T]:  # fmt: skip
    """The powers are those before this update: the step is the one whose powers are b^(t-1)."""
    step = 1 if beta1_power == 1 else round(math.log(beta1_power) / math.log(beta1)) + 1
    settings = {"lr": lr, "betas": (beta1, beta2), "epsilon": epsilon, "weight_decay": weight_decay}
    adamw_file.reference(out[0], grad, out[1], out[2], step=step, **settings)
    return out[0], out[1], out[2]


def npu_gather_backward(grad: T, self_size: list[int], dim: int, index: T, sparse_grad: bool) -> T:
    return grad.new_zeros(self_size).scatter_add_(dim, index, grad)


def dtype_cast(input: T, dtype: torch.dtype) -> T:
    return input.to(dtype)


def dtype_cast_backward(grad: T, dtype: torch.dtype) -> T:
    return grad.to(dtype)


def npu_silu(input: T) -> T:
    return F.silu(input)


OWN: dict[str, Callable[..., Any]] = {
    "npu_fusion_attention": npu_fusion_attention,
    "npu_fusion_attention_grad": npu_fusion_attention_grad,
    "npu_fused_infer_attention_score": npu_fused_infer_attention_score,
    "npu_rms_norm": npu_rms_norm,
    "npu_rms_norm_backward": npu_rms_norm_backward,
    "npu_add_rms_norm": npu_add_rms_norm,
    "npu_rotary_mul": npu_rotary_mul,
    "npu_rotary_mul_backward": npu_rotary_mul_backward,
    "npu_swiglu": npu_swiglu,
    "npu_swiglu_backward": npu_swiglu_backward,
    "npu_grouped_matmul": npu_grouped_matmul,
    "npu_moe_token_permute": npu_moe_token_permute,
    "npu_moe_token_permute_grad": npu_moe_token_permute_grad,
    "npu_moe_token_permute_grad_v2": npu_moe_token_permute_grad_v2,
    "npu_moe_token_unpermute": npu_moe_token_unpermute,
    "_npu_moe_token_unpermute": _npu_moe_token_unpermute,
    "npu_moe_token_unpermute_grad": npu_moe_token_unpermute_grad,
    "npu_moe_token_unpermute_grad_v2": npu_moe_token_unpermute_grad_v2,
    "npu_moe_init_routing_v2": npu_moe_init_routing_v2,
    "npu_moe_gating_top_k_softmax": npu_moe_gating_top_k_softmax,
    "npu_moe_gating_top_k": npu_moe_gating_top_k,
    "npu_gather_backward": npu_gather_backward,
    "_npu_dtype_cast": dtype_cast,
    "_npu_dtype_cast_backward": dtype_cast_backward,
    "npu_apply_adam_w.out": npu_apply_adam_w_out,
    "npu_silu": npu_silu,
}


def find(namespace: str, name: str) -> Callable[..., Any] | None:
    return (ATEN if namespace == "aten" else OWN).get(name)
