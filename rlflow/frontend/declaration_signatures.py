"""What the declarations of a flow can be made by: data, models, rewards, environments."""

from __future__ import annotations

from rlflow.frontend.parameters import (
    REQUIRED,
    Adapter,
    Count,
    Duration,
    Flag,
    Modules,
    OnError,
    Parameter,
    Real,
    Reference,
    Signature,
    Text,
    Whole,
    Word,
)

P = Parameter

_SHUFFLE = P("shuffle", Flag(), True, "a new seeded order every epoch; false = file order")
_SYSTEM = P("system", Text(), None, "system message put before every prompt, which makes it a chat", optional=True)
_TOO_LONG = P(
    "too_long",
    Word(("error", "drop", "truncate")),
    "error",
    "prompts that leave no room for `max_new`: stop, leave the row out, or keep the last tokens",
)
_PROMPT_TOKENS = P(
    "prompt_tokens",
    Count("tokens"),
    None,
    "mean of a prompt, for estimates of time and memory only; default: 256 tokens",
    optional=True,
)
_FILE = (
    P("path", Text(), REQUIRED, "file, relative to this .rlflow file"),
    P(
        "prompt",
        Text(),
        "prompt",
        "column with the prompt: a string, or a list of {role, content} messages; default: `prompt` or `messages`",
    ),
    P(
        "answer",
        Text(),
        None,
        "column that rewards get as `answer`; dots reach into nested columns; default: found by its name",
        optional=True,
    ),
    _SHUFFLE,
    _SYSTEM,
    _TOO_LONG,
    _PROMPT_TOKENS,
)
_COMPUTE = P("compute", Word(("fp32", "bf16")), "fp32", "precision of matrix products; weights are trained in fp32")
_LORA = P(
    "lora",
    Adapter(),
    None,
    "low-rank adapters are trained and the weights stay as they are; default: all weights are trained",
    optional=True,
)
_TIMEOUT = P("timeout", Duration(), 15_000_000, "limit per sample")
_ON_ERROR = P(
    "on_error",
    OnError(),
    (0, "fail"),
    "when a sample cannot be scored: `fail`, `drop` (leave it out), or `retry(times, then = fail)` first",
)

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
                _TOO_LONG,
                _PROMPT_TOKENS,
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
                _LORA,
            ),
            "a pretrained model",
        ),
        "tiny": Signature(
            "tiny",
            (
                P("architecture", Word(("qwen3", "llama", "qwen3_moe")), REQUIRED, "model family"),
                P("alphabet", Text(), REQUIRED, "characters of the tokenizer, one token each"),
                P("hidden", Whole(8), 64, "hidden size"),
                P("layers", Whole(1), 2, "transformer layers"),
                P("heads", Whole(1), 4, "attention heads"),
                P("kv_heads", Whole(1), 2, "key-value heads"),
                P("intermediate", Whole(8), 128, "inner size of the feed-forward block, or of one expert"),
                P("experts", Whole(2), None, "experts of every layer; only of `qwen3_moe`, which needs it"),
                P("experts_per_token", Whole(1), None, "experts that a token goes through; only of `qwen3_moe`"),
                P("context", Count("tokens"), 256, "longest sequence"),
                P("init_seed", Whole(0), 0, "seed of the initial weights"),
                _COMPUTE,
                _LORA,
            ),
            "a small random model made on the fly, for tests and first steps",
        ),
        "preset": Signature(
            "preset",
            (P("name", Text(), REQUIRED, "an architecture that ships with rlflow, such as qwen3_8b"), _LORA),
            "an architecture without weights, to compile and simulate",
        ),
        "value": Signature(
            "value",
            (
                P("of", Reference("model"), REQUIRED, "model whose first weights it starts from"),
                P("shared", Flag(), False, "a head on that model's own body, trained in that model's `train`"),
            ),
            "a value model (critic): a scalar head on another model's first weights",
        ),
        "reward_model": Signature(
            "reward_model",
            (P("path", Text(), REQUIRED, "sequence-classification checkpoint with one output"), _COMPUTE),
            "a trained reward model",
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

DECLARATIONS["environment"] = {
    "python": Signature(
        "python",
        (
            P("target", Text(), REQUIRED, "module:Class, beside this file or installed"),
            P("timeout", Duration(), 15_000_000, "limit per call"),
        ),
        "a Python class with `step(text)`, made anew for every sample",
    )
}

ON_ERRORS: dict[str, Signature] = {
    "retry": Signature(
        "retry",
        (
            P("times", Whole(1, 100), 1, "further tries"),
            P("then", Word(("fail", "drop")), "fail", "what to do when they fail too"),
        ),
        "try again first",
    ),
}

ADAPTERS: dict[str, Signature] = {
    "lora": Signature(
        "lora",
        (
            P("rank", Whole(1, 65536), 16, "inner size of an adapter"),
            P(
                "alpha",
                Real(0, open_least=True),
                None,
                "its factor is alpha / rank; default: twice the rank",
                optional=True,
            ),
            P("targets", Modules(), "all_linear", "the linear layers of the decoder that get an adapter"),
            P("dropout", Real(0, 1), 0.0, "must be 0: the trainer must compute what the sampler computes"),
            P("init_seed", Whole(0), 0, "seed of the adapters' first weights"),
        ),
        "low-rank adapters beside frozen weights",
    ),
}
