"""Random streams that depend on what is drawn, never on when or beside what it is drawn.

Every stream is one Philox-4x64 generator (Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3"), keyed by
(seed, purpose) and started at a counter made of the thing's own coordinates. So a sample's tokens do not change with
the batch it sits in, with the rank that makes it, or with a resume. Only the raw 64-bit words of numpy's bit generator
are used: numpy keeps those stable over releases, unlike the methods of `Generator`.
"""

from __future__ import annotations

from typing import Final

import numpy as np

_MASK: Final = (1 << 64) - 1

# Purposes. A number never changes its meaning, or old runs would not repeat.
_SAMPLING: Final = 1
_DATA_ORDER: Final = 2
_MINIBATCH_ORDER: Final = 3


def uniforms(seed: int, step: int, uid: int, sample: int, count: int) -> np.ndarray:
    """The first `count` draws of one sample's stream: float64 [count] in [0, 1).

    The draw for token i is element i whatever `count` is. Values are multiples of 2**-52, so that `u * total < total`
    holds in float64 for every positive total: inverse-CDF sampling can never step off the end.
    """
    raw = _words(seed, _SAMPLING, (step, uid, sample), count)
    return np.asarray((raw >> np.uint64(12)).astype(np.float64) * 2.0**-52)


def permutation(seed: int, epoch: int, n: int) -> np.ndarray:
    """The order of a data set's n rows in one epoch: int64 [n]."""
    return _order(_words(seed, _DATA_ORDER, (epoch, 0, 0), n))


def minibatch_permutation(seed: int, step: int, epoch: int, n: int) -> np.ndarray:
    """The order in which one training step's n samples enter mini-batches: int64 [n]."""
    return _order(_words(seed, _MINIBATCH_ORDER, (step, epoch, 0), n))


def _order(keys: np.ndarray) -> np.ndarray:
    # Sorting random keys is a uniform shuffle and, unlike Generator.permutation, the same in every numpy release.
    return np.argsort(keys, kind="stable").astype(np.int64)


def _words(seed: int, purpose: int, coordinates: tuple[int, int, int], count: int) -> np.ndarray:
    """uint64 [count]. Counter word 0 counts blocks inside the stream, so streams overlap only after 2**64 blocks."""
    a, b, c = (value & _MASK for value in coordinates)
    bits = np.random.Philox(
        key=np.array([seed & _MASK, purpose], dtype=np.uint64), counter=np.array([0, c, b, a], dtype=np.uint64)
    )
    return np.asarray(bits.random_raw(count), dtype=np.uint64)
