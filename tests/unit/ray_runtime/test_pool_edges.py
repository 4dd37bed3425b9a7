"""A queue between two pools that stands still: the rank that waits for it ends, and says how things are."""

from __future__ import annotations

import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from rlflow.backends.ray_runtime.batch import Batch
from rlflow.backends.ray_runtime.dist_queue.client import start_queue
from rlflow.backends.ray_runtime.dist_queue.edges import edge_of
from rlflow.backends.ray_runtime.pool_edges import PoolEdges
from rlflow.backends.ray_runtime.stages.call import Frame
from rlflow.backends.ray_runtime.world import World
from rlflow.diagnostics.diagnostic import RunFailure
from rlflow.driver import compile
from rlflow.plan import Plan, PutRows, TakeRows
from tests.unit.ray_runtime.conftest import FLOW
from tests.unit.ray_runtime.test_splitting import part

pytestmark = pytest.mark.ray

SCHEDULE = """\
schedule sums on two {
  pool rollout = 1 devices
  pool learner = 1 devices
  place actor.generate on rollout
  place actor.train, reference on learner
}
cluster two {
  host = 2 * cpu { memory = 8 GiB, cpus = 8 }
}
"""
DEADLINE = 0.3
POOLS = {"rollout": 1, "learner": 1}


@pytest.fixture
def plan(small_plan: Plan, tmp_path: Path) -> Plan:
    flow = tmp_path / "sums.rlflow"
    flow.write_text(FLOW + SCHEDULE, "utf-8")
    return compile(flow)


@pytest.fixture
def queues(plan: Plan, ray_cluster: Any) -> Iterator[dict[str, list[Any]]]:
    made = {queue.id: start_queue(edge_of(queue, 1, 1, DEADLINE)) for queue in plan.queues}
    yield made
    for actors in made.values():
        for actor in actors:
            ray_cluster.kill(actor)


def edges(plan: Plan, pool: str, queues: dict[str, list[Any]]) -> PoolEdges:
    return PoolEdges(plan, World(pool, 0, POOLS, timedelta(seconds=DEADLINE), queues=queues), {})


def instruction(plan: Plan, pool: str, kind: type) -> Any:
    program = next(program for program in plan.programs if program.pool == pool)
    return next(found for found in program.step if isinstance(found, kind) and found.queue)


def test_a_reader_that_nobody_feeds_ends(plan: Plan, queues: dict[str, list[Any]]) -> None:
    take = instruction(plan, "learner", TakeRows)
    started = time.monotonic()
    with pytest.raises(RunFailure) as caught:
        edges(plan, "learner", queues).take(take, Frame())
    assert time.monotonic() - started < DEADLINE + 20, "the actor's start, and some"
    assert caught.value.code == "RLF5019"
    assert caught.value.message == f"rank 0 of pool `learner` waited 0.3 s for the queue `{take.queue}`"
    (note,) = caught.value.notes
    assert "reader 0 found no 1 rows to take: 0 of 1 places" in note
    assert "open producers: rank 0" in note


def test_a_writer_that_nobody_reads_from_ends(plan: Plan, queues: dict[str, list[Any]]) -> None:
    put = instruction(plan, "rollout", PutRows)
    writer, frame = edges(plan, "rollout", queues), Frame()
    frame.values[put.stage] = frame.rows[put.stage] = part([0, 0], [0, 1])
    assert writer.put(put, frame) > 0
    with pytest.raises(RunFailure) as caught:
        writer.put(put, frame)
    assert caught.value.code == "RLF5019"
    assert "rank 0 found no room for group 1: 1 of 1 places" in caught.value.notes[0]
    assert "reader 0 could take 1" in caught.value.notes[0]


def test_what_the_queue_holds_is_told_by_the_rank_that_takes(plan: Plan, queues: dict[str, list[Any]]) -> None:
    put, take = instruction(plan, "rollout", PutRows), instruction(plan, "learner", TakeRows)
    sent, got = Frame(), Frame()
    sent.values[put.stage] = sent.rows[put.stage] = part([0, 0, 1], [0, 1, 0])
    edges(plan, "rollout", queues).put(put, sent)
    assert edges(plan, "learner", queues).take(take, got) == 1
    batch = got.values[take.stage]
    assert isinstance(batch, Batch)
    assert batch.array("group").tolist() == [0, 0, 1]


def test_a_queue_whose_actor_died_says_so(plan: Plan, queues: dict[str, list[Any]], ray_cluster: Any) -> None:
    take = instruction(plan, "learner", TakeRows)
    (actor,) = queues[take.queue]
    ray_cluster.get(actor.describe.remote())
    ray_cluster.kill(actor)
    with pytest.raises(RunFailure) as caught:
        edges(plan, "learner", queues).take(take, Frame())
    assert caught.value.code == "RLF5065"
    assert caught.value.message == f"the queue `{take.queue}` that rank 0 of pool `learner` uses has died"
