"""Seconds of the stages of a published run by the cost model, and of its step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from benchmarks.validation.compose import step_of
from benchmarks.validation.hardware import machine_of, model_named
from benchmarks.validation.layouts import devices_of, engine_options, rollout_layout, train_layout, weight_bytes
from benchmarks.validation.runs import Run
from benchmarks.validation.workloads import workload_of
from rlflow.cost.components import MIXED, Precision
from rlflow.cost.decode import Speculation, decode_step
from rlflow.cost.dimensions import Dimensions
from rlflow.cost.generation import engine_memory
from rlflow.cost.knobs import Calibration
from rlflow.cost.lengths import mean
from rlflow.cost.machine import Machine
from rlflow.cost.occupancy import mean_held
from rlflow.cost.roles import stage_cost
from rlflow.cost.stages import ComputeOptions, EngineOptions, StageCost, Workload
from rlflow.cost.sync import host_swap, weight_sync
from rlflow.ir.flow import Layout

ACCEPTED = 0.85
"""Share of tokens of one multi-token prediction that the model accepts: DeepSeek-V3, 85 to 90 % (arXiv 2412.19437)."""
DRAFT = 0.1
"""Seconds of drafting one token over a decode step: one layer of 61, the head, and a launch of their own."""
STAGE_NAMES = {
    "old_logprob": "old log-probabilities",
    "ref_logprob": "reference pass",
    "update": "update",
    "selective": "update, selective recompute",
    "offload": "offload and onload",
    "reshard": "weights to engines",
}


@dataclass(frozen=True, slots=True)
class Prediction:
    """Seconds of the stages that the model can tell, of the step where it can tell all of them, and their parts."""

    stages: Mapping[str, float]
    step: float | None
    details: Mapping[str, StageCost]


def predict(run: Run, tuned: Calibration | None = None, mean_response: float | None = None) -> Prediction:
    """`mean_response` stands for a mean that the row lacks; without one such a row has no stages."""
    model, work = model_named(run.text["model"]), workload_of(run, mean_response)
    if model is None or work is None:
        return Prediction({}, None, {})
    engine, trainer = rollout_layout(run, model), train_layout(run, model)
    here, there = (machine_of(run, devices_of(run, role), tuned) for role in ("rollout", "train"))
    placement = run.text["placement"]
    if placement == "train_only":
        return _training_only(model, trainer, there, work)
    details: dict[str, StageCost] = {}
    stages: dict[str, float] = {}
    options = _engine(run, model, engine, here, work)
    if engine is not None:
        details["rollout"] = stage_cost("generate", model, engine, here, work, engine=options)
        stages["rollout"] = details["rollout"].seconds
    if placement == "rollout_only":
        return Prediction(stages, stages.get("rollout"), details)
    if trainer is not None:
        details["update"], stages["update"] = _update(run, model, trainer, there, work)
        forward = replace(trainer, recompute="none")
        for name in logprob_passes(run):
            details[name] = stage_cost("logprobs", model, forward, there, work)
            stages[name] = details[name].seconds
    saturated = 0.0
    if trainer is not None and engine is not None:
        stages |= _moves(run, model, details, here)
        saturated = saturated_seconds(run, model, engine, here, work, options)
    return Prediction(stages, step_of(run, stages, here.calibration, saturated), details)


def logprob_passes(run: Run) -> tuple[str, ...]:
    """Passes without gradients: old log-probabilities unless the source removed them, those of a reference for GRPO."""
    old = run.text["old_logprob_s"] != "0" and "log-probs come from the rollout" not in run.text["note"]
    reference = run.text["algorithm"].startswith("GRPO")
    return (("old_logprob",) if old else ()) + (("ref_logprob",) if reference else ())


def saturated_seconds(
    run: Run, model: Dimensions, layout: Layout, machine: Machine, work: Workload, options: EngineOptions
) -> float:
    """Seconds of a batch from engines that always run all samples that the bound on staleness admits."""
    bound = run.number("staleness_batches") or 0.0
    prompt = mean(work.prompt)
    _, pool = engine_memory(model, layout, machine, work, options)
    held = mean_held(work.response, prompt)
    running = min(options.slots, (1 + bound) * work.rows / layout.dp, max(1.0, pool.tokens / held))
    step = decode_step(model, layout, machine, precision=options.precision, buckets=options.buckets, skew=options.skew)
    return work.rows * mean(work.response) / (layout.dp * running) * step.seconds(running, running * held)


def _engine(run: Run, model: Dimensions, layout: Layout, machine: Machine, work: Workload) -> EngineOptions:
    options = engine_options(run, model)
    if run.text["rollout_dtype"] == "fp8":
        options = replace(options, precision=Precision(weights=1, gradients=4, optimizer=12, kv=MIXED.kv))
    if "multi-token prediction" not in run.text["note"]:
        return options
    # Verifying is a step with twice the tokens: it reads more experts, but no more keys and values.
    step = decode_step(model, layout, machine, precision=options.precision, buckets=options.buckets)
    running = min(options.slots, work.rows / layout.dp) * mean(work.response) / work.response.maximum
    held = running * mean_held(work.response, mean(work.prompt))
    growth = step.seconds(2 * running, held) / step.seconds(running, held) - 1
    return replace(options, speculation=Speculation(1, ACCEPTED, DRAFT, growth))


def _training_only(model: Dimensions, layout: Layout | None, machine: Machine, work: Workload) -> Prediction:
    """Both ways of the Megatron rows, attention that keeps its scores: full recompute, and selective with sequence
    parallelism."""
    if layout is None:
        return Prediction({}, None, {})
    options = ComputeOptions(flash=False)
    full = stage_cost("train", model, replace(layout, sp=False), machine, work, options)
    some = stage_cost("train", model, replace(layout, sp=True, recompute="selective"), machine, work, options)
    stages = {"update": full.seconds, "selective": some.seconds}
    return Prediction(stages, full.seconds, {"update": full, "selective": some})


def _update(run: Run, model: Dimensions, layout: Layout, machine: Machine, work: Workload) -> tuple[StageCost, float]:
    """With full recompute, or of so many layers of every pipeline stage as the row says."""
    full = stage_cost("train", model, layout, machine, work)
    again = run.said("note", r"(\d+) layers recomputed")
    if again is None:
        return full, full.seconds
    share = min(1.0, again * layout.pp * layout.vp / model.layers)
    none = stage_cost("train", model, replace(layout, recompute="none"), machine, work)
    return full, share * full.seconds + (1 - share) * none.seconds


def _moves(run: Run, model: Dimensions, details: Mapping[str, StageCost], machine: Machine) -> dict[str, float]:
    """Weights to the engines, and where both share devices what of training goes to the host and comes back.

    These systems gather or broadcast every tensor whole, and each device then keeps its part: the whole model passes
    through every device.
    """
    link = machine.link_inside() if _joined(run) <= machine.supernode_devices else machine.link_across()
    moved = {"reshard": weight_sync(weight_bytes(model), link, machine)}
    if run.text["placement"] == "colocated":
        static = details["update"].static
        held = static.weights + static.gradients + static.optimizer
        moved["offload"] = sum(host_swap(held, machine, to_host=way) for way in (True, False))
    return moved


def _joined(run: Run) -> int:
    if run.text["placement"] == "colocated":
        return devices_of(run, "rollout")
    return devices_of(run, "rollout") + devices_of(run, "train")
