"""Fields as the pieces in which they travel: those that the same consumers read lie together."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import ray

from rlflow.backends.ray_runtime.dist_queue.columns import Field, Sent, kind, nbytes, sent
from rlflow.backends.ray_runtime.dist_queue.rows import EdgeSpec, Piece

INLINE_BYTES = 32 * 1024
"""A piece up to this size travels inside the call and lies in the actor: cheaper than an object of its own."""


def pieces_of(spec: EdgeSpec, fields: Mapping[str, Field]) -> list[Piece]:
    """The pieces of some rows; what no consumer reads does not travel. Large ones are put into the object store."""
    together: dict[tuple[tuple[str, ...] | None, ...], dict[str, Sent]] = {}
    wanted = tuple(dict.fromkeys(spec.consumers.values()))  # a consumer a rank, and mostly they read the same
    for name, column in fields.items():
        readers = tuple(names for names in wanted if names is None or name in names)
        if readers:
            together.setdefault(readers, {})[name] = sent(column)
    pieces = []
    for columns in together.values():
        size = sum(nbytes(column) for column in columns.values())
        kinds = tuple(kind(column) for column in columns.values())
        data: Any = columns if size <= INLINE_BYTES else [ray.put(columns)]  # in a list it stays a reference
        pieces.append(Piece(tuple(columns), kinds, data, size))
    return pieces
