"""Tokens to the rows of their experts (`route`), and the experts' rows back into tokens (`unpermute`).

`order` says where things went: row order[t * k + j] is token t for its j-th expert. Rows of one expert lie together, in
the order of the tokens.

torch_npu: `npu_moe_init_routing_v2` for inference, which counts the tokens of each expert on the way;
`npu_moe_token_permute` and `npu_moe_token_unpermute`, which have derivatives, for training.
"""

from __future__ import annotations

import torch

from rlflow.backends.ray_runtime.kernels.kernel import Checker, Kernel, shape

_MOST_SLOTS = 16_777_215
_MOST_CHOSEN = 512
_MOST_EXPERTS = 10_240


def reference(
    tokens: torch.Tensor, experts: torch.Tensor, count: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """tokens [tokens, size], experts int [tokens, k] below `count`.

    Returns (rows [tokens * k, size], order int32 [tokens * k], counts int64 [count]: rows of each expert).
    """
    flat = experts.reshape(-1)
    source = torch.argsort(flat, stable=True)
    order = torch.empty_like(source)
    order[source] = torch.arange(len(flat), device=flat.device)
    counts = torch.bincount(flat, minlength=count)
    return tokens[source // experts.shape[1]], order.int(), counts


def npu(tokens: torch.Tensor, experts: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """As `reference`."""
    import torch_npu

    if torch.is_grad_enabled() and tokens.requires_grad:
        rows, order = torch_npu.npu_moe_token_permute(tokens, experts.int())
        counts = torch.histc(experts.int(), bins=count, min=0, max=count - 1).long()
        return rows, order, counts
    rows, order, counts, _ = torch_npu.npu_moe_init_routing_v2(
        tokens,
        experts.int(),
        active_num=experts.numel(),
        expert_num=count,
        expert_tokens_num_type=1,  # counts, not their sums
        expert_tokens_num_flag=True,
        active_expert_range=[0, count],
        quant_mode=-1,
        row_idx_type=0,  # by token and choice, as unpermute reads it
    )
    return rows, order, counts


def check(checker: Checker, tokens: torch.Tensor, experts: torch.Tensor, count: int) -> None:
    """One row of experts per token."""
    checker.floating("tokens", tokens)
    checker.dims("tokens", tokens, 2)
    checker.dims("experts", experts, 2)
    checker.integers("experts", experts, torch.int32, torch.int64)
    checker.that(
        len(tokens) == len(experts),
        f"{len(tokens)} tokens {shape(tokens)}, and experts of {len(experts)} {shape(experts)}",
    )
    checker.that(experts.shape[1] <= count, f"{experts.shape[1]} experts per token of {count}")
    checker.limit(count <= _MOST_EXPERTS, f"{count} experts, and {_MOST_EXPERTS} are the most")
    checker.limit(experts.numel() < _MOST_SLOTS, f"{experts.numel()} rows, and {_MOST_SLOTS - 1} are the most")


def unpermute_reference(rows: torch.Tensor, order: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """rows [tokens * k, size], order int32 [tokens * k], weights [tokens, k]; the weighted sums [tokens, size]."""
    chosen = rows[order.long()].unflatten(0, weights.shape)
    return (chosen * weights[..., None]).sum(1).to(rows.dtype)


def unpermute_npu(rows: torch.Tensor, order: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """As `unpermute_reference`."""
    import torch_npu

    tokens: torch.Tensor = torch_npu.npu_moe_token_unpermute(rows, order, weights)
    return tokens


def check_unpermute(checker: Checker, rows: torch.Tensor, order: torch.Tensor, weights: torch.Tensor) -> None:
    """One weight and one place per row."""
    checker.floating("rows", rows)
    checker.floating("weights", weights)
    checker.dims("rows", rows, 2)
    checker.dims("weights", weights, 2)
    checker.integers("order", order, torch.int32)
    checker.that(
        len(rows) == order.numel() == weights.numel(),
        f"{len(rows)} rows, {order.numel()} places and {weights.numel()} weights",
    )
    checker.limit(weights.shape[1] <= _MOST_CHOSEN, f"{weights.shape[1]} experts per token, most is {_MOST_CHOSEN}")


route = Kernel("route", reference=reference, npu=npu, check=check)
unpermute = Kernel("unpermute", reference=unpermute_reference, npu=unpermute_npu, check=check_unpermute)
