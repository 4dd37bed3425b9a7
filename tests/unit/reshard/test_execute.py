"""Execution finds wrong transfer sets: the reference must not be kind."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from rlflow.ir.flow import Layout
from rlflow.reshard.catalogue import Catalogue, Rule, TensorSpec
from rlflow.reshard.endpoint import Endpoint, Fabric
from rlflow.reshard.errors import ReshardError
from rlflow.reshard.execute import cut, digests, execute, gather, read
from rlflow.reshard.plan import plan_reshard
from rlflow.reshard.shards import Sharding
from rlflow.reshard.storage import Storage

NAME = "model.layers.0.up.weight"
TENSORS = Catalogue((TensorSpec(NAME, (8, 4), Rule.SHARD, 0, 8, layer=0),), 1)
VALUES = {NAME: np.arange(32, dtype=np.float32).reshape(8, 4)}
FABRIC = Fabric.uniform(6, 2, 1e9, 1e9)
PLAN = plan_reshard(TENSORS, Endpoint(Layout(tp=2), (0, 1)), Endpoint(Layout(dp=4), (2, 3, 4, 5)), FABRIC)
SOURCE = {device: cut(Sharding(TENSORS, Layout(tp=2)), VALUES, device) for device in (0, 1)}


def test_the_plan_as_it_is():
    result = execute(PLAN, SOURCE)
    assert all((result[device][NAME] == VALUES[NAME]).all() for device in (2, 3, 4, 5))
    assert {t.step for t in PLAN.transfers()} == {0, 1, 2}


def test_twice_never_early_and_from_where_it_is_not():
    transfers = list(PLAN.transfers())
    with pytest.raises(ReshardError, match=r"gets part of .* twice"):
        execute(PLAN, SOURCE, transfers=[*transfers, transfers[0]])
    with pytest.raises(ReshardError, match="does not get all of"):
        execute(PLAN, SOURCE, transfers=transfers[:-1])
    with pytest.raises(ReshardError, match=r"passes on .* before it has it"):
        execute(PLAN, SOURCE, transfers=sorted(transfers, key=lambda t: -t.step))
    other = next(t for t in transfers if t.step == 0)
    with pytest.raises(ReshardError, match=r"rank . has 0 of 16 elements"):
        execute(PLAN, SOURCE, transfers=[replace(other, source=1 - other.source)])


def test_a_cast_happens_on_the_way():
    target = replace(PLAN.target, storage=Storage(dtype="float16"))
    source = replace(PLAN.source, storage=Storage(dtype="float32"))
    plan = plan_reshard(TENSORS, source, target, FABRIC)
    result = execute(plan, {d: {NAME: a[NAME] + np.float32(1e-3)} for d, a in SOURCE.items()}, np.float16)
    assert result[4][NAME].dtype == np.float16
    assert (result[4][NAME] == (VALUES[NAME] + np.float32(1e-3)).astype(np.float16)).all()


def test_copies_that_differ_are_found():
    sharding = Sharding(TENSORS, Layout(dp=2))
    shards = {rank: cut(sharding, VALUES, rank) for rank in (0, 1)}
    whole = digests(sharding, shards)
    halves = Sharding(TENSORS, Layout(tp=2))
    assert digests(halves, {rank: cut(halves, VALUES, rank) for rank in (0, 1)}) == whole
    shards[1][NAME][3, 2] += 1
    with pytest.raises(ReshardError, match="rank 1 has another"):
        gather(sharding, shards, NAME)
    with pytest.raises(ReshardError, match=r"16 elements of .* are on no rank"):
        gather(halves, {0: cut(halves, VALUES, 0)}, NAME)
    with pytest.raises(ReshardError, match="rank 0 has 16 of 20 elements"):
        read(halves, 0, cut(halves, VALUES, 0), NAME, ((0, 5), (0, 4)))
