"""Which rank keeps the others waiting: found by asking all of them, and only while nothing is heard from any.

A rank that waits for another one ends with a failure of its own after the plan's limit. It cannot know whom to blame:
that are those who are behind, and those who do not even answer. A rank that nobody waits for hangs without a word, so
the driver looks for one whose thread has not computed at all for longer than the limit.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

import ray

from rlflow.backends.ray_runtime.failures import with_notes
from rlflow.backends.ray_runtime.place import Place
from rlflow.backends.ray_runtime.start_ranks import StartedRank
from rlflow.diagnostics.diagnostic import RunFailure
from rlflow.ir.ops import Score
from rlflow.plan import Plan

ANSWER_S = 10.0
"""For a rank to say where it is: a thread of its own does."""
_SHOWN = 4


class Watchdog:
    """`limit_s`: of every wait between ranks; `queues`: their actors by id; `patient`: instructions that may last
    longer, see `patient_instructions`. Tell it of every report by `heard`."""

    def __init__(
        self,
        ranks: Sequence[StartedRank],
        limit_s: float,
        queues: Mapping[str, Any] | None = None,
        patient: frozenset[str] = frozenset(),
    ) -> None:
        self._ranks, self._limit, self._queues, self._patient = list(ranks), limit_s, queues or {}, patient
        self._margin = min(60.0, limit_s)
        """After the limit, so that ranks that wait for each other say so first."""
        self._last = self._asked = time.monotonic()
        self._still: dict[int, tuple[tuple[int, str, float | None], float]] = {}
        """Rank to what it did, how much it had computed, and since when both are so."""

    def heard(self) -> None:
        """A rank has reported."""
        self._last = time.monotonic()
        self._still.clear()

    def check(self) -> RunFailure | None:
        """RLF5050 when nothing has been heard for longer than the limit, and a rank has not computed since or does
        not answer."""
        now = time.monotonic()
        if now - self._last < self._limit / 2 or now - self._asked < self._limit / 20:
            return None
        self._asked = now
        places = self.places()
        stuck: dict[int, Place | None] = {}
        for index, place in places.items():
            state = (-1, "", None) if place is None else (place.step, place.instruction, place.cpu_s)
            before, since = self._still.get(index, (None, now))
            self._still[index] = (state, since if state == before else now)
            fine = place is not None and (place.cpu_s is None or place.instruction in self._patient)
            if not fine and now - self._still[index][1] > self._limit / 2 + self._margin:
                stuck[index] = place
        if not stuck:
            return None
        return self._told(stuck, now - self._last)

    def places(self, dump: bool = False) -> dict[int, Place | None]:
        """Where every rank is; None for one that does not answer in time. Dead ones are left out."""
        refs = {
            rank.actor.where.options(concurrency_group="control").remote(dump): index
            for index, rank in enumerate(self._ranks)
        }
        done, late = ray.wait(list(refs), num_returns=len(refs), timeout=ANSWER_S)
        found: dict[int, Place | None] = dict.fromkeys((refs[ref] for ref in late), None)
        for ref in done:
            try:
                found[refs[ref]] = ray.get(ref)
            except ray.exceptions.RayError:
                continue
        return found

    def blame(self, failure: RunFailure) -> RunFailure:
        """A failure of a rank that waited too long, with where the others are, those behind first, and all queues."""
        places = self.places(dump=True)
        stacks = "the stacks of the ranks that answer are in their logs"
        return with_notes(failure, *self._sentences(places), *self._dump(), stacks)

    def _told(self, stuck: dict[int, Place | None], quiet_s: float) -> RunFailure:
        self.places(dump=True)
        names = ", ".join(str(self._ranks[index]) for index in list(stuck)[:_SHOWN])
        return RunFailure(
            "RLF5050",
            f"{names} hang{'s' * (len(stuck) == 1)}: nothing was reported for {quiet_s:.0f} s",
            notes=("the stacks of the ranks that answer are in their logs", *self._dump(), *self._sentences(stuck)),
            help=(f"a wait between ranks of this plan may last {self._limit:g} s",),
        )

    def _dump(self) -> list[str]:
        """How all queues are."""
        refs = {actor.describe.remote(): name for name, actor in self._queues.items()}
        done, _ = ray.wait(list(refs), num_returns=len(refs), timeout=ANSWER_S) if refs else ([], [])
        found = dict.fromkeys(self._queues, "does not answer")
        for ref in done:
            try:
                found[refs[ref]] = ray.get(ref)
            except ray.exceptions.RayError:
                found[refs[ref]] = "its process is gone"
        return [f"queue `{name}`: {how}" for name, how in found.items()]

    def _sentences(self, places: dict[int, Place | None]) -> list[str]:
        def order(index: int) -> tuple[int, float]:
            place = places[index]
            return (-1, 0.0) if place is None else (place.step, -place.seconds)

        ranked = sorted(places, key=order)
        shown = []
        for index in ranked[:_SHOWN]:
            place = places[index]
            said = f"does not answer within {ANSWER_S:g} s" if place is None else f"is {place.sentence()}"
            shown.append(f"{self._ranks[index]} {said}")
        return shown + [f"and {len(ranked) - _SHOWN} further ranks"] * (len(ranked) > _SHOWN)


def patient_instructions(plan: Plan) -> frozenset[str]:
    """Instructions that wait for user code in other processes, which has deadlines of its own for every call: a reward
    on many samples by few workers, an environment over many turns."""
    slow = {s.id for s in plan.stages if isinstance(s.op, Score) or getattr(s.op, "environment", None)}
    found = set()
    for program in plan.programs:
        for instructions in (program.step, *(evaluation.instructions for evaluation in program.evaluations)):
            found |= {i.id for i in instructions if getattr(i, "stage", "") in slow}
    return frozenset(found)
