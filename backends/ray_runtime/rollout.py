"""The embedded rollout engine: sampling from a transformers model without a server.

A group's prompt is prefilled once and its cache repeated n times; finished rows leave the cache as decoding goes on;
every sample has its own random stream. So the tokens of a sample depend on weights, prompt, (seed, step, uid, sample)
and the sampling parameters, and not on the batch around it, except where float rounding of another batch shape moves
a draw that lies within it of the border between two tokens.
"""

from __future__ import annotations

import copy
from typing import Literal

import numpy as np
import torch
from transformers import PreTrainedModel

from rlflow.backends.ray_runtime.batch import Batch, Packed
from rlflow.backends.ray_runtime.conversation import Conversations, decode_text
from rlflow.backends.ray_runtime.decoder import make_decoder
from rlflow.backends.ray_runtime.environment_worker import Environments
from rlflow.backends.ray_runtime.models import LoadedModel
from rlflow.backends.ray_runtime.parallel.mesh import Mesh
from rlflow.backends.ray_runtime.randomness import uniforms
from rlflow.backends.ray_runtime.sampling import Sampler, response_lengths
from rlflow.diagnostics.diagnostic import RunFailure
from rlflow.ir.ops import Generate

__all__ = ["RolloutEngine", "Sampler", "response_lengths"]

_MAX_ROWS = 256
"""Samples decoded together; bounds the cache of a large batch."""
_COMPACT_SHARE = 8
"""Finished rows are dropped when they are at least one in this many: dropping copies the cache once."""


class RolloutEngine:
    """Samples from `loaded`. With compute "fp32" it reads the master weights themselves, so it is never out of date;
    with "bf16" it holds a copy that `load_weights` refreshes. Of a model with adapters it holds the weights with the
    adapters added, and shares the others with the trainer."""

    def __init__(
        self, loaded: LoadedModel, compute: Literal["fp32", "bf16"], mesh: Mesh | None = None, own: bool = False
    ) -> None:
        self.loaded = loaded
        self.version = 0
        self.mesh = mesh
        self._model: PreTrainedModel = loaded.model
        self.digest = ""
        """Of the weights with adapters that it samples from; empty for a model without."""
        if loaded.adapters is not None:
            self._model = loaded.adapters.merged(torch.bfloat16 if compute == "bf16" else torch.float32)
            self.digest = loaded.adapters.write_merged(self._model)
        elif compute == "bf16" or own:
            kind = torch.bfloat16 if compute == "bf16" else torch.float32
            self._model = copy.deepcopy(loaded.model).to(kind).requires_grad_(False)
        self._decoder = make_decoder(self._model)

    def local_tensors(self) -> dict[str, torch.Tensor]:
        return {name: parameter.data for name, parameter in self._model.named_parameters()}

    def begin_update(self) -> None:
        pass

    def end_update(self, version: int) -> None:
        self.version = version

    def load_weights(self, version: int) -> None:
        """Take over the master weights, in place, as `version`."""
        if self.loaded.adapters is not None:
            self.digest = self.loaded.adapters.write_merged(self._model)
        elif self._model is not self.loaded.model:
            with torch.no_grad():
                for mine, master in zip(self._model.parameters(), self.loaded.model.parameters(), strict=True):
                    mine.copy_(master)
        self.version = version

    def generate(
        self,
        prompts: Batch,
        op: Generate,
        *,
        seed: int,
        step: int,
        version: int,
        environments: Environments | None = None,
    ) -> Batch:
        """`op.n` samples per prompt, prompt by prompt: the columns of a samples batch (see batch.py).

        `logprobs` are those of the sampled tokens under softmax(logits / temperature) over the whole vocabulary, that
        is before top-k and top-p cut it; at temperature 0 (greedy) they are taken at temperature 1. Two generate
        stages on the same prompts of one step draw the same numbers unless their seeds differ.

        Of prompts with a share only the share's samples are made; `group` then counts over the whole step.

        With `op.environment` the samples are conversations with `environments` (see conversation.py) and have two more
        columns, `mask` and `turns`.

        RunFailure: RLF5007 a prompt with `op.max_new` does not fit the context, RLF5002 an empty prompt, RLF5017 a
        failing environment.
        """
        ids = [row.numpy() for row in _rows(prompts.packed("prompt_ids"))]
        uids = prompts.array("uid")
        self._check_lengths(ids, uids, op.max_new)
        first, own = own_samples(prompts, op.n)
        # Rows are numbered as if all samples of these prompts were made; those of other ranks stay empty.
        tokens = torch.zeros(len(ids) * op.n, op.max_new, dtype=torch.int64)
        logprobs = torch.zeros(len(ids) * op.n, op.max_new, dtype=torch.float32)
        talks: Conversations | None = None
        if op.environment is not None:
            assert environments is not None, f"generate needs the environment `{op.environment}`"
            talks = Conversations(self._decoder, self.loaded, op, environments, prompts, tokens, logprobs)
        with torch.inference_mode():
            self._decoder.refresh()
            # Prompts of similar length are decoded together, for the least padding.
            order = np.argsort([len(row) for row in ids], kind="stable")
            order = order[((order + 1) * op.n > own.start) & (order * op.n < own.stop)]
            per_wave = max(1, _MAX_ROWS // op.n)
            for start in range(0, len(order), per_wave):
                wave = order[start : start + per_wave]
                logits, rows, draws = self._prefill(ids, uids, wave, own, op, seed, step)
                if talks is None:
                    self._decode(logits, rows, draws, op, tokens, logprobs)
                else:
                    talks.run(logits, rows, draws, _COMPACT_SHARE)
        mine = slice(own.start, own.stop)
        tokens, logprobs = tokens[mine], logprobs[mine]
        if talks is None:
            lengths, truncated = response_lengths(tokens, self.loaded.eos_ids)
        else:
            lengths, truncated = talks.lengths[mine], talks.truncated[mine]
        kept = torch.arange(op.max_new) < lengths[:, None]
        offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
        responses = Packed(tokens[kept], offsets)
        prompt, sample = np.divmod(np.arange(own.start, own.stop, dtype=np.int64), op.n)
        repeated = prompts.select(prompt)
        if talks is not None:
            mask, turns = talks.mask[mine][kept], talks.turns[mine]
            repeated = repeated.with_columns(mask=Packed(mask, offsets), turns=turns.numpy())
        return repeated.with_columns(
            group=first + prompt,
            sample=sample,
            response_ids=responses,
            logprobs=Packed(logprobs[kept], offsets),
            text=decode_text(self.loaded.tokenizer, responses),
            truncated=truncated.numpy(),
            version=np.full(len(own), version, dtype=np.int64),
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

    def _prefill(
        self, ids: list[np.ndarray], uids: np.ndarray, wave: np.ndarray, own: range, op: Generate, seed: int, step: int
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """Read the prompts numbered `wave`. By row of the cache: the first token's logits, the sample's number in the
        batch (int64, on the CPU), which is in `own`, and its draws [rows, max_new], None when greedy."""
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

        grid = (wave[:, None] * op.n + np.arange(op.n)).reshape(-1)
        mine = (grid >= own.start) & (grid < own.stop)
        rows = torch.from_numpy(grid[mine])
        draws: torch.Tensor | None = None
        if op.temperature > 0:
            streams = [uniforms(seed, step, int(uids[row // op.n]), row % op.n, op.max_new) for row in rows.tolist()]
            draws = torch.from_numpy(np.stack(streams)).to(device)
        logits = self._decoder.prefill(torch.from_numpy(padded).to(device), lengths, op.max_new)
        repeat = torch.from_numpy(np.repeat(source, op.n)[mine]).to(device)
        logits = logits[repeat]
        if op.max_new > 1 or op.environment is not None:
            self._decoder.select(repeat)
        return logits, rows, draws

    def _decode(
        self,
        logits: torch.Tensor,
        rows: torch.Tensor,
        draws: torch.Tensor | None,
        op: Generate,
        tokens: torch.Tensor,
        logprobs: torch.Tensor,
    ) -> None:
        """Decode what was prefilled, into the rows of `tokens` and `logprobs` that are theirs."""
        device = logits.device
        sampler = Sampler(op.temperature, op.top_p, op.top_k)
        eos_ids = self.loaded.eos_ids
        eos = torch.tensor(eos_ids, device=device)
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


def own_samples(prompts: Batch, n: int) -> tuple[int, range]:
    """The first prompt's number in the whole step, and which of the prompts' samples (prompt by prompt, `n` each, from
    0 on) are this rank's: all, unless the prompts have a share."""
    share = prompts.share
    if share is None:
        return 0, range(prompts.rows * n)
    first, whole = share.touched.start, share.samples(n)
    return first, range(whole.start - first * n, whole.stop - first * n)


def _rows(packed: Packed) -> list[torch.Tensor]:
    return [packed.row(index) for index in range(packed.rows)]
