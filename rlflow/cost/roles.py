"""One way in for the five kinds of stages that run a model, and a step of stages one after the other."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from rlflow.cost.dimensions import Dimensions
from rlflow.cost.errors import WorkloadError
from rlflow.cost.generation import generate
from rlflow.cost.knobs import Calibration
from rlflow.cost.machine import Machine
from rlflow.cost.stages import ComputeOptions, EngineOptions, Role, StageCost, Workload
from rlflow.cost.training import logprobs, train
from rlflow.ir.flow import Layout


def stage_cost(
    role: Role,
    model: Dimensions,
    layout: Layout,
    machine: Machine,
    work: Workload,
    compute: ComputeOptions | None = None,
    engine: EngineOptions | None = None,
) -> StageCost:
    """Seconds and bytes of a stage. Values and scores have a scalar head whatever `compute` says.

    LayoutError for a layout that does not fit the model, UnknownFactError for a fact that is missing, WorkloadError for
    a batch that contradicts itself.
    """
    if role == "generate":
        return generate(model, layout, machine, work, engine or EngineOptions())
    compute = compute or ComputeOptions()
    if role in ("values", "score"):
        compute = replace(compute, head="scalar")
    return (train if role == "train" else logprobs)(model, layout, machine, work, compute)


def synchronous_step(stages: Iterable[float], calibration: Calibration) -> float:
    """Seconds of a step whose stages run one after the other, with the share of it that is in no stage."""
    residual = calibration.knobs.step_residual
    if residual >= 1:
        raise WorkloadError(f"the residual of a step is below 1, not {residual}")
    return sum(stages) / (1 - residual)
