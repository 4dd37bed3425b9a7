"""Which rows a stage's result belongs to, by the plan alone. No torch here: virtual ranks ask too."""

from __future__ import annotations

from rlflow.ir.ops import BestOf, BestWorst, Generate, MixedGroups, Take
from rlflow.plan import Plan, PutRows, Queue, RunStage, TakeRows, WaitStage

ROW_PORTS = ("samples", "rows", "prompts", "scores", "rewards", "values", "c0")
"""Ports in the order in which they say which rows a stage's result belongs to."""
_ROWS = (Take, Generate, BestOf, BestWorst, MixedGroups)
"""Stages that give rows; the others give a column of them."""


def rows_root(plan: Plan, stage_id: str) -> str:
    """The stage whose rows a stage's result belongs to: itself where it gives rows."""
    stage = plan.stage(stage_id)
    while not isinstance(stage.op, _ROWS):
        stage = plan.stage(next(stage.inputs[port] for port in ROW_PORTS if port in stage.inputs))
    return stage.id


def needs_rows(plan: Plan, queue: Queue) -> bool:
    """Whether the rows must travel with a column: its reader does not have them when it takes the column."""
    root = rows_root(plan, queue.stage)
    if root == queue.stage:
        return False
    program = plan.program(queue.target)
    for instructions in (program.step, *(e.instructions for e in program.evaluations)):
        if not any(isinstance(i, TakeRows) and i.queue == queue.id for i in instructions):
            continue
        for instruction in instructions:
            if isinstance(instruction, TakeRows) and instruction.queue == queue.id:
                return True
            if isinstance(instruction, TakeRows | RunStage | WaitStage) and instruction.stage == root:
                return False
    return True


def last_readers(plan: Plan, pool: str) -> dict[str, list[str]]:
    """Instruction of a pool to the values nobody reads after it."""
    out: dict[str, list[str]] = {}
    program = plan.program(pool)
    for instructions in (program.step, *(e.instructions for e in program.evaluations)):
        last: dict[str, str] = {}
        for instruction in instructions:
            if isinstance(instruction, RunStage):
                for value in plan.stage(instruction.stage).inputs.values():
                    last[value] = instruction.id
            elif isinstance(instruction, PutRows):
                last[instruction.stage] = last[rows_root(plan, instruction.stage)] = instruction.id
            elif isinstance(instruction, TakeRows) and instruction.queue:
                last[rows_root(plan, instruction.stage)] = instruction.id
        for value, reader in last.items():
            out.setdefault(reader, []).append(value)
    return out
