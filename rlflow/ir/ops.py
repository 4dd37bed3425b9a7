"""The closed set of operations that the stages of a flow perform.

Every op is a frozen dataclass with typed fields and a `kind`; the plan file stores exactly these. Sizes carry their
unit in the field's doc: `prompts`, `samples`, `tokens`. Times are integer microseconds. Inputs are not fields: they are
data edges, by port. What a flow declares is in `sources.py`, what a train stage minimises in `losses.py`; both can be
imported from here.
"""

from __future__ import annotations

from typing import Any, ClassVar, Literal, get_args

from rlflow.ir.losses import (
    CORRECTIONS,
    LOSSES,
    AdamW,
    Behaviour,
    Cispo,
    Correction,
    Distill,
    Dpo,
    Entropy,
    Gspo,
    Kl,
    LossTerm,
    Nll,
    PpoClip,
    Reinforce,
    TruncatedIs,
    ValueClip,
)
from rlflow.ir.sources import (
    DatasetScorer,
    DataSource,
    EnvironmentSource,
    FileData,
    FrozenModel,
    GymData,
    HfModel,
    Lora,
    ModelSource,
    PresetModel,
    PythonEnvironment,
    PythonReward,
    RewardModel,
    RewardSource,
    TinyModel,
    ValueModel,
)
from rlflow.values import dataclass

__all__ = [
    "CORRECTIONS",
    "LOSSES",
    "OPS",
    "AdamW",
    "Behaviour",
    "BestOf",
    "BestWorst",
    "Cispo",
    "Combine",
    "Correction",
    "DataSource",
    "DatasetScorer",
    "Distill",
    "Dpo",
    "Entropy",
    "EnvironmentSource",
    "FieldOf",
    "FileData",
    "FrozenModel",
    "Gae",
    "Generate",
    "GroupNormalize",
    "Gspo",
    "GymData",
    "HfModel",
    "Join",
    "Kl",
    "KlReward",
    "Logprobs",
    "Lora",
    "LossTerm",
    "MixedGroups",
    "ModelScore",
    "ModelSource",
    "Nll",
    "Op",
    "Overlong",
    "PpoClip",
    "PresetModel",
    "PythonEnvironment",
    "PythonReward",
    "Reinforce",
    "ReinforcePp",
    "Remax",
    "RewardModel",
    "RewardSource",
    "Rloo",
    "Score",
    "Take",
    "TinyModel",
    "Train",
    "TruncatedIs",
    "ValueClip",
    "ValueModel",
    "Values",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Take:
    """The next rows of a data set, in its seeded order."""

    __pydantic_config__: ClassVar[Any] = {"extra": "forbid"}
    data: str
    count: int | None
    """prompts; None = every row once, in file order (evaluation)"""
    kind: Literal["take"] = "take"


@dataclass(frozen=True, slots=True, kw_only=True)
class Generate:
    """Sample `n` responses for every prompt. Adds response_ids, logprobs, text, truncated, version."""

    __pydantic_config__: ClassVar[Any] = {"extra": "forbid"}
    model: str
    n: int
    """samples per prompt"""
    max_new: int
    """tokens"""
    temperature: float = 1.0
    """0 = greedy"""
    top_p: float = 1.0
    top_k: int = 0
    """0 = all"""
    environment: str | None = None
    """Multi-turn: after every turn of the model the environment answers, up to `turns` turns. Adds `mask`, which is 0
    on the environment's tokens; `max_new` bounds all tokens after the prompt."""
    turns: int = 1
    mean_new: int | None = None
    """tokens; what estimates take for the mean of a response. None = not said."""
    part: tuple[int, int] | None = None
    """Of the prompts that it reads, those from the first number (from 0) up to the second, without it; None = all.
    Set by the compiler where several pools sample for one stage."""
    kind: Literal["generate"] = "generate"


@dataclass(frozen=True, slots=True, kw_only=True)
class Join:
    """The rows of several stages, one stage after the other. Ports: r0, r1, ... Set by the compiler."""

    __pydantic_config__: ClassVar[Any] = {"extra": "forbid"}
    kind: Literal["join"] = "join"


@dataclass(frozen=True, slots=True, kw_only=True)
class Logprobs:
    """Log-probability of every response token under a model."""

    __pydantic_config__: ClassVar[Any] = {"extra": "forbid"}
    model: str
    temperature: float
    kind: Literal["logprobs"] = "logprobs"


@dataclass(frozen=True, slots=True, kw_only=True)
class Score:
    """One reward per sample."""

    __pydantic_config__: ClassVar[Any] = {"extra": "forbid"}
    reward: str
    kind: Literal["score"] = "score"


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupNormalize:
    """Reward minus its group's mean, over the group's standard deviation (GRPO, arXiv 2402.03300 section 4.1)."""

    __pydantic_config__: ClassVar[Any] = {"extra": "forbid"}
    std: bool = True
    """False: subtract the mean only (Dr. GRPO, arXiv 2503.20783)"""
    epsilon: float = 1e-6
    kind: Literal["group_normalize"] = "group_normalize"


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelScore:
    """One reward per sample from a reward model. Port: samples."""

    __pydantic_config__: ClassVar[Any] = {"extra": "forbid"}
    model: str
    kind: Literal["model_score"] = "model_score"


@dataclass(frozen=True, slots=True, kw_only=True)
class Values:
    """A value model's estimate before every response token. Port: samples."""

    __pydantic_config__: ClassVar[Any] = {"extra": "forbid"}
    model: str
    kind: Literal["values"] = "values"


@dataclass(frozen=True, slots=True, kw_only=True)
class Combine:
    """Weighted sum of columns of one kind plus a constant. Ports: c0, c1, ..., in the order of `weights`."""

    __pydantic_config__: ClassVar[Any] = {"extra": "forbid"}
    weights: tuple[float, ...]
    constant: float = 0.0
    kind: Literal["combine"] = "combine"


@dataclass(frozen=True, slots=True, kw_only=True)
class FieldOf:
    """A column that rows carry, by name. Port: rows."""

    __pydantic_config__: ClassVar[Any] = {"extra": "forbid"}
    field: str
    kind: Literal["field"] = "field"


@dataclass(frozen=True, slots=True, kw_only=True)
class Rloo:
    """Reward minus the mean of the other samples of its group (arXiv 2402.14740). Port: scores."""

    __pydantic_config__: ClassVar[Any] = {"extra": "forbid"}
    kind: Literal["rloo"] = "rloo"


@dataclass(frozen=True, slots=True, kw_only=True)
class ReinforcePp:
    """REINFORCE++ (arXiv 2501.03262): rewards whitened over the whole batch. Port: scores.

    With `baseline`, the group's mean is taken off first.
    """

    __pydantic_config__: ClassVar[Any] = {"extra": "forbid"}
    baseline: bool = False
    kind: Literal["reinforce_pp"] = "reinforce_pp"


@dataclass(frozen=True, slots=True, kw_only=True)
class Remax:
    """Reward minus the reward of the prompt's greedy response (arXiv 2310.10505). Ports: scores, baseline."""

    __pydantic_config__: ClassVar[Any] = {"extra": "forbid"}
    kind: Literal["remax"] = "remax"


@dataclass(frozen=True, slots=True, kw_only=True)
class KlReward:
    """Per-token reward: minus `weight` times the KL estimate k1, and the score at the last token.

    Ports: scores, samples (whose log-probabilities are the policy's), reference.
    """

    __pydantic_config__: ClassVar[Any] = {"extra": "forbid"}
    weight: float
    also_in_loss: bool = False
    """Whether the loss may have a KL term as well."""
    kind: Literal["kl_reward"] = "kl_reward"


@dataclass(frozen=True, slots=True, kw_only=True)
class Gae:
    """Generalised advantage estimation (arXiv 1506.02438). Ports: rewards (per row or per token), values.

    `output` chooses the advantages (whitened over the batch when `whiten`) or the returns.
    """

    __pydantic_config__: ClassVar[Any] = {"extra": "forbid"}
    gamma: float = 1.0
    lam: float = 0.95
    whiten: bool = True
    output: Literal["advantages", "returns"] = "advantages"
    kind: Literal["gae"] = "gae"


@dataclass(frozen=True, slots=True, kw_only=True)
class Overlong:
    """DAPO's soft length penalty (arXiv 2503.14476). Port: samples.

    0 up to limit - buffer tokens, falling to -1 at the limit.
    """

    __pydantic_config__: ClassVar[Any] = {"extra": "forbid"}
    limit: int
    """tokens"""
    buffer: int
    """tokens"""
    kind: Literal["overlong"] = "overlong"


@dataclass(frozen=True, slots=True, kw_only=True)
class BestOf:
    """The `keep` best samples of every prompt, with their `score`. Ports: samples, scores."""

    __pydantic_config__: ClassVar[Any] = {"extra": "forbid"}
    keep: int = 1
    at_least: float | None = None
    """Samples that score less are left out."""
    kind: Literal["best_of"] = "best_of"


@dataclass(frozen=True, slots=True, kw_only=True)
class BestWorst:
    """Of every prompt its best and its worst sample, in this order; prompts with equal scores are left out.

    Ports: samples, scores. Adds `score`.
    """

    __pydantic_config__: ClassVar[Any] = {"extra": "forbid"}
    kind: Literal["best_worst"] = "best_worst"


@dataclass(frozen=True, slots=True, kw_only=True)
class MixedGroups:
    """Groups whose samples do not all score the same, with their `score` (dynamic sampling, arXiv 2503.14476).

    Ports: samples, scores. While fewer prompts than the step takes are left, the stages from `take` on run again with
    the next prompts, `refill` times at most; surplus groups are dropped and counted.
    """

    __pydantic_config__: ClassVar[Any] = {"extra": "forbid"}
    refill: int = 0
    on_short: Literal["error", "train"] = "error"
    """What to do when the groups are still too few."""
    kind: Literal["mixed_groups"] = "mixed_groups"


@dataclass(frozen=True, slots=True, kw_only=True)
class Train:
    """Optimizer updates of one model on one batch of samples."""

    __pydantic_config__: ClassVar[Any] = {"extra": "forbid"}
    model: str
    loss: tuple[LossTerm, ...]
    optimizer: AdamW
    minibatch: int
    """samples per optimizer update; 0 = the whole batch (set by the frontend to the batch size)"""
    microbatch_tokens: int = 16384
    """Padded tokens of one forward and backward; bounds activation memory, never changes the result's meaning."""
    epochs: int = 1
    aggregate: Literal["token_mean", "seq_mean_token_mean", "seq_mean_token_sum", "token_sum"] = "token_mean"
    """token_sum divides by samples times `horizon` (Dr. GRPO)."""
    horizon: int = 0
    """tokens; for token_sum: the generate stage's max_new"""
    max_grad_norm: float = 1.0
    """0 = no clipping"""
    temperature: float = 1.0
    """The sampling temperature, so that the ratio starts at 1; set by the compiler from the samples' stage."""
    correction: Correction | None = None
    """How samples of an older version are accounted for; set by the compiler where the schedule lets them be older."""
    kind: Literal["train"] = "train"


Op = (
    Take
    | Generate
    | Join
    | Logprobs
    | Score
    | ModelScore
    | Values
    | Combine
    | FieldOf
    | GroupNormalize
    | Rloo
    | ReinforcePp
    | Remax
    | KlReward
    | Gae
    | Overlong
    | BestOf
    | BestWorst
    | MixedGroups
    | Train
)

OPS: dict[str, type[Op]] = {op.__dataclass_fields__["kind"].default: op for op in get_args(Op)}
