"""One call of generate: its samples, what they have so far, and decoding them in waves."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import torch

from rlflow.backends.ray_runtime.decoder import Decoder
from rlflow.backends.ray_runtime.engine import Ends, Enough
from rlflow.backends.ray_runtime.engine_gate import ENOUGH, GIVE, GO_ON, Gate
from rlflow.backends.ray_runtime.models import LoadedModel
from rlflow.backends.ray_runtime.randomness import uniforms
from rlflow.backends.ray_runtime.replica import Replica, Sample
from rlflow.backends.ray_runtime.sampling import Sampler, response_lengths
from rlflow.backends.ray_runtime.spells import Spell, Spells, Stopwatch, no_spells
from rlflow.ir.ops import Generate
from rlflow.protocol.samples import Segment

Resume: TypeAlias = Callable[[int], tuple[int, bool]]
"""Wait until a pause is over: the version of the weights from then on, and whether the cache is gone."""


@dataclass(frozen=True)
class Work:
    """Samples to be made. Arrays [samples]; `begun` int64 tokens that a sample has already, by its number."""

    prompts: list[np.ndarray]
    """Distinct prompts, int64 ids."""
    prompt: np.ndarray
    """Number of a sample's prompt."""
    uid: np.ndarray
    sample: np.ndarray
    step: np.ndarray
    """uid, sample and step name the random stream."""
    begun: dict[int, torch.Tensor]
    begun_logprobs: dict[int, torch.Tensor]


class Generation:
    """`tokens` and `logprobs` [samples, max_new] are filled in place; `made` int64 [samples] says how far.

    `version` stands beside tokens until a pause after which the engine has other weights than `loaded_version`.

    What is in a row behind its first end token has no meaning.
    """

    def __init__(
        self,
        decoder: Decoder,
        loaded: LoadedModel,
        op: Generate,
        work: Work,
        *,
        device: torch.device,
        seed: int,
        version: int,
        loaded_version: int,
        gate: Gate,
        replica: Replica,
        resume: Resume,
        enough: Enough | None = None,
        wanted: Enough | None = None,
        give: Callable[[], None] = lambda: None,
        ends: Ends | None = None,
        spells: Spells | None = None,
    ) -> None:
        samples = len(work.prompt)
        self.work = work
        self.version = version
        self.stopped = False
        """Ended by `enough` or an abort."""
        self.tokens = torch.zeros(samples, op.max_new, dtype=torch.int64)
        self.logprobs = torch.zeros(samples, op.max_new, dtype=torch.float32)
        self.made = torch.zeros(samples, dtype=torch.int64)
        self.complete = np.zeros(samples, dtype=bool)
        """Kept up to date where `enough` or `wanted` is given."""
        self._versions: torch.Tensor | None = None
        """int64 [samples, max_new]; None while one version made everything"""
        self._first_version = version
        self._loaded_version = loaded_version
        self._decoder = decoder
        self._loaded = loaded
        self._op = op
        self.device = device
        self._seed = seed
        self._gate = gate
        self._replica = replica
        self._resume = resume
        self._enough, self._wanted, self._give = enough, wanted, give
        self._looks = enough is not None or wanted is not None
        without = loaded.ids_without_token
        self._ends: torch.Tensor | None = None
        """int64 [samples]: the number of a sample's last token, where that is imposed"""
        if ends is not None:
            self._ends = torch.from_numpy(ends(work.uid, work.sample))
            # One that is cut off ends with an ordinary token.
            self._ends = torch.where(self._ends < op.max_new, self._ends, op.max_new + 1)
            without = (*without, *loaded.eos_ids)
        self._spells = no_spells() if spells is None else spells
        never = torch.tensor(without, device=device) if without else None
        self._sampler = Sampler(op.temperature, op.top_p, op.top_k, never)
        for row, tokens in work.begun.items():
            self.tokens[row, : len(tokens)] = tokens
            self.logprobs[row, : len(tokens)] = work.begun_logprobs[row]
            self.made[row] = len(tokens)
        lengths, truncated = self.lengths()
        self.complete[:] = (~truncated | (lengths == op.max_new)).numpy()

    def lengths(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Tokens that every sample has, int64 [samples], and whether they lack an end token, bool [samples]."""
        ends, open_ = response_lengths(self.tokens, self._loaded.eos_ids)
        open_ |= ends > self.made
        return torch.where(open_, self.made, ends), open_

    def segments(self, row: int, length: int, before: tuple[Segment, ...] = ()) -> tuple[Segment, ...]:
        """The versions that made a sample's `length` tokens; `before`: those of the tokens it was given with."""
        given = sum(segment.tokens for segment in before)
        if self._versions is None:
            new = [Segment(self._first_version, length - given)] if length > given else []
        else:
            versions, counts = torch.unique_consecutive(self._versions[row, given:length], return_counts=True)
            new = [Segment(v, n) for v, n in zip(versions.tolist(), counts.tolist(), strict=True)]
        if before and new and before[-1].version == new[0].version:
            return (*before[:-1], Segment(new[0].version, before[-1].tokens + new[0].tokens), *new[1:])
        return (*before, *new)

    # --- waves -----------------------------------------------------------------------------------------------------

    def waves(self, rows: np.ndarray, most: int) -> list[np.ndarray]:
        """Samples numbered `rows` in parts of about `most`: begun ones first, then by length, for the least padding.

        Samples of a prompt stay together where they can: they share its prefill.
        """
        if not len(rows):
            return []
        prompts = np.array([len(prompt) for prompt in self.work.prompts], dtype=np.int64)
        made = self.made[torch.from_numpy(rows)].numpy()
        order = rows[np.lexsort((prompts[self.work.prompt[rows]] + made, made == 0))]
        per_wave = max(1, most // self._op.n) * self._op.n
        return [order[start : start + per_wave] for start in range(0, len(order), per_wave)]

    def run(self, rows: np.ndarray, most: int, compact_share: int) -> None:
        """Take the samples numbered `rows` to their ends, or until generation is stopped."""
        waiting = self.waves(rows, most)
        while waiting and not self.stopped:
            wave = torch.from_numpy(waiting.pop(0))
            rest = self._decode(*self.prefill(wave), wave, compact_share)
            if len(rest):
                waiting.insert(0, rest)

    def prefill(self, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Read prompts and what the samples have. By row: the next token's logits, and the draws of the tokens that
        are still to come, float64 [rows, most of them]; None when greedy."""
        work, op = self.work, self._op
        made = self.made[rows].tolist()
        room = op.max_new - min(made)
        # Equal sequences are read once, whoever asked for them.
        unique: dict[bytes, int] = {}
        keys: dict[int, bytes] = {}
        source = []
        for row, have in zip(rows.tolist(), made, strict=True):
            prompt = int(work.prompt[row])
            key = keys.get(prompt)
            if key is None:
                key = keys[prompt] = work.prompts[prompt].tobytes()
            if have:
                key += self.tokens[row, :have].numpy().tobytes()
            source.append(unique.setdefault(key, len(unique)))
        distinct = [np.frombuffer(key, dtype=np.int64) for key in unique]
        started = time.perf_counter()
        ids, lengths = left_padded(distinct, self._loaded.pad_id)
        device = self.device
        draws: torch.Tensor | None = None
        if op.temperature > 0:
            streams = np.zeros((len(rows), room))
            for line, row, have in zip(streams, rows.tolist(), made, strict=True):
                stream = uniforms(
                    self._seed, int(work.step[row]), int(work.uid[row]), int(work.sample[row]), op.max_new
                )
                line[: op.max_new - have] = stream[have:]
            draws = torch.from_numpy(streams).to(device)
        logits = self._decoder.prefill(ids.to(device), lengths.to(device), room)
        repeat = torch.tensor(source, device=device)
        logits = logits[repeat]
        if room > 1 or op.environment is not None:
            self._decoder.select(repeat)
        self._spells.append(Spell(0, len(distinct), int(lengths.sum()), time.perf_counter() - started))
        return logits, draws

    def _decode(
        self, logits: torch.Tensor, draws: torch.Tensor | None, rows: torch.Tensor, compact_share: int
    ) -> np.ndarray:
        """Decode the samples `rows`, which were prefilled. Returns those that are to be prefilled anew."""
        device, max_new = logits.device, self._op.max_new
        eos_ids = self._loaded.eos_ids
        eos = torch.tensor(eos_ids, device=device)
        done = torch.zeros(len(rows), dtype=torch.bool, device=device)
        at = self.made[rows]
        # Rows that began at different tokens reach max_new at different columns.
        rooms = None if bool((at == at[0]).all()) else (max_new - at).to(device)
        room = max_new - int(at.min())
        # Columns decoded since the last compaction; the rows of the cache did not change in between.
        pending: list[tuple[torch.Tensor, torch.Tensor]] = []
        start = finished = 0
        watch = Stopwatch(self._spells, time.perf_counter())
        tokens = self._contexts(rows)
        for position in range(room):
            draw = None if draws is None else draws[:, position]
            ending = None if self._ends is None else (self._ends[rows] == at + position + 1).to(device)
            chosen, logp, signal = self.sample(logits, draw, ending=ending)
            if signal:
                self._store(rows, at, start, pending)
                watch.lap(time.perf_counter())
                pending, start = [], position
                if self.pause(signal):
                    return np.asarray(rows[~done.cpu()].numpy())
                watch.lap(time.perf_counter())
                chosen, logp, _ = self.sample(logits, draw, GO_ON, ending)
            pending.append((chosen, logp))
            live = len(rows) - finished
            watch.step(live, live * tokens // len(rows) + live * position)
            done |= (chosen == eos_ids[0]) if len(eos_ids) == 1 else torch.isin(chosen, eos)
            if rooms is not None:
                done |= rooms <= position + 1
            before, finished = finished, int(done.sum())
            if self._looks and finished > before:
                self.complete[rows[done.cpu()].numpy()] = True
            last = position + 1 == room or finished == len(rows)
            compact = finished * compact_share >= len(rows)
            if last or compact:
                self._store(rows, at, start, pending)
                pending, start = [], position + 1
                watch.lap(time.perf_counter())
            if last:
                self.complete[rows.numpy()] = True
                break
            if compact and finished:
                alive = torch.nonzero(~done)[:, 0]
                self._decoder.select(alive)
                rows, at, chosen = rows[alive.cpu()], at[alive.cpu()], chosen[alive]
                draws = None if draws is None else draws[alive]
                rooms = None if rooms is None else rooms[alive]
                tokens = self._contexts(rows) - len(rows) * (position + 1)
                done = torch.zeros(len(rows), dtype=torch.bool, device=device)
                finished = 0
            logits = self._decoder.step(chosen)
        return np.zeros(0, dtype=np.int64)

    def _contexts(self, rows: torch.Tensor) -> int:
        """Tokens of the contexts of the samples `rows` together, as far as they are noted."""
        prompts = self.work.prompts
        return sum(len(prompts[number]) for number in self.work.prompt[rows.numpy()].tolist()) + int(
            self.made[rows].sum()
        )

    # --- stopping --------------------------------------------------------------------------------------------------

    def sample(
        self,
        logits: torch.Tensor,
        draws: torch.Tensor | None,
        signal: int | None = None,
        ending: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor, int]:
        """Tokens and their log-probs; or no such things, and the signal that generation is to stop before them.

        `ending` bool [rows]: these get the end token.
        """
        sampler: Sample = self._sampler
        if ending is not None and bool(ending.any()):
            sampler = functools.partial(self._sampler.ended, ending=ending, token=self._loaded.eos_ids[0])
        return self._replica.sample(sampler, logits, draws, self._signal() if signal is None else signal)

    def _signal(self) -> int:
        signal = self._gate.signal
        if signal or not self._looks or not self._replica.first:
            return signal
        if self._enough is not None and self._enough(self.complete):
            return ENOUGH
        return GIVE if self._wanted is not None and self._wanted(self.complete) else GO_ON

    def pause(self, signal: int) -> bool:
        """Do what a signal says. Whether what was prefilled is of no use any more: it is over, or the cache is gone."""
        if signal == GIVE:
            self._give()
            return False
        if signal == ENOUGH or signal % 2:
            self.stopped = True
            return True
        version, gone = self._resume(signal)
        if version != self._loaded_version:
            if self._versions is None:
                self._versions = torch.full_like(self.tokens, self._first_version)
            self.version = self._loaded_version = version
        return gone

    def _store(
        self, rows: torch.Tensor, at: torch.Tensor, start: int, pending: list[tuple[torch.Tensor, torch.Tensor]]
    ) -> None:
        """Write columns `start`, `start` + 1, ... of a wave whose rows began at their tokens `at`."""
        if not pending:
            return
        tokens = torch.stack([token for token, _ in pending], 1).cpu()
        logprobs = torch.stack([logp for _, logp in pending], 1).cpu()
        first = int(at[0]) + start
        if bool((at == at[0]).all()):
            columns: tuple[torch.Tensor, torch.Tensor | slice] = (rows, slice(first, first + len(pending)))
        else:
            grid = at[:, None] + torch.arange(start, start + len(pending))
            real = grid < self.tokens.shape[1]
            columns = (rows[:, None].expand_as(grid)[real], grid[real])
            tokens, logprobs = tokens[real], logprobs[real]
        self.write(columns, tokens, logprobs)
        self.made[rows] = (at + start + len(pending)).clamp(max=self.tokens.shape[1])

    def write(
        self, where: tuple[torch.Tensor, torch.Tensor | slice], tokens: torch.Tensor, logprobs: torch.Tensor
    ) -> None:
        """Note new tokens of (samples, columns), made with the weights of now."""
        self.tokens[where] = tokens
        self.logprobs[where] = logprobs
        if self._versions is not None:
            self._versions[where] = self.version


def left_padded(sequences: list[np.ndarray], pad_id: int) -> tuple[torch.Tensor, torch.Tensor]:
    """int64 [sequences, longest] padded on the left, and their lengths."""
    width = max(len(sequence) for sequence in sequences)
    padded = np.full((len(sequences), width), pad_id, dtype=np.int64)
    for line, sequence in zip(padded, sequences, strict=True):
        line[width - len(sequence) :] = sequence
    return torch.from_numpy(padded), torch.tensor([len(sequence) for sequence in sequences])
