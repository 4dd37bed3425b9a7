"""Scoring samples in processes of their own, so that user code can be slow, hang or crash without taking a run along.

A hanging function is stopped in two ways. Python code that waits or loops is given up by `score_rows`, which reports
RLF5004; the pool then ends the process. Code that never lets go of the interpreter lock (a regular expression that
backtracks for ever) would stop that very report, so a watchdog of the C library ends the process one second later and
leaves the place in the code in the worker's mark file, from which the pool makes the same RLF5004.
"""

from __future__ import annotations

import faulthandler
import itertools
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import ray

from rlflow.backends.ray_runtime.data_sources import describe
from rlflow.backends.ray_runtime.rewards import RewardFunction, Sample, Scores, load_reward, score_rows, timed_out
from rlflow.diagnostics.diagnostic import RunFailure
from rlflow.ir.ops import DataSource, RewardSource

if TYPE_CHECKING:  # importing it takes torch along, which a reward worker has no use for
    from rlflow.backends.ray_runtime.batch import Batch

WATCHDOG_GRACE_S = 1.0
COLLECT_GRACE_S = 10.0


@dataclass(frozen=True, slots=True)
class Loaded:
    """What the pool needs to know of the reward a worker has loaded."""

    name: str
    batched: bool
    wants_tokens: bool


class RewardWorker:
    """One loaded reward; made into a Ray actor by `RewardPool`. Failures are returned, so that Ray adds nothing."""

    def __init__(self, source: RewardSource, base_dir: str, data: Mapping[str, DataSource], mark: str) -> None:
        self._source = source
        self._base_dir = Path(base_dir)
        self._data = data
        self._mark = Path(mark)
        self._armed_at = 0.0
        self._function: RewardFunction | None = None

    def load(self) -> Loaded | RunFailure:
        try:
            self._function = load_reward(self._source, self._base_dir, self._data)
        except RunFailure as failure:
            return failure
        self._mark.parent.mkdir(parents=True, exist_ok=True)  # another host than the pool's has no such folder yet
        self._mark_file = self._mark.open("w+b", buffering=0)
        return Loaded(self._function.name, self._function.batched, self._function.wants_tokens)

    def score(self, samples: list[Sample]) -> Scores | RunFailure:
        """After RLF5004 a call is still running in this process: end it."""
        function = self._function
        assert function is not None, "score before load"
        timeout = self._source.timeout_us / 1e6
        limit = timeout * (len(samples) if function.batched else 1) + WATCHDOG_GRACE_S

        def on_start(index: int) -> None:
            self._mark_file.seek(0)
            self._mark_file.write(b"%9d\n" % index)
            # Arming starts a thread, so fast functions share one; it still fires only after `timeout`.
            if time.monotonic() - self._armed_at > WATCHDOG_GRACE_S / 2:
                faulthandler.dump_traceback_later(limit, exit=True, file=self._mark_file)
                self._armed_at = time.monotonic()

        try:
            return score_rows(function, samples, self._source.retries, timeout, on_start)
        except RunFailure as failure:
            return failure
        finally:
            faulthandler.cancel_dump_traceback_later()
            self._armed_at = 0.0


@dataclass(frozen=True, slots=True)
class Handle:
    """Samples being scored: chunk i is `chunks[i]`, by worker i, its result behind `refs[i]`."""

    chunks: tuple[list[Sample], ...]
    refs: tuple[Any, ...]


class RewardPool:
    """`workers` processes with one reward, started on first use. Used by one thread of its owner.

    `base_dir`: where the .rlflow file is. `data`: the flow's data declarations by name. `actor_options`: what Ray is
    told about each worker. `start_timeout`: seconds.
    """

    def __init__(
        self,
        name: str,
        source: RewardSource,
        base_dir: Path,
        data: Mapping[str, DataSource],
        *,
        workers: int = 1,
        start_timeout: float = 120.0,
        actor_options: Mapping[str, Any] | None = None,
    ) -> None:
        self.name = name
        self._source = source
        self._base_dir = base_dir.absolute()
        self._data = dict(data)
        self._workers = workers
        self._start_timeout = start_timeout
        self._options = {"num_cpus": 0, **(actor_options or {})}
        self._actors: list[Any] = []
        self._marks: list[Path] = []
        self._loaded: Loaded | None = None

    def open(self) -> None:
        """Start the workers unless they run. Raises RunFailure: what `load_reward` raises, RLF5008 or RLF5011."""
        if self._loaded is not None:
            return
        folder = Path(tempfile.mkdtemp(prefix="rlflow-reward-"))
        self._marks = [folder / str(index) for index in range(self._workers)]
        remote = ray.remote(RewardWorker).options(**self._options)
        self._actors = [remote.remote(self._source, str(self._base_dir), self._data, str(mark)) for mark in self._marks]
        try:
            results = ray.get([actor.load.remote() for actor in self._actors], timeout=self._start_timeout)
        except ray.exceptions.GetTimeoutError:
            self.close()
            raise RunFailure(
                "RLF5008",
                f"the {self._workers} workers of reward `{self.name}` did not start within {self._start_timeout:g} s",
                notes=("either the machine is busy or has no room for them, or importing the reward's module hangs",),
            ) from None
        except ray.exceptions.RayError as error:
            self.close()
            raise RunFailure(
                "RLF5011", f"a worker of reward `{self.name}` died while starting", notes=(describe(error),)
            ) from None
        for result in results:
            if isinstance(result, RunFailure):
                self.close()
                raise result
        self._loaded = results[0]

    def start(self, samples: Batch) -> Handle:
        """Begin to score `samples` (rows as `generate` made them) and come back at once."""
        self.open()
        assert self._loaded is not None
        rows = _samples(samples, self._loaded.wants_tokens)
        bounds = _split(rows, self._workers, whole_groups=self._loaded.batched)
        chunks = tuple(rows[first:last] for first, last in bounds)
        return Handle(chunks, tuple(a.score.remote(c) for a, c in zip(self._actors, chunks, strict=False)))

    def collect(self, handle: Handle) -> Scores:
        """float32 [rows] in the samples' order, and the extras by name. Waits for the slowest worker at most as long
        as its samples may take. After a failure the workers are ended; the next `start` makes new ones."""
        tries = self._source.retries + 1
        longest = max((len(chunk) for chunk in handle.chunks), default=0)
        deadline = time.monotonic() + longest * tries * self._source.timeout_us / 1e6 + COLLECT_GRACE_S
        results: dict[Any, Scores] = {}
        waiting = list(handle.refs)
        while waiting:
            done, waiting = ray.wait(waiting, num_returns=1, timeout=max(deadline - time.monotonic(), 0))
            if not done:
                index = handle.refs.index(waiting[0])
                name = self._loaded.name if self._loaded else self.name
                self.close()
                raise timed_out(name, handle.chunks[index], self._source.timeout_us / 1e6)
            index = handle.refs.index(done[0])
            try:
                result = ray.get(done[0])
            except ray.exceptions.RayError as error:
                failure = self._worker_died(index, handle.chunks[index], error)
                self.close()
                raise failure from None
            if isinstance(result, RunFailure):
                self.close()
                raise result
            results[done[0]] = result
        return _joined([results[ref] for ref in handle.refs], handle.chunks)

    def close(self) -> None:
        """End the workers at once, hanging ones too."""
        for actor in self._actors:
            ray.kill(actor)
        for mark in self._marks:
            mark.unlink(missing_ok=True)
        if self._marks:
            self._marks[0].parent.rmdir()
        self._actors, self._marks, self._loaded = [], [], None

    def _worker_died(self, index: int, chunk: list[Sample], error: Exception) -> RunFailure:
        """RLF5004 when the watchdog ended the worker, else RLF5011. Without a mark (another host) any sample of the
        chunk may be to blame."""
        assert self._loaded is not None
        try:
            first, _, trace = self._marks[index].read_text(errors="replace").partition("\n")
        except OSError:
            first, trace = "", ""
        if first.strip().isdigit() and not self._loaded.batched:
            chunk = [chunk[int(first)]]
        if trace.strip():
            return timed_out(self._loaded.name, chunk, self._source.timeout_us / 1e6, trace.strip())
        sample = chunk[0]
        where = "sample" if len(chunk) == 1 else f"one of {len(chunk)} samples, the first"
        return RunFailure(
            "RLF5011",
            f"a worker of reward `{self._loaded.name}` died while scoring {where} {sample.index} "
            f"of the prompt with uid {sample.uid}",
            notes=(describe(error),),
            help=("the reward's function may have crashed the process or used up the memory",),
        )


def _samples(batch: Batch, with_tokens: bool) -> list[Sample]:
    rows = zip(
        batch.array("uid").tolist(),
        batch.array("sample").tolist(),
        batch.items("record"),
        batch.items("text"),
        strict=True,
    )
    samples = [Sample(uid, index, record, text) for uid, index, record, text in rows]
    if not with_tokens:
        return samples
    prompts, responses = batch.packed("prompt_ids"), batch.packed("response_ids")
    return [
        replace(sample, prompt_ids=prompts.row(i).tolist(), response_ids=responses.row(i).tolist())
        for i, sample in enumerate(samples)
    ]


def _split(rows: Sequence[Sample], parts: int, *, whole_groups: bool) -> list[tuple[int, int]]:
    """At most `parts` ranges (first, last) of nearly equal size that cover the rows; whole groups: rows of one prompt
    that follow each other stay together."""
    cuts = list(range(len(rows) + 1))
    if whole_groups:
        cuts = [i for i in cuts if i in (0, len(rows)) or rows[i].uid != rows[i - 1].uid]
    units = len(cuts) - 1
    ends = [cuts[units * part // parts] for part in range(parts + 1)]
    return [(first, last) for first, last in itertools.pairwise(ends) if first < last]


def _joined(results: Sequence[Scores], chunks: Sequence[Sequence[Sample]]) -> Scores:
    scores = np.concatenate([np.empty(0, np.float32), *(scores for scores, _ in results)])
    names = dict.fromkeys(name for _, extras in results for name in extras)
    extras: dict[str, list[Any]] = {name: [] for name in names}
    for (_, part), chunk in zip(results, chunks, strict=True):
        for name in names:
            extras[name] += part.get(name, [None] * len(chunk))
    return scores, extras
