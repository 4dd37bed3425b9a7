"""Loss terms and optimizers of a train stage. A loss is a weighted sum of terms."""

from __future__ import annotations

from typing import Any, ClassVar, Literal, get_args

from rlflow.values import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class PpoClip:
    """Clipped policy-gradient surrogate, Schulman et al. 2017 (arXiv 1707.06347) eq. 7, as a loss."""

    __pydantic_config__: ClassVar[Any] = {"extra": "forbid"}
    weight: float
    clip_low: float
    clip_high: float
    dual: float | None = None
    """Bound of the loss at negative advantages, as a multiple (dual clip, arXiv 1912.09729); None = no bound."""
    kind: Literal["ppo_clip"] = "ppo_clip"


@dataclass(frozen=True, slots=True, kw_only=True)
class Kl:
    """KL penalty against the reference, estimators k1, k2, k3 of Schulman 2020."""

    __pydantic_config__: ClassVar[Any] = {"extra": "forbid"}
    weight: float
    estimator: Literal["k1", "k2", "k3"]
    kind: Literal["kl"] = "kl"


@dataclass(frozen=True, slots=True, kw_only=True)
class Entropy:
    """Mean entropy of the policy's next-token distribution; a negative weight rewards entropy."""

    __pydantic_config__: ClassVar[Any] = {"extra": "forbid"}
    weight: float
    kind: Literal["entropy"] = "entropy"


@dataclass(frozen=True, slots=True, kw_only=True)
class Gspo:
    """Clipped policy gradient with the ratio of whole responses, length-normalised (arXiv 2507.18071)."""

    __pydantic_config__: ClassVar[Any] = {"extra": "forbid"}
    weight: float
    clip_low: float
    clip_high: float
    kind: Literal["gspo"] = "gspo"


@dataclass(frozen=True, slots=True, kw_only=True)
class Cispo:
    """Policy gradient weighted with the clipped, detached ratio (arXiv 2506.13585)."""

    __pydantic_config__: ClassVar[Any] = {"extra": "forbid"}
    weight: float
    clip_low: float | None
    """None = no lower bound"""
    clip_high: float
    kind: Literal["cispo"] = "cispo"


@dataclass(frozen=True, slots=True, kw_only=True)
class Reinforce:
    """Plain policy gradient: minus advantage times log-probability (Williams 1992)."""

    __pydantic_config__: ClassVar[Any] = {"extra": "forbid"}
    weight: float
    kind: Literal["reinforce"] = "reinforce"


@dataclass(frozen=True, slots=True, kw_only=True)
class ValueClip:
    """Squared error of a value model against returns, clipped around its old values (PPO)."""

    __pydantic_config__: ClassVar[Any] = {"extra": "forbid"}
    weight: float
    clip: float | None
    """None = no clipping"""
    kind: Literal["value_clip"] = "value_clip"


@dataclass(frozen=True, slots=True, kw_only=True)
class Nll:
    """Negative log-likelihood of the responses: supervised fine-tuning on chosen samples."""

    __pydantic_config__: ClassVar[Any] = {"extra": "forbid"}
    weight: float
    kind: Literal["nll"] = "nll"


@dataclass(frozen=True, slots=True, kw_only=True)
class Dpo:
    """Direct preference optimisation on pairs of a chosen and a rejected response (arXiv 2305.18290 eq. 7)."""

    __pydantic_config__: ClassVar[Any] = {"extra": "forbid"}
    weight: float
    beta: float
    label_smoothing: float = 0.0
    kind: Literal["dpo"] = "dpo"


@dataclass(frozen=True, slots=True, kw_only=True)
class Distill:
    """On-policy distillation (arXiv 2306.08543): reverse KL to the teacher on sampled tokens, as a policy gradient."""

    __pydantic_config__: ClassVar[Any] = {"extra": "forbid"}
    weight: float
    kind: Literal["distill"] = "distill"


LossTerm = PpoClip | Gspo | Cispo | Reinforce | Kl | Entropy | ValueClip | Nll | Dpo | Distill


@dataclass(frozen=True, slots=True, kw_only=True)
class TruncatedIs:
    """Truncated importance sampling (Ionides 2008; IMPALA, arXiv 1802.01561): the loss of a token is weighted with
    min(old / behaviour, cap), old = the policy that learning starts from, behaviour = the one that sampled. The ratio
    of the loss itself stays current / old, as in decoupled PPO (arXiv 2110.00641)."""

    __pydantic_config__: ClassVar[Any] = {"extra": "forbid"}
    cap: float | None = 2.0
    """None = not truncated"""
    level: Literal["token", "sequence", "sequence_mean"] = "token"
    """What one weight belongs to: a token; a response, by the product of its ratios, or by their geometric mean."""
    outside: Literal["truncate", "mask"] = "truncate"
    """Above the cap: bounded by it, or weight 0."""
    kind: Literal["truncated_is"] = "truncated_is"


@dataclass(frozen=True, slots=True, kw_only=True)
class Behaviour:
    """The ratio of the loss is current / behaviour: clipped around the policy that sampled (PPO as written)."""

    __pydantic_config__: ClassVar[Any] = {"extra": "forbid"}
    kind: Literal["behaviour"] = "behaviour"


Correction = TruncatedIs | Behaviour
"""How a loss accounts for samples of an older version."""

RATIO_TERMS: tuple[str, ...] = ("ppo_clip", "gspo", "cispo")
"""Kinds of terms with an importance ratio."""
POLICY_TERMS: tuple[str, ...] = (*RATIO_TERMS, "reinforce", "distill")
"""Kinds of terms that assume samples of the policy that is trained."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AdamW:
    """AdamW (Loshchilov & Hutter, arXiv 1711.05101)."""

    __pydantic_config__: ClassVar[Any] = {"extra": "forbid"}
    lr: float
    beta1: float = 0.9
    beta2: float = 0.999
    epsilon: float = 1e-8
    weight_decay: float = 0.0
    warmup: int = 0
    """Optimizer updates over which the rate rises linearly from lr/warmup to lr."""
    kind: Literal["adamw"] = "adamw"


CORRECTIONS: dict[str, type[Correction]] = {t.__dataclass_fields__["kind"].default: t for t in get_args(Correction)}
LOSSES: dict[str, type[LossTerm]] = {t.__dataclass_fields__["kind"].default: t for t in get_args(LossTerm)}

NEEDS: dict[str, tuple[str, ...]] = {
    "ppo_clip": ("advantages",),
    "gspo": ("advantages",),
    "cispo": ("advantages",),
    "reinforce": ("advantages",),
    "kl": ("reference",),
    "dpo": ("reference",),
    "distill": ("teacher",),
    "value_clip": ("returns", "values"),
    "nll": (),
    "entropy": (),
}
"""Kind of a term to the inputs of `train` that it reads, beside the samples."""
