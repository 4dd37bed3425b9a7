"""Parts of a plan in a few words each, the same in graph, summary and tooltips."""

from __future__ import annotations

from collections.abc import Sequence

from rlflow.ir.flow import Layout as FlowLayout
from rlflow.ir.ops import (
    BestOf,
    BestWorst,
    Combine,
    DatasetScorer,
    DataSource,
    EnvironmentSource,
    FieldOf,
    FileData,
    FrozenModel,
    Gae,
    Generate,
    GroupNormalize,
    GymData,
    HfModel,
    Join,
    KlReward,
    Logprobs,
    Lora,
    MixedGroups,
    ModelScore,
    ModelSource,
    Op,
    Overlong,
    PresetModel,
    PythonEnvironment,
    PythonReward,
    ReinforcePp,
    Remax,
    RewardModel,
    RewardSource,
    Rloo,
    Score,
    Take,
    TinyModel,
    Train,
    ValueModel,
    Values,
)
from rlflow.plan import Because, Instruction, Layout, MoveObject, Pool
from rlflow.plan_parts import SpanRef


def describe_op(op: Op) -> str:
    """An op and its main sizes in one line, such as `generate n=8 max_new=512`."""
    if isinstance(op, Take):
        return f"take {'all rows' if op.count is None else f'{op.count} prompts'}"
    if isinstance(op, Generate):
        text = f"generate n={op.n} max_new={op.max_new}"
        text += " greedy" if op.temperature == 0 else f" temperature={op.temperature:g}"
        text += "" if op.top_p == 1.0 else f" top_p={op.top_p:g}"
        text += "" if op.top_k == 0 else f" top_k={op.top_k}"
        text += "" if not op.part else f" prompts {op.part[0] + 1} to {op.part[1]}"
        return text + ("" if op.environment is None else f" in {op.environment} turns={op.turns}")
    if isinstance(op, Logprobs):
        return f"logprobs of {op.model} temperature={op.temperature:g}"
    if isinstance(op, Score):
        return f"score with {op.reward}"
    if isinstance(op, ModelScore):
        return f"score with the model {op.model}"
    if isinstance(op, Values):
        return f"values of {op.model}"
    if isinstance(op, Join):
        return "join the rows of several pools"
    if isinstance(op, Train):
        batch = "whole batch" if op.minibatch == 0 else f"minibatch={op.minibatch}"
        return f"train {batch}" + ("" if op.epochs == 1 else f" epochs={op.epochs}")
    return _describe_columns(op)


def _describe_columns(
    op: (
        Combine
        | FieldOf
        | GroupNormalize
        | Rloo
        | ReinforcePp
        | Remax
        | KlReward
        | Gae
        | Overlong
        | BestOf
        | BestWorst
        | MixedGroups
    ),
) -> str:
    """Ops on columns, and selections."""
    if isinstance(op, Combine):
        return _describe_sum(op)
    if isinstance(op, FieldOf):
        return f"column {op.field}"
    if isinstance(op, GroupNormalize):
        return "group_normalize" + ("" if op.std else " mean only")
    if isinstance(op, Rloo):
        return "rloo: minus the mean of the others"
    if isinstance(op, ReinforcePp):
        return "reinforce_pp: whitened over the batch" + (" after the group's mean" if op.baseline else "")
    if isinstance(op, Remax):
        return "remax: minus the greedy response's reward"
    if isinstance(op, KlReward):
        return f"kl_reward weight={op.weight:g}"
    if isinstance(op, Gae):
        name = "returns" if op.output == "returns" else "gae"
        return f"{name} gamma={op.gamma:g} lambda={op.lam:g}" + (" whitened" if op.whiten else "")
    if isinstance(op, Overlong):
        return f"overlong limit={op.limit} buffer={op.buffer}"
    if isinstance(op, BestOf):
        return f"best {op.keep} of each group" + ("" if op.at_least is None else f" with score >= {op.at_least:g}")
    if isinstance(op, BestWorst):
        return "best and worst of each group"
    refill = f" refill<={op.refill}" if op.refill else ""
    return f"groups with different scores{refill}, {op.on_short} when too few"


def _describe_sum(op: Combine) -> str:
    """A weighted sum by its ports, such as `c0 + 0.5 c1 - 1`."""
    text = ""
    parts = [*((weight, f"c{index}") for index, weight in enumerate(op.weights)), (op.constant, "")]
    for number, name in parts:
        if not name and number == 0:
            continue
        sign = ("-" if number < 0 else "") if not text else (" - " if number < 0 else " + ")
        size = "" if name and abs(number) == 1 else f"{abs(number):g}"
        text += sign + " ".join(filter(None, (size, name)))
    return text


def describe_layout(layout: Layout | FlowLayout) -> str:
    """Mesh axes, such as `dp=1 tp=2 pp=1`, and what else is not at its default."""
    parts = [f"dp={layout.dp}", f"tp={layout.tp}", f"pp={layout.pp}"]
    parts += [
        f"{axis}={size}"
        for axis in ("cp", "ep", "etp", "vp", "zero")
        if (size := getattr(layout, axis)) > 0 + (axis != "zero")
    ]
    parts += ["split=" + "/".join(map(str, layout.split))] if layout.split else []
    parts += ["sp"] if layout.sp else []
    parts += [f"recompute={layout.recompute}"] if layout.recompute != "none" else []
    return " ".join(parts)


def describe_pool(pool: Pool) -> str:
    """Device count and kind, and hosts when there are several."""
    return describe_ranks(pool.device, [rank.host for rank in pool.ranks])


def describe_ranks(device: str, hosts: Sequence[str]) -> str:
    """The same of the hosts of all ranks of a pool."""
    if device == "functions":
        return f"{len(hosts)} CPU worker{'s' * (len(hosts) != 1)} for Python functions"
    distinct = len(set(hosts))
    return f"{len(hosts)} x {device}" + (f" on {distinct} hosts" if distinct > 1 else "")


def describe_instruction(instruction: Instruction) -> str:
    """An instruction in a few words, such as `run samples` or `publish actor`."""
    if instruction.kind == "publish" or instruction.kind == "reshard":
        return f"{instruction.kind} {instruction.model}"
    if isinstance(instruction, MoveObject):
        return f"{instruction.kind} {instruction.object}"
    if instruction.kind == "put":
        return f"put {instruction.queue}"
    if instruction.kind == "take" and instruction.queue:
        return f"take {instruction.queue}"
    if instruction.kind == "checkpoint":
        return f"checkpoint every {instruction.every} steps" if instruction.every else "checkpoint at the end"
    return f"{instruction.kind} {instruction.stage}"


def describe_source(source: DataSource | ModelSource | RewardSource | EnvironmentSource) -> str:
    """Where a data set, a model, a reward or an environment comes from, in one line."""
    if isinstance(source, FileData):
        return f"{source.format} {source.path}"
    if isinstance(source, HfModel):
        return f"hf {source.path} compute {source.compute}{_adapters(source.lora)}"
    if isinstance(source, TinyModel):
        size = f"{source.layers} layers, hidden {source.hidden}"
        if source.experts:
            size += f", {source.experts} experts of which {source.experts_per_token} per token"
        return f"tiny {source.architecture} {size}, compute {source.compute}{_adapters(source.lora)}"
    if isinstance(source, FrozenModel):
        return f"frozen copy of {source.of}"
    if isinstance(source, ValueModel):
        return f"value head on {source.of}'s {'own body' if source.shared else 'first weights'}"
    if isinstance(source, RewardModel):
        return f"reward model {source.path} compute {source.compute}"
    if isinstance(source, PresetModel):
        return f"preset {source.name} without weights{_adapters(source.lora)}"
    if isinstance(source, PythonReward):
        return f"python {source.function}"
    if isinstance(source, PythonEnvironment):
        return f"python {source.target}"
    if isinstance(source, DatasetScorer):
        return f"scorer of {source.data}"
    assert isinstance(source, GymData)
    return f"reasoning_gym {source.task} size {source.size}"


def _adapters(lora: Lora | None) -> str:
    """`, lora rank 16 alpha 32 on attention`; empty where all weights are trained."""
    if lora is None:
        return ""
    where = lora.targets if isinstance(lora.targets, str) else " ".join(lora.targets)
    return f", lora rank {lora.rank} alpha {lora.alpha:g} on {where}"


def describe_because(because: Because) -> str:
    """`file:line:column`, and the reason and pass when a pass put it in."""
    place = describe_span(because.span)
    return place if not because.inserted_by else f"{place}  + {because.inserted_by} ({because.reason})"


def describe_span(span: SpanRef) -> str:
    return f"{span.file}:{span.line}:{span.column}"


def model_of(op: Op) -> str | None:
    """The model an op computes with; None for ops without one."""
    return op.model if isinstance(op, Generate | Logprobs | Values | ModelScore | Train) else None
