"""What a flow declares: where data, models and rewards come from.

Every source is a frozen dataclass with a `kind`; the plan file stores exactly these.
"""

from __future__ import annotations

from typing import Any, ClassVar, Literal

from rlflow.ir.columns import Layout, Role
from rlflow.values import dataclass

TooLong = Literal["error", "drop", "truncate"]
"""What is done with a prompt that, after the chat template, leaves no room for the longest response: stop the run,
leave the row out, or keep the last tokens."""
OnError = Literal["fail", "drop"]
"""What is done about a sample that cannot be scored: stop the run, or leave the sample out of the update."""


def _tuples(value: Any) -> Any:
    return tuple(_tuples(item) for item in value) if isinstance(value, list | tuple) else value


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
    find: tuple[Role, ...] = ()
    """Columns that the flow does not name and the compiler could not read: found when the file is opened."""
    layout: Layout | None = None
    """Whose convention the columns follow that the compiler found."""
    shuffle: bool = True
    system: str | None = None
    """System message put before a string prompt; makes it a chat."""
    too_long: TooLong = "error"
    prompt_tokens: int | None = None
    """tokens; what estimates take for the mean of a prompt. None = not said."""
    kind: Literal["file"] = "file"

    def __post_init__(self) -> None:
        object.__setattr__(self, "find", tuple(self.find))  # JSON has lists only


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
    too_long: TooLong = "error"
    prompt_tokens: int | None = None
    kind: Literal["reasoning_gym"] = "reasoning_gym"

    def __post_init__(self) -> None:
        object.__setattr__(self, "options", _tuples(self.options))  # JSON has lists only


@dataclass(frozen=True, slots=True, kw_only=True)
class Lora:
    """Low-rank adapters beside frozen linear layers (Hu et al. 2021, arXiv 2106.09685): W x + (alpha / rank) B A x.

    Only A [rank, in] and B [out, rank] are trained. B starts at 0, so that the model starts as its base.
    """

    __pydantic_config__: ClassVar[Any] = {"extra": "forbid"}
    rank: int
    alpha: float
    targets: Literal["attention", "all_linear"] | tuple[str, ...]
    """Which linear layers of the decoder: those of the attention, all of them, or those of these names."""
    init_seed: int = 0
    """Seed of A."""
    kind: Literal["lora"] = "lora"

    def __post_init__(self) -> None:
        object.__setattr__(self, "targets", _tuples(self.targets))  # JSON has lists only


@dataclass(frozen=True, slots=True, kw_only=True)
class HfModel:
    """A Hugging Face checkpoint folder (or hub name). Weights are kept in fp32 for training."""

    __pydantic_config__: ClassVar[Any] = {"extra": "forbid"}
    path: str
    compute: Literal["fp32", "bf16"] = "fp32"
    """Precision of matrix products in training and of the rollout copy."""
    lora: Lora | None = None
    """With adapters the weights of the checkpoint are frozen."""
    kind: Literal["hf"] = "hf"


@dataclass(frozen=True, slots=True, kw_only=True)
class TinyModel:
    """A small randomly initialised model made on the fly, with a character tokenizer."""

    __pydantic_config__: ClassVar[Any] = {"extra": "forbid"}
    architecture: Literal["qwen3", "llama", "qwen3_moe"]
    alphabet: str
    """The tokenizer's characters, one token each; an end token and a padding token are added."""
    hidden: int = 64
    layers: int = 2
    heads: int = 4
    kv_heads: int = 2
    intermediate: int = 128
    """Of one expert where there are experts."""
    experts: int = 0
    """Of every layer; 0 for a dense model."""
    experts_per_token: int = 0
    context: int = 256
    """tokens"""
    init_seed: int = 0
    compute: Literal["fp32", "bf16"] = "fp32"
    lora: Lora | None = None
    kind: Literal["tiny"] = "tiny"


@dataclass(frozen=True, slots=True, kw_only=True)
class FrozenModel:
    """The weights that another model starts from, never trained."""

    __pydantic_config__: ClassVar[Any] = {"extra": "forbid"}
    of: str
    kind: Literal["frozen"] = "frozen"


@dataclass(frozen=True, slots=True, kw_only=True)
class ValueModel:
    """The first weights of another model with a scalar head instead of its vocabulary head; trained (a critic).

    `shared`: a scalar head on the other model's own body, not on a copy. One optimizer trains both.
    """

    __pydantic_config__: ClassVar[Any] = {"extra": "forbid"}
    of: str
    shared: bool = False
    kind: Literal["value"] = "value"


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardModel:
    """A sequence-classification checkpoint with one output; its score is read at the last token. Never trained."""

    __pydantic_config__: ClassVar[Any] = {"extra": "forbid"}
    path: str
    compute: Literal["fp32", "bf16"] = "fp32"
    kind: Literal["reward_model"] = "reward_model"


@dataclass(frozen=True, slots=True, kw_only=True)
class PresetModel:
    """An architecture that ships with rlflow, without weights: to compile and simulate, not to run."""

    __pydantic_config__: ClassVar[Any] = {"extra": "forbid"}
    name: str
    compute: Literal["fp32", "bf16"] = "bf16"
    lora: Lora | None = None
    kind: Literal["preset"] = "preset"


@dataclass(frozen=True, slots=True, kw_only=True)
class PythonReward:
    """A Python function `module:function`, found beside the .rlflow file or on the Python path."""

    __pydantic_config__: ClassVar[Any] = {"extra": "forbid"}
    function: str
    timeout_us: int = 15_000_000
    """Per sample."""
    retries: int = 0
    """Times a failed sample is scored again."""
    on_error: OnError = "fail"
    kind: Literal["python"] = "python"


@dataclass(frozen=True, slots=True, kw_only=True)
class DatasetScorer:
    """The scorer that a data set brings itself (reasoning-gym)."""

    __pydantic_config__: ClassVar[Any] = {"extra": "forbid"}
    data: str
    timeout_us: int = 15_000_000
    retries: int = 0
    on_error: OnError = "fail"
    kind: Literal["scorer"] = "scorer"


@dataclass(frozen=True, slots=True, kw_only=True)
class PythonEnvironment:
    """A Python class `module:Class`, made anew for every sample: `reset(record)`, then `step(text)` after every turn.

    `step` returns the observation (a string the model reads next) or None when the episode is over.
    """

    __pydantic_config__: ClassVar[Any] = {"extra": "forbid"}
    target: str
    timeout_us: int = 15_000_000
    """Per call."""
    kind: Literal["python_environment"] = "python_environment"


DataSource = FileData | GymData
ModelSource = HfModel | TinyModel | FrozenModel | ValueModel | RewardModel | PresetModel
RewardSource = PythonReward | DatasetScorer
EnvironmentSource = PythonEnvironment
