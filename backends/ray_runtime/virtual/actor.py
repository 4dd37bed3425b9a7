"""The Ray actor around a virtual worker, with the calls that the launcher makes of a rank. A stop comes through the
run's control."""

from __future__ import annotations

import faulthandler
import os
import socket
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ray

from rlflow.backends.ray_runtime.failures import guarded
from rlflow.backends.ray_runtime.place import Identity, Place, PlaceNote
from rlflow.backends.ray_runtime.run_logs import log_to, rank_log, told
from rlflow.diagnostics.diagnostic import RunFailure

if TYPE_CHECKING:
    from rlflow.backends.ray_runtime.virtual.settings import WorkerSettings
    from rlflow.backends.ray_runtime.virtual.worker import VirtualWorker


class VirtualActor:
    """States: new -> prepare -> run -> ended. There is nothing to join and nothing to load."""

    def __init__(self, settings: WorkerSettings) -> None:
        self._settings = settings
        self._worker: VirtualWorker | None = None
        self._place = PlaceNote()
        self._log = rank_log(Path(settings.run_dir), settings.pool, settings.first)
        log_to(self._log, f"{settings.pool}/{settings.first}")

    def identity(self) -> Identity:
        """Where this process is."""
        return Identity(socket.gethostname(), ray.get_runtime_context().get_node_id(), os.getpid())

    def where(self, dump: bool = False) -> Place:
        """What the worker does now. Nobody expects a sleeper to compute, so how much it has is not said. `dump`: the
        stacks of all threads go to its log."""
        if dump:
            faulthandler.dump_traceback(2, all_threads=True)
        return replace(self._place.read(), cpu_s=None)

    def prepare(self) -> RunFailure | None:
        """Import and build the worker."""

        def build() -> None:
            from rlflow.backends.ray_runtime.virtual.worker import VirtualWorker

            self._worker = VirtualWorker(self._settings, place=self._place)

        failure = guarded("starting a virtual worker", build)
        return None if failure is None else told(failure, self._log)

    def open_rewards(self) -> RunFailure | None:
        """Rewards take their time; nobody computes them."""
        return None

    def address(self) -> str:
        """Of no process group."""
        return ""

    def join(self, address: str) -> RunFailure | None:
        return None

    def load(self, part: str) -> RunFailure | None:
        return None

    def resume(self, step: int) -> RunFailure | None:
        return RunFailure("RLF5010", "a virtual run has no weights, and no checkpoint to go on from")

    def facts(self) -> dict[str, Any]:
        return self._ready.facts()

    def run(self, done: int, last: int, data: dict[str, str]) -> Iterator[dict[str, Any] | RunFailure]:
        """See `VirtualWorker.run`."""
        for report in self._ready.run(done, last):
            yield told(report, self._log) if isinstance(report, RunFailure) else report

    @property
    def _ready(self) -> VirtualWorker:
        assert self._worker is not None, "called before prepare"
        return self._worker
