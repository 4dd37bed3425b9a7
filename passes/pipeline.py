"""The compiler on one page: the ordered passes, and the runner that verifies after each."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib import import_module

from rlflow.diagnostics import CompileError
from rlflow.ir.flow import Flow
from rlflow.ir.printer import print_flow
from rlflow.ir.verify import broken_rules
from rlflow.passes.base import Pass, PassContext

# Name -> where the class is. Loaded when used, so that importing this module costs nothing.
PASSES: dict[str, tuple[str, str]] = {
    "drop-unused": ("rlflow.passes.drop_unused", "DropUnused"),
    "insert-old-logprobs": ("rlflow.passes.insert_old_logprobs", "InsertOldLogprobs"),
    "search-placement": ("rlflow.passes.search_placement", "SearchPlacement"),
    "lend-devices": ("rlflow.passes.lend_devices", "LendDevices"),
    "place": ("rlflow.passes.place", "Place"),
    "parallelize": ("rlflow.passes.parallelize", "Parallelize"),
    "insert-weight-edges": ("rlflow.passes.insert_weight_edges", "InsertWeightEdges"),
    "relax-staleness": ("rlflow.passes.relax_staleness", "RelaxStaleness"),
    "insert-reshards": ("rlflow.passes.insert_reshards", "InsertReshards"),
    "insert-queues": ("rlflow.passes.insert_queues", "InsertQueues"),
    "schedule": ("rlflow.passes.schedule", "ScheduleStages"),
    "estimate": ("rlflow.passes.estimate", "EstimateStages"),
    "verify-plan": ("rlflow.passes.verify_plan", "VerifyPlan"),
    "insert-swaps": ("rlflow.passes.insert_swaps", "InsertSwaps"),
}

DEFAULT_PIPELINE: tuple[str, ...] = (
    "drop-unused",  # first: nothing is inserted or placed for what is not read
    "insert-old-logprobs",  # before place: what it inserts must be placed too
    "search-placement",  # before place: what it finds is placed as if it had been written
    "lend-devices",  # before place: every pool that samples gets a stage of its own
    "place",
    "parallelize",  # after place: the pool's size decides what divides
    "insert-weight-edges",  # after place: edges between pools will need reshards
    "relax-staleness",  # after the edges whose tokens it raises
    "insert-reshards",  # after the weight edges: from the layout at one end to that at the other
    "insert-queues",  # after relax-staleness: capacities follow from its tokens
    "schedule",  # everything that takes a slot is there
    "insert-swaps",  # after schedule: what is needed when follows from the order
    "estimate",  # after insert-swaps: a cache takes what memory leaves it
    "verify-plan",  # last: the proof of everything that was decided
)

Observer = Callable[[str, Flow, Flow], None]
"""Called after every pass with its name, the flow before and the flow after."""


class InternalError(Exception):
    """A bug of rlflow: a pass failed or left a broken flow. `flow_text` is the last sound flow."""

    def __init__(self, pass_name: str, problem: str, flow_text: str) -> None:
        super().__init__(f"pass {pass_name}: {problem}")
        self.pass_name = pass_name
        self.problem = problem
        self.flow_text = flow_text


def load_pass(name: str) -> type[Pass]:
    """The class of a pass; KeyError for an unknown name."""
    module, attribute = PASSES[name]
    found: type[Pass] = getattr(import_module(module), attribute)
    return found


def run_pipeline(
    flow: Flow, context: PassContext, names: Sequence[str] = DEFAULT_PIPELINE, observe: Observer | None = None
) -> Flow:
    """The flow after all passes. Raises CompileError for errors of the input, InternalError for bugs of ours."""
    _verify("the input of the pipeline", flow, flow)
    for name in names:
        pass_ = load_pass(name)()
        if flow.stage != pass_.requires:
            raise InternalError(
                name, f"needs a flow of stage {pass_.requires.name}, got {flow.stage.name}", print_flow(flow)
            )
        before = flow
        try:
            flow = pass_.run(before, context)
        except Exception as error:
            raise InternalError(name, f"{type(error).__name__}: {error}", print_flow(before)) from error
        if context.has_errors:
            raise CompileError(context.diagnostics)
        if flow.stage != pass_.ensures:
            raise InternalError(name, f"left a flow of stage {flow.stage.name}", print_flow(before))
        _verify(name, before, flow)
        if observe is not None:
            observe(name, before, flow)
    return flow


def _verify(name: str, before: Flow, after: Flow) -> None:
    problems = broken_rules(after)
    if problems:
        raise InternalError(name, "; ".join(problems), print_flow(before))
