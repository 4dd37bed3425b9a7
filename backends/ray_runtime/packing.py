"""Between packed rows and the padded rectangles a model reads, without a Python loop over samples."""

from __future__ import annotations

import heapq
from dataclasses import dataclass

import numpy as np
import torch

from rlflow.backends.ray_runtime.batch import Batch
from rlflow.backends.ray_runtime.randomness import minibatch_permutation


def ranges(starts: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """starts[0] .. starts[0]+lengths[0]-1, then the same for the next row, ...: int64 [lengths.sum()]."""
    first = np.cumsum(lengths) - lengths
    return np.repeat(starts - first, lengths) + np.arange(int(lengths.sum()), dtype=np.int64)


def minibatch_rows(rows: int, size: int, *, seed: int, step: int, epoch: int) -> list[np.ndarray]:
    """The samples of each mini-batch of `size` (0 = all): shuffled when there are several, else in order."""
    if not size or rows <= size:
        return [np.arange(rows, dtype=np.int64)]
    order = minibatch_permutation(seed, step, epoch, rows)
    return [order[start : start + size] for start in range(0, rows, size)]


def minibatch_pairs(rows: int, size: int, *, seed: int, step: int, epoch: int) -> list[np.ndarray]:
    """`minibatch_rows` for rows in pairs (2i, 2i + 1), which stay side by side. ValueError for an odd number."""
    if rows % 2:
        raise ValueError(f"{rows} samples are not pairs")
    parts = minibatch_rows(rows // 2, size // 2, seed=seed, step=step, epoch=epoch)
    return [(part[:, None] * 2 + np.arange(2)).reshape(-1) for part in parts]


@dataclass(frozen=True, slots=True)
class Family:
    """A prompt that samples share (see shared_prompts.py): its tokens, and rectangles of responses, (rows, width)."""

    prompt: int
    blocks: tuple[tuple[int, int], ...]

    @property
    def rows(self) -> int:
        return sum(count for count, _ in self.blocks)

    @property
    def area(self) -> int:
        """Tokens with padding."""
        return self.prompt + sum(count * width for count, width in self.blocks)


@dataclass(frozen=True)
class MicroBatch:
    """Some samples as one right-padded rectangle. Response tokens of the rows lie one after another in all [tokens].

    Response tokens are the counted ones: an environment's are read by the model, and are in none of the columns.
    """

    rows: np.ndarray
    """int64: the samples, longest first"""
    ids: torch.Tensor
    """int64 [rows, width]: prompt and response but for the very last token, which predicts nothing"""
    read: torch.Tensor
    """int64 [tokens]: index into the flattened rectangle of the position that predicts each response token"""
    targets: torch.Tensor
    """int64 [tokens]: the response tokens"""
    source: np.ndarray
    """int64 [tokens]: where each response token lies in the batch's packed response columns"""
    lengths: torch.Tensor
    """int64 [rows]: response tokens per row"""
    segments: tuple[int, ...] | None = None
    """Of a packed micro-batch, whose ids are [1, width]: the tokens of every row, which lie one after another; what is
    behind them is padding."""
    families: tuple[Family, ...] | None = None
    """Of a micro-batch whose ids are [1, width] and in which samples share their prompts."""


class Sequences:
    """Prompt and response of every sample, joined once per batch.

    `counted` bool [response tokens] is the column `mask`; None = every token counts.
    """

    def __init__(self, samples: Batch, pad_id: int) -> None:
        prompts, responses = samples.packed("prompt_ids"), samples.packed("response_ids")
        self.pad_id = pad_id
        self.responses = responses
        self.prompt_lengths = prompts.lengths.numpy()
        self.response_lengths = responses.lengths.numpy()
        self.counted: np.ndarray | None = None
        self.counts = self.response_lengths
        """int64 [rows]: counted response tokens"""
        if "mask" in samples.columns:
            self.counted = samples.packed("mask").values.numpy() > 0
            rows = responses.row_ids().numpy()[self.counted]
            self.counts = np.bincount(rows, minlength=samples.rows).astype(np.int64)
        self.lengths = self.prompt_lengths + self.response_lengths
        self.starts = np.cumsum(self.lengths) - self.lengths
        self.response_starts = responses.offsets.numpy()[:-1]
        self.ids = np.empty(int(self.lengths.sum()), dtype=np.int64)
        self.ids[ranges(self.starts, self.prompt_lengths)] = prompts.values.numpy()
        self.ids[ranges(self.starts + self.prompt_lengths, self.response_lengths)] = responses.values.numpy()

    def micro_batches(self, rows: np.ndarray, budget: int, unit: int = 1, multiple: int = 1) -> list[MicroBatch]:
        """`rows` cut into rectangles of at most `budget` padded tokens, but at least `unit` samples each.

        Longest first, so that rows of a rectangle are of similar length and the largest rectangle comes first: a budget
        that is too large fails at once. Every `unit` consecutive rows stay together and in order (2 for pairs). Widths
        are multiples of `multiple`.
        """
        units = rows.reshape(-1, unit)
        longest = self.lengths[units].max(1) if len(units) else np.zeros(0, dtype=np.int64)
        order = np.argsort(-longest, kind="stable")
        batches: list[MicroBatch] = []
        start = 0
        while start < len(order):
            width = _up(max(1, int(longest[order[start]]) - 1), multiple)
            count = max(1, budget // (width * unit))
            batches.append(self._pad(units[order[start : start + count]].reshape(-1), width))
            start += count
        return batches

    def even_micro_batches(
        self, rows: np.ndarray, budget: int, unit: int, *, parts: int, multiple: int = 1
    ) -> list[MicroBatch]:
        """As `micro_batches`, all as wide as the longest row and, but for the last ones, of equally many rows; at least
        `parts` of them where there are enough rows."""
        units = rows.reshape(-1, unit)
        if not len(units):
            return []
        width = _up(max(1, int(self.lengths[rows].max()) - 1), multiple)
        count = max(-(-len(units) // max(1, budget // (width * unit))), min(parts, len(units)))
        order = np.argsort(-self.lengths[units].max(1), kind="stable")
        return [self._pad(units[part].reshape(-1), width) for part in np.array_split(order, count)]

    def packed_micro_batches(
        self, rows: np.ndarray, budget: int, unit: int, *, parts: int, multiple: int = 1
    ) -> list[MicroBatch]:
        """`rows` one after another in rows of equally many tokens, about `budget` at most but at least `unit` samples;
        at least `parts` of them where there are enough rows.

        Balanced: the longest first, each to where the least is (Graham 1969: at most 4/3 of the best).
        """
        units = rows.reshape(-1, unit)
        if not len(units):
            return []
        tokens = (self.lengths[units] - 1).sum(1)
        count = max(-(-int(tokens.sum()) // budget), min(parts, len(units)))
        loads = [(0, number) for number in range(min(count, len(units)))]
        bins: list[list[int]] = [[] for _ in loads]
        for index in np.argsort(-tokens, kind="stable"):
            load, number = heapq.heappop(loads)
            bins[number].append(int(index))
            heapq.heappush(loads, (load + int(tokens[index]), number))
        width = _up(max(load for load, _ in loads), multiple)
        return [self._pack(units[chosen].reshape(-1), width) for chosen in bins]

    def rectangles(self, budget: int) -> list[tuple[np.ndarray, torch.Tensor, torch.Tensor]]:
        """All rows with all their tokens, at most `budget` padded tokens at once: (rows, ids [rows, width], last).

        `last` int64 [rows] is the column of each row's last token.
        """
        order = np.argsort(-self.lengths, kind="stable")
        out = []
        start = 0
        while start < len(order):
            width = int(self.lengths[order[start]])
            rows = order[start : start + max(1, budget // max(1, width))]
            columns = np.arange(width)
            inside = columns < self.lengths[rows][:, None]
            ids = np.where(inside, self.ids[np.where(inside, self.starts[rows][:, None] + columns, 0)], self.pad_id)
            out.append((rows, torch.from_numpy(ids), torch.from_numpy(self.lengths[rows] - 1)))
            start += len(rows)
        return out

    def _pack(self, rows: np.ndarray, width: int) -> MicroBatch:
        lengths = self.lengths[rows] - 1
        ids = np.full(width, self.pad_id, dtype=np.int64)
        ids[: int(lengths.sum())] = self.ids[ranges(self.starts[rows], lengths)]
        firsts = np.cumsum(lengths) - lengths
        segments = tuple(int(length) for length in lengths if length)
        return self.micro_batch(rows, torch.from_numpy(ids)[None], firsts, segments)

    def _pad(self, rows: np.ndarray, width: int) -> MicroBatch:
        columns = np.arange(width)
        inside = columns < (self.lengths[rows] - 1)[:, None]
        index = np.where(inside, self.starts[rows][:, None] + columns, 0)
        ids = np.where(inside, self.ids[index], self.pad_id)
        return self.micro_batch(rows, torch.from_numpy(ids), np.arange(len(rows)) * width)

    def micro_batch(
        self,
        rows: np.ndarray,
        ids: torch.Tensor,
        firsts: np.ndarray,
        segments: tuple[int, ...] | None = None,
        *,
        heads: np.ndarray | None = None,
        families: tuple[Family, ...] | None = None,
    ) -> MicroBatch:
        """`firsts` int64 [rows]: where in the flattened `ids` each row begins, or would if its prompt lay before its
        response. `heads` int64 [rows]: where its first response token is predicted, if not right before it."""
        lengths = self.response_lengths[rows]
        read = ranges(firsts + self.prompt_lengths[rows] - 1, lengths)
        if heads is not None:
            some = lengths > 0
            read[(np.cumsum(lengths) - lengths)[some]] = heads[some]
        source = ranges(self.response_starts[rows], lengths)
        if self.counted is not None:
            kept = self.counted[source]
            read, source, lengths = read[kept], source[kept], self.counts[rows]
        return MicroBatch(
            rows,
            ids,
            torch.from_numpy(read),
            self.responses.values[torch.from_numpy(source)],
            source,
            torch.from_numpy(lengths),
            segments,
            families,
        )


def _up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple
