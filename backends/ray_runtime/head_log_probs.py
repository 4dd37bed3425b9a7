"""Log-probabilities of chosen tokens and entropies from logits, with one buffer of [tokens, vocabulary].

torch's log_softmax, gather and entropy make five such buffers on the way forward and back, and on a CPU new memory of
that size costs more time than the arithmetic. Here the logits become probabilities in place, some rows at a time, so
that intermediate results stay in the processor's caches, and the probabilities become the gradient in place:

    d logp / d logits = onehot - p,   d entropy / d logits = -p (log p + entropy)
"""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd.function import once_differentiable

_PART = 1 << 20
"""Logits worked on at once, which fit into a processor's cache."""
_PART_OF_ACCELERATOR = 1 << 26
"""There calls should be few."""


def log_probs_of(
    logits: torch.Tensor, targets: torch.Tensor, temperature: float, *, entropies: bool, spread: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probability of `targets` int64 [tokens] and entropy (nats) under softmax(logits / temperature): float32
    [tokens] each, the latter empty unless `entropies`; it carries a gradient with `spread`.

    `logits` float32 [tokens, vocabulary] are overwritten: whoever made them must not need them, in backward either.
    """
    found: tuple[torch.Tensor, torch.Tensor] = _LogProbs.apply(logits, targets, temperature, entropies)
    return found[0], found[1] if spread else found[1].detach()


class _LogProbs(torch.autograd.Function):  # type: ignore[misc]
    @staticmethod
    def forward(
        ctx: Any, logits: torch.Tensor, targets: torch.Tensor, temperature: float, entropies: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        tokens = len(logits)
        logp = logits.new_empty(tokens)
        spread = logits.new_empty(tokens if entropies else 0)
        rows = _rows_at_once(logits)
        for first in range(0, tokens, rows):
            part = slice(first, first + rows)
            z = logits[part]
            if temperature != 1.0:
                z.div_(temperature)
            z.sub_(z.amax(-1, keepdim=True))
            chosen = z.gather(1, targets[part, None])[:, 0]
            e = z.exp()
            total = e.sum(-1)
            logs = total.log()
            torch.sub(chosen, logs, out=logp[part])
            if entropies:
                # -sum p log p with log p = z - log(total)
                torch.sub(logs, (e * z).sum(-1).div_(total), out=spread[part])
            torch.div(e, total[:, None], out=z)
        ctx.probabilities, ctx.temperature = logits.detach(), temperature
        ctx.save_for_backward(targets, spread)
        ctx.set_materialize_grads(False)
        return logp, spread

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(
        ctx: Any, of_logp: torch.Tensor | None, of_entropy: torch.Tensor | None
    ) -> tuple[torch.Tensor | None, None, None, None]:
        p, ctx.probabilities = ctx.probabilities, None
        if p is None:
            raise RuntimeError("these log-probabilities have been differentiated already: their buffer is used up")
        targets, spread = ctx.saved_tensors
        scale = 1.0 / ctx.temperature
        rows = _rows_at_once(p)
        for first in range(0, len(p), rows):
            part = slice(first, first + rows)
            if of_entropy is not None:
                factor = -(torch.log(p[part].clamp(min=torch.finfo(p.dtype).tiny)) + spread[part, None])
                factor *= of_entropy[part, None]
                if of_logp is not None:
                    factor -= of_logp[part, None]
                p[part].mul_(factor.mul_(scale))
            elif of_logp is not None:
                p[part].mul_(of_logp[part, None] * -scale)
        if of_logp is not None:
            p.scatter_add_(1, targets[:, None], (of_logp * scale)[:, None])
        return (None if of_logp is None and of_entropy is None else p), None, None, None


def _rows_at_once(logits: torch.Tensor) -> int:
    part = _PART if logits.device.type == "cpu" else _PART_OF_ACCELERATOR
    return max(1, part // int(logits.shape[1]))
