"""Which versions of the weights a pool is given, computed alike by the pool that trains and the one that reads.

A version is the number of completed steps. Readers use exactly the version that the plan's staleness says (the edge is
a queue of tokens, hence every run with one seed is the same), and an evaluation uses the weights of the step that it
follows. What is newer than asked for stays: a version is sent once, and those that nobody asks for are not sent.

A pool that reads with a lag is ahead of the pool that trains: when step i is trained, samples of the steps after it are
there or under way that versions older than i make. A run that goes on from a checkpoint of step i has no such version,
so these samples are part of the checkpoint (`ahead`, saving/ahead.py). At the end of a run they are made for its last
checkpoint, so that more steps can follow.
"""

from __future__ import annotations

from dataclasses import dataclass

from rlflow.ir.ops import Generate
from rlflow.plan import Evaluation, Plan, ReshardWeights, SaveCheckpoint
from rlflow.plan_decisions import Reshard
from rlflow.protocol.stale_settings import is_stream


@dataclass(frozen=True)
class Reading:
    """How the pool that reads uses one reshard."""

    in_step: bool
    lag: int
    """steps"""
    evaluations: tuple[Evaluation, ...]
    streamed: bool = False
    """The reader samples all the time and takes every version as it comes."""

    @classmethod
    def of(cls, plan: Plan, reshard: Reshard) -> Reading:
        program = plan.program(reshard.target)
        stale = {
            stale.stage: stale for channel in plan.channels if channel.model == reshard.model for stale in channel.stale
        }
        readers = [r for r in reshard.readers if plan.stage(r).phase == "step"]
        # Readers of one reshard hold one copy, so that the most impatient one decides.
        lag = min((stale[reader].steps if reader in stale else 0 for reader in readers), default=0)
        streamed = any(reader in stale and is_stream(stale[reader]) for reader in readers)
        evaluations = tuple(e for e in program.evaluations if _reads(e.instructions, reshard))
        return cls(_reads(program.step, reshard), 0 if streamed else lag, evaluations, streamed)

    def of_step(self, step: int) -> int:
        """The version that step `step` (from 1) reads with; at least this one."""
        return max(0, step - 1 - self.lag)

    def version_at(self, step: int) -> int:
        """The version that step `step` does read with, in a run that goes on for ever: evaluations bring newer ones."""
        every = [evaluation.every for evaluation in self.evaluations if evaluation.every]
        return max([self.of_step(step), *((step - 1) // steps * steps for steps in every)])

    def ahead(self, done: int) -> range:
        """The steps after `done` that read with an older version than `done`."""
        end = done + 1
        while self.in_step and end <= done + self.lag and self.version_at(end) < done:
            end += 1
        return range(done + 1, end)

    def evaluates(self, step: int, last: int) -> bool:
        """Whether an evaluation that reads follows `step`."""
        return any(due(evaluation, step, last) for evaluation in self.evaluations)

    def versions(self, done: int, last: int, more: bool = False) -> list[int]:
        """All versions that are sent in a run of the steps done + 1 to last, in order; `done` is there already.

        `more`: with those for the steps ahead of the last.
        """
        have, found = done, []
        for step in range(done + 1, last + 1):
            wanted = [self.of_step(step)] if self.in_step else []
            if more and step == last:
                wanted += [self.of_step(ahead) for ahead in self.ahead(last)]
            if self.evaluates(step, last):
                wanted.append(step)
            for version in wanted:
                if version > have:
                    found.append(version)
                    have = version
        return found


def due(evaluation: Evaluation, step: int, last: int) -> bool:
    """Whether the evaluation runs after `step` of a run that ends with `last`."""
    return step == last or bool(evaluation.every and step % evaluation.every == 0)


def _reads(instructions: tuple[object, ...], reshard: Reshard) -> bool:
    return any(
        isinstance(i, ReshardWeights) and i.model == reshard.model and set(i.readers) == set(reshard.readers)
        for i in instructions
    )


def stale_samplers(plan: Plan, pool: str) -> dict[str, Reading]:
    """The stages of a pool that sample with weights that come late from another pool, each with how they read."""
    found: dict[str, Reading] = {}
    for reshard in plan.reshards:
        if reshard.target != pool or reshard.source == pool:
            continue
        reading = Reading.of(plan, reshard)
        for reader in reshard.readers:
            stage = plan.stage(reader)
            if reading.lag and stage.phase == "step" and isinstance(stage.op, Generate):
                found[reader] = reading
    return found


def save_every(plan: Plan) -> int | None:
    """Steps between checkpoints by the plan, 0 = only at the end; None for a plan without checkpoints."""
    every = [i.every for program in plan.programs for i in program.step if isinstance(i, SaveCheckpoint)]
    return every[0] if every else None
