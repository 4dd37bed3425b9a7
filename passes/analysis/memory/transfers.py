"""Copies over one direction of the host link: do they meet their deadlines, and how long do they stand in the way?

Each direction is a queue of its own. Demand-bound test and earliest deadline first: Baruah, Rosier, Howell 1990;
Liu and Layland 1973. With preemption the test is necessary and sufficient.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from fractions import Fraction

from rlflow.values import dataclass


@dataclass(frozen=True, slots=True)
class Job:
    """So many bytes to copy, not before `release` (the last use) and by `deadline` (the next use), in seconds."""

    name: str
    bytes: int
    release: Fraction
    deadline: Fraction


@dataclass(frozen=True, slots=True)
class Demand:
    """The window in which most is asked of the link: bytes released and due inside it, and what it can carry."""

    start: Fraction
    end: Fraction
    bytes: int
    bytes_per_s: int

    @property
    def excess_seconds(self) -> Fraction:
        """Seconds by which the copies exceed the window; 0 or less where they fit."""
        return Fraction(self.bytes, self.bytes_per_s) - (self.end - self.start)


@dataclass(frozen=True, slots=True)
class Slice:
    """One uninterrupted stretch of a job on the link."""

    name: str
    start: Fraction
    end: Fraction


def tightest_window(jobs: Sequence[Job], bytes_per_s: int) -> Demand | None:
    """The window [release, deadline] with the greatest excess; None without jobs. Feasible if its excess is at most 0.

    Time O(n^2): windows that matter start at a release and end at a deadline.
    """
    worst: Demand | None = None
    by_deadline = sorted((job for job in jobs if job.bytes), key=lambda job: job.deadline)
    for start in sorted({job.release for job in by_deadline}):
        asked = 0
        for job in by_deadline:
            if job.release >= start:
                asked += job.bytes
                found = Demand(start, job.deadline, asked, bytes_per_s)
                if worst is None or found.excess_seconds > worst.excess_seconds:
                    worst = found
    return worst


def link_suffices(jobs: Sequence[Job], bytes_per_s: int) -> bool:
    """Whether all jobs can meet their deadlines: for no window do they ask more than it can carry."""
    worst = tightest_window(jobs, bytes_per_s)
    return worst is None or worst.excess_seconds <= 0


def earliest_deadline_first(jobs: Sequence[Job], bytes_per_s: int) -> tuple[Slice, ...]:
    """The preemptive schedule; it meets all deadlines if any schedule does. Ties go by position in `jobs`."""
    left = [Fraction(job.bytes, bytes_per_s) for job in jobs]
    releases = sorted({job.release for job in jobs})
    now = releases[0] if releases else Fraction(0)
    slices: list[Slice] = []
    while any(left):
        ready = [i for i, job in enumerate(jobs) if left[i] and job.release <= now]
        following = next((release for release in releases if release > now), None)
        if not ready:
            assert following is not None, "what is left has been released or will be"
            now = following
            continue
        i = min(ready, key=lambda i: (jobs[i].deadline, i))
        end = now + left[i] if following is None else min(now + left[i], following)
        left[i] -= end - now
        if slices and slices[-1].name == jobs[i].name and slices[-1].end == now:
            slices[-1] = Slice(jobs[i].name, slices[-1].start, end)
        else:
            slices.append(Slice(jobs[i].name, now, end))
        now = end
    return tuple(slices)


def exposed_seconds(demands: Iterable[tuple[Fraction, Fraction]]) -> Fraction:
    """Sum of max(0, demand - window) over (demand, window) pairs, in seconds: what copies add to the period."""
    return sum((max(Fraction(0), demand - window) for demand, window in demands), Fraction(0))
