"""The kernels under transformers' models: Llama, Qwen2, Qwen3, Qwen3-MoE, DeepSeek-V3.

Attention and experts go through the registries that transformers has for them (`AttentionInterface`,
`ExpertsInterface`). Norms, MLPs, routers, rotary positions and decoder layers have none that works without another
package: their modules get a subclass of their own class that overrides `forward`, in place, as torch's `fully_shard`
and `parametrize` do it. Parameters, names of the state dict, hooks and gradient checkpointing stay what they were.
"""

from __future__ import annotations

from collections import Counter
from typing import Any, Final

import torch
from torch import nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations.moe import ExpertsInterface
from transformers.masking_utils import sdpa_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from rlflow.backends.ray_runtime.kernels.kernel import Checker
from rlflow.backends.ray_runtime.kernels.rotary import halves
from rlflow.backends.ray_runtime.kernels.table import (
    add_rms_norm,
    attention,
    gating,
    grouped_matmul,
    infer_attention,
    rms_norm,
    rotary,
    route,
    swiglu,
    unpermute,
)

NAME: Final = "rlflow_kernels"
"""What a model's config calls these implementations."""
_HALF: Final = (torch.float16, torch.bfloat16)


def serve(model: PreTrainedModel) -> dict[str, int]:
    """Put the kernels under a model, in place and once; returns how many modules of each class are served.

    What the kernels cannot compute (an MLP that is not gated by silu, experts with biases) is left as it is.
    """
    _activate(model)
    served: Counter[str] = Counter()
    for module in model.modules():
        kind = type(module)
        if issubclass(kind, _Served):
            served[kind.__name__.removeprefix("Served")] += 1
            continue
        mixin = _MIXINS.get(kind.__name__) if kind.__module__.startswith("transformers.models.") else None
        if mixin is not None and mixin.fits(module):
            module.__class__ = _subclass(kind, mixin)
            served[kind.__name__] += 1
    return dict(served)


def _activate(model: PreTrainedModel) -> None:
    """The registries' part. Experts stay as they are where one of them has parts that these kernels have not."""
    model.set_attn_implementation(NAME)
    experts = [module for module in model.modules() if hasattr(module, "_is_expert_parallel")]
    if experts and all(_can_serve_experts(module) for module in experts):
        model.set_experts_implementation(NAME)


_subclasses: dict[tuple[type, type], type] = {}


def _subclass(kind: type, mixin: type) -> type:
    key = (kind, mixin)
    if key not in _subclasses:
        _subclasses[key] = type(f"Served{kind.__name__}", (mixin, kind), {"__module__": __name__})
    return _subclasses[key]


# --- attention -------------------------------------------------------------------------------------------------------


def _mask(*, attention_mask: torch.Tensor | None = None, allow_is_causal_skip: bool = True, **rest: Any) -> Any:
    """As transformers' own, True = seen; None where the plain triangle is meant. It reads no values, which would wait
    for the device: a padding mask without padding is a mask all the same."""
    window = rest.get("local_size")
    plain = rest["q_offset"] + rest["q_length"] == rest["kv_offset"] + rest["kv_length"]
    if allow_is_causal_skip and attention_mask is None and plain and (window is None or rest["kv_length"] <= window):
        return None
    return sdpa_mask(attention_mask=attention_mask, allow_is_causal_skip=False, **rest)


def _attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """Query [batch, heads, length, size], key and value with fewer heads; returns [batch, length, heads, size]."""
    Checker(attention.name, "").that(not dropout, f"dropout is {dropout:g}, and there is none", "call model.eval()")
    # Autocast reaches linear layers, not these operators: what went through no linear layer is still wide.
    query, key = query.to(value.dtype), key.to(value.dtype)
    hidden = None if attention_mask is None else _hidden(attention_mask)
    settings: dict[str, Any] = {
        "scale": query.shape[-1] ** -0.5 if scaling is None else scaling,
        "mask": hidden,
        "causal": hidden is None and getattr(module, "is_causal", True),
    }
    trained = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in (query, key, value))
    wide = query.device.type == "npu" and value.dtype not in _HALF  # the operator for inference has 16 bits only
    out = (
        attention(query, key, value, **settings) if trained or wide else infer_attention(query, key, value, **settings)
    )
    return out.transpose(1, 2), None


def _hidden(mask: torch.Tensor) -> torch.Tensor:
    """transformers' mask, boolean (True = seen) or to be added (0 = seen), as the kernels read it."""
    return ~mask if mask.dtype == torch.bool else mask != 0


AttentionInterface.register(NAME, _attention)
AttentionMaskInterface.register(NAME, _mask)


# --- experts ---------------------------------------------------------------------------------------------------------


def _can_serve_experts(module: Any) -> bool:
    return (
        module.has_gate
        and module.is_concatenated
        and not (module.has_bias or module.has_post_expert_norm or module._is_expert_parallel)
        and module.config.hidden_act == "silu"
    )


def _experts(module: Any, tokens: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """tokens [tokens, size], chosen and weights [tokens, k]; the weighted sums of the experts' outputs, like tokens."""
    rows, order, counts = route(tokens, chosen, module.num_experts)
    up, down = module.gate_up_proj, module.down_proj
    if not module.is_transposed:
        up, down = up.transpose(1, 2), down.transpose(1, 2)
    rows = grouped_matmul(rows, up.to(rows.dtype), counts)
    rows = grouped_matmul(swiglu(rows), down.to(rows.dtype), counts)
    return unpermute(rows, order, weights.to(rows.dtype))


ExpertsInterface.register(NAME, _experts)


# --- modules ---------------------------------------------------------------------------------------------------------


class _Served:
    """Base of the overriding classes."""

    @staticmethod
    def fits(module: Any) -> bool:
        """Whether this module is one that the kernels compute."""
        return True


class _Norm(_Served):
    def forward(self: Any, hidden_states: torch.Tensor) -> torch.Tensor:
        return rms_norm(hidden_states, self.weight, self.variance_epsilon)


class _Mlp(_Served):
    @staticmethod
    def fits(module: Any) -> bool:
        return bool(module.config.hidden_act == "silu")

    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        both = torch.cat((self.gate_proj(x), self.up_proj(x)), -1)
        out: torch.Tensor = self.down_proj(swiglu(both))
        return out


class _SoftmaxRouter(_Served):
    def forward(self: Any, hidden_states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        logits = nn.functional.linear(hidden_states.reshape(-1, self.hidden_dim), self.weight)
        weights, experts = gating(logits, self.top_k, renormalize=self.norm_topk_prob)
        return logits, weights, experts


class _SigmoidRouter(_Served):
    def forward(self: Any, hidden_states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        logits = nn.functional.linear(hidden_states.reshape(-1, self.hidden_dim).float(), self.weight.float())
        weights, experts = gating(
            logits,
            self.top_k,
            score="sigmoid",
            renormalize=self.norm_topk_prob,
            groups=self.num_group,
            kept_groups=self.topk_group,
            bias=self.e_score_correction_bias,
            scale=self.routed_scaling_factor,
        )
        return logits, weights, experts


def _rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """x [batch, heads, length, size]; cos and sin [batch or 1, length, size]."""
    return rotary(x, cos.to(x.dtype)[:, None], sin.to(x.dtype)[:, None])


def _attend(module: Any, query: Any, key: Any, value: Any, mask: torch.Tensor | None, options: Any) -> torch.Tensor:
    """The model's attention function and its output projection, [batch, length, hidden]."""
    function = ALL_ATTENTION_FUNCTIONS[module.config._attn_implementation]
    dropout = module.attention_dropout if module.training else 0.0
    options = {"sliding_window": getattr(module, "sliding_window", None), **options}
    out, _ = function(module, query, key, value, mask, dropout=dropout, scaling=module.scaling, **options)
    projected: torch.Tensor = module.o_proj(out.flatten(2))
    return projected


class _Attention(_Served):
    """Llama, Qwen2 and the Qwen3 ones, which norm queries and keys."""

    def forward(
        self: Any,
        hidden_states: torch.Tensor,
        position_embeddings: tuple[torch.Tensor, torch.Tensor],
        attention_mask: torch.Tensor | None = None,
        past_key_values: Any = None,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, None]:
        split = (*hidden_states.shape[:-1], -1, self.head_dim)
        query, key, value = (p(hidden_states).view(split) for p in (self.q_proj, self.k_proj, self.v_proj))
        if hasattr(self, "q_norm"):
            query, key = self.q_norm(query), self.k_norm(key)
        query, key = (_rotate(x.transpose(1, 2), *position_embeddings) for x in (query, key))
        value = value.transpose(1, 2)
        if past_key_values is not None:
            key, value = past_key_values.update(key, value, self.layer_idx)
        return _attend(self, query, key, value, attention_mask, kwargs), None


class _LatentAttention(_Served):
    """DeepSeek-V3: keys and values from one small latent, which is what the cache holds."""

    def forward(
        self: Any,
        hidden_states: torch.Tensor,
        position_embeddings: tuple[torch.Tensor, torch.Tensor],
        attention_mask: torch.Tensor | None = None,
        past_key_values: Any = None,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, None]:
        batch, length = hidden_states.shape[:-1]
        plain, turned = self.qk_nope_head_dim, self.qk_rope_head_dim
        if self.q_lora_rank is None:
            query = self.q_proj(hidden_states)
        else:
            query = self.q_b_proj(self.q_a_layernorm(self.q_a_proj(hidden_states)))
        query = query.view(batch, length, -1, self.qk_head_dim).transpose(1, 2)
        query, query_turned = query.split([plain, turned], -1)
        latent, key_turned = self.kv_a_proj_with_mqa(hidden_states).split([self.kv_lora_rank, turned], -1)
        latent = self.kv_a_layernorm(latent).unsqueeze(1)
        key_turned = key_turned.unsqueeze(1)
        if self.config.rope_interleave:
            query_turned, key_turned = halves(query_turned), halves(key_turned)
        query_turned, key_turned = (_rotate(x, *position_embeddings) for x in (query_turned, key_turned))
        if past_key_values is not None:
            latent, key_turned = past_key_values.update(latent, key_turned, self.layer_idx)
        key, value = self.expand_kv(latent, key_turned)
        query = torch.cat((query, query_turned), -1)
        return _attend(self, query, key, value, attention_mask, kwargs), None


class _Layer(_Served):
    """Without gradients the residual's addition and the norm after it are one operation."""

    def forward(self: Any, hidden_states: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        mixed, _ = self.self_attn(hidden_states=self.input_layernorm(hidden_states), **kwargs)
        norm = self.post_attention_layernorm
        if not torch.is_grad_enabled() and mixed.dtype == hidden_states.dtype == norm.weight.dtype:
            normed, hidden_states = add_rms_norm(hidden_states, mixed, norm.weight, norm.variance_epsilon)
        else:
            hidden_states = hidden_states + mixed
            normed = norm(hidden_states)
        return hidden_states + self.mlp(normed)


_DENSE: Final = ("Llama", "Qwen2", "Qwen3", "Qwen3Moe")
_FAMILIES: Final = (*_DENSE, "DeepseekV3")
_MIXINS: Final[dict[str, type[_Served]]] = {
    **{f"{family}RMSNorm": _Norm for family in _FAMILIES},
    **{f"{family}MLP": _Mlp for family in _FAMILIES},
    **{f"{family}DecoderLayer": _Layer for family in _FAMILIES},
    **{f"{family}Attention": _Attention for family in _DENSE},
    "DeepseekV3Attention": _LatentAttention,
    "Qwen3MoeTopKRouter": _SoftmaxRouter,
    "DeepseekV3TopkRouter": _SigmoidRouter,
}
"""By the name of transformers' class."""
