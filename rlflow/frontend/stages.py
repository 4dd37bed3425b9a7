"""The typing of every stage: from its bound arguments to its op and the type of what it gives."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

from rlflow.diagnostics import Label, Span
from rlflow.frontend.bind import Bound
from rlflow.frontend.constants import Reporter
from rlflow.frontend.declarations import Declarations
from rlflow.frontend.parameters import Column, Parameter, PerRow, PerToken, Rows
from rlflow.grammar import nodes
from rlflow.ir import ops
from rlflow.ir.flow import Edge, EdgeKind, Model, Node
from rlflow.ir.typesystem import PROMPT_FIELDS, SAMPLE_FIELDS, Field, RowsType, WeightsType
from rlflow.values import dataclass

SCORE = Field("score", "f32")
_HOLDS = {"logprobs": "log-probabilities, from `MODEL.logprobs(...)`", "values": "estimates, from `CRITIC.values(...)`"}


@dataclass(frozen=True)
class StageContext:
    """What the typing of one stage may look at. `owner` is the declaration whose stage it is; `nodes` precede it."""

    declared: Declarations
    report: Reporter
    nodes: dict[str, Node]
    edges: list[Edge]
    phase: str
    owner: str
    owner_span: Span

    def source(self, node: Node, port: str) -> Node:
        """The producer of a node's input."""
        return next(
            self.nodes[e.src] for e in self.edges if e.dst == node.id and e.kind is EdgeKind.DATA and e.port == port
        )

    def sampling(self, samples: Node) -> tuple[Node, ops.Generate]:
        """The generate stage that sampled these rows, before any selection."""
        assert isinstance(samples.type, RowsType)
        node = self.nodes[samples.type.origin]
        while not isinstance(node.op, ops.Generate):
            node = self.source(node, "samples")
        return node, node.op

    def fits(self, model: str, bound: Bound) -> None:
        """The response leaves room for a prompt in the model's context, where that is known; raises Poison."""
        context = self.declared.context_of(model)
        max_new: int = bound["max_new"]
        if context is not None and max_new >= context:
            raise self.report.error(
                "RLF1010",
                f"`max_new = {max_new} tokens` leaves no room for a prompt: `{model}` reads {context} tokens",
                Label(bound.spans["max_new"], f"{max_new} + 1 > {context}"),
                help=(f"at most `max_new = {context - 1} tokens`",),
            )

    def aligned(self, rows: Node, rows_name: str, column: Node | None, name: str, spans: dict[str, Span]) -> None:
        """Columns belong to the very rows they are used with; raises Poison after reporting."""
        if column is None:
            return
        assert isinstance(rows.type, RowsType)
        assert isinstance(column.type, RowsType)
        if rows.type.origin != column.type.origin:
            help_lines: tuple[str, ...] = ()
            if column.type.field("score") and rows.type.field("score"):
                help_lines = (f"the rows carry their scores: `{rows.id}.score`",)
            raise self.report.error(
                "RLF1009",
                f"`{name}` was computed on other rows than `{rows_name}`",
                Label(spans[name], f"from `{column.type.origin}`"),
                Label(spans[rows_name], f"rows of `{rows.type.origin}`", primary=False),
                help=help_lines,
            )

    def holds(self, field: str, names: tuple[str, ...], bound: Bound) -> None:
        """Columns per token hold what the stage takes them for; raises Poison after reporting."""
        for name in names:
            node: Node | None = bound[name]
            if node is None:
                continue
            assert isinstance(node.type, RowsType)
            if node.type.fields[0].name != field:
                raise self.report.error(
                    "RLF1007",
                    f"`{name}` takes {_HOLDS[field]}",
                    Label(bound.spans[name], f"this holds `{node.type.fields[0].name}`"),
                )

    def not_itself(self, model: str, name: str, bound: Bound) -> None:
        """A reference or teacher is another model than the one compared with it; raises Poison after reporting."""
        node: Node | None = bound[name]
        if node is None or self._models_of(node) != {model}:
            return
        raise self.report.error(
            "RLF1016",
            f"the {name} is `{model}` itself: the divergence would always be 0",
            Label(bound.spans[name]),
            help=(f"declare `model reference = frozen({model})`",),
        )

    def _models_of(self, node: Node) -> set[str]:
        """Models whose log-probabilities are in a column, also where they were scaled and added up."""
        if isinstance(node.op, ops.Logprobs):
            return {node.op.model}
        if not isinstance(node.op, ops.Combine):
            return set()
        parts = {e.src for e in self.edges if e.dst == node.id and e.kind is EdgeKind.DATA}
        return {model for part in parts for model in self._models_of(self.nodes[part])}


Typed = tuple[ops.Op, RowsType | WeightsType]
Stage = Callable[[StageContext, Bound, str], Typed]


def check_stage_of_model(model: Model, method: nodes.Ident, report: Reporter) -> None:
    """Which stages a kind of model has; raises Poison after reporting."""
    match model.source:
        case ops.ValueModel():
            legal: tuple[str, ...] = ("values", "train")
            what = "a value model"
        case ops.RewardModel():
            legal, what = ("score",), "a reward model"
        case _:
            legal, what = ("generate", "logprobs", "train"), "a language model"
    if method.text not in legal:
        words = " and ".join(f"`{word}`" for word in legal)
        raise report.error(
            "RLF1007",
            f"`{model.name}` is {what} and has no stage `{method.text}`",
            Label(method.span, f"it has {words}"),
        )


def column(like: Node, field: Field) -> RowsType:
    """A column beside the rows of `like`."""
    assert isinstance(like.type, RowsType)
    return RowsType(like.type.row, like.type.origin, like.type.rows, like.type.group, (field,))


# --- rows ----------------------------------------------------------------------------------------------------------


def _take(context: StageContext, bound: Bound, node_id: str) -> Typed:
    count = bound["count"]
    return ops.Take(data=context.owner, count=count), RowsType("prompt", node_id, count, 1, PROMPT_FIELDS)


def _all(context: StageContext, bound: Bound, node_id: str) -> Typed:
    return ops.Take(data=context.owner, count=None), RowsType("prompt", node_id, None, 1, PROMPT_FIELDS)


def _generate(context: StageContext, bound: Bound, node_id: str) -> Typed:
    prompts: RowsType = bound["prompts"].type
    n, environment, turns = bound["n"], bound["environment"], bound["turns"]
    if environment is None and turns > 1:
        raise context.report.error(
            "RLF1004",
            f"`turns = {turns}` needs an `environment` that answers between them",
            Label(bound.spans["turns"]),
            help=('declare one: `environment tools = python("environments:Calculator")`',),
        )
    context.fits(context.owner, bound)
    mean_new, max_new = bound["mean_new"], bound["max_new"]
    if mean_new is not None and mean_new > max_new:
        raise context.report.error(
            "RLF1010",
            f"a mean of {mean_new} tokens is more than the longest response, `max_new = {max_new} tokens`",
            Label(bound.spans["mean_new"]),
            help=(f"at most `mean_new = {max_new} tokens`",),
        )
    rows = None if prompts.rows is None else prompts.rows * n
    op = ops.Generate(
        model=context.owner,
        n=n,
        max_new=max_new,
        mean_new=mean_new,
        temperature=bound["temperature"],
        top_p=bound["top_p"],
        top_k=bound["top_k"],
        environment=environment,
        turns=turns,
    )
    fields = SAMPLE_FIELDS if environment is None else (*SAMPLE_FIELDS, Field("mask", "i64", "token"))
    return op, RowsType("sample", node_id, rows, n, fields)


def _selected(context: StageContext, bound: Bound, node_id: str, rows: int | None, group: int) -> RowsType:
    samples: Node = bound["samples"]
    context.aligned(samples, "samples", bound["scores"], "scores", bound.spans)
    assert isinstance(samples.type, RowsType)
    fields = tuple(f for f in samples.type.fields if f.name != SCORE.name)
    return RowsType("sample", node_id, rows, group, (*fields, SCORE))


def _best_of(context: StageContext, bound: Bound, node_id: str) -> Typed:
    samples: RowsType = bound["samples"].type
    keep = bound["keep"]
    if keep > samples.group:
        raise context.report.error(
            "RLF1010",
            f"cannot keep {keep} of {samples.group} samples of a prompt",
            Label(bound.spans.get("keep", bound.spans["samples"])),
            help=(f"at most `keep = {samples.group}`",),
        )
    fixed = bound["at_least"] is None and samples.rows is not None
    rows = samples.rows // samples.group * keep if fixed and samples.rows is not None else None
    return ops.BestOf(keep=keep, at_least=bound["at_least"]), _selected(context, bound, node_id, rows, keep)


def _best_worst(context: StageContext, bound: Bound, node_id: str) -> Typed:
    _needs_group(context, bound, "samples", "best_worst")
    return ops.BestWorst(), _selected(context, bound, node_id, None, 2)


def _mixed_groups(context: StageContext, bound: Bound, node_id: str) -> Typed:
    _needs_group(context, bound, "samples", "mixed_groups")
    samples: RowsType = bound["samples"].type
    refill = bound["refill"]
    on_short: Literal["error", "train"] = bound["on_short"] or ("error" if refill else "train")
    rows = samples.rows if on_short == "error" else None
    op = ops.MixedGroups(refill=refill, on_short=on_short)
    return op, _selected(context, bound, node_id, rows, samples.group)


# --- columns -------------------------------------------------------------------------------------------------------


def _logprobs(context: StageContext, bound: Bound, node_id: str) -> Typed:
    samples: Node = bound["samples"]
    # One temperature for sampling, trainer and reference, or the ratio would not start at 1.
    temperature = context.sampling(samples)[1].temperature or 1.0
    op = ops.Logprobs(model=context.owner, temperature=temperature)
    return op, column(samples, Field("logprobs", "f32", "token"))


def _values(context: StageContext, bound: Bound, node_id: str) -> Typed:
    return ops.Values(model=context.owner), column(bound["samples"], Field("values", "f32", "token"))


def _score(context: StageContext, bound: Bound, node_id: str) -> Typed:
    return ops.ModelScore(model=context.owner), column(bound["samples"], SCORE)


def _reward(context: StageContext, bound: Bound, node_id: str) -> Typed:
    return ops.Score(reward=context.owner), column(bound["samples"], SCORE)


def _needs_group(context: StageContext, bound: Bound, port: str, word: str) -> None:
    """The stage compares the samples of one prompt; raises Poison after reporting."""
    rows: RowsType = bound[port].type
    if rows.group >= 2:
        return
    origin = context.nodes[rows.origin]
    related = [Label(origin.span, "sampled here with n = 1", primary=False)] if origin.span else []
    raise context.report.error(
        "RLF2002",
        f"`{word}` compares the samples of one prompt, and here there is 1 per prompt",
        Label(bound.spans[port]),
        *related,
        help=("a group needs at least 2 samples: `n = 8`",),
    )


_ADVANTAGE = Field("advantage", "f32")


def _not_twice(context: StageContext, bound: Bound, word: str) -> None:
    """Scores go in, not what a normalisation already gave; raises Poison after reporting."""
    scores: Node = bound["scores"]
    assert isinstance(scores.type, RowsType)
    if scores.type.fields[0] == _ADVANTAGE:
        related = [Label(scores.span, "normalised here", primary=False)] if scores.span else []
        raise context.report.error(
            "RLF1018",
            f"`{word}` gets what is normalised already",
            Label(bound.spans["scores"]),
            *related,
            help=("give it the scores",),
        )


def _group_normalize(context: StageContext, bound: Bound, node_id: str) -> Typed:
    _not_twice(context, bound, "group_normalize")
    _needs_group(context, bound, "scores", "group_normalize")
    return ops.GroupNormalize(std=bound["std"], epsilon=bound["epsilon"]), column(bound["scores"], _ADVANTAGE)


def _rloo(context: StageContext, bound: Bound, node_id: str) -> Typed:
    _not_twice(context, bound, "rloo")
    _needs_group(context, bound, "scores", "rloo")
    return ops.Rloo(), column(bound["scores"], _ADVANTAGE)


def _reinforce_pp(context: StageContext, bound: Bound, node_id: str) -> Typed:
    _not_twice(context, bound, "reinforce_pp")
    if bound["baseline"]:
        _needs_group(context, bound, "scores", "reinforce_pp")
    return ops.ReinforcePp(baseline=bound["baseline"]), column(bound["scores"], _ADVANTAGE)


def _remax(context: StageContext, bound: Bound, node_id: str) -> Typed:
    _not_twice(context, bound, "remax")
    scores, baseline = bound["scores"], bound["baseline"]
    sampled, _ = context.sampling(scores)
    greedy, greedy_op = context.sampling(baseline)
    if context.source(sampled, "prompts").id != context.source(greedy, "prompts").id or greedy_op.n != 1:
        raise context.report.error(
            "RLF1009",
            "the baseline must score one response to each of the same prompts",
            Label(bound.spans["baseline"], f"{greedy_op.n} per prompt, from `{greedy.id}`"),
            Label(bound.spans["scores"], f"from `{sampled.id}`", primary=False),
        )
    return ops.Remax(), column(scores, _ADVANTAGE)


def _kl_reward(context: StageContext, bound: Bound, node_id: str) -> Typed:
    samples: Node = bound["samples"]
    for name in ("scores", "reference"):
        context.aligned(samples, "samples", bound[name], name, bound.spans)
    context.holds("logprobs", ("reference",), bound)
    context.not_itself(context.sampling(samples)[1].model, "reference", bound)
    op = ops.KlReward(weight=bound["weight"], also_in_loss=bound["also_in_loss"])
    return op, column(samples, Field("reward", "f32", "token"))


def _gae(context: StageContext, bound: Bound, node_id: str) -> Typed:
    context.aligned(bound["values"], "values", bound["rewards"], "rewards", bound.spans)
    context.holds("values", ("values",), bound)
    op = ops.Gae(gamma=bound["gamma"], lam=bound["lam"], whiten=bound["whiten"])
    return op, column(bound["values"], Field("advantage", "f32", "token"))


def _returns(context: StageContext, bound: Bound, node_id: str) -> Typed:
    context.aligned(bound["values"], "values", bound["rewards"], "rewards", bound.spans)
    context.holds("values", ("values",), bound)
    op = ops.Gae(gamma=bound["gamma"], lam=bound["lam"], whiten=False, output="returns")
    return op, column(bound["values"], Field("returns", "f32", "token"))


def _overlong(context: StageContext, bound: Bound, node_id: str) -> Typed:
    max_new = context.sampling(bound["samples"])[1].max_new
    limit = max_new if bound["limit"] is None else bound["limit"]
    if bound["buffer"] > limit:
        raise context.report.error(
            "RLF1010",
            f"the buffer of {bound['buffer']} tokens is longer than the limit of {limit} tokens",
            Label(bound.spans["buffer"]),
            help=(f"at most `buffer = {limit} tokens`",),
        )
    if limit > max_new:
        raise context.report.error(
            "RLF1010",
            f"no response reaches {limit} tokens: they are sampled with `max_new = {max_new} tokens`",
            Label(bound.spans["limit"]),
            help=("leave `limit` out",),
        )
    return ops.Overlong(limit=limit, buffer=bound["buffer"]), column(bound["samples"], Field("penalty", "f32"))


STAGES: dict[str, Stage] = {
    "take": _take,
    "all": _all,
    "generate": _generate,
    "logprobs": _logprobs,
    "values": _values,
    "score": _score,
    "reward": _reward,
    "group_normalize": _group_normalize,
    "rloo": _rloo,
    "reinforce_pp": _reinforce_pp,
    "remax": _remax,
    "kl_reward": _kl_reward,
    "gae": _gae,
    "returns": _returns,
    "overlong": _overlong,
    "best_of": _best_of,
    "best_worst": _best_worst,
    "mixed_groups": _mixed_groups,
}
"""By the name of the signature; `train` is in training.py."""


def wanted(parameter: Parameter) -> str:
    """What a parameter takes, in words."""
    match parameter.accepts:
        case Rows(row=row):
            return f"rows of {row}s"
        case PerRow():
            return "one number per sample, such as a score"
        case PerToken():
            return "one number per response token, such as log-probabilities"
        case Column():
            return "one number per sample or per response token"
    return "a value"


def in_words(type_: RowsType | WeightsType) -> str:
    """What a value is, in words."""
    if isinstance(type_, WeightsType):
        return f"new weights of `{type_.model}`"
    if type_.is_column:
        return f"one number per {'sample' if type_.fields[0].per == 'row' else 'response token'}"
    return f"rows of {type_.row}s"
