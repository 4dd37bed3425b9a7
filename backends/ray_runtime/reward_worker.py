"""The processes that score samples, seen from outside: started, handed samples, watched, replaced."""

from __future__ import annotations

import itertools
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ray

from rlflow.backends.ray_runtime.failures import exit_reason
from rlflow.backends.ray_runtime.reward_process import Loaded, RewardWorker
from rlflow.backends.ray_runtime.rewards import (
    Attempt,
    NothingScored,
    Sample,
    Scores,
    Unit,
    timed_out,
    units_of,
)
from rlflow.backends.ray_runtime.worker_start import load_all
from rlflow.diagnostics.diagnostic import RunFailure
from rlflow.ir.ops import DataSource, RewardSource

if TYPE_CHECKING:  # importing it takes torch along, which a reward worker has no use for
    from rlflow.backends.ray_runtime.batch import Batch

COLLECT_GRACE_S = 10.0


@dataclass(frozen=True, slots=True)
class Handle:
    """Samples being scored: chunk i is `chunks[i]`, by worker i, its result behind `refs[i]`."""

    chunks: tuple[list[Sample], ...]
    refs: tuple[Any, ...]


@dataclass
class _Job:
    """A chunk on its way: what is known of its samples, and what a worker has been asked for."""

    worker: int
    chunk: list[Sample]
    units: list[Unit]
    ref: Any
    deadline: float
    known: Attempt = field(default_factory=Attempt)


class RewardPool:
    """`workers` processes with one reward, started on first use. Used by one thread of its owner.

    `base_dir`: where the .rlflow file is. `data`: the flow's data declarations by name. `actor_options`: what Ray is
    told about each worker. `start_timeout`: seconds. `logs`: of every worker the file for what it prints; none = Ray's.
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
        logs: Sequence[Path] = (),
    ) -> None:
        self.name = name
        self._logs = list(logs)
        self._source = source
        self._base_dir = base_dir.absolute()
        self._data = dict(data)
        self._workers = workers
        self._start_timeout = start_timeout
        # Ray's record of single calls would grow with every step; the run's trace has them.
        self._options = {"num_cpus": 0, "enable_task_events": False, **(actor_options or {})}
        self._actors: list[Any] = []
        self._marks: list[Path] = []
        self._loaded: Loaded | None = None
        self._starting: set[int] = set()
        """Workers that replace another one and have not answered yet."""
        self.ended = 0.0
        """When the last worker had the scores that were collected last; seconds since the epoch, 0 = not known."""

    def open(self) -> None:
        """Start the workers unless they run. Raises RunFailure: what `load_reward` raises, RLF5008 or RLF5011."""
        if self._loaded is not None:
            return
        folder = Path(tempfile.mkdtemp(prefix="rlflow-reward-"))
        self._marks = [folder / str(index) for index in range(self._workers)]
        self._actors = [self._new_worker(worker) for worker in range(self._workers)]
        try:
            what = f"reward `{self.name}`"
            self._loaded = load_all(self._actors, what, self._start_timeout, "the reward's module")[0]
        except RunFailure:
            self.close()
            raise

    @property
    def batched(self) -> bool:
        """Whether the function takes lists of samples, whole groups together. Starts the workers unless they run."""
        self.open()
        assert self._loaded is not None
        return self._loaded.batched

    def start(self, samples: Batch) -> Handle:
        """Begin to score `samples` (rows as `generate` made them) and come back at once."""
        self.open()
        assert self._loaded is not None
        rows = _samples(samples, self._loaded.wants_tokens)
        bounds = _split(rows, self._workers, whole_groups=self._loaded.batched)
        chunks = tuple(rows[first:last] for first, last in bounds)
        units = [units_of(self._loaded.batched, len(chunk)) for chunk in chunks]
        calls = zip(self._actors, chunks, units, strict=False)
        return Handle(chunks, tuple(actor.score.remote(chunk, own) for actor, chunk, own in calls))

    def collect(self, handle: Handle) -> Scores:
        """float32 [rows] in the samples' order, and the extras by name. Waits for the slowest worker at most as long
        as its samples may take. After a failure the workers are ended; the next `start` makes new ones."""
        if not handle.refs:
            return Attempt().scores(0)
        assert self._loaded is not None
        jobs = []
        for worker, (chunk, ref) in enumerate(zip(handle.chunks, handle.refs, strict=True)):
            units = units_of(self._loaded.batched, len(chunk))
            jobs.append(_Job(worker, chunk, units, ref, self._deadline(units, worker)))
        try:
            while waiting := {job.ref: job for job in jobs if job.ref is not None}:
                deadline = max(job.deadline for job in waiting.values())
                done, _ = ray.wait(list(waiting), num_returns=1, timeout=max(deadline - time.monotonic(), 0))
                if not done:
                    late = next(iter(waiting.values()))
                    raise timed_out(self._loaded.name, late.chunk, self._source.timeout_us / 1e6)
                self._receive(waiting[done[0]])
            whole, first = Attempt(), 0
            self.ended = max(job.known.ended for job in jobs)
            for job in jobs:
                whole.scored |= {first + row: scored for row, scored in job.known.scored.items()}
                whole.dropped |= {first + row: failure for row, failure in job.known.dropped.items()}
                first += len(job.chunk)
            return whole.scores(first)
        except NothingScored:
            raise  # the workers are well, and other ranks may have scored samples
        except RunFailure:
            self.close()
            raise

    def _receive(self, job: _Job) -> None:
        """Take what a worker has to say about a chunk, and have a new one go on with what it left."""
        try:
            result = ray.get(job.ref)
        except ray.exceptions.RayError as error:
            unit, failure = self._worker_died(job, error)
            failure = self._with_log(failure, job.worker)
            if unit is None or self._source.on_error == "fail":
                raise failure from None
            result = Attempt(rest=[other for other in job.units if other != unit], hangs=True)
            result.fail(unit, job.chunk, failure)
        if isinstance(result, RunFailure):
            raise self._with_log(result, job.worker)
        job.known.scored |= result.scored
        job.known.dropped |= result.dropped
        job.known.ended = max(job.known.ended, result.ended)
        job.ref = None
        self._starting.discard(job.worker)
        if result.hangs:
            self._replace_worker(job.worker)
        if result.rest:
            job.units = result.rest
            job.deadline = self._deadline(job.units, job.worker)
            job.ref = self._actors[job.worker].score.remote(job.chunk, job.units)

    def _with_log(self, failure: RunFailure, worker: int) -> RunFailure:
        """The failure with the place of what the function has printed, if it has."""
        if not self._logs or not self._logs[worker].is_file() or not self._logs[worker].stat().st_size:
            return failure
        help = (*failure.help, f"what the reward printed is in {self._logs[worker]}")
        return RunFailure(failure.code, failure.message, notes=failure.notes, help=help, trace=failure.trace)

    def _deadline(self, units: Sequence[Unit], worker: int) -> float:
        tries = self._source.retries + 1
        if self._source.on_error == "drop":
            tries *= 2  # a batched function is called again for each group
        rows = sum(last - first for first, last in units)
        start = self._start_timeout if worker in self._starting else 0.0
        return time.monotonic() + rows * tries * self._source.timeout_us / 1e6 + COLLECT_GRACE_S + start

    def _new_worker(self, worker: int) -> Any:
        remote = ray.remote(RewardWorker).options(**self._options)
        log = str(self._logs[worker]) if self._logs else ""
        who = f"reward {self.name} worker {worker}"
        return remote.remote(self._source, str(self._base_dir), self._data, str(self._marks[worker]), log, who)

    def _replace_worker(self, index: int) -> None:
        ray.kill(self._actors[index])
        self._marks[index].unlink(missing_ok=True)
        self._actors[index] = self._new_worker(index)
        self._starting.add(index)
        self._actors[index].load.remote()  # calls of one actor run in order, so this one is done before the next

    def close(self) -> None:
        """End the workers at once, hanging ones too."""
        for actor in self._actors:
            ray.kill(actor)
        for mark in self._marks:
            mark.unlink(missing_ok=True)
        if self._marks:
            self._marks[0].parent.rmdir()
        self._actors, self._marks, self._loaded = [], [], None
        self._starting.clear()

    def _worker_died(self, job: _Job, error: Exception) -> tuple[Unit | None, RunFailure]:
        """RLF5004 and the unit to blame when the watchdog ended the worker, else RLF5011. Without a mark (another
        host) any sample of the chunk may be to blame."""
        assert self._loaded is not None
        try:
            first, _, trace = self._marks[job.worker].read_text(errors="replace").partition("\n")
        except OSError:
            first, trace = "", ""
        marked = int(first) if first.strip().isdigit() else -1
        unit = next((unit for unit in job.units if unit[0] == marked), None)
        chunk = job.chunk if unit is None else job.chunk[unit[0] : unit[1]]
        if trace.strip():
            return unit, timed_out(self._loaded.name, chunk, self._source.timeout_us / 1e6, trace.strip())
        sample = chunk[0]
        where = "sample" if len(chunk) == 1 else f"one of {len(chunk)} samples, the first"
        return None, RunFailure(
            "RLF5011",
            f"a worker of reward `{self._loaded.name}` died while scoring {where} {sample.index} "
            f"of the prompt with uid {sample.uid}",
            notes=(exit_reason(error),),
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
