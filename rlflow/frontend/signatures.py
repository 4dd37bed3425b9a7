"""Everything that can be called in a .rlflow file: one schema for checking, overrides, defaults and documentation."""

from __future__ import annotations

from dataclasses import dataclass, field


class _Required:
    def __repr__(self) -> str:
        return "required"


REQUIRED = _Required()
MOST = 2**63 - 1
"""The largest whole number that a plan's readers can be expected to hold."""

# --- what a parameter accepts ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Text:
    """A string."""


@dataclass(frozen=True, slots=True)
class Flag:
    """true or false"""


@dataclass(frozen=True, slots=True)
class Whole:
    """A plain whole number within bounds."""

    least: int = 0
    most: int = MOST


@dataclass(frozen=True, slots=True)
class Real:
    """A plain number within bounds; `open_least` excludes the lower bound."""

    least: float | None = None
    most: float | None = None
    open_least: bool = False


@dataclass(frozen=True, slots=True)
class Count:
    """A whole number of something, written with its unit."""

    unit: str
    least: int = 1
    most: int = MOST


@dataclass(frozen=True, slots=True)
class Duration:
    """A time, above zero."""


@dataclass(frozen=True, slots=True)
class Word:
    """One of a few words."""

    choices: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Rows:
    """A value of the step: rows of prompts or of samples."""

    row: str


@dataclass(frozen=True, slots=True)
class PerRow:
    """A value of the step: one number per sample, such as a score."""


@dataclass(frozen=True, slots=True)
class PerToken:
    """A value of the step: one number per response token, such as log-probabilities."""


@dataclass(frozen=True, slots=True)
class Loss:
    """A sum of loss terms, each with an optional factor."""


@dataclass(frozen=True, slots=True)
class Optimizer:
    """A call of an optimizer."""


@dataclass(frozen=True, slots=True)
class OnError:
    """`fail` or `retry(times)`"""


@dataclass(frozen=True, slots=True)
class Reference:
    """The name of a declaration of this kind."""

    kind: str


Accepts = (
    Text
    | Flag
    | Whole
    | Real
    | Count
    | Duration
    | Word
    | Rows
    | PerRow
    | PerToken
    | Loss
    | Optimizer
    | OnError
    | Reference
)


@dataclass(frozen=True, slots=True)
class Parameter:
    """`default` is REQUIRED, or what stands when the argument is left out (in base units)."""

    name: str
    accepts: Accepts
    default: object
    doc: str
    optional: bool = False
    """Whether `none` is accepted."""


@dataclass(frozen=True, slots=True)
class Signature:
    name: str
    parameters: tuple[Parameter, ...]
    doc: str
    extra: bool = False
    """Whether further keyword arguments with constant values are passed on."""
    names: frozenset[str] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "names", frozenset(p.name for p in self.parameters))

    def parameter(self, name: str) -> Parameter | None:
        return next((p for p in self.parameters if p.name == name), None)


P = Parameter

_SHUFFLE = P("shuffle", Flag(), True, "a new seeded order every epoch; false = file order")
_SYSTEM = P("system", Text(), None, "system message put before every prompt, which makes it a chat", optional=True)
_FILE = (
    P("path", Text(), REQUIRED, "file, relative to this .rlflow file"),
    P("prompt", Text(), "prompt", "column with the prompt: a string, or a list of {role, content} messages"),
    P("answer", Text(), None, "column that rewards get as `answer`; dots reach into nested columns", optional=True),
    _SHUFFLE,
    _SYSTEM,
)
_COMPUTE = P("compute", Word(("fp32", "bf16")), "fp32", "precision of matrix products; weights are trained in fp32")
_TIMEOUT = P("timeout", Duration(), 15_000_000, "limit per sample")
_ON_ERROR = P("on_error", OnError(), 0, "what to do when a sample cannot be scored: `fail`, or `retry(times)` first")

DECLARATIONS: dict[str, dict[str, Signature]] = {
    "data": {
        "jsonl": Signature("jsonl", _FILE, "rows of a JSON Lines file"),
        "parquet": Signature("parquet", _FILE, "rows of a Parquet file"),
        "reasoning_gym": Signature(
            "reasoning_gym",
            (
                P("task", Text(), REQUIRED, "name of the task, such as chain_sum"),
                P("size", Whole(1), REQUIRED, "rows"),
                P("seed", Whole(0), 0, "seed of the generator"),
                _SHUFFLE,
                _SYSTEM,
            ),
            "procedurally generated tasks of the reasoning-gym package; further arguments go to the task",
            extra=True,
        ),
    },
    "model": {
        "hf": Signature(
            "hf",
            (
                P("path", Text(), REQUIRED, "Hugging Face checkpoint folder relative to this file, or hub name"),
                _COMPUTE,
            ),
            "a pretrained model",
        ),
        "tiny": Signature(
            "tiny",
            (
                P("architecture", Word(("qwen3", "llama")), REQUIRED, "model family"),
                P("alphabet", Text(), REQUIRED, "characters of the tokenizer, one token each"),
                P("hidden", Whole(8), 64, "hidden size"),
                P("layers", Whole(1), 2, "transformer layers"),
                P("heads", Whole(1), 4, "attention heads"),
                P("kv_heads", Whole(1), 2, "key-value heads"),
                P("intermediate", Whole(8), 128, "inner size of the feed-forward block"),
                P("context", Count("tokens"), 256, "longest sequence"),
                P("init_seed", Whole(0), 0, "seed of the initial weights"),
                _COMPUTE,
            ),
            "a small random model made on the fly, for tests and first steps",
        ),
        "frozen": Signature(
            "frozen",
            (P("of", Reference("model"), REQUIRED, "model whose first weights are kept"),),
            "a copy never trained",
        ),
    },
    "reward": {
        "python": Signature(
            "python",
            (P("function", Text(), REQUIRED, "module:function, beside this file or installed"), _TIMEOUT, _ON_ERROR),
            "a Python function",
        ),
        "scorer": Signature(
            "scorer",
            (P("data", Reference("data"), REQUIRED, "a reasoning_gym data set"), _TIMEOUT, _ON_ERROR),
            "the data set's own scorer",
        ),
    },
}

_SAMPLES = P("samples", Rows("sample"), REQUIRED, "the samples")

METHODS: dict[str, dict[str, Signature]] = {
    "data": {
        "take": Signature(
            "take", (P("count", Count("prompts"), REQUIRED, "rows"),), "the next rows, in the seeded order"
        ),
        "all": Signature("all", (), "every row once, in file order"),
    },
    "model": {
        "generate": Signature(
            "generate",
            (
                P("prompts", Rows("prompt"), REQUIRED, "what to answer"),
                P("n", Whole(1), 1, "samples per prompt"),
                P("max_new", Count("tokens"), REQUIRED, "longest response"),
                P("temperature", Real(0), 1.0, "0 = greedy"),
                P("top_p", Real(0, 1, open_least=True), 1.0, "nucleus sampling"),
                P("top_k", Whole(0), 0, "0 = all tokens"),
            ),
            "sample responses",
        ),
        "logprobs": Signature("logprobs", (_SAMPLES,), "log-probability of every response token under this model"),
        "train": Signature(
            "train",
            (
                _SAMPLES,
                P("advantages", PerRow(), REQUIRED, "one advantage per sample"),
                P("reference", PerToken(), None, "log-probabilities under the reference, for a kl term", optional=True),
                P("loss", Loss(), REQUIRED, "sum of terms such as ppo_clip(0.2) + 0.001 * kl(k3)"),
                P("optimizer", Optimizer(), REQUIRED, "such as adamw(lr = 1e-6)"),
                P("minibatch", Count("samples"), None, "samples per optimizer update; default: the whole batch"),
                P("epochs", Whole(1), 1, "passes over the batch"),
                P(
                    "aggregate",
                    Word(("token_mean", "seq_mean_token_mean", "seq_mean_token_sum")),
                    "token_mean",
                    "how per-token losses become one number, over the whole mini-batch",
                ),
                P("max_grad_norm", Real(0), 1.0, "gradient clipping; 0 = none"),
                P("microbatch", Count("tokens"), 16384, "padded tokens per forward and backward"),
            ),
            "update the weights",
        ),
    },
}

FUNCTIONS: dict[str, Signature] = {
    "group_normalize": Signature(
        "group_normalize",
        (
            P("scores", PerRow(), REQUIRED, "rewards"),
            P("std", Flag(), True, "divide by the group's standard deviation"),
            P("epsilon", Real(0), 1e-6, "added to the standard deviation"),
        ),
        "reward minus the mean of its group, over the group's standard deviation",
    ),
}

REWARD_CALL = Signature("reward", (_SAMPLES,), "score the samples")

LOSSES: dict[str, Signature] = {
    "ppo_clip": Signature(
        "ppo_clip",
        (
            P("low", Real(0, open_least=True), 0.2, "the ratio is clipped below 1 - low"),
            P("high", Real(0, open_least=True), None, "and above 1 + high; default: low"),
        ),
        "clipped policy gradient",
    ),
    "kl": Signature(
        "kl", (P("estimator", Word(("k1", "k2", "k3")), "k3", "estimator"),), "divergence from the reference"
    ),
    "entropy": Signature("entropy", (), "entropy of the policy; give it a negative factor to encourage it"),
}

OPTIMIZERS: dict[str, Signature] = {
    "adamw": Signature(
        "adamw",
        (
            P("lr", Real(0), REQUIRED, "learning rate"),
            P("beta1", Real(0, 1), 0.9, "decay of the first moment"),
            P("beta2", Real(0, 1), 0.999, "decay of the second moment"),
            P("epsilon", Real(0, open_least=True), 1e-8, "added to the denominator"),
            P("weight_decay", Real(0), 0.0, "decoupled weight decay"),
            P("warmup", Whole(0), 0, "updates over which the rate rises linearly"),
        ),
        "AdamW",
    ),
}

CORRECTIONS: dict[str, Signature] = {
    "truncated_is": Signature(
        "truncated_is",
        (P("cap", Real(0, open_least=True), 2.0, "largest weight of a token"),),
        "truncated importance sampling",
    ),
}
"""How a loss accounts for samples of an older policy; `allow MODEL staleness <= N steps with CORRECTION`."""

ON_ERRORS: dict[str, Signature] = {
    "retry": Signature("retry", (P("times", Whole(1, 100), 1, "further tries"),), "try again, then stop the run"),
}
