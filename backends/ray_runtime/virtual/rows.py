"""What virtual stages give: rows with numbers, versions, lengths and some bytes, packed."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from rlflow.backends.ray_runtime.dist_queue.columns import Field, Ragged


@dataclass(frozen=True)
class Rows:
    """Rows in the order of a step, or a column of them (`uid` says of which)."""

    uid: np.ndarray
    """int64 [rows]: number of the sample in the run, from 0, over all steps."""
    version: np.ndarray
    """int64 [rows]: of the weights that made the row; -1 for a prompt."""
    lengths: np.ndarray
    """int64 [rows]: tokens of the response."""
    payload: np.ndarray
    """uint8 [bytes]: the rows' bytes one after another, or the stated share of them."""
    ends: np.ndarray
    """int64 [rows]: where each row's bytes end in `payload`."""

    @property
    def count(self) -> int:
        return len(self.uid)

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in (self.uid, self.version, self.lengths, self.payload, self.ends))

    def fields(self) -> dict[str, Field]:
        """As they go through a queue."""
        payload = Ragged(self.payload, np.concatenate([np.zeros(1, np.int64), self.ends]))
        return {"uid": self.uid, "version": self.version, "lengths": self.lengths, "payload": payload}

    @classmethod
    def of(cls, fields: Mapping[str, Field]) -> Rows:
        """What `fields` gave, on the other side."""
        payload = fields["payload"]
        assert isinstance(payload, Ragged)
        uid, version, lengths = (np.asarray(fields[name]) for name in ("uid", "version", "lengths"))
        return cls(uid, version, lengths, payload.values, payload.offsets[1:])

    def part(self, low: int, high: int) -> Rows:
        """Rows [low, high)."""
        start = int(self.ends[low - 1]) if low else 0
        end = int(self.ends[high - 1]) if high else 0
        return Rows(
            self.uid[low:high],
            self.version[low:high],
            self.lengths[low:high],
            self.payload[start:end],
            self.ends[low:high] - start,
        )

    def where(self, keep: np.ndarray) -> Rows:
        """The rows at which `keep`, bool [rows], is true."""
        sizes = np.diff(self.ends, prepend=0)
        return packed(
            self.uid[keep], self.version[keep], self.lengths[keep], sizes[keep], self.payload[np.repeat(keep, sizes)]
        )


def packed(
    uid: np.ndarray, version: np.ndarray, lengths: np.ndarray, sizes: np.ndarray, payload: np.ndarray | None = None
) -> Rows:
    """`sizes` int64 [rows]: bytes of every row; without a payload each byte is the row's number modulo 251."""
    if payload is None:
        payload = np.repeat((uid % 251).astype(np.uint8), sizes)
    return Rows(uid, version, lengths, payload, np.cumsum(sizes))


def joined(parts: Sequence[Rows]) -> Rows:
    """The rows of all parts, in order; at least one part."""
    sizes = [np.diff(part.ends, prepend=0) for part in parts]
    return Rows(
        np.concatenate([part.uid for part in parts]),
        np.concatenate([part.version for part in parts]),
        np.concatenate([part.lengths for part in parts]),
        np.concatenate([part.payload for part in parts]),
        np.cumsum(np.concatenate(sizes)),
    )


def bounds(rows: int, ranks: int, rank: int) -> tuple[int, int]:
    """The rows of a rank: consecutive, and as evenly as they go."""
    return rank * rows // ranks, (rank + 1) * rows // ranks


def drawn(
    uid: np.ndarray, group: int, version: int, length: Callable[[int, int], int], byte_share: float, token_bytes: int
) -> Rows:
    """Samples with drawn lengths; sample `uid` is number uid % group of prompt uid // group."""
    lengths = np.fromiter((length(int(u) // group, int(u) % group) for u in uid), np.int64, len(uid))
    sizes = np.maximum(1, np.ceil(lengths * (token_bytes * byte_share))).astype(np.int64)
    return packed(uid, np.full(len(uid), version, np.int64), lengths, sizes)
