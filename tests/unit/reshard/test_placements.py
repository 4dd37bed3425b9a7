"""Each placement on hand-worked cases, and the strided shard against the order of two mesh axes."""

from __future__ import annotations

import numpy as np
import pytest

from rlflow.reshard.boxes import extents, slices
from rlflow.reshard.placements import SS, Flat, Own, R, S, Shard, concatenate


def filled(shard, *tensors):
    """The local tensor as an array, padding -1."""
    local = np.full(shard.shape, -1)
    for piece in shard.pieces:
        local[slices(piece.local)] = tensors[piece.part][slices(piece.box)].reshape(extents(piece.local))
    return local


ROWS = np.arange(12)
TABLE = np.arange(24).reshape(6, 4)


def test_replicate_shard_and_own():
    whole = Shard.of((12,))
    assert filled(R().apply(whole, 3, 1), ROWS).tolist() == list(range(12))
    assert filled(S(0).apply(whole, 3, 1), ROWS).tolist() == [4, 5, 6, 7]
    assert filled(S(1).apply(Shard.of((6, 4)), 2, 1), TABLE).tolist() == TABLE[:, 2:].tolist()
    assert Own(1).apply(whole, 2, 1) == whole
    assert Own(1).apply(whole, 2, 0).elements == 0


@pytest.mark.parametrize(("extent", "size", "parts"), [(5, 2, [3, 2]), (5, 4, [2, 2, 1, 0]), (2, 4, [1, 1, 0, 0])])
def test_uneven_shards_are_cut_as_torch_chunk_does(extent, size, parts):
    found = [S(0).apply(Shard.of((extent,)), size, i) for i in range(size)]
    assert [s.elements for s in found] == parts
    assert [n for s in found for n in filled(s, np.arange(extent)).tolist()] == list(range(extent))


def test_a_strided_shard_is_block_cyclic():
    whole = Shard.of((12,))
    assert filled(SS(0, 3).apply(whole, 2, 0), ROWS).tolist() == [0, 1, 4, 5, 8, 9]
    assert filled(SS(0, 3).apply(whole, 2, 1), ROWS).tolist() == [2, 3, 6, 7, 10, 11]


def test_fsdp_over_tensor_parallel_is_a_strided_shard_of_the_outer_axis():
    """DTensor over (dp, tp) says _StridedShard(0, split_factor=tp), Shard(0) for what tp cuts first and dp second."""
    whole, dp, tp = Shard.of((12,)), 3, 2
    for d in range(dp):
        for t in range(tp):
            inner_first = S(0).apply(S(0).apply(whole, tp, t), dp, d)
            outer_first = S(0).apply(SS(0, tp).apply(whole, dp, d), tp, t)
            assert filled(inner_first, ROWS).tolist() == filled(outer_first, ROWS).tolist()


def test_flat_slices_of_a_column_shard():
    half = S(1).apply(Shard.of((6, 4)), 2, 1)
    flat = [Flat.equal(half, 5, i).apply(half, 5, i) for i in range(5)]
    assert [f.shape for f in flat] == [(3,)] * 5
    values = np.concatenate([filled(f, TABLE) for f in flat])
    assert values.tolist() == [*TABLE[:, 2:].ravel(), -1, -1, -1]


def test_flat_slices_of_a_joined_tensor_whose_pieces_are_not_contiguous():
    a, b = np.arange(12).reshape(2, 3, 2), 100 + np.arange(12).reshape(2, 3, 2)
    joined = concatenate([Shard.of((2, 3, 2)), Shard.of((2, 3, 2))], dim=1)
    flat = [Flat.equal(joined, 5, i).apply(joined, 5, i) for i in range(5)]
    values = np.concatenate([filled(f, a, b) for f in flat])
    assert values.tolist() == [*np.concatenate([a, b], 1).ravel(), -1]


def test_locate_in_a_flat_piece_gives_its_contiguous_runs():
    piece = Flat(0, 24).apply(Shard.of((6, 4)), 1, 0).pieces[0]
    found = list(piece.locate(((1, 3), (1, 3))))
    assert found == [(((1, 2), (1, 3)), ((5, 7),)), (((2, 3), (1, 3)), ((9, 11),))]
