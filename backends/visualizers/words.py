"""Parts of a plan in a few words each, the same in graph, summary and tooltips."""

from __future__ import annotations

from rlflow.ir.ops import (
    DatasetScorer,
    DataSource,
    FileData,
    FrozenModel,
    Generate,
    GroupNormalize,
    HfModel,
    Logprobs,
    ModelSource,
    Op,
    PythonReward,
    RewardSource,
    Score,
    Take,
    TinyModel,
    Train,
)
from rlflow.plan import Because, Instruction, Layout, Pool, SpanRef


def describe_op(op: Op) -> str:
    """An op and its main sizes in one line, such as `generate n=8 max_new=512`."""
    if isinstance(op, Take):
        return f"take {'all rows' if op.count is None else f'{op.count} prompts'}"
    if isinstance(op, Generate):
        text = f"generate n={op.n} max_new={op.max_new}"
        text += " greedy" if op.temperature == 0 else f" temperature={op.temperature:g}"
        text += "" if op.top_p == 1.0 else f" top_p={op.top_p:g}"
        return text + ("" if op.top_k == 0 else f" top_k={op.top_k}")
    if isinstance(op, Logprobs):
        return f"logprobs of {op.model} temperature={op.temperature:g}"
    if isinstance(op, Score):
        return f"score with {op.reward}"
    if isinstance(op, GroupNormalize):
        return "group_normalize" + ("" if op.std else " mean only")
    batch = "whole batch" if op.minibatch == 0 else f"minibatch={op.minibatch}"
    return f"train {batch}" + ("" if op.epochs == 1 else f" epochs={op.epochs}")


def describe_layout(layout: Layout) -> str:
    """Mesh axes, such as `dp=1 tp=2 pp=1`."""
    return f"dp={layout.dp} tp={layout.tp} pp={layout.pp}"


def describe_pool(pool: Pool) -> str:
    """Device count and kind, and hosts when there are several."""
    if pool.device == "functions":
        return f"{len(pool.ranks)} CPU worker{'s' * (len(pool.ranks) != 1)} for Python functions"
    hosts = len({rank.host for rank in pool.ranks})
    return f"{len(pool.ranks)} x {pool.device}" + (f" on {hosts} hosts" if hosts > 1 else "")


def describe_instruction(instruction: Instruction) -> str:
    """An instruction in a few words, such as `run samples` or `publish actor`."""
    if instruction.kind == "publish":
        return f"publish {instruction.model}"
    if instruction.kind == "checkpoint":
        return f"checkpoint every {instruction.every} steps" if instruction.every else "checkpoint at the end"
    return f"{instruction.kind} {instruction.stage}"


def describe_source(source: DataSource | ModelSource | RewardSource) -> str:
    """Where a data set, a model or a reward comes from, in one line."""
    if isinstance(source, FileData):
        return f"{source.format} {source.path}"
    if isinstance(source, HfModel):
        return f"hf {source.path} compute {source.compute}"
    if isinstance(source, TinyModel):
        return f"tiny {source.architecture} {source.layers} layers, hidden {source.hidden}, compute {source.compute}"
    if isinstance(source, FrozenModel):
        return f"frozen copy of {source.of}"
    if isinstance(source, PythonReward):
        return f"python {source.function}"
    if isinstance(source, DatasetScorer):
        return f"scorer of {source.data}"
    return f"reasoning_gym {source.task} size {source.size}"


def describe_because(because: Because) -> str:
    """`file:line:column`, and the reason and pass when a pass put it in."""
    place = describe_span(because.span)
    return place if not because.inserted_by else f"{place}  + {because.inserted_by} ({because.reason})"


def describe_span(span: SpanRef) -> str:
    return f"{span.file}:{span.line}:{span.column}"


def model_of(op: Op) -> str | None:
    """The model an op computes with; None for ops without one."""
    return op.model if isinstance(op, Generate | Logprobs | Train) else None
