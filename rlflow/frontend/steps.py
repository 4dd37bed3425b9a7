"""Statements of a `step` or `evaluate` block to nodes and edges, with types, units and fields checked."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from rlflow.diagnostics import Label, Span
from rlflow.frontend.bind import Bound, Scope, bind
from rlflow.frontend.constants import Poison, Reporter
from rlflow.frontend.declarations import Declarations, nearest_divisors, nearest_multiples
from rlflow.frontend.losses import loss_terms, optimizer
from rlflow.frontend.signatures import (
    FUNCTIONS,
    METHODS,
    REWARD_CALL,
    Loss,
    Optimizer,
    Parameter,
    PerRow,
    PerToken,
    Rows,
    Signature,
)
from rlflow.grammar import nodes
from rlflow.ir import ops
from rlflow.ir.flow import STEP, Edge, EdgeKind, Node
from rlflow.ir.typesystem import PROMPT_FIELDS, SAMPLE_FIELDS, Field, RowsType, WeightsType


@dataclass
class _Value:
    """What a name of the block stands for; node None = its definition had errors."""

    node: Node | None
    defined: nodes.Ident
    used: bool = False


class Block:
    """Lowers one block; `nodes` and `edges` hold the result."""

    def __init__(self, declarations: Declarations, scope: Scope, report: Reporter, phase: str) -> None:
        self._declared = declarations
        self._scope = scope
        self._report = report
        self._phase = phase
        self._values: dict[str, _Value] = {}
        self.nodes: dict[str, Node] = {}
        self.edges: list[Edge] = []

    def lower(self, body: tuple[nodes.Statement, ...]) -> None:
        for statement in body:
            name = statement.name if isinstance(statement, nodes.Assign) else None
            node: Node | None
            try:
                node = self._call(statement.value, name)
            except Poison:
                node = None
            if name is not None:
                self._define(name, node)
            elif node is not None and not isinstance(node.op, ops.Train):
                self._report.warning(
                    "RLF1013", "the result of this call is not used", Label(statement.span, "give it a name")
                )
        if self._report.has_errors:
            return  # what an error left out may have been the use
        for value in self._values.values():
            if not value.used and value.node is not None and not self._ends(value.node.op):
                self._report.warning(
                    "RLF1013",
                    f"`{value.defined.text}` is never used",
                    Label(value.defined.span, "computed for nothing"),
                )

    def _ends(self, op: ops.Op) -> bool:
        """Whether the block may end in this stage: its result needs no reader."""
        return isinstance(op, ops.Train) or (isinstance(op, ops.Score) and self._phase != STEP)

    def _define(self, name: nodes.Ident, node: Node | None) -> None:
        if name.text in self._values:
            self._report.error(
                "RLF1002",
                f"`{name.text}` is assigned twice",
                Label(name.span, "again here"),
                Label(self._values[name.text].defined.span, "first here", primary=False),
                help=("a value is assigned once; choose another name",),
            )
            return
        if name.text in self._scope.constants:
            self._report.error("RLF1002", f"`{name.text}` is already a parameter of the flow", Label(name.span))
        if self._declared.kind_of(name.text) is not None:
            self._report.error(
                "RLF1002",
                f"`{name.text}` is already a {self._declared.kind_of(name.text)}",
                Label(name.span),
                Label(self._declared.declared_at(name.text).span, "declared here", primary=False),
            )
        self._values[name.text] = _Value(node, name)

    @property
    def names(self) -> set[str]:
        """What the block assigns."""
        return set(self._values)

    # --- calls -----------------------------------------------------------------------------------------------------

    def _call(self, expr: nodes.Expr, name: nodes.Ident | None) -> Node:
        if not isinstance(expr, nodes.Call):
            if isinstance(expr, nodes.Name):
                return self._look_up(expr)
            raise self._report.error(
                "RLF1007", "a step is made of calls such as `actor.generate(...)`", Label(expr.span)
            )
        function = expr.function
        if isinstance(function, nodes.Attribute) and isinstance(function.base, nodes.Name):
            return self._method(expr, function.base, function.name, name)
        if not isinstance(function, nodes.Name):
            raise self._report.error("RLF1007", "this cannot be called", Label(function.span))
        kind = self._declared.kind_of(function.id)
        if kind == "reward":
            if function.id in self._declared.poisoned:
                raise Poison()
            return self._build(expr, REWARD_CALL, name, function.id, lambda b, i: self._score(function.id, b, i))
        if function.id in FUNCTIONS:
            return self._build(expr, FUNCTIONS[function.id], name, function.id, self._group_normalize)
        if kind is not None:
            methods = " or ".join(f"`{function.id}.{m}(...)`" for m in METHODS[kind])
            raise self._report.error(
                "RLF1007", f"`{function.id}` is a {kind} and cannot be called", Label(function.span), help=(methods,)
            )
        candidates = sorted(FUNCTIONS) + self._declared.names("reward")
        raise self._report.unknown("function", function.id, Label(function.span), candidates)

    def _method(self, call: nodes.Call, base: nodes.Name, method: nodes.Ident, name: nodes.Ident | None) -> Node:
        owner = base.id
        kind = self._declared.kind_of(owner)
        if kind is None:
            candidates = self._declared.names("data") + self._declared.names("model")
            raise self._report.unknown("name", owner, Label(base.span), candidates)
        table = METHODS.get(kind, {})
        if method.text not in table:
            raise self._report.unknown(f"stage of {kind} `{owner}`:", method.text, Label(method.span), sorted(table))
        if owner in self._declared.poisoned:
            raise Poison()
        build: dict[str, Callable[[Bound, str], tuple[ops.Op, RowsType | WeightsType]]] = {
            "take": lambda b, i: self._take(owner, b["count"], i),
            "all": lambda b, i: self._take(owner, None, i),
            "generate": lambda b, i: self._generate(owner, b, i),
            "logprobs": lambda b, i: self._logprobs(owner, b, i),
            "train": lambda b, i: self._train(owner, base.span, b, i),
        }
        return self._build(call, table[method.text], name, f"{owner}.{method.text}", build[method.text])

    def _build(
        self,
        call: nodes.Call,
        signature: Signature,
        name: nodes.Ident | None,
        fallback: str,
        make: Callable[[Bound, str], tuple[ops.Op, RowsType | WeightsType]],
    ) -> Node:
        bound = bind(call, signature, self._scope, self._report, self._special)
        prefix = "" if self._phase == STEP else f"{self._phase}."
        node_id = prefix + (name.text if name is not None else fallback)
        number = 2
        while node_id in self.nodes:
            node_id = f"{prefix}{fallback}.{number}"
            number += 1
        op, type_ = make(bound, node_id)
        node = Node(node_id, op, type_, call.span, self._phase)
        self.nodes[node_id] = node
        for parameter in signature.parameters:
            value = bound.values.get(parameter.name)
            if isinstance(value, Node):
                self.edges.append(
                    Edge(value.id, node_id, EdgeKind.DATA, parameter.name, span=bound.spans[parameter.name])
                )
        return node

    # --- arguments that are values of the block -----------------------------------------------------------------------

    def _look_up(self, expr: nodes.Name) -> Node:
        found = self._values.get(expr.id)
        if found is None:
            kind = self._declared.kind_of(expr.id)
            if kind is not None:
                raise self._report.error(
                    "RLF1007", f"`{expr.id}` is a {kind}, not a value of this block", Label(expr.span)
                )
            raise self._report.unknown("name", expr.id, Label(expr.span), sorted(self._values))
        found.used = True
        if found.node is None:
            raise Poison()
        return found.node

    def _special(self, parameter: Parameter, expr: nodes.Expr) -> Any:
        accepts = parameter.accepts
        if isinstance(accepts, Loss):
            return loss_terms(expr, self._scope, self._report)
        if isinstance(accepts, Optimizer):
            return optimizer(expr, self._scope, self._report)
        if isinstance(expr, nodes.Constant) and expr.value is None and parameter.optional:
            return None
        if not isinstance(expr, nodes.Name | nodes.Call):
            raise self._report.error("RLF1007", f"`{parameter.name}` is {_wanted(parameter)}", Label(expr.span))
        node = self._look_up(expr) if isinstance(expr, nodes.Name) else self._call(expr, None)
        type_ = node.type
        fits = isinstance(type_, RowsType) and (
            (isinstance(accepts, Rows) and not type_.is_column and type_.row == accepts.row)
            or (isinstance(accepts, PerRow) and type_.is_column and type_.fields[0].per == "row")
            or (isinstance(accepts, PerToken) and type_.is_column and type_.fields[0].per == "token")
        )
        if not fits:
            raise self._report.error(
                "RLF1007",
                f"`{parameter.name}` is {_wanted(parameter)}",
                Label(expr.span, f"this is {_in_words(type_)}"),
            )
        return node

    def _aligned(self, samples: Node, column: Node | None, name: str, spans: dict[str, Span]) -> None:
        """Columns belong to the very rows they are used with."""
        if column is None:
            return
        assert isinstance(samples.type, RowsType)
        assert isinstance(column.type, RowsType)
        if samples.type.origin != column.type.origin:
            raise self._report.error(
                "RLF1009",
                f"`{name}` was computed on other rows than `samples`",
                Label(spans[name], f"from `{column.type.origin}`"),
                Label(spans["samples"], f"rows of `{samples.type.origin}`", primary=False),
            )

    # --- stages ------------------------------------------------------------------------------------------------------

    def _take(self, data: str, count: int | None, node_id: str) -> tuple[ops.Op, RowsType]:
        return ops.Take(data=data, count=count), RowsType("prompt", node_id, count, 1, PROMPT_FIELDS)

    def _generate(self, model: str, bound: Bound, node_id: str) -> tuple[ops.Op, RowsType]:
        prompts: RowsType = bound["prompts"].type
        n = bound["n"]
        rows = None if prompts.rows is None else prompts.rows * n
        op = ops.Generate(
            model=model,
            n=n,
            max_new=bound["max_new"],
            temperature=bound["temperature"],
            top_p=bound["top_p"],
            top_k=bound["top_k"],
        )
        return op, RowsType("sample", node_id, rows, n, SAMPLE_FIELDS)

    def _sampling(self, samples: Node) -> ops.Generate:
        """The stage that sampled these rows."""
        assert isinstance(samples.type, RowsType)
        op = self.nodes[samples.type.origin].op
        assert isinstance(op, ops.Generate)
        return op

    def _logprobs(self, model: str, bound: Bound, node_id: str) -> tuple[ops.Op, RowsType]:
        samples: Node = bound["samples"]
        # One temperature for sampling, trainer and reference, or the ratio would not start at 1.
        temperature = self._sampling(samples).temperature or 1.0
        return ops.Logprobs(model=model, temperature=temperature), _column(samples, Field("logprobs", "f32", "token"))

    def _score(self, reward: str, bound: Bound, node_id: str) -> tuple[ops.Op, RowsType]:
        return ops.Score(reward=reward), _column(bound["samples"], Field("score", "f32"))

    def _group_normalize(self, bound: Bound, node_id: str) -> tuple[ops.Op, RowsType]:
        scores: Node = bound["scores"]
        assert isinstance(scores.type, RowsType)
        if scores.type.group < 2:
            origin = self.nodes[scores.type.origin]
            raise self._report.error(
                "RLF2002",
                "`group_normalize` compares the samples of one prompt, and here there is 1 per prompt",
                Label(bound.spans["scores"]),
                *([Label(origin.span, "sampled here with n = 1", primary=False)] if origin.span else []),
                help=("a group needs at least 2 samples: `n = 8`",),
            )
        op = ops.GroupNormalize(std=bound["std"], epsilon=bound["epsilon"])
        return op, _column(scores, Field("advantage", "f32"))

    def _train(self, model: str, base: Span, bound: Bound, node_id: str) -> tuple[ops.Op, WeightsType]:
        report, spans = self._report, bound.spans
        if self._phase != STEP:
            raise report.error("RLF1014", "an evaluation cannot train", Label(base))
        if not self._declared.models[model].trainable:
            raise report.error(
                "RLF1014",
                f"`{model}` is frozen and cannot be trained",
                Label(base),
                Label(self._declared.declared_at(model).span, "declared here", primary=False),
            )
        samples: Node = bound["samples"]
        self._aligned(samples, bound["advantages"], "advantages", spans)
        self._aligned(samples, bound["reference"], "reference", spans)
        terms: tuple[ops.LossTerm, ...] = bound["loss"]
        self._check_reference(model, terms, bound)
        sampling = self._sampling(samples)
        if sampling.temperature == 0:
            origin = self.nodes[samples.type.origin]  # type: ignore[union-attr]
            raise report.error(
                "RLF1010",
                "greedy samples cannot train a policy: every sample of a prompt is the same",
                Label(spans["samples"]),
                *([Label(origin.span, "sampled with temperature = 0", primary=False)] if origin.span else []),
            )
        assert isinstance(samples.type, RowsType)
        op = ops.Train(
            model=model,
            loss=terms,
            optimizer=bound["optimizer"],
            minibatch=self._minibatch(samples.type, bound),
            microbatch_tokens=bound["microbatch"],
            epochs=bound["epochs"],
            aggregate=bound["aggregate"],
            max_grad_norm=bound["max_grad_norm"],
            temperature=sampling.temperature,
        )
        return op, WeightsType(model)

    def _check_reference(self, model: str, terms: tuple[ops.LossTerm, ...], bound: Bound) -> None:
        needs = any(isinstance(term, ops.Kl) and term.weight != 0 for term in terms)
        reference: Node | None = bound["reference"]
        if needs and reference is None:
            raise self._report.error(
                "RLF1004",
                "the loss has a `kl` term, and `train` gets no `reference` to compare with",
                Label(bound.spans["loss"]),
                help=("`ref = reference.logprobs(samples)`, then `reference = ref`",),
            )
        if reference is not None and not needs:
            self._report.warning(
                "RLF1013",
                "`reference` is given, and the loss has no `kl` term that uses it",
                Label(bound.spans["reference"]),
                help=("leave it out: the reference model is then neither loaded nor run",),
            )
        if reference is not None and isinstance(reference.op, ops.Logprobs) and reference.op.model == model:
            raise self._report.error(
                "RLF1016",
                f"the reference is `{model}` itself: the divergence would always be 0",
                Label(bound.spans["reference"]),
                help=(f"declare `model reference = frozen({model})`",),
            )

    def _minibatch(self, samples: RowsType, bound: Bound) -> int:
        size: int | None = bound["minibatch"]
        if samples.rows is None:  # known in the run only
            return size or 0
        if size is None:
            return samples.rows
        if size > samples.rows or samples.rows % size:
            below, above = nearest_divisors(samples.rows, size)
            legal = f"{below} samples" if below == above else f"{below} or {above} samples"
            prompts = samples.rows // samples.group
            fits = ""
            if size % samples.group == 0:
                fits = f"; or take {nearest_multiples(prompts, size // samples.group)} prompts"
            raise self._report.error(
                "RLF2001",
                f"a batch of {samples.rows} samples does not divide into mini-batches of {size}",
                Label(
                    bound.spans["minibatch"],
                    f"{samples.rows} = {samples.rows // size} x {size} + {samples.rows % size}",
                ),
                notes=(f"the batch is {prompts} prompts x {samples.group} samples",),
                help=(f"nearest that divide: {legal}{fits}",),
            )
        return size


def _column(like: Node, field: Field) -> RowsType:
    assert isinstance(like.type, RowsType)
    return RowsType(like.type.row, like.type.origin, like.type.rows, like.type.group, (field,))


def _wanted(parameter: Parameter) -> str:
    match parameter.accepts:
        case Rows(row=row):
            return f"rows of {row}s"
        case PerRow():
            return "one number per sample, such as a score"
        case PerToken():
            return "one number per response token, such as log-probabilities"
    return "a value"


def _in_words(type_: RowsType | WeightsType) -> str:
    if isinstance(type_, WeightsType):
        return f"new weights of `{type_.model}`"
    if type_.is_column:
        return f"one number per {'sample' if type_.fields[0].per == 'row' else 'response token'}"
    return f"rows of {type_.row}s"
