"""The actor around an edge, and a rank that waits for it: every wait ends, and says what was missing."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest

from rlflow.backends.ray_runtime.streams.edge_actor import EdgeActor
from rlflow.backends.ray_runtime.streams.sampler import Sampler
from rlflow.backends.ray_runtime.streams.specs import StreamSpec
from rlflow.diagnostics import RunFailure
from rlflow.ir.ops import Generate
from rlflow.protocol.settings import Settings

SPEC = StreamSpec("samples", "batch", "d", "actor", "rollout", "learner", Settings("slack_edf", 1, 4, 2), 1, 1)


def test_calls_wait_inside_the_actor_for_what_they_ask_for() -> None:
    async def play() -> None:
        edge = EdgeActor(SPEC, 1, deadline_s=5.0)
        await edge.want(1)  # the pool that trains may be first
        waiting = asyncio.create_task(edge.batch(0, 1))
        assert not await edge.orders(0, 0.01), "nothing is known before the run begins"
        await edge.begin(0, 3, None)
        orders = await edge.orders(0, 1.0)
        assert [ticket.position for ticket in orders.tickets] == [0, 1, 2, 3]
        samples = [id for ticket in orders.tickets for id in ticket.samples]
        await edge.began(samples, 0)
        await edge.paused({samples[-1]: 3}, 0)
        await edge.finished(samples[:2])
        assert not waiting.done()
        await edge.finished(samples[2:4])
        assert await waiting == [0, 1]
        await edge.trained(1)
        assert (await edge.orders(0, 1.0)).version == 1
        await edge.loaded(0, 1)
        assert [t.position for t in (await edge.orders(0, 1.0)).tickets] == [4, 5]
        assert (await edge.cursor())["ends"] == {"trained": 2}
        assert (await edge.cursor())["again"] == [2, 3, 4, 5]

    asyncio.run(play())


def test_a_step_that_never_comes_ends_with_the_reason() -> None:
    async def play() -> str:
        edge = EdgeActor(SPEC, 1, deadline_s=0.05)
        await edge.begin(0, 3, None)
        answer = await edge.batch(0, 1)
        assert isinstance(answer, str)
        return answer

    assert asyncio.run(play()) == (
        "step 1 waits for 2 more finished groups of 2; 0 of 4 groups are finished, 0 places free; step 0 is trained; "
        "replicas have version 0"
    )


def sampler(edge: Any) -> Sampler:
    """A rank's end whose thread is not started."""
    op = Generate(model="actor", n=2, max_new=4)
    channel = SimpleNamespace(reshard=SimpleNamespace(readers=("samples",)), version=0, left=lambda end: [])
    state: Any = SimpleNamespace(
        rank=0,
        plan=SimpleNamespace(stage=lambda name: SimpleNamespace(op=op)),
        channels={"c": channel},
        models={"actor": SimpleNamespace(engine=None, engine_mesh=None)},
        all=SimpleNamespace(timeout=timedelta(seconds=0.3)),
    )
    return Sampler(SPEC, state, edge)


@pytest.fixture
def actor(ray_cluster: Any) -> Callable[[float], Any]:
    return lambda deadline: ray_cluster.remote(num_cpus=0)(EdgeActor).remote(SPEC, 1, deadline)


@pytest.mark.ray
def test_a_rank_that_waits_in_vain_says_for_what(actor: Callable[[float], Any], ray_cluster: Any) -> None:
    edge = actor(0.2)
    ray_cluster.get(edge.begin.remote(0, 3, None))
    with pytest.raises(RunFailure) as caught:
        sampler(edge).batch(1)
    ray_cluster.kill(edge)
    assert caught.value.code == "RLF5041"
    assert caught.value.message == "rank 0 of pool `rollout` waited 0.3 s for the samples of step 1"
    assert "2 more finished groups of 2" in caught.value.notes[0]


@pytest.mark.ray
def test_an_edge_that_is_gone_is_named(actor: Callable[[float], Any], ray_cluster: Any) -> None:
    edge = actor(60.0)
    ray_cluster.get(edge.begin.remote(0, 3, None))
    ray_cluster.kill(edge)
    started = time.monotonic()
    with pytest.raises(RunFailure) as caught:
        sampler(edge).batch(1)
    assert time.monotonic() - started < 20
    assert caught.value.code == "RLF5042"
    assert "`samples` is gone" in caught.value.message


def test_a_thread_that_gives_nothing_is_not_waited_for_for_ever() -> None:
    with pytest.raises(RunFailure) as caught, sampler(None).held(3):
        pass
    assert caught.value.code == "RLF5041"
    assert caught.value.message.endswith("for version 3 of `actor`")
