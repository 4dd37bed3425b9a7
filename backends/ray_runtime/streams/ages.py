"""The age of samples where they are trained on, against what the plan promises."""

from __future__ import annotations

from rlflow.backends.ray_runtime.batch import Batch
from rlflow.diagnostics.diagnostic import RunFailure
from rlflow.plan import Plan


def check_ages(plan: Plan, model: str, samples: Batch, step: int, rank: int) -> None:
    """RLF5040 for a sample that is older than promised. Step `step` (from 1) trains with version `step` - 1."""
    if "version" not in samples.columns or not samples.rows:
        return
    found = [stale for channel in plan.channels if channel.model == model for stale in channel.stale]
    promised = [stale.worst_age for stale in found if stale.worst_age is not None]
    versions = samples.array("version")
    oldest = int(versions.min())
    age = step - 1 - oldest
    if not found or len(promised) < len(found) or age <= max(promised):
        return
    stale = found[0]
    raise RunFailure(
        "RLF5040",
        f"step {step} would train on a sample of `{stale.stage}` that is {_steps(age)} old, and the plan promises "
        f"at most {max(promised)}",
        notes=(
            f"prompt {int(samples.array('uid')[int(versions.argmin())])}, on rank {rank}: its oldest token is of "
            f"version {oldest}, and step {step} trains with version {step - 1}",
            f"`admit {stale.admit}` with a staleness of {_steps(stale.steps)} and a trigger at {stale.trigger:.0%}",
        ),
        help=("this is a fault of rlflow: please report it with the run folder",),
    )


def _steps(number: int) -> str:
    return f"{number} step{'s' * (number != 1)}"
