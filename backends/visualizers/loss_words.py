"""Losses and optimizers of train stages in words."""

from __future__ import annotations

from rlflow.ir.ops import (
    Behaviour,
    Cispo,
    Correction,
    Dpo,
    Entropy,
    Gspo,
    Kl,
    LossTerm,
    Nll,
    PpoClip,
    Reinforce,
    Train,
    ValueClip,
)


def describe_loss(train: Train) -> str:
    """The loss in words, and where the KL term enters."""
    text = " + ".join(_describe_term(term) for term in train.loss)
    kinds = {term.kind for term in train.loss}
    if kinds & {"ppo_clip", "gspo", "cispo", "reinforce"} and "kl" not in kinds:
        text += "; no KL term"
    if train.correction is not None:
        text += f"; {_correction_words(train.correction)}"
    if kinds == {"dpo"}:
        return f"{text}; mean over pairs"
    if kinds == {"gspo"}:
        return f"{text}; mean over samples"
    mean = {
        "token_mean": "mean over all tokens",
        "seq_mean_token_mean": "mean over samples of each sample's token mean",
        "seq_mean_token_sum": "mean over samples of each sample's token sum",
        "token_sum": f"sum over tokens / (samples x {train.horizon} tokens)",
    }[train.aggregate]
    return f"{text}; {mean}"


def describe_optimizer(train: Train) -> str:
    """Optimizer, batch sizes (samples) and gradient clipping in words."""
    adamw = train.optimizer
    warmup = f", warm-up {adamw.warmup} updates" if adamw.warmup else ""
    batch = f"minibatch {train.minibatch} samples" if train.minibatch else "one minibatch"
    clip = f"gradient norm clipped at {train.max_grad_norm:g}" if train.max_grad_norm else "no gradient clipping"
    betas = f"betas {adamw.beta1:g}/{adamw.beta2:g}"
    return (
        f"AdamW lr {adamw.lr:g}, {betas}, decay {adamw.weight_decay:g}{warmup}; {batch}, "
        f"{train.epochs} epoch{'s' * (train.epochs != 1)}, {clip}"
    )


def _describe_term(term: LossTerm) -> str:
    factor = "" if term.weight == 1 else f"{term.weight:g} x "
    return factor + _term_words(term)


def _term_words(term: LossTerm) -> str:
    if isinstance(term, PpoClip):
        bound = "" if term.dual is None else f", loss at most {term.dual:g} x |advantage|"
        return f"clipped policy gradient, ratio in {_interval(term.clip_low, term.clip_high)}{bound}"
    if isinstance(term, Gspo):
        return f"clipped policy gradient, ratio of whole samples in {_interval(term.clip_low, term.clip_high)}"
    if isinstance(term, Cispo):
        bounds = f"at most {1 + term.clip_high:g}" if term.clip_low is None else (
            f"in {_interval(term.clip_low, term.clip_high)}"
        )  # fmt: skip
        return f"policy gradient, its weight, the ratio, {bounds}"
    if isinstance(term, Reinforce):
        return "plain policy gradient"
    if isinstance(term, Kl):
        return f"KL to the reference in the loss, not in the reward (estimator {term.estimator})"
    if isinstance(term, Entropy):
        return "entropy of the policy"
    if isinstance(term, ValueClip):
        bound = "" if term.clip is None else f", clipped {term.clip:g} around the old values"
        return f"squared error to the returns / 2{bound}"
    if isinstance(term, Nll):
        return "negative log-likelihood of the samples"
    if isinstance(term, Dpo):
        smoothing = f", label smoothing {term.label_smoothing:g}" if term.label_smoothing else ""
        return f"direct preference loss on pairs, beta {term.beta:g}{smoothing}"
    return "reverse KL to the teacher as a policy gradient"


def _correction_words(correction: Correction) -> str:
    """How the age of samples is accounted for."""
    if isinstance(correction, Behaviour):
        return "its ratio is against the policy that sampled"
    of = {"token": "each token", "sequence": "each sample", "sequence_mean": "each sample's mean"}[correction.level]
    if correction.cap is None:
        return f"{of} weighted with old / sampling policy"
    beyond = f"at most {correction.cap:g}" if correction.outside == "truncate" else f"0 above {correction.cap:g}"
    return f"{of} weighted with old / sampling policy, {beyond}"


def _interval(low: float, high: float) -> str:
    return f"[{1 - low:g}, {1 + high:g}]"
