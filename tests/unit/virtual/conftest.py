"""Virtual workers without Ray: actors on an event loop of this process, workers in threads, clocks that jump or run."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rlflow.backends.ray_runtime.batch_queue import QueueActor, QueueSettings, readers_of
from rlflow.backends.ray_runtime.run_control import RunControl
from rlflow.backends.ray_runtime.virtual.clock import Clock
from rlflow.backends.ray_runtime.virtual.crew import virtual_pools
from rlflow.backends.ray_runtime.virtual.fabric import Fabric
from rlflow.backends.ray_runtime.virtual.post import Post
from rlflow.backends.ray_runtime.virtual.settings import VirtualSettings
from rlflow.backends.ray_runtime.virtual.start import workers_of
from rlflow.backends.ray_runtime.virtual.worker import VirtualWorker
from rlflow.driver import compile
from rlflow.plan import Plan

EXAMPLES = Path(__file__).parents[3] / "examples"


class Loop:
    """An event loop in a thread; what actors of Ray do in processes of their own."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()

    def make(self, build: Callable[[], Any]) -> Any:
        async def made() -> Any:
            return build()

        return self.all([made()])[0]

    def all(self, coroutines: list[Any]) -> list[Any]:
        futures = [asyncio.run_coroutine_threadsafe(each, self._loop) for each in coroutines]
        return [future.result(30) for future in futures]

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


class LocalPost(Post):
    """Calls actors of this process; references are the objects themselves."""

    def __init__(self, loop: Loop) -> None:
        super().__init__()
        self._loop = loop

    def ask(self, calls: Any) -> list[Any]:
        async def asked(method: str, actor: Any, arguments: tuple[Any, ...]) -> Any:
            answer = getattr(actor, method)(*arguments)
            return await answer if asyncio.iscoroutine(answer) else answer

        self.sent.update(method for method, _, _ in calls)
        return self._loop.all([asked(*call) for call in calls])

    def store(self, value: Any) -> Any:
        self.sent["store"] += 1
        return value

    def fetch(self, references: Any) -> list[Any]:
        self.sent["fetch"] += len(references)
        return list(references)


class FakeTime:
    """Passes only when somebody sleeps."""

    def __init__(self) -> None:
        self.now = 1000.0

    def clock(self, speed_up: float) -> Clock:
        return Clock(speed_up, self.now, lambda: self.now, self.sleep)

    def sleep(self, seconds: float) -> None:
        self.now += seconds


class Team:
    """All workers of a virtual run of a plan."""

    def __init__(self, loop: Loop, plan: Plan, folder: Path, virtual: VirtualSettings) -> None:
        (folder / "trace").mkdir(exist_ok=True)
        self.plan, self.folder, self._loop = plan, folder, loop
        pools = virtual_pools(plan)
        self.sizes = {pool.name: len(pool.ranks) for pool in pools}
        self.fabric = loop.make(lambda: Fabric(20.0))
        self.control = RunControl(1)
        self.queues = {
            queue.id: loop.make(
                lambda queue=queue: QueueActor(
                    QueueSettings(
                        queue.id,
                        queue.capacity,
                        parts=self.sizes[queue.source],
                        readers=readers_of(queue, self.sizes[queue.target]),
                        deadline_s=20.0,
                    )
                )
            )
            for queue in plan.queues
        }
        self.told = [
            replace(told, queues=self.queues, control=self.control, fabric=self.fabric)
            for told in workers_of(plan, pools, virtual, folder, 7, 0.0)
        ]
        self.reports: list[Any] = []

    def post(self) -> LocalPost:
        return LocalPost(self._loop)

    def worker(self, index: int, clock: Clock | None = None) -> VirtualWorker:
        return VirtualWorker(self.told[index], clock, self.post())

    def run(self, steps: int, clock: Callable[[], Clock] | None = None) -> list[Any]:
        """Every worker in a thread of its own; what all of them reported."""
        workers = [self.worker(index, None if clock is None else clock()) for index in range(len(self.told))]

        def work(worker: VirtualWorker) -> None:
            for report in worker.run(0, steps):
                self.reports.append(report)

        threads = [threading.Thread(target=work, args=(worker,), daemon=True) for worker in workers]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
            assert not thread.is_alive()
        return self.reports


@pytest.fixture
def loop() -> Iterator[Loop]:
    made = Loop()
    yield made
    made.close()


@pytest.fixture
def team(loop: Loop, tmp_path: Path) -> Callable[..., Team]:
    """`team(plan, speed_up=..., ...)`"""
    return lambda plan, **virtual: Team(loop, plan, tmp_path, VirtualSettings(**virtual))


@pytest.fixture
def fake_time() -> FakeTime:
    return FakeTime()


@pytest.fixture(scope="session")
def async_plan() -> Plan:
    """Two pools of 16 devices, samples a step old."""
    return compile(EXAMPLES / "async_grpo.rlflow")


@pytest.fixture(scope="session")
def fused_plan(tmp_path_factory: pytest.TempPathFactory) -> Plan:
    """The same flow with everything on one pool."""
    folder = tmp_path_factory.mktemp("fused")
    text = (EXAMPLES / "async_grpo.rlflow").read_text("utf-8")
    head, _, rest = text.partition("schedule async_grpo on pod")
    cluster = rest[rest.index("cluster pod") :]
    pool = "schedule async_grpo on pod {\n  pool main = 16 devices\n  place digits on cpu with workers = 8\n}\n\n"
    (folder / "data").mkdir()
    (folder / "data" / "arithmetic.jsonl").write_text('{"question": "1+1=", "answer": "2"}\n', "utf-8")
    (folder / "rewards.py").write_text((EXAMPLES / "rewards.py").read_text("utf-8"), "utf-8")
    file = folder / "fused.rlflow"
    file.write_text(head + pool + cluster, "utf-8")
    return compile(file)
