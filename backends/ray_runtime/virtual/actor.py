"""The Ray actor around a virtual worker, with the calls that the launcher makes of a rank. A stop comes through the
run's control."""

from __future__ import annotations

import faulthandler
import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlflow.backends.ray_runtime.failures import guarded
from rlflow.diagnostics.diagnostic import RunFailure

if TYPE_CHECKING:
    from rlflow.backends.ray_runtime.virtual.settings import WorkerSettings
    from rlflow.backends.ray_runtime.virtual.worker import VirtualWorker


class VirtualActor:
    """States: new -> prepare -> run -> ended. There is nothing to join and nothing to load."""

    def __init__(self, settings: WorkerSettings) -> None:
        self._settings = settings
        self._worker: VirtualWorker | None = None
        path = Path(settings.run_dir) / "logs" / f"{settings.pool}-{settings.first}.log"
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        os.dup2(descriptor, 1)
        os.dup2(descriptor, 2)
        faulthandler.enable(2)

    def prepare(self) -> RunFailure | None:
        """Import and build the worker."""

        def build() -> None:
            from rlflow.backends.ray_runtime.virtual.worker import VirtualWorker

            self._worker = VirtualWorker(self._settings)

        return guarded("starting a virtual worker", build)

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
        yield from self._ready.run(done, last)

    @property
    def _ready(self) -> VirtualWorker:
        assert self._worker is not None, "called before prepare"
        return self._worker
