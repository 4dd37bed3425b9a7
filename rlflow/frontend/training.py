"""The typing of `train`: which inputs the loss needs, what fits the model, and how the batch divides."""

from __future__ import annotations

from rlflow.diagnostics import Label
from rlflow.frontend.bind import Bound
from rlflow.frontend.constants import Poison
from rlflow.frontend.declarations import nearest_divisors, nearest_multiples
from rlflow.frontend.derived_models import shared_critic_of
from rlflow.frontend.stages import StageContext
from rlflow.ir import ops
from rlflow.ir.flow import STEP, EdgeKind, Node
from rlflow.ir.losses import NEEDS
from rlflow.ir.typesystem import RowsType, WeightsType

_HOW = {
    "advantages": "for example `advantages = group_normalize(score)`",
    "reference": "`ref = reference.logprobs(samples)`, then `reference = ref`",
    "teacher": "`t = teacher.logprobs(samples)`, then `teacher = t`",
    "returns": "`ret = returns(score, v)`, then `returns = ret`",
    "values": "`v = critic.values(samples)`, then `values = v`",
}
_INPUTS = ("advantages", "reference", "teacher", "returns", "values")


def train(context: StageContext, bound: Bound, node_id: str) -> tuple[ops.Train, WeightsType]:
    """The op and type of a train stage; raises Poison after reporting."""
    report, model = context.report, context.owner
    if context.phase != STEP:
        raise report.error("RLF1014", "an evaluation cannot train", Label(context.owner_span))
    declared = context.declared.models[model]
    if not declared.trainable:
        raise report.error(
            "RLF1014",
            f"`{model}` is frozen and cannot be trained",
            Label(context.owner_span),
            Label(context.declared.declared_at(model).span, "declared here", primary=False),
        )
    _check_not_shared(context)
    samples: Node = bound["samples"]
    for name in _INPUTS:
        context.aligned(samples, "samples", bound[name], name, bound.spans)
    context.holds("logprobs", ("reference", "teacher"), bound)
    context.holds("values", ("values",), bound)
    terms: tuple[ops.LossTerm, ...] = bound["loss"]
    _check_terms(context, terms, bound)
    _check_inputs(context, terms, bound)
    _check_kl_once(context, terms, bound)
    origin, sampling = context.sampling(samples)
    if sampling.temperature == 0 and any("advantages" in NEEDS[term.kind] for term in terms):
        raise report.error(
            "RLF1010",
            "greedy samples cannot train a policy: every sample of a prompt is the same",
            Label(bound.spans["samples"]),
            *([Label(origin.span, "sampled with temperature = 0", primary=False)] if origin.span else []),
        )
    if sampling.model != model and any("advantages" in NEEDS[term.kind] for term in terms):
        raise report.error(
            "RLF1009",
            f"`{model}` is trained by policy gradient on samples of another model, `{sampling.model}`",
            Label(bound.spans["samples"]),
            *([Label(origin.span, f"sampled from `{sampling.model}`", primary=False)] if origin.span else []),
            help=(f"sample with `{model}.generate(...)`; `nll()` and `dpo()` may learn from others",),
        )
    assert isinstance(samples.type, RowsType)
    op = ops.Train(
        model=model,
        loss=terms,
        optimizer=bound["optimizer"],
        minibatch=_minibatch(context, samples, bound),
        microbatch_tokens=bound["microbatch"],
        epochs=bound["epochs"],
        aggregate=bound["aggregate"],
        horizon=sampling.max_new if bound["aggregate"] == "token_sum" else 0,
        max_grad_norm=bound["max_grad_norm"],
        temperature=1.0 if isinstance(declared.source, ops.ValueModel) else sampling.temperature or 1.0,
    )
    return op, WeightsType(model)


def _check_terms(context: StageContext, terms: tuple[ops.LossTerm, ...], bound: Bound) -> None:
    """The terms fit the kind of model, and each other."""
    is_value = isinstance(context.declared.models[context.owner].source, ops.ValueModel)
    critic = shared_critic_of(context.owner, context.declared.models)
    if critic is not None:
        _check_shared_head(context, critic, terms, bound)
    for term in terms:
        if isinstance(term, ops.ValueClip) != is_value and not (isinstance(term, ops.ValueClip) and critic):
            what = "a value model" if is_value else "a language model"
            legal = "`value_clip`" if is_value else "policy losses such as `ppo_clip`"
            raise context.report.error(
                "RLF1007",
                f"`{context.owner}` is {what} and cannot be trained with `{term.kind}`",
                Label(bound.spans["loss"]),
                help=(f"it takes {legal}",),
            )
    pairs = any(isinstance(term, ops.Dpo) for term in terms)
    samples: RowsType = bound["samples"].type
    if pairs and not isinstance(context.nodes[samples.origin].op, ops.BestWorst):
        raise context.report.error(
            "RLF1007",
            "`dpo` needs pairs of a better and a worse sample",
            Label(bound.spans["samples"], "these rows are no pairs"),
            help=("`pairs = best_worst(samples, score)`, then train on `pairs`",),
        )
    if pairs and any(not isinstance(term, ops.Dpo) for term in terms):
        raise context.report.error(
            "RLF1007", "`dpo` is a loss over pairs and does not add to losses over tokens", Label(bound.spans["loss"])
        )


def _check_not_shared(context: StageContext) -> None:
    """A head on a shared body has no `train` of its own: two optimizers would pull at the same weights."""
    source = context.declared.models[context.owner].source
    if not (isinstance(source, ops.ValueModel) and source.shared):
        return
    raise context.report.error(
        "RLF1021",
        f"`{context.owner}` shares its weights with `{source.of}` and is trained in `{source.of}.train`",
        Label(context.owner_span),
        Label(context.declared.declared_at(context.owner).span, "declared here", primary=False),
        notes=("two optimizers would each undo what the other did to the same weights",),
        help=(
            f"`{source.of}.train(..., returns = ..., values = ..., loss = ppo_clip(0.2) + 0.5 * value_clip(0.2))`",
            "or leave `shared` out: a value model of its own has a `train` of its own",
        ),
    )


def _check_shared_head(context: StageContext, critic: str, terms: tuple[ops.LossTerm, ...], bound: Bound) -> None:
    """The loss of a model with a value head trains that head, on that head's own estimates."""
    if not any(isinstance(term, ops.ValueClip) and term.weight != 0 for term in terms):
        raise context.report.error(
            "RLF1021",
            f"`{critic}` is a value head on `{context.owner}`, and this loss does not train it",
            Label(bound.spans["loss"]),
            Label(context.declared.declared_at(critic).span, "declared here", primary=False),
            help=("add `0.5 * value_clip(0.2)` with `returns` and `values`, or take the value model out",),
        )
    values: Node | None = bound["values"]
    if values is not None and isinstance(values.op, ops.Values) and values.op.model != critic:
        raise context.report.error(
            "RLF1021",
            f"`values` are those of `{values.op.model}`, and the value head of `{context.owner}` is `{critic}`",
            Label(bound.spans["values"]),
            help=(f"`v = {critic}.values(samples)`, then `values = v`",),
        )


def _check_inputs(context: StageContext, terms: tuple[ops.LossTerm, ...], bound: Bound) -> None:
    """Every input that the loss reads is given, and every given one is read."""
    report = context.report
    needed: dict[str, str] = {}
    for term in terms:
        if term.weight != 0:
            for name in NEEDS[term.kind]:
                needed.setdefault(name, term.kind)
    missing = False
    for name, kind in needed.items():
        if bound[name] is None:
            what = "`reference` to compare with" if name == "reference" else f"`{name}`"
            report.error(
                "RLF1004",
                f"the loss has a `{kind}` term, and `train` gets no {what}",
                Label(bound.spans["loss"]),
                help=(_HOW[name],),
            )
            missing = True
    if missing:
        raise Poison()
    for name in _INPUTS:
        if bound[name] is not None and name not in needed:
            only_kl = name == "reference"
            report.warning(
                "RLF1013",
                f"`{name}` is given, and the loss has no {'`kl` ' if only_kl else ''}term that uses it",
                Label(bound.spans[name]),
                help=("leave it out: the reference model is then neither loaded nor run",) if only_kl else (),
            )
    for name in ("reference", "teacher"):
        context.not_itself(context.owner, name, bound)


def _check_kl_once(context: StageContext, terms: tuple[ops.LossTerm, ...], bound: Bound) -> None:
    """KL enters in the reward or in the loss; both only when the reward's stage says so."""
    if not any(isinstance(term, ops.Kl) and term.weight != 0 for term in terms) or bound["advantages"] is None:
        return
    sources: dict[str, list[str]] = {}
    for edge in context.edges:
        if edge.kind is EdgeKind.DATA:
            sources.setdefault(edge.dst, []).append(edge.src)
    stack, seen = [bound["advantages"].id], set[str]()
    while stack:
        node = context.nodes[stack.pop()]
        if node.id in seen:  # sums of sums have very many ways to one score
            continue
        seen.add(node.id)
        if isinstance(node.op, ops.KlReward) and node.op.weight != 0 and not node.op.also_in_loss:
            raise context.report.error(
                "RLF1019",
                "the KL to the reference is in the reward and in the loss: it counts twice",
                Label(bound.spans["loss"], "here as a term"),
                *([Label(node.span, "and here in the reward", primary=False)] if node.span else []),
                help=("drop one of them, or say that both are meant: `kl_reward(..., also_in_loss = true)`",),
            )
        stack += sources.get(node.id, [])


def _minibatch(context: StageContext, node: Node, bound: Bound) -> int:
    samples = node.type
    assert isinstance(samples, RowsType)
    size: int | None = bound["minibatch"]
    if size is not None and size % 2 and isinstance(context.nodes[samples.origin].op, ops.BestWorst):
        raise context.report.error(
            "RLF2001",
            f"a mini-batch of {size} samples would tear a pair apart",
            Label(bound.spans["minibatch"]),
            help=(f"nearest even sizes: {size - 1 or 2} or {size + 1} samples",),
        )
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
        raise context.report.error(
            "RLF2001",
            f"a batch of {samples.rows} samples does not divide into mini-batches of {size}",
            Label(
                bound.spans["minibatch"], f"{samples.rows} = {samples.rows // size} x {size} + {samples.rows % size}"
            ),
            notes=(f"the batch is {prompts} prompts x {samples.group} samples",),
            help=(f"nearest that divide: {legal}{fits}",),
        )
    return size
