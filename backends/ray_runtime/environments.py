"""Environments in processes of their own, so that they can be slow, hang or crash without taking a run along.

An episode stays with the worker that began it. A turn of the whole batch is one call to every worker, so the cost of
processes is paid per turn and not per sample. Hanging code is stopped as a hanging reward is: the worker reports it,
and code that never lets go of the interpreter lock is ended by the C library's watchdog, which leaves the place in the
worker's mark file.
"""

from __future__ import annotations

import faulthandler
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import ray

from rlflow.backends.ray_runtime.environment_worker import (
    Environments,
    LocalEnvironments,
    Observation,
    Turn,
    timed_out,
)
from rlflow.backends.ray_runtime.failures import exit_reason
from rlflow.backends.ray_runtime.worker_start import load_all
from rlflow.diagnostics.diagnostic import RunFailure
from rlflow.ir.sources import PythonEnvironment

__all__ = ["EnvironmentPool", "Environments", "LocalEnvironments", "Observation", "Turn"]

_WATCHDOG_GRACE_S = 1.0
_COLLECT_GRACE_S = 10.0
_CALLS_PER_TURN = 4
"""A first turn may need constructor, reset, step and close."""

Answers = list[Observation | None]


class EnvironmentWorker:
    """Made into a Ray actor by `EnvironmentPool`. Failures are returned, so that Ray adds nothing."""

    def __init__(self, source: PythonEnvironment, base_dir: str, mark: str) -> None:
        self._source = source
        self._base_dir = Path(base_dir)
        self._mark = Path(mark)
        self._armed_at = 0.0
        self._episodes: LocalEnvironments | None = None

    def load(self) -> RunFailure | None:
        try:
            self._episodes = LocalEnvironments(self._source, self._base_dir)
        except RunFailure as failure:
            return failure
        self._mark.parent.mkdir(parents=True, exist_ok=True)  # another host than the pool's has no such folder yet
        self._mark_file = self._mark.open("w+b", buffering=0)
        return None

    def step(self, turns: list[Turn]) -> Answers | RunFailure:
        """After RLF5017 a call may still run in this process: end it."""
        assert self._episodes is not None, "step before load"
        try:
            return self._episodes.step(turns, self._begin)
        except RunFailure as failure:
            return failure
        finally:
            self._disarm()

    def forget(self) -> RunFailure | None:
        assert self._episodes is not None, "forget before load"
        try:
            self._episodes.forget(self._begin)
        except RunFailure as failure:
            return failure
        finally:
            self._disarm()
        return None

    def _begin(self, index: int) -> None:
        self._mark_file.seek(0)
        self._mark_file.write(b"%9d\n" % index)
        # Arming starts a thread, so fast calls share one; it still fires only after the timeout.
        if time.monotonic() - self._armed_at > _WATCHDOG_GRACE_S / 2:
            limit = self._source.timeout_us / 1e6 + _WATCHDOG_GRACE_S
            faulthandler.dump_traceback_later(limit, exit=True, file=self._mark_file)
            self._armed_at = time.monotonic()

    def _disarm(self) -> None:
        faulthandler.cancel_dump_traceback_later()
        self._armed_at = 0.0


class EnvironmentPool:
    """`workers` processes that run episodes of one environment, started on first use. Used by one thread.

    `base_dir`: where the .rlflow file is. `actor_options`: what Ray is told about a worker. `start_timeout`: seconds.
    """

    def __init__(
        self,
        name: str,
        source: PythonEnvironment,
        base_dir: Path,
        *,
        workers: int = 1,
        start_timeout: float = 120.0,
        actor_options: Mapping[str, Any] | None = None,
    ) -> None:
        self.name = name
        self._source = source
        self._base_dir = base_dir.absolute()
        self._workers = workers
        self._start_timeout = start_timeout
        self._options = {"num_cpus": 0, **(actor_options or {})}
        self._actors: list[Any] = []
        self._marks: list[Path] = []
        self._open: list[dict[int, Turn]] = []
        """By worker: the last turns of the episodes that are not over, in the order in which they began."""

    def open(self) -> None:
        """Start the workers unless they run. RunFailure: RLF5014 an unusable class, RLF5008 or RLF5011 no worker."""
        if self._actors:
            return
        folder = Path(tempfile.mkdtemp(prefix="rlflow-environment-"))
        self._marks = [folder / str(index) for index in range(self._workers)]
        remote = ray.remote(EnvironmentWorker).options(**self._options)
        self._actors = [remote.remote(self._source, str(self._base_dir), str(mark)) for mark in self._marks]
        self._open = [{} for _ in self._actors]
        try:
            load_all(self._actors, f"environment `{self.name}`", self._start_timeout, "the module")
        except RunFailure:
            self.close()
            raise

    def step(self, turns: Sequence[Turn]) -> Answers:
        """See `Environments`. After a failure the workers are ended; the next call makes new ones."""
        self.open()
        parts: list[list[int]] = [[] for _ in self._actors]
        for place, turn in enumerate(turns):
            parts[turn.key % len(parts)].append(place)
        chunks = [[turns[place] for place in part] for part in parts]
        for mine, chunk in zip(self._open, chunks, strict=True):
            mine.update((turn.key, turn) for turn in chunk)
        results = self._collect(chunks, lambda actor, chunk: actor.step.remote(chunk))
        answers: Answers = [None] * len(turns)
        for worker, (part, result) in enumerate(zip(parts, results, strict=True)):
            for place, answer in zip(part, result or [], strict=True):
                answers[place] = answer
                if answer is None:
                    del self._open[worker][turns[place].key]
        return answers

    def forget(self) -> None:
        if any(self._open):
            self._collect([list(mine.values()) for mine in self._open], lambda actor, _: actor.forget.remote())
            self._open = [{} for _ in self._actors]

    def close(self) -> None:
        """End the workers at once, hanging ones too."""
        for actor in self._actors:
            ray.kill(actor)
        for mark in self._marks:
            mark.unlink(missing_ok=True)
        if self._marks:
            self._marks[0].parent.rmdir()
        self._actors, self._marks, self._open = [], [], []

    def _collect(self, chunks: Sequence[list[Turn]], start: Callable[[Any, list[Turn]], Any]) -> list[Any]:
        """One call to every worker that has a chunk; waits at most as long as the longest chunk may take."""
        refs = [start(actor, chunk) if chunk else None for actor, chunk in zip(self._actors, chunks, strict=True)]
        timeout = self._source.timeout_us / 1e6
        longest = max(len(chunk) for chunk in chunks)
        deadline = time.monotonic() + longest * _CALLS_PER_TURN * timeout + _COLLECT_GRACE_S
        results: list[Any] = [None] * len(chunks)
        waiting = [ref for ref in refs if ref is not None]
        while waiting:
            done, waiting = ray.wait(waiting, num_returns=1, timeout=max(deadline - time.monotonic(), 0))
            index = refs.index(done[0] if done else waiting[0])
            failure: RunFailure | None = None
            try:
                if not done:
                    failure = timed_out(self._source.target, chunks[index][0], timeout)
                else:
                    results[index] = ray.get(done[0])
            except ray.exceptions.RayError as error:
                failure = self._worker_died(index, chunks[index], error)
            if isinstance(results[index], RunFailure):
                failure = results[index]
            if failure is not None:
                self.close()
                raise failure
        return results

    def _worker_died(self, index: int, chunk: list[Turn], error: Exception) -> RunFailure:
        """RLF5017 when the watchdog ended the worker, else RLF5011; the mark says which call it was in."""
        name = self._source.target
        try:
            first, _, trace = self._marks[index].read_text(errors="replace").partition("\n")
        except OSError:  # the worker ran on another host
            first, trace = "", ""
        if first.strip().isdigit() and int(first) < len(chunk):
            chunk = [chunk[int(first)]]
        turn = chunk[0]
        if trace.strip():
            return timed_out(name, turn, self._source.timeout_us / 1e6, trace=trace.strip())
        where = "sample" if len(chunk) == 1 else f"one of {len(chunk)} samples, the first"
        return RunFailure(
            "RLF5011",
            f"a worker of environment `{name}` died on {where} {turn.index} of the prompt with uid {turn.uid}",
            notes=(exit_reason(error),),
            help=("the environment may have crashed the process or used up the memory",),
        )
