"""Which experts a token goes to, and with which weights.

`softmax` (Qwen3-MoE): the k largest of softmax(logits). `sigmoid` (DeepSeek-V3, arXiv 2412.19437): scores are
sigmoid(logits); experts lie in groups, a group counts as the sum of its two best scores plus bias, only the best groups
are looked at, and the k best of them by score plus bias are taken with their scores alone as weights.

torch_npu: `npu_moe_gating_top_k_softmax` and `npu_moe_gating_top_k`, which are made for inference. With gradients they
choose the experts, and the weights of the chosen are computed here, in torch, from the logits.
"""

from __future__ import annotations

from typing import Literal

import torch

from rlflow.backends.ray_runtime.kernels.kernel import Checker, Kernel, dtype, shape

Score = Literal["softmax", "sigmoid"]

_MOST_EXPERTS = 2048
_MOST_CHOSEN = 1024
_ALIGNED = 32
_TINY = 1e-20
"""What keeps a sum of weights from being 0, in DeepSeek's own code."""


def reference(
    logits: torch.Tensor,
    k: int,
    *,
    score: Score = "softmax",
    renormalize: bool = True,
    groups: int = 1,
    kept_groups: int = 1,
    bias: torch.Tensor | None = None,
    scale: float = 1.0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """logits [tokens, experts], bias [experts]; returns weights and experts (int64), [tokens, k] each.

    `renormalize`: weights of a token sum to `scale`. Computed in fp32 at least.
    """
    with torch.no_grad():
        ranked = _scores(logits, score)
        if score == "sigmoid":
            ranked = ranked if bias is None else ranked + bias
            if groups > 1:
                grouped = ranked.unflatten(-1, (groups, -1))
                best = grouped.topk(2, -1).values.sum(-1).topk(kept_groups, -1).indices
                hidden = torch.ones(grouped.shape[:2], dtype=torch.bool, device=logits.device).scatter_(1, best, False)
                ranked = grouped.masked_fill(hidden[..., None], float("-inf")).flatten(-2)
        experts = ranked.topk(k, -1).indices
    return _weights(logits, experts, score, renormalize, scale), experts


def npu(
    logits: torch.Tensor,
    k: int,
    *,
    score: Score = "softmax",
    renormalize: bool = True,
    groups: int = 1,
    kept_groups: int = 1,
    bias: torch.Tensor | None = None,
    scale: float = 1.0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """As `reference`."""
    import torch_npu

    trained = torch.is_grad_enabled() and logits.requires_grad
    with torch.no_grad():
        if score == "softmax":
            weights, experts, _ = torch_npu.npu_moe_gating_top_k_softmax(logits.detach(), None, k)
            if renormalize:
                weights = weights / weights.sum(-1, keepdim=True)
            weights = weights * scale if scale != 1.0 else weights
        else:
            weights, experts, _ = torch_npu.npu_moe_gating_top_k(
                logits.detach(),
                k,
                bias=None if bias is None else bias.to(logits.dtype),
                k_group=kept_groups,
                group_count=groups,
                group_select_mode=1,
                renorm=0,
                norm_type=1,
                routed_scaling_factor=scale,
                eps=_TINY,
            )
    experts = experts.long()
    return (_weights(logits, experts, score, renormalize, scale) if trained else weights), experts


def _scores(logits: torch.Tensor, score: Score) -> torch.Tensor:
    wide = logits if logits.dtype == torch.float64 else logits.float()
    return torch.softmax(wide, -1) if score == "softmax" else wide.sigmoid()


def _weights(
    logits: torch.Tensor, experts: torch.Tensor, score: Score, renormalize: bool, scale: float
) -> torch.Tensor:
    """Weights of the chosen experts, with the logits' gradient."""
    weights = _scores(logits, score).gather(1, experts)
    if renormalize:
        weights = weights / (weights.sum(-1, keepdim=True) + _TINY)
    return (weights * scale).to(logits.dtype)


def check(
    checker: Checker,
    logits: torch.Tensor,
    k: int,
    *,
    score: Score = "softmax",
    renormalize: bool = True,
    groups: int = 1,
    kept_groups: int = 1,
    bias: torch.Tensor | None = None,
    scale: float = 1.0,
) -> None:
    """Groups that divide, and a k that the looked-at experts can give."""
    checker.floating("logits", logits)
    checker.dims("logits", logits, 2)
    experts = logits.shape[1]
    checker.that(score in ("softmax", "sigmoid"), f"score is `{score}`, not `softmax` or `sigmoid`")
    checker.that(groups >= 1 and experts % groups == 0, f"{experts} experts do not divide into {groups} groups")
    checker.that(1 <= kept_groups <= groups, f"{kept_groups} of {groups} groups are to be kept")
    open_experts = experts // groups * kept_groups
    checker.that(
        1 <= k <= open_experts, f"{k} experts per token, and {kept_groups} of {groups} groups hold {open_experts}"
    )
    if score == "softmax":
        checker.that(groups == 1 and bias is None, "groups and a bias belong to the score `sigmoid`")
        checker.limit(k <= _MOST_CHOSEN, f"{k} experts per token, and {_MOST_CHOSEN} are the most")
        return
    size = experts // groups
    checker.that(groups == 1 or size >= 2, f"groups of {size} expert: a group counts as its two best")
    if bias is not None:
        checker.that(list(bias.shape) == [experts], f"bias {shape(bias)} for {experts} experts")
        checker.that(bias.dtype.is_floating_point, f"bias is {dtype(bias)}, not a floating type")
    checker.limit(renormalize, "weights of the score `sigmoid` are always renormalised")
    checker.limit(size > 2, f"groups of {size} experts, and 3 are the least")
    aligned = -(-size // _ALIGNED) * _ALIGNED * groups
    checker.limit(
        aligned <= _MOST_EXPERTS,
        f"{groups} groups of {size} experts take {aligned} places of {_ALIGNED} each, most is {_MOST_EXPERTS}",
    )


gating = Kernel("gating", reference=reference, npu=npu, check=check)
