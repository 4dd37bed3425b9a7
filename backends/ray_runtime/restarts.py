"""When a run is started again: a process that dies is lost, and what it did since the last checkpoint is done again.

What user code, data or the plan did wrong would happen again, so it ends the run at once. A process may die for a
reason that comes back, too (its memory, a sample that crashes native code), so that the same death at the same step
ends the run as well. No ray here: a policy is a few counters.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rlflow.backends.ray_runtime.checkpoint_folder import latest_step, whole_steps
from rlflow.backends.ray_runtime.deliveries import save_every
from rlflow.backends.ray_runtime.failures import is_echo, is_late, with_notes
from rlflow.diagnostics.diagnostic import RunFailure
from rlflow.plan import Plan

DEFAULT_RESTARTS = 3
"""Of one `rlflow run`."""


@dataclass(frozen=True)
class Restart:
    """What an observer is told. `step` was in progress; the run goes on after `from_step`, 0 = from its start."""

    number: int
    limit: int
    failure: RunFailure
    step: int
    from_step: int

    def row(self) -> dict[str, Any]:
        """For run.json."""
        failure = self.failure
        at = time.strftime("%Y-%m-%dT%H:%M:%S%z")
        what = failure.to_diagnostic().message
        return {"at": at, "code": failure.code, "what": what, "step": self.step, "from_step": self.from_step}

    def sentence(self) -> str:
        """For the user."""
        where = f"the checkpoint of step {self.from_step}" if self.from_step else "its start: no step is saved"
        facts = [note for note in self.failure.notes if "\n" not in note]
        return "\n".join(
            [
                f"{self.failure.to_diagnostic().message}, at step {self.step}",
                *(f"  {fact}" for fact in facts),
                f"restart {self.number} of {self.limit}: the run goes on from {where}",
            ]
        )


@dataclass
class Restarts:
    """How often a run was started again, and after what. `limit` 0 = never."""

    limit: int = DEFAULT_RESTARTS
    number: int = 0
    _seen: set[tuple[str, str, str, int]] = field(default_factory=set)

    def after(self, failure: RunFailure, step: int) -> None:
        """Count a restart after a failure in step `step`. Raises the failure where it ends the run, with the reason
        as a note where a restart would have been thinkable."""
        if not is_loss(failure) or not self.limit:
            raise failure
        key = (failure.code, failure.message, failure.stage, step)
        if key in self._seen:
            raise with_notes(failure, f"the same happened at step {step} before: it would happen again")
        if self.number == self.limit:
            raise with_notes(
                failure, f"the run was started again {self.number} times already (--restarts {self.limit})"
            )
        self._seen.add(key)
        self.number += 1


def is_loss(failure: RunFailure) -> bool:
    """Whether something was lost that another try has again: a process, a host, a connection, a rank that hangs."""
    return failure.code == "RLF5011" or is_late(failure) or is_echo(failure)


def step_to_resume(folder: Path, recorded: int | None, plan: Plan) -> int | None:
    """The step to go on from; None = from the start. `folder` has the checkpoints; RLF5010 for a pointer to nothing.

    `recorded`: up to which step everything that was measured is written down (None = not known). A process may die
    between a checkpoint and the report of its step. That step is then run again from the checkpoint before, which gives
    the same once more, so that every step is recorded exactly once. Where older checkpoints were pruned there is
    nothing to go back to, and the newest is taken.
    """
    newest = latest_step(folder)
    if newest is None or recorded is None or newest <= recorded:
        return newest
    older = [step for step in whole_steps(folder) if step <= recorded]
    if older:
        return max(older)
    return None if newest <= (save_every(plan) or newest) else newest


def from_the_start(plan: Plan, recorded: int | None, run_dir: Path) -> str:
    """For a run without a checkpoint: that it starts again at its first step, in words. RLF5010 where it had come so
    far that a checkpoint must have been there: steps that were trained are not thrown away for a missing folder.
    A checkpoint is written beside the steps, and is whole before the next one begins."""
    first = save_every(plan)
    done = recorded or 0
    if done and (not first or done >= 2 * first):
        steps = "1 step is" if done == 1 else f"{done} steps are"
        due = "nothing is saved before the end" if not first else f"the first was due after step {first}"
        raise RunFailure(
            "RLF5010",
            f"there is no checkpoint to resume from in `{run_dir}`: {steps} done, and {due}",
            help=("start it anew in another run folder",),
        )
    return "it ended before its first checkpoint was whole: it starts again at step 1"
