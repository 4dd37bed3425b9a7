"""What a model says about the response tokens of a micro-batch. No loss, no state.

Padding is on the right and attention is causal, so no mask is needed: no real token sees padding.
"""

from __future__ import annotations

import contextlib
from typing import Any, Literal

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from rlflow.backends.ray_runtime.head_log_probs import log_probs_of
from rlflow.backends.ray_runtime.packing import MicroBatch
from rlflow.backends.ray_runtime.parallel.packed import packed_inputs
from rlflow.backends.ray_runtime.parallel.vocabulary import VocabularyHead

Compute = Literal["fp32", "bf16"]
Spread = Literal["none", "value", "gradient"]
"""Entropy: not computed, computed as a metric, or computed as part of the loss."""


def response_log_probs(
    model: Any, compute: Compute, micro: MicroBatch, temperature: float, spread: Spread, *, limit: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probability and entropy (nats) of the response tokens: float32 [tokens] each, the latter if asked for.

    `limit`: logits computed at once; beyond it the head runs in chunks, whose logits backward computes again.
    """
    hidden = response_hidden(model, compute, micro)
    return hidden_log_probs(model, compute, hidden, micro, temperature, spread, limit=limit)


def response_hidden(model: Any, compute: Compute, micro: MicroBatch) -> torch.Tensor:
    """Last hidden states at the positions that predict the response tokens: [tokens, hidden]."""
    with autocast(model, compute):
        beside = packed_inputs(micro, model.device)
        ids = micro.ids.to(model.device)
        hidden = model.get_decoder()(input_ids=ids, use_cache=False, **beside).last_hidden_state
    read = micro.read.to(model.device)
    if micro.families is None:
        return hidden.flatten(0, 1)[read]
    # Positions repeat; the gradient of this selection is summed in one order, that of [read] in any.
    return hidden.flatten(0, 1).index_select(0, read)


def hidden_log_probs(
    model: Any,
    compute: Compute,
    hidden: torch.Tensor,
    micro: MicroBatch,
    temperature: float,
    spread: Spread,
    *,
    limit: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """As `response_log_probs`, from what `response_hidden` gave."""
    with autocast(model, compute):
        targets = micro.targets.to(model.device)
        rows = max(1, limit // model.config.vocab_size)
        if len(hidden) <= rows:
            return _head(model, hidden, targets, temperature, spread)
        parts = [
            checkpoint(_head, model, h, t, temperature, spread, use_reentrant=False)
            for h, t in zip(hidden.split(rows), targets.split(rows), strict=True)
        ]
    return torch.cat([part[0] for part in parts]), torch.cat([part[1] for part in parts])


def _head(
    model: Any, hidden: torch.Tensor, targets: torch.Tensor, temperature: float, spread: Spread
) -> tuple[torch.Tensor, torch.Tensor]:
    if isinstance(model.lm_head, VocabularyHead):
        return model.lm_head.log_probs(hidden, targets, temperature, spread)
    logits = model.lm_head(hidden)
    # A plain layer gives a tensor that nobody else reads; of other heads a copy is overwritten.
    own = logits.float() if type(model.lm_head) is nn.Linear or logits.dtype != torch.float32 else logits.clone()
    return log_probs_of(own, targets, temperature or 1.0, entropies=spread != "none", spread=spread == "gradient")


def response_values(model: Any, compute: Compute, micro: MicroBatch) -> torch.Tensor:
    """A value model's estimate before each response token, at the position that predicts it: float32 [tokens]."""
    return model.value(response_hidden(model, compute, micro))


def sequence_scores(model: Any, compute: Compute, ids: torch.Tensor, last: torch.Tensor) -> torch.Tensor:
    """A reward model's output at one position of each row: float32 [rows].

    Args: `ids` int64 [rows, width], right-padded; `last` int64 [rows]: the position to read.
    """
    with autocast(model, compute):
        body = getattr(model, model.base_model_prefix)
        hidden = body(input_ids=ids.to(model.device), use_cache=False).last_hidden_state
        rows = torch.arange(len(ids), device=model.device)
        return model.score(hidden[rows, last.to(model.device)])[:, 0].float()


def autocast(model: Any, compute: Compute) -> contextlib.AbstractContextManager[Any]:
    """bf16 matrix products over fp32 weights, or nothing."""
    context: contextlib.AbstractContextManager[Any] = contextlib.nullcontext()
    if compute == "bf16":
        context = torch.autocast(model.device.type, dtype=torch.bfloat16)
    return context
