"""The closed set of operations a flow is made of, and what they refer to.

Every op is a frozen dataclass with typed fields and a `kind`; the plan file stores exactly these. Sizes carry their
unit in the field's doc: `prompts`, `samples`, `tokens`. Times are integer microseconds.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Literal


def _tuples(value: Any) -> Any:
    return tuple(_tuples(item) for item in value) if isinstance(value, list | tuple) else value


# --- declarations ----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class FileData:
    """Rows from a JSON Lines or Parquet file. `path` is relative to the .rlflow file."""

    __pydantic_config__: ClassVar[Any] = {"extra": "forbid"}
    path: str
    format: Literal["jsonl", "parquet"]
    prompt: str = "prompt"
    """Column with the prompt: a string, or a list of {role, content} messages for the chat template."""
    answer: str | None = None
    """Column given to rewards as `answer`; dots reach into nested columns."""
    shuffle: bool = True
    system: str | None = None
    """System message put before a string prompt; makes it a chat."""
    kind: Literal["file"] = "file"


@dataclass(frozen=True, slots=True, kw_only=True)
class GymData:
    """Procedurally generated tasks of the reasoning-gym package."""

    __pydantic_config__: ClassVar[Any] = {"extra": "forbid"}
    task: str
    size: int
    """rows"""
    seed: int = 0
    options: tuple[tuple[str, Any], ...] = ()
    """Further keyword arguments of the task, sorted by name."""
    shuffle: bool = True
    system: str | None = None
    kind: Literal["reasoning_gym"] = "reasoning_gym"

    def __post_init__(self) -> None:
        object.__setattr__(self, "options", _tuples(self.options))  # JSON has lists only


@dataclass(frozen=True, slots=True, kw_only=True)
class HfModel:
    """A Hugging Face checkpoint folder (or hub name). Weights are kept in fp32 for training."""

    __pydantic_config__: ClassVar[Any] = {"extra": "forbid"}
    path: str
    compute: Literal["fp32", "bf16"] = "fp32"
    """Precision of matrix products in training and of the rollout copy."""
    kind: Literal["hf"] = "hf"


@dataclass(frozen=True, slots=True, kw_only=True)
class TinyModel:
    """A small randomly initialised model made on the fly, with a character tokenizer."""

    __pydantic_config__: ClassVar[Any] = {"extra": "forbid"}
    architecture: Literal["qwen3", "llama"]
    alphabet: str
    """The tokenizer's characters, one token each; an end token and a padding token are added."""
    hidden: int = 64
    layers: int = 2
    heads: int = 4
    kv_heads: int = 2
    intermediate: int = 128
    context: int = 256
    """tokens"""
    init_seed: int = 0
    compute: Literal["fp32", "bf16"] = "fp32"
    kind: Literal["tiny"] = "tiny"


@dataclass(frozen=True, slots=True, kw_only=True)
class FrozenModel:
    """The weights that another model starts from, never trained."""

    __pydantic_config__: ClassVar[Any] = {"extra": "forbid"}
    of: str
    kind: Literal["frozen"] = "frozen"


@dataclass(frozen=True, slots=True, kw_only=True)
class PythonReward:
    """A Python function `module:function`, found beside the .rlflow file or on the Python path."""

    __pydantic_config__: ClassVar[Any] = {"extra": "forbid"}
    function: str
    timeout_us: int = 15_000_000
    """Per sample."""
    retries: int = 0
    """Times a failed sample is scored again before the run stops."""
    kind: Literal["python"] = "python"


@dataclass(frozen=True, slots=True, kw_only=True)
class DatasetScorer:
    """The scorer that a data set brings itself (reasoning-gym)."""

    __pydantic_config__: ClassVar[Any] = {"extra": "forbid"}
    data: str
    timeout_us: int = 15_000_000
    retries: int = 0
    kind: Literal["scorer"] = "scorer"


DataSource = FileData | GymData
ModelSource = HfModel | TinyModel | FrozenModel
RewardSource = PythonReward | DatasetScorer

# --- losses and optimizers ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class PpoClip:
    """Clipped policy-gradient surrogate, Schulman et al. 2017 (arXiv 1707.06347) eq. 7, as a loss."""

    __pydantic_config__: ClassVar[Any] = {"extra": "forbid"}
    weight: float
    clip_low: float
    clip_high: float
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


LossTerm = PpoClip | Kl | Entropy


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


# --- stages --------------------------------------------------------------------------------------------------------


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
    kind: Literal["generate"] = "generate"


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
    aggregate: Literal["token_mean", "seq_mean_token_mean", "seq_mean_token_sum"] = "token_mean"
    max_grad_norm: float = 1.0
    """0 = no clipping"""
    temperature: float = 1.0
    """The sampling temperature, so that the ratio starts at 1; set by the compiler from the samples' stage."""
    kind: Literal["train"] = "train"


Op = Take | Generate | Logprobs | Score | GroupNormalize | Train

OPS: dict[str, type[Op]] = {
    "take": Take,
    "generate": Generate,
    "logprobs": Logprobs,
    "score": Score,
    "group_normalize": GroupNormalize,
    "train": Train,
}
