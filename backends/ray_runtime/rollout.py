"""The embedded rollout engine: sampling from a transformers model without a server.

A group's prompt is prefilled once and its cache repeated n times; finished rows leave the cache as decoding goes on;
every sample has its own random stream. So the tokens of a sample depend on weights, prompt, (seed, step, uid, sample)
and the sampling parameters, and not on the batch around it, except where float rounding of another batch shape moves
a draw that lies within it of the border between two tokens.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

import numpy as np
import torch
from transformers import PreTrainedModel

from rlflow.backends.ray_runtime.batch import Batch, Packed
from rlflow.backends.ray_runtime.decoder import make_decoder
from rlflow.backends.ray_runtime.models import LoadedModel
from rlflow.backends.ray_runtime.randomness import uniforms
from rlflow.diagnostics.diagnostic import RunFailure
from rlflow.ir.ops import Generate

_MAX_ROWS = 256
"""Samples decoded together; bounds the cache of a large batch."""
_COMPACT_SHARE = 8
"""Finished rows are dropped when they are at least one in this many: dropping copies the cache once."""


class RolloutEngine:
    """Samples from `loaded`. With compute "fp32" it reads the master weights themselves, so it is never out of date;
    with "bf16" it holds a copy that `load_weights` refreshes."""

    def __init__(self, loaded: LoadedModel, compute: Literal["fp32", "bf16"]) -> None:
        self.loaded = loaded
        self.version = 0
        self._model: PreTrainedModel = loaded.model
        if compute == "bf16":
            self._model = copy.deepcopy(loaded.model).to(torch.bfloat16).requires_grad_(False)
        self._decoder = make_decoder(self._model)

    def load_weights(self, version: int) -> None:
        """Take over the master weights, in place, as `version`."""
        if self._model is not self.loaded.model:
            with torch.no_grad():
                for mine, master in zip(self._model.parameters(), self.loaded.model.parameters(), strict=True):
                    mine.copy_(master)
        self.version = version

    def generate(self, prompts: Batch, op: Generate, *, seed: int, step: int, version: int) -> Batch:
        """`op.n` samples per prompt, prompt by prompt: the columns of a samples batch (see batch.py).

        `logprobs` are those of the sampled tokens under softmax(logits / temperature) over the whole vocabulary, that
        is before top-k and top-p cut it; at temperature 0 (greedy) they are taken at temperature 1. Two generate
        stages on the same prompts of one step draw the same numbers unless their seeds differ.

        RunFailure: RLF5007 a prompt with `op.max_new` does not fit the context, RLF5002 an empty prompt.
        """
        ids = [row.numpy() for row in _rows(prompts.packed("prompt_ids"))]
        uids = prompts.array("uid")
        self._check_lengths(ids, uids, op.max_new)
        samples = len(ids) * op.n
        tokens = torch.zeros(samples, op.max_new, dtype=torch.int64)
        logprobs = torch.zeros(samples, op.max_new, dtype=torch.float32)
        with torch.inference_mode():
            self._decoder.refresh()
            # Prompts of similar length are decoded together, for the least padding.
            order = np.argsort([len(row) for row in ids], kind="stable")
            per_wave = max(1, _MAX_ROWS // op.n)
            for start in range(0, len(ids), per_wave):
                self._decode(ids, uids, order[start : start + per_wave], op, seed, step, tokens, logprobs)
        lengths, truncated = response_lengths(tokens, self.loaded.eos_ids)
        kept = torch.arange(op.max_new) < lengths[:, None]
        offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
        responses = Packed(tokens[kept], offsets)
        repeated = prompts.select(np.repeat(np.arange(len(ids)), op.n))
        return repeated.with_columns(
            group=np.repeat(np.arange(len(ids), dtype=np.int64), op.n),
            sample=np.tile(np.arange(op.n, dtype=np.int64), len(ids)),
            response_ids=responses,
            logprobs=Packed(logprobs[kept], offsets),
            text=self._decode_text(responses),
            truncated=truncated.numpy(),
            version=np.full(samples, version, dtype=np.int64),
        )

    def _check_lengths(self, ids: list[np.ndarray], uids: np.ndarray, max_new: int) -> None:
        for row, uid in zip(ids, uids, strict=True):
            if not len(row):
                raise RunFailure("RLF5002", f"prompt {uid} has no tokens")
            if len(row) + max_new > self.loaded.context:
                raise RunFailure(
                    "RLF5007",
                    f"prompt {uid} has {len(row)} tokens; with max_new = {max_new} that is {len(row) + max_new}, "
                    f"and the model's context is {self.loaded.context} tokens",
                    help=(f"lower max_new to {self.loaded.context - len(row)} or drop prompts this long",)
                    if len(row) < self.loaded.context
                    else ("drop prompts this long",),
                )

    def _decode(
        self,
        ids: list[np.ndarray],
        uids: np.ndarray,
        wave: np.ndarray,
        op: Generate,
        seed: int,
        step: int,
        tokens: torch.Tensor,
        logprobs: torch.Tensor,
    ) -> None:
        """Decode the prompts numbered `wave`, into the rows of `tokens` and `logprobs` that are theirs."""
        device = self._model.device
        # Equal prompts are prefilled once, whoever asked for them.
        unique: dict[bytes, int] = {}
        source = [unique.setdefault(ids[i].tobytes(), len(unique)) for i in wave]
        distinct = [np.frombuffer(key, dtype=np.int64) for key in unique]
        width = max(len(row) for row in distinct)
        padded = np.full((len(distinct), width), self.loaded.pad_id, dtype=np.int64)
        for index, row in enumerate(distinct):
            padded[index, width - len(row) :] = row
        lengths = torch.tensor([len(row) for row in distinct], device=device)

        # rows[i]: the row of `tokens` that row i of the cache fills
        rows = torch.from_numpy((wave[:, None] * op.n + np.arange(op.n)).reshape(-1))
        draws: torch.Tensor | None = None
        if op.temperature > 0:
            streams = [uniforms(seed, step, int(uids[i]), s, op.max_new) for i in wave for s in range(op.n)]
            draws = torch.from_numpy(np.stack(streams)).to(device)
        sampler = Sampler(op.temperature, op.top_p, op.top_k)
        eos_ids = self.loaded.eos_ids
        eos = torch.tensor(eos_ids, device=device)

        logits = self._decoder.prefill(torch.from_numpy(padded).to(device), lengths, op.max_new)
        repeat = torch.tensor(source, device=device).repeat_interleave(op.n)
        logits = logits[repeat]
        if op.max_new > 1:
            self._decoder.select(repeat)
        done = torch.zeros(len(rows), dtype=torch.bool, device=device)
        # Columns decoded since the last compaction; the rows of the cache did not change in between.
        pending: list[tuple[torch.Tensor, torch.Tensor]] = []
        start = 0
        for position in range(op.max_new):
            chosen, logp = sampler(logits, None if draws is None else draws[:, position])
            pending.append((chosen, logp))
            done |= (chosen == eos_ids[0]) if len(eos_ids) == 1 else torch.isin(chosen, eos)
            finished = int(done.sum())
            last = position + 1 == op.max_new or finished == len(rows)
            compact = finished * _COMPACT_SHARE >= len(rows)
            if last or compact:
                tokens[rows, start : position + 1] = torch.stack([t for t, _ in pending], 1).cpu()
                logprobs[rows, start : position + 1] = torch.stack([p for _, p in pending], 1).cpu()
                pending, start = [], position + 1
            if last:
                break
            if compact and finished:
                alive = torch.nonzero(~done)[:, 0]
                self._decoder.select(alive)
                rows, chosen = rows[alive.cpu()], chosen[alive]
                draws = None if draws is None else draws[alive]
                done = torch.zeros(len(rows), dtype=torch.bool, device=device)
            logits = self._decoder.step(chosen)

    def _decode_text(self, responses: Packed) -> list[str]:
        bounds = responses.offsets.tolist()
        values = responses.values.tolist()
        rows = [values[a:b] for a, b in pairwise(bounds)]
        tokenizer = self.loaded.tokenizer
        if getattr(tokenizer, "clean_up_tokenization_spaces", False) or not rows:
            return list(tokenizer.batch_decode(rows, skip_special_tokens=True)) if rows else []
        # What batch_decode does row by row, in one call.
        return list(tokenizer.backend_tokenizer.decode_batch(rows, skip_special_tokens=True))


def response_lengths(tokens: torch.Tensor, eos_ids: tuple[int, ...]) -> tuple[torch.Tensor, torch.Tensor]:
    """Where each row's response ends: the first end token is its last token, without one it fills the row.

    Args: `tokens` int64 [rows, width]; what follows an end token is ignored. Returns lengths int64 [rows] and
    truncated bool [rows]: no end token was sampled. Nothing is ever appended to a truncated response.
    """
    width = tokens.shape[1]
    ends = torch.isin(tokens, torch.tensor(eos_ids, device=tokens.device))
    found = ends.any(1)
    lengths = torch.where(found, ends.int().argmax(1) + 1, torch.full_like(found, width, dtype=torch.int64))
    return lengths, ~found


@dataclass(frozen=True, slots=True)
class Sampler:
    """Inverse-CDF sampling: the first token whose cumulative probability exceeds the row's uniform draw.

    top-k keeps the k likeliest tokens; then top-p (Holtzman et al. 2020, arXiv 1904.09751) the smallest set of the
    likeliest tokens whose renormalised probability reaches p. The CDF is summed in float64, in the order of token ids.
    """

    temperature: float
    top_p: float = 1.0
    top_k: int = 0

    def __call__(self, logits: torch.Tensor, draws: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        """Tokens int64 [rows] and their log-probabilities float32 [rows] before top-k and top-p.

        Args: `logits` [rows, vocabulary]; `draws` float64 [rows] in [0, 1 - 2**-52], None when greedy.
        """
        logits = logits.float()
        if draws is None:
            logp = torch.log_softmax(logits, -1)
            chosen = logits.argmax(-1, keepdim=True)
            return chosen[:, 0], logp.gather(1, chosen)[:, 0]
        logp = torch.log_softmax(logits if self.temperature == 1.0 else logits / self.temperature, -1)
        weights = logp.exp()
        if self.top_k or self.top_p < 1.0:
            weights = self._truncate(weights)
        cdf = torch.cumsum(weights, -1, dtype=torch.float64)
        chosen = torch.searchsorted(cdf, draws[:, None] * cdf[:, -1:], right=True)
        return chosen[:, 0], logp.gather(1, chosen)[:, 0]

    def _truncate(self, weights: torch.Tensor) -> torch.Tensor:
        ordered, tokens = torch.sort(weights, dim=-1, descending=True, stable=True)
        if self.top_k:
            ordered[:, self.top_k :] = 0.0
        if self.top_p < 1.0:
            ordered /= ordered.sum(-1, keepdim=True)
            # A token stays while the ones before it have not yet reached p, so the likeliest always stays.
            ordered = torch.where(ordered.cumsum(-1) - ordered < self.top_p, ordered, 0.0)
        return torch.zeros_like(weights).scatter_(1, tokens, ordered)


def _rows(packed: Packed) -> list[torch.Tensor]:
    return [packed.row(index) for index in range(packed.rows)]
