"""How the weights of one reshard get from the ranks that train to those that read.

On one pool all ranks move their parts when the `reshard` instruction comes. Between pools the ranks that train give
every version that is asked for (`deliveries`) in a thread of their own, so that `publish` returns at once: what trains
next waits until the version before has left, unless readers may lag by two steps or more, or take a version only when
their samples are finished: for those a copy is kept.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable

from rlflow.backends.ray_runtime.deliveries import Reading
from rlflow.backends.ray_runtime.reshard_links import Moved, ReshardLinks, Tensors
from rlflow.backends.ray_runtime.waiting import ANSWER_GRACE_S
from rlflow.diagnostics.diagnostic import RunFailure
from rlflow.plan_decisions import Reshard

_COPY_FROM_LAG = 2
"""With a lag of one step the samples that training waits for come after the weights have been taken."""


class WeightChannel:
    """This rank's end of a reshard. `limit_s`: for weights to leave; the links have it for every message."""

    def __init__(
        self, reshard: Reshard, links: ReshardLinks, reading: Reading, model: str, limit_s: float = 1800.0
    ) -> None:
        self._limit_s = limit_s
        self.reshard, self.links, self.reading, self.model = reshard, links, reading, model
        self.between_pools = reshard.source != reshard.target
        self._copies = reading.lag >= _COPY_FROM_LAG or reading.streamed
        self.version = 0
        """Of the weights that the readers hold."""
        self.moved = Moved()
        """Of the last execution."""
        self._planned: list[int] = []
        self._jobs: queue.SimpleQueue[tuple[int, Tensors] | None] = queue.SimpleQueue()
        self._idle = threading.Event()
        self._idle.set()
        self._pending = 0
        self._lock = threading.Lock()
        self._failure: BaseException | None = None
        self._thread: threading.Thread | None = None

    def start(self, done: int, last: int, more: bool = False) -> None:
        """A run of the steps done + 1 to last begins; `more`: it ends with the samples of the steps ahead."""
        self.version = done
        self._planned = self.reading.versions(done, last, more)
        if self.between_pools and self.links.sends:
            self._thread = threading.Thread(target=self._serve, name=f"weights of {self.model}", daemon=True)
            self._thread.start()

    # --- the pool that trains ----------------------------------------------------------------------------------------

    def published(self, version: int, tensors: Callable[[], Tensors]) -> None:
        """`version` is trained: give it away, if it is asked for."""
        if version in self._planned:
            self._give(version, tensors())

    def _give(self, version: int, tensors: Tensors) -> None:
        if self._copies:
            tensors = {name: tensor.detach().to("cpu", copy=True) for name, tensor in tensors.items()}
        with self._lock:
            self._pending += 1
            self._idle.clear()
        self._jobs.put((version, tensors))

    def before_update(self) -> None:
        """Wait until the tensors that are about to change have left. Raises what went wrong on the way."""
        if not self._copies or self._failure is not None:
            self.settle()

    def settle(self) -> None:
        """Wait until everything has left."""
        if not self._idle.wait(self._limit_s + ANSWER_GRACE_S):
            raise self._stuck("the thread that sends them does not end")
        if self._failure is not None:
            raise self._failure

    def _serve(self) -> None:
        while (job := self._jobs.get()) is not None:
            version, tensors = job
            if self._failure is None:
                try:
                    self.moved = self.links.run(tensors, None, version)
                except BaseException as error:
                    self._failure = _told(error, self.reshard, version)
            with self._lock:
                self._pending -= 1
                if not self._pending:
                    self._idle.set()

    # --- the pool that reads -----------------------------------------------------------------------------------------

    def receive(self, version: int, tensors: Tensors) -> None:
        """Bring the weights to `version`, the next that is sent."""
        try:
            self.moved = self.links.run(None, tensors, version)
        except RuntimeError as error:
            raise _told(error, self.reshard, version) from error
        self.version = version

    def left(self, end: int) -> list[int]:
        """The versions that a stop after step `end` leaves on their way to this rank: the other end waits for them."""
        if not (self.between_pools and self.links.receives):
            return []
        return [version for version in self._planned if self.version < version <= end]

    def _stuck(self, why: str) -> RunFailure:
        edge = f"from pool `{self.reshard.source}` to pool `{self.reshard.target}`"
        return RunFailure(
            "RLF5019",
            f"weights of `{self.reshard.model}` did not get {edge} within {self._limit_s:g} s",
            notes=(why,),
        )

    # --- one pool ----------------------------------------------------------------------------------------------------

    def move(self, source: Tensors, target: Tensors, version: int) -> None:
        """From the layout that trains to the one that reads, on the same ranks."""
        self.moved = self.links.run(source, target, version)
        self.version = version

    def close(self) -> None:
        """Everything has left, or what went wrong is raised; either way the thread ends."""
        if self._thread is not None:
            try:
                self.settle()
            finally:
                self._jobs.put(None)
                self._thread.join(ANSWER_GRACE_S)
                self._thread = None


def _told(error: BaseException, reshard: Reshard, version: int) -> BaseException:
    if isinstance(error, RunFailure):
        return error
    return RunFailure(
        "RLF5006",
        f"version {version} of `{reshard.model}` did not get from pool `{reshard.source}` to pool `{reshard.target}`",
        notes=(f"{type(error).__name__}: {error}",),
    )
