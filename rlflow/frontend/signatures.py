"""Everything that can be called in a .rlflow file: one schema for checking, overrides, defaults and documentation."""

from __future__ import annotations

from rlflow.frontend.declaration_signatures import ADAPTERS, DECLARATIONS, ON_ERRORS
from rlflow.frontend.parameters import (
    REQUIRED,
    Column,
    Count,
    Flag,
    Loss,
    Optimizer,
    Parameter,
    PerRow,
    PerToken,
    Real,
    Reference,
    Rows,
    Signature,
    Whole,
    Word,
)

__all__ = [
    "ADAPTERS",
    "CORRECTIONS",
    "DECLARATIONS",
    "FUNCTIONS",
    "LOSSES",
    "METHODS",
    "ON_ERRORS",
    "OPTIMIZERS",
    "REWARD_CALL",
]

P = Parameter

_SAMPLES = P("samples", Rows("sample"), REQUIRED, "the samples")
_SCORES = P("scores", PerRow(), REQUIRED, "rewards")

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
                P("environment", Reference("environment"), None, "answers after every turn", optional=True),
                P("turns", Whole(1), 1, "turns of the model at most"),
                P(
                    "mean_new",
                    Count("tokens"),
                    None,
                    "mean of a response, for estimates of time and memory only; default: a quarter of `max_new`",
                    optional=True,
                ),
            ),
            "sample responses",
        ),
        "logprobs": Signature("logprobs", (_SAMPLES,), "log-probability of every response token under this model"),
        "values": Signature("values", (_SAMPLES,), "a value model's estimate before every response token"),
        "score": Signature("score", (_SAMPLES,), "a reward model's score of every sample"),
        "train": Signature(
            "train",
            (
                _SAMPLES,
                P("advantages", Column(), None, "one advantage per sample or per token", optional=True),
                P(
                    "reference",
                    PerToken(),
                    None,
                    "log-probabilities under the reference (kl, dpo)",
                    optional=True,
                ),
                P("teacher", PerToken(), None, "log-probabilities under the teacher (distill)", optional=True),
                P("returns", PerToken(), None, "what a value model learns (value_clip)", optional=True),
                P("values", PerToken(), None, "its estimates before the update (value_clip)", optional=True),
                P("loss", Loss(), REQUIRED, "sum of terms such as ppo_clip(0.2) + 0.001 * kl(k3)"),
                P("optimizer", Optimizer(), REQUIRED, "such as adamw(lr = 1e-6)"),
                P("minibatch", Count("samples"), None, "samples per optimizer update; default: the whole batch"),
                P("epochs", Whole(1), 1, "passes over the batch"),
                P(
                    "aggregate",
                    Word(("token_mean", "seq_mean_token_mean", "seq_mean_token_sum", "token_sum")),
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

_GAMMA = P("gamma", Real(0, 1), 1.0, "discount per token")
_LAM = P("lam", Real(0, 1), 0.95, "0 = one step, 1 = the whole response")
_REWARDS = P("rewards", Column(), REQUIRED, "rewards, per sample (then at the last token) or per token")
_VALUES = P("values", PerToken(), REQUIRED, "the value model's estimates")

FUNCTIONS: dict[str, Signature] = {
    signature.name: signature
    for signature in (
        Signature(
            "group_normalize",
            (
                _SCORES,
                P("std", Flag(), True, "divide by the group's standard deviation"),
                P("epsilon", Real(0), 1e-6, "added to the standard deviation"),
            ),
            "reward minus the mean of its group, over the group's standard deviation",
        ),
        Signature("rloo", (_SCORES,), "reward minus the mean of the other samples of its group"),
        Signature(
            "reinforce_pp",
            (_SCORES, P("baseline", Flag(), False, "take the group's mean off first")),
            "rewards whitened over the whole batch (REINFORCE++)",
        ),
        Signature(
            "remax",
            (_SCORES, P("baseline", PerRow(), REQUIRED, "the reward of the prompt's greedy response")),
            "reward minus that of the greedy response",
        ),
        Signature(
            "kl_reward",
            (
                _SCORES,
                _SAMPLES,
                P("reference", PerToken(), REQUIRED, "log-probabilities under the reference"),
                P("weight", Real(0), REQUIRED, "factor of the KL penalty"),
                P("also_in_loss", Flag(), False, "whether the loss may have a kl term as well"),
            ),
            "per-token reward: the score at the last token, minus a KL penalty on every token",
        ),
        Signature(
            "gae",
            (_REWARDS, _VALUES, _GAMMA, _LAM, P("whiten", Flag(), True, "mean 0 and deviation 1 over the batch")),
            "generalised advantage estimation",
        ),
        Signature("returns", (_REWARDS, _VALUES, _GAMMA, _LAM), "advantage plus value: what a value model learns"),
        Signature(
            "overlong",
            (
                _SAMPLES,
                P("limit", Count("tokens"), None, "default: the `max_new` that sampled them", optional=True),
                P("buffer", Count("tokens"), REQUIRED, "how long before the limit the penalty begins"),
            ),
            "length penalty: 0 up to limit - buffer, falling to -1 at the limit",
        ),
        Signature(
            "best_of",
            (
                _SAMPLES,
                _SCORES,
                P("keep", Whole(1), 1, "samples per prompt"),
                P("at_least", Real(), None, "leave out samples that score less", optional=True),
            ),
            "the best samples of every prompt, with their `score`",
        ),
        Signature(
            "best_worst",
            (_SAMPLES, _SCORES),
            "pairs of the best and the worst sample of every prompt; prompts with equal scores are left out",
        ),
        Signature(
            "mixed_groups",
            (
                _SAMPLES,
                _SCORES,
                P("refill", Whole(0, 1000), 0, "times to sample further prompts while groups are too few"),
                P(
                    "on_short",
                    Word(("error", "train")),
                    None,
                    "when they still are too few; default: error with a refill, else train on what is there",
                    optional=True,
                ),
            ),
            "the groups whose samples do not all score the same, with their `score` (dynamic sampling)",
        ),
    )
}

REWARD_CALL = Signature("reward", (_SAMPLES,), "score the samples")

_LOW = P("low", Real(0, 1, open_least=True), 0.2, "the ratio is clipped below 1 - low")
_HIGH = P("high", Real(0, open_least=True), None, "and above 1 + high; default: low", optional=True)

LOSSES: dict[str, Signature] = {
    signature.name: signature
    for signature in (
        Signature(
            "ppo_clip",
            (
                _LOW,
                _HIGH,
                P("dual", Real(1, open_least=True), None, "bound at negative advantages (dual clip)", optional=True),
            ),
            "clipped policy gradient",
        ),
        Signature("gspo", (_LOW, _HIGH), "clipped policy gradient with the ratio of whole responses"),
        Signature(
            "cispo",
            (
                P("high", Real(0, open_least=True), 0.2, "the ratio's weight is clipped above 1 + high"),
                P("low", Real(0, 1, open_least=True), None, "and below 1 - low; default: no bound", optional=True),
            ),
            "policy gradient weighted with the clipped ratio",
        ),
        Signature("reinforce", (), "plain policy gradient"),
        Signature(
            "kl", (P("estimator", Word(("k1", "k2", "k3")), "k3", "estimator"),), "divergence from the reference"
        ),
        Signature("entropy", (), "entropy of the policy; give it a negative factor to encourage it"),
        Signature(
            "value_clip",
            (P("clip", Real(0, open_least=True), 0.2, "bound of a change; none = no bound", optional=True),),
            "squared error of a value model against the returns",
        ),
        Signature("nll", (), "negative log-likelihood of the samples (supervised fine-tuning)"),
        Signature(
            "dpo",
            (
                P("beta", Real(0, open_least=True), 0.1, "strength of the pull to the reference"),
                P("label_smoothing", Real(0, 0.5), 0.0, "share of pairs taken to be the wrong way round"),
            ),
            "direct preference optimisation on pairs of best_worst",
        ),
        Signature("distill", (), "reverse KL to the teacher on the sampled tokens"),
    )
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
        (
            P("cap", Real(0, open_least=True), 2.0, "largest weight; `none` = not truncated", optional=True),
            P("level", Word(("token", "sequence", "sequence_mean")), "token", "what one weight belongs to"),
            P("outside", Word(("truncate", "mask")), "truncate", "above the cap: bounded, or weight 0"),
        ),
        "truncated importance sampling: a token's loss is weighted with old / behaviour policy",
    ),
    "behaviour": Signature("behaviour", (), "the ratio of the loss is taken against the policy that sampled"),
}
"""How a loss accounts for samples of an older policy; `allow MODEL staleness <= N steps with CORRECTION`."""
