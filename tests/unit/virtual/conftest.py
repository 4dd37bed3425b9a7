"""Virtual workers without Ray: actors on an event loop of this process, workers in threads, clocks that jump or run."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rlflow.backends.ray_runtime.dist_queue.client import DistQueue
from rlflow.backends.ray_runtime.dist_queue.edges import edge_of
from rlflow.backends.ray_runtime.dist_queue.rows import Piece, Refused
from rlflow.backends.ray_runtime.dist_queue.service import QueueService
from rlflow.backends.ray_runtime.run_control import RunControl
from rlflow.backends.ray_runtime.virtual.clock import Clock
from rlflow.backends.ray_runtime.virtual.crew import virtual_pools
from rlflow.backends.ray_runtime.virtual.fabric import Fabric
from rlflow.backends.ray_runtime.virtual.post import Post
from rlflow.backends.ray_runtime.virtual.settings import VirtualSettings
from rlflow.backends.ray_runtime.virtual.start import workers_of
from rlflow.backends.ray_runtime.virtual.worker import VirtualWorker
from rlflow.driver import compile
from rlflow.plan import Plan, Queue

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
        return [future.result(30) for future in [self.begin(each) for each in coroutines]]

    def begin(self, coroutine: Any) -> Future[Any]:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    def close(self) -> None:
        self.all([asyncio.sleep(0.01)])  # what nobody waits for
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


class LocalPost(Post):
    """Calls actors of this process."""

    def __init__(self, loop: Loop) -> None:
        super().__init__()
        self._loop = loop

    def ask(self, calls: Any) -> list[Any]:
        async def asked(method: str, actor: Any, arguments: tuple[Any, ...]) -> Any:
            answer = getattr(actor, method)(*arguments)
            return await answer if asyncio.iscoroutine(answer) else answer

        self.sent.update(method for method, _, _ in calls)
        return self._loop.all([asked(*call) for call in calls])


class LocalActor:
    """A queue's actor of this process, called as Ray's are; answers are waited for by `LocalQueue`."""

    def __init__(self, loop: Loop, service: QueueService) -> None:
        self._loop, self._service = loop, service

    def __getattr__(self, method: str) -> Any:
        call = getattr(self._service, method)
        return SimpleNamespace(remote=lambda *arguments: self._loop.begin(call(*arguments)))


def local_end() -> Callable[..., DistQueue]:
    """The real end of a queue, on actors of this process. Parts must be small enough to travel inside a call."""

    class LocalQueue(DistQueue):
        def _all(self, calls: list[Any]) -> list[Any]:
            unheard, self._unheard = self._unheard, []
            answers = [future.result(30) for future in [*unheard, *calls]]
            for answer in answers:
                if isinstance(answer, Refused):
                    raise self._refused(answer)
            return answers[len(unheard) :]

        def _fetch(self, pieces: list[Piece]) -> list[Any]:
            assert not any(piece.stored for piece in pieces)
            return [piece.data for piece in pieces]

    return LocalQueue


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
            queue.id: [LocalActor(loop, loop.make(lambda queue=queue: self._service(queue)))] for queue in plan.queues
        }
        self.told = [
            replace(told, queues=self.queues, control=self.control, fabric=self.fabric)
            for told in workers_of(plan, pools, virtual, folder, 7, 0.0)
        ]
        self.reports: list[Any] = []

    def _service(self, queue: Queue) -> QueueService:
        return QueueService(edge_of(queue, self.sizes[queue.source], self.sizes[queue.target], 20.0))

    def end(self) -> Callable[..., DistQueue]:
        return local_end()

    def post(self) -> LocalPost:
        return LocalPost(self._loop)

    def worker(self, index: int, clock: Clock | None = None) -> VirtualWorker:
        return VirtualWorker(self.told[index], clock, self.post(), open_end=self.end())

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
