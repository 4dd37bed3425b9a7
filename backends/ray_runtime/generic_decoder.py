"""What a decoder is, the one for every causal model, and the cache of rows that are put aside."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from transformers import DynamicCache, PreTrainedModel


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class Parked:
    """Rows that left a decoder. By layer, keys and values [rows, kv heads, slots, size]; `pads` int64 [rows]: the slot
    of a row's first token. Slots behind a row's last token may hold anything. No layers: the rows must be read anew."""

    keys: list[torch.Tensor]
    values: list[torch.Tensor]
    pads: torch.Tensor

    @property
    def dropped(self) -> bool:
        return not self.keys

    def drop(self) -> None:
        self.keys.clear()
        self.values.clear()

    def select(self, rows: torch.Tensor) -> Parked:
        return Parked(
            [keys.index_select(0, rows) for keys in self.keys],
            [values.index_select(0, rows) for values in self.values],
            self.pads[rows],
        )


def joined(parked: Sequence[Parked], pads: torch.Tensor, width: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Keys and values of all parked rows, layer by layer, cut or moved so that a row's first token is in slot `pads`
    and there are `width` slots."""
    slots = torch.arange(width, device=pads.device)
    sources, first = [], 0
    for part in parked:
        rows = pads[first : first + len(part.pads)]
        source = (slots + (part.pads - rows)[:, None]).clamp(min=0, max=part.keys[0].shape[2] - 1)
        sources.append(source[:, None, :, None])
        first += len(part.pads)
    for layer in range(len(parked[0].keys)):
        pair = []
        for tensors in ([part.keys[layer] for part in parked], [part.values[layer] for part in parked]):
            moved = [
                tensor.gather(2, source.expand(-1, tensor.shape[1], -1, tensor.shape[3]))
                for tensor, source in zip(tensors, sources, strict=True)
            ]
            pair.append(torch.cat(moved))
        yield pair[0], pair[1]


def causal_mask(queries: torch.Tensor, slots: torch.Tensor, pads: torch.Tensor) -> torch.Tensor:
    """bool [rows, 1, queries, slots]: the token in each queried slot sees itself and the real tokens before it."""
    real = slots >= pads[:, None]
    # A padding slot sees itself: a row of the mask without any True would be NaN and spread.
    itself = queries[:, None] == slots
    return (((queries[:, None] >= slots) & real[:, None, :]) | itself)[:, None]


class Decoder(Protocol):
    """Rows [batch] of one cache. All rows are at the same position; shorter prompts are padded on the left."""

    def refresh(self) -> None:
        """Read the model's weights anew."""

    cache_peak: int
    """The most bytes of keys and values since the caller set it to 0."""

    def drop(self) -> None:
        """Free the cache, that of parked rows too: what comes next is a `prefill`, or a `resume` that reads anew."""

    def drop_weights(self) -> None:
        """Let go of copies of the weights until `refresh`."""

    def copied_bytes(self) -> int:
        """Bytes of copies of the weights."""

    def cache_bytes(self) -> int:
        """Bytes of keys and values, parked rows included."""

    def prefill(self, ids: torch.Tensor, lengths: torch.Tensor, max_new: int) -> torch.Tensor:
        """Start with left-padded prompts int64 [batch, width]; logits of the next token [batch, vocabulary]."""

    def select(self, rows: torch.Tensor) -> None:
        """Keep, repeat and reorder rows: int64 [new batch]."""

    def step(self, tokens: torch.Tensor) -> torch.Tensor:
        """Append one token per row, int64 [batch]; logits of the next one [batch, vocabulary]."""

    def park(self, rows: torch.Tensor) -> Parked:
        """A copy of some rows' cache, int64 [rows], to be given to `resume`."""

    def resume(
        self, parked: Sequence[Parked], ids: torch.Tensor, lengths: torch.Tensor, new: int, max_new: int
    ) -> torch.Tensor:
        """Go on with exactly the rows of `parked`, in their order; logits of the next token [rows, vocabulary].

        Args: `ids` int64 [rows, width]: whole sequences, left-padded, of `lengths` tokens; all tokens before the last
        `new` columns are in the rows' caches, and of those columns as many as the row was stepped through.
        """


class GenericDecoder:
    """transformers' own forward, masks and cache."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model
        self.cache: DynamicCache | None = None
        self.cache_peak = 0

    def refresh(self) -> None:
        pass

    def drop(self) -> None:
        self._note()
        self.cache = None

    def _note(self) -> None:
        """Before rows leave: between two such moments the cache only grows."""
        self.cache_peak = max(self.cache_peak, self.cache_bytes())

    def drop_weights(self) -> None:
        pass

    def copied_bytes(self) -> int:
        return 0

    def cache_bytes(self) -> int:
        layers = [] if self.cache is None else self.cache.layers
        return bytes_of(t for layer in layers for t in vars(layer).values() if isinstance(t, torch.Tensor))

    def prefill(self, ids: torch.Tensor, lengths: torch.Tensor, max_new: int) -> torch.Tensor:
        width = ids.shape[1]
        self.mask = (torch.arange(width, device=ids.device) >= (width - lengths)[:, None]).long()
        self.positions = lengths.clone()
        self._note()
        self.cache = DynamicCache(config=self.model.config)
        return self._forward(ids, (self.mask.cumsum(-1) - 1).clamp(min=0))

    def select(self, rows: torch.Tensor) -> None:
        assert self.cache is not None
        self._note()
        # reorder_cache rather than batch_select_indices: every kind of cache layer has it.
        self.cache.reorder_cache(rows)
        self.mask, self.positions = self.mask[rows], self.positions[rows]

    def step(self, tokens: torch.Tensor) -> torch.Tensor:
        self.mask = F.pad(self.mask, (0, 1), value=1)
        logits = self._forward(tokens[:, None], self.positions[:, None])
        self.positions = self.positions + 1
        return logits

    def park(self, rows: torch.Tensor) -> Parked:
        return Parked([], [], rows)

    def resume(
        self, parked: Sequence[Parked], ids: torch.Tensor, lengths: torch.Tensor, new: int, max_new: int
    ) -> torch.Tensor:
        # Caches of some models cannot be cut at a token (sliding windows, recurrent states): read everything anew.
        return self.prefill(ids, lengths, max_new)

    def _forward(self, ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        output = self.model(
            input_ids=ids,
            attention_mask=self.mask,
            position_ids=positions,
            past_key_values=self.cache,
            use_cache=True,
            logits_to_keep=1,
        )
        return output.logits[:, -1]


def bytes_of(tensors: Iterable[torch.Tensor]) -> int:
    """Of the storages behind tensors, each counted once."""
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}
    return sum(storages.values())
