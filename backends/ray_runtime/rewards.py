"""Scoring samples with a time limit each. A failure is a failure of the run, never a score. No torch, no ray here."""

from __future__ import annotations

import queue
import threading
import traceback
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np

from rlflow.backends.ray_runtime.data_sources import describe, shorten
from rlflow.backends.ray_runtime.reward_functions import RewardFunction, Sample, Scored, load_reward
from rlflow.diagnostics.diagnostic import RunFailure

__all__ = ["RewardFunction", "Sample", "Scores", "load_reward", "score_rows"]

Scores = tuple[np.ndarray, dict[str, list[Any]]]
"""float32 [samples], and the extras by name, one entry per sample (None where a sample has no such extra)."""


def score_rows(
    function: RewardFunction,
    samples: Sequence[Sample],
    retries: int,
    timeout: float,
    on_start: Callable[[int], None] | None = None,
) -> Scores:
    """Score one sample after the other, a batched function all of them in one call.

    `timeout`: seconds for one try of one sample (times the number of samples for a batched function). `retries`: more
    tries after one that raised or ran out of time. `on_start(i)` is told before a try of sample i.

    Raises RunFailure: RLF5003 when the function raised, RLF5004 when it did not come back (its thread is then still
    running, so the process should be ended), RLF5005 for a result that is no score, RLF5014 for a parameter that no
    column fills.
    """
    thread = _CallThread()
    scored: list[Scored] = []
    step = max(len(samples), 1) if function.batched else 1
    try:
        for start in range(0, len(samples), step):
            chunk = samples[start : start + step]
            for attempt in range(retries + 1):
                if on_start is not None:
                    on_start(start)
                try:
                    scored += thread.call(partial(function.score, chunk), timeout * len(chunk))
                    break
                except _Expired:
                    thread = _CallThread()
                    failure = timed_out(function.name, chunk, timeout)
                except RunFailure as error:  # a wrong result stays wrong
                    raise _with_sample(error, chunk) from None
                except BaseException as error:  # user code may raise anything, SystemExit too
                    if isinstance(error, KeyboardInterrupt):
                        raise
                    failure = _raised(function.name, chunk, error)
                if attempt == retries:
                    raise failure
    finally:
        thread.stop()
    return _as_arrays(scored)


def timed_out(name: str, chunk: Sequence[Sample], timeout: float, trace: str = "") -> RunFailure:
    """RLF5004 for a function that did not come back from `chunk`; `trace` says where it was, when that is known."""
    return RunFailure(
        "RLF5004",
        f"reward `{name}` did not return within {timeout * len(chunk):g} s on {_which(chunk)}",
        notes=_about(chunk),
        help=("raise the reward's `timeout`, or make the function give up by itself",),
        trace=trace,
    )


def _raised(name: str, chunk: Sequence[Sample], error: BaseException) -> RunFailure:
    return RunFailure(
        "RLF5003",
        f"reward `{name}` raised {type(error).__name__} on {_which(chunk)}",
        notes=(*_about(chunk), describe(error)),
        trace="".join(traceback.format_exception(error)),
    )


def _with_sample(failure: RunFailure, chunk: Sequence[Sample]) -> RunFailure:
    message = f"{failure.message} (on {_which(chunk)})"
    return RunFailure(failure.code, message, notes=(*_about(chunk), *failure.notes), help=failure.help)


def _which(chunk: Sequence[Sample]) -> str:
    first = f"sample {chunk[0].index} of the prompt with uid {chunk[0].uid}"
    return first if len(chunk) == 1 else f"{len(chunk)} samples from {first} on"


def _about(chunk: Sequence[Sample]) -> tuple[str, ...]:
    sample = chunk[0]
    return (
        f"prompt: {shorten(sample.record['prompt'])}",
        f"response: {shorten(sample.text)}",
        f"answer: {shorten(sample.record['answer'])}",
    )


def _as_arrays(scored: Sequence[Scored]) -> Scores:
    names = dict.fromkeys(name for _, extras in scored for name in extras)
    return (
        np.array([score for score, _ in scored], dtype=np.float32),
        {name: [extras.get(name) for _, extras in scored] for name in names},
    )


class _Expired(Exception):
    """A call ran out of time. Not a TimeoutError: the function itself may raise that."""


class _CallThread:
    """A daemon thread that runs calls, so that the caller can stop waiting for one and the process can still end."""

    def __init__(self) -> None:
        self._calls: queue.SimpleQueue[Callable[[], list[Scored]] | None] = queue.SimpleQueue()
        self._results: queue.SimpleQueue[tuple[list[Scored], BaseException | None]] = queue.SimpleQueue()
        threading.Thread(target=self._run, daemon=True, name="reward").start()

    def call(self, function: Callable[[], list[Scored]], timeout: float) -> list[Scored]:
        """Its result, or what it raised; _Expired after `timeout` seconds, when this thread is of no more use."""
        self._calls.put(function)
        try:
            result, error = self._results.get(timeout=timeout)
        except queue.Empty:
            raise _Expired from None
        if error is not None:
            raise error
        return result

    def stop(self) -> None:
        self._calls.put(None)

    def _run(self) -> None:
        while (function := self._calls.get()) is not None:
            try:
                self._results.put((function(), None))
            except BaseException as error:
                self._results.put(([], error))
