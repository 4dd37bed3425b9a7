"""Scoring samples with a time limit each. A failure is never a score. No torch, no ray here.

A sample that cannot be scored (its function raised or did not come back) stops the run, or with `on_error = drop` has
the score NaN, which says "not applicable" to everything downstream. A result that is no score always stops the run.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np

from rlflow.backends.ray_runtime.call_thread import CallThread, Expired
from rlflow.backends.ray_runtime.data_sources import describe, shorten
from rlflow.backends.ray_runtime.reward_functions import RewardFunction, Sample, Scored
from rlflow.backends.ray_runtime.reward_loading import load_reward
from rlflow.diagnostics.diagnostic import RunFailure
from rlflow.ir.sources import OnError

__all__ = [
    "DROPPED",
    "NOT_APPLICABLE",
    "NothingScored",
    "RewardFunction",
    "Sample",
    "Scores",
    "load_reward",
    "score_rows",
]

Scores = tuple[np.ndarray, dict[str, list[Any]]]
"""float32 [samples], NaN where the reward does not apply, and the extras by name, one entry per sample (None where a
sample has no such extra). The three names below are among the extras only where there is something to say."""

NOT_APPLICABLE = "reward_na"
"""bool: the function returned None."""
DROPPED = "reward_dropped"
"""bool: the sample could not be scored."""
ERROR = "reward_error"
"""Why not, as text."""


class NothingScored(RunFailure):
    """No sample could be scored. `scores` says so of each: other ranks may have scored theirs."""

    def __init__(self, first: RunFailure, notes: Sequence[str], scores: Scores) -> None:
        super().__init__(first.code, first.message, notes=notes, help=first.help, trace=first.trace)
        self.scores = scores


Unit = tuple[int, int]
"""Samples (first, last) that one call scores: one sample, or for a batched function many."""


@dataclass
class Attempt:
    """What came of some samples, by their place: scores, and for those that cannot be scored the reason."""

    scored: dict[int, Scored] = field(default_factory=dict)
    dropped: dict[int, RunFailure] = field(default_factory=dict)
    rest: list[Unit] = field(default_factory=list)
    """Not tried yet."""
    hangs: bool = False
    """A call is still running in this process: end it, and try the rest in another one."""
    ended: float = 0.0
    """When the attempt was over, in seconds since the epoch on its host; 0 = not known."""

    def fail(self, unit: Unit, samples: Sequence[Sample], failure: RunFailure) -> None:
        """A unit cannot be scored: it is dropped, or when it has several groups, each is tried by itself."""
        groups = _groups(unit, samples)
        if len(groups) > 1:
            self.rest = groups + self.rest
        else:
            self.dropped.update(dict.fromkeys(range(*unit), failure))

    def scores(self, rows: int) -> Scores:
        """Of all `rows` samples. Raises NothingScored, made of the first failure, when no sample could be scored."""
        if rows and len(self.dropped) == rows:
            first = self.dropped[0]
            notes = (*first.notes, f"none of the {rows} samples of this step could be scored")
            raise NothingScored(first, notes, _as_arrays(rows, self.scored, self.dropped))
        return _as_arrays(rows, self.scored, self.dropped)


def score_rows(
    function: RewardFunction,
    samples: Sequence[Sample],
    retries: int,
    timeout: float,
    on_error: OnError = "fail",
) -> Scores:
    """Score all samples in this process; raises what `attempt` raises, and see `Attempt.scores`."""
    rest = units_of(function.batched, len(samples))
    whole = Attempt()
    while rest:
        part = attempt(function, samples, rest, retries, timeout, on_error)
        whole.scored |= part.scored
        whole.dropped |= part.dropped
        rest = part.rest
    return whole.scores(len(samples))


def units_of(batched: bool, rows: int) -> list[Unit]:
    return [(0, rows)] * bool(rows) if batched else [(row, row + 1) for row in range(rows)]


def attempt(
    function: RewardFunction,
    samples: Sequence[Sample],
    units: Sequence[Unit],
    retries: int,
    timeout: float,
    on_error: OnError = "fail",
    on_start: Callable[[Unit], None] | None = None,
) -> Attempt:
    """Score one unit after the other, up to the first that does not come back.

    `timeout`: seconds for one try of one sample (times the number of samples for a batched function). `retries`: more
    tries after one that raised or ran out of time. `on_start` is told before a try of a unit.

    Raises RunFailure: RLF5005 for a result that is no score, RLF5014 for a parameter that no column fills; unless
    `on_error` is `drop`, RLF5003 when the function raised, RLF5004 when it did not come back (its thread is then
    still running, so the process should be ended).
    """
    done = Attempt(rest=list(units))
    thread = CallThread("reward")
    try:
        while done.rest and not done.hangs:
            unit = done.rest.pop(0)
            chunk = samples[unit[0] : unit[1]]
            for number in range(retries + 1):
                if on_start is not None:
                    on_start(unit)
                try:
                    results = thread.call(partial(function.score, chunk), timeout * len(chunk))
                    done.scored.update(zip(range(*unit), results, strict=True))
                    break
                except Expired:
                    thread = CallThread("reward")
                    done.hangs = True
                    failure = timed_out(function.name, chunk, timeout)
                except RunFailure as error:  # a wrong result stays wrong
                    raise _with_sample(error, chunk) from None
                except BaseException as error:  # user code may raise anything, SystemExit too
                    if isinstance(error, KeyboardInterrupt):
                        raise
                    failure = _raised(function.name, chunk, error)
                if number < retries:
                    continue
                if on_error == "fail":
                    raise failure
                done.fail(unit, samples, failure)
    finally:
        thread.stop()
    return done


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


def _groups(unit: Unit, samples: Sequence[Sample]) -> list[Unit]:
    """The unit's runs of samples of one prompt."""
    first, last = unit
    cuts = [row for row in range(first + 1, last) if samples[row].uid != samples[row - 1].uid]
    return list(zip([first, *cuts], [*cuts, last], strict=True))


def _as_arrays(rows: int, scored: Mapping[int, Scored], dropped: Mapping[int, RunFailure]) -> Scores:
    nothing: Scored = (None, {})
    values = [scored.get(row, nothing) for row in range(rows)]
    names = dict.fromkeys(name for _, extras in values for name in extras)
    extras = {name: [own.get(name) for _, own in values] for name in names}
    if len(dropped) < sum(score is None for score, _ in values):
        extras[NOT_APPLICABLE] = [score is None and row not in dropped for row, (score, _) in enumerate(values)]
    if dropped:
        extras[DROPPED] = [row in dropped for row in range(rows)]
        extras[ERROR] = [dropped[row].message if row in dropped else None for row in range(rows)]
    return np.array([np.nan if score is None else score for score, _ in values], dtype=np.float32), extras
