"""Which sharding a model stage gets on its pool, and whether it is legal."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from rlflow.cluster.shape import ModelShape
from rlflow.cluster.spec import PlaceRequest
from rlflow.diagnostics import Span
from rlflow.ir.flow import Layout
from rlflow.values import dataclass


@dataclass(frozen=True, slots=True)
class Violation:
    """A rule that the layout breaks, with the place of the setting and the values that would be legal."""

    message: str
    span: Span | None
    help: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Home:
    """What decides about a layout beside its request. `pool` and `model` are names for messages; `devices` is the
    pool's size; `accelerator` is False for CPUs, whose memory is not divided into devices."""

    pool: str
    devices: int
    model: str
    shape: ModelShape | None
    training: bool = False
    accelerator: bool = False


Report = Callable[..., None]
"""Called with the setting at fault, the message, and lines of help."""


def layout_of(request: PlaceRequest | None, home: Home) -> tuple[Layout, list[Violation]]:
    """The layout of a model on a pool: pinned settings as they are, dp takes the rest. All violations at once.

    Left open, experts are sharded as the rest (etp = tp), and training on accelerators shards its optimizer state
    (zero = 1) and splits norms over tp (sp): neither changes the result, both save memory at no traffic.
    """
    if request is None:
        return _defaults(Layout(dp=home.devices), None, home), []
    found: list[Violation] = []

    def broken(setting: str, message: str, *help: str) -> None:
        found.append(Violation(message, request.settings.get(setting, request.span), help))

    tp, pp, cp, ep, vp = request.tp or 1, request.pp or 1, request.cp or 1, request.ep or 1, request.vp or 1
    if home.devices % (tp * pp * cp):
        given = [(name, n) for name, n in (("tp", tp), ("cp", cp), ("pp", pp)) if n > 1]
        axes = " x ".join(f"{name} {n}" for name, n in given)
        total = f" = {tp * pp * cp}" if len(given) > 1 else ""
        broken(
            given[0][0],
            f"pool `{home.pool}` of {home.devices} devices does not divide into {axes}{total}",
            _legal(home.devices, "product" if len(given) > 1 else given[0][0]),
        )
        if home.shape is not None:
            _check_axes(request, home, home.shape, broken)
        return Layout(dp=home.devices), found
    dp = home.devices // (tp * pp * cp)
    if request.dp is not None and request.dp != dp:
        fill = f"{home.devices} device{'s' if home.devices != 1 else ''}"
        others = " and ".join(f"{name} {n}" for name, n in (("tp", tp), ("cp", cp), ("pp", pp)) if n > 1)
        broken(
            "dp",
            f"`dp = {request.dp}` does not fill pool `{home.pool}` of {fill}{f' with {others}' if others else ''}",
            f"`dp = {dp}`, or a pool of {request.dp * tp * pp * cp} devices",
        )
    etp = request.etp or (tp if home.shape is not None and home.shape.experts else 1)
    if home.shape is not None:
        _check_axes(request, home, home.shape, broken)
    if not found:  # sizes that are wrong by themselves would be reported twice
        _check_experts_grid(request, ep, etp, dp, broken, tp=tp, cp=cp, pp=pp)
    if vp > 1 and pp == 1:
        broken(
            "vp", f"`vp = {vp}` divides the layers of pipeline stages further, and there is one stage", "`pp` above 1"
        )
    if request.sp and tp == 1:
        broken("sp", "`sp = true` splits norms over the tensor-parallel ranks, and `tp` is 1", "`tp` above 1")
    layout = Layout(dp=dp, tp=tp, pp=pp, ep=ep, cp=cp, etp=etp, vp=vp, split=request.split or ())
    return _defaults(layout, request, home), found


def _defaults(layout: Layout, request: PlaceRequest | None, home: Home) -> Layout:
    """With the settings of training filled in."""
    if not home.training:
        return layout
    zero = None if request is None else request.zero
    sp = None if request is None else request.sp
    if zero is None:
        zero = 1 if home.accelerator and layout.dp * layout.cp > 1 else 0
    if sp is None:
        sp = home.accelerator and layout.tp > 1
    recompute = "none" if request is None or request.recompute is None else request.recompute
    return replace(layout, zero=zero, sp=sp, recompute=recompute)  # type: ignore[arg-type]


def _check_experts_grid(
    request: PlaceRequest, ep: int, etp: int, dp: int, broken: Report, *, tp: int, cp: int, pp: int
) -> None:
    """The mesh of the experts, ep x etp, must divide the devices of a pipeline stage."""
    devices = dp * cp * tp
    if devices % (ep * etp) == 0:
        return
    if request.etp is None and etp > 1 and devices % ep == 0:
        broken(
            "ep",
            f"`ep = {ep}` x expert tensor parallel {etp} (as `tp`, since `etp` is not given) x pp {pp} = "
            f"{ep * etp * pp} "
            f"does not fit the {devices * pp} devices of the pool",
            f"`etp = 1`, or {_legal(devices // etp, 'ep')}",
        )
    elif etp > 1:
        broken(
            "etp" if request.etp is not None else "ep",
            f"`ep = {ep}` x expert tensor parallel {etp} = {ep * etp} does not divide the {devices} ranks of a "
            f"pipeline "
            f"stage (dp {dp} x cp {cp} x tp {tp})",
            _legal(devices, "ep x etp"),
        )
    else:
        inside = f"dp {dp} x cp {cp} x tp {tp}" if cp > 1 else f"dp {dp} x tp {tp}"
        broken(
            "ep",
            f"`ep = {ep}` does not divide the {devices} ranks of a pipeline stage ({inside})",
            _legal(devices, "ep"),
        )


def _check_axes(request: PlaceRequest, home: Home, shape: ModelShape, broken: Report) -> None:
    """Everything that the sizes of the model must divide into."""
    tp, cp, ep = request.tp or 1, request.cp or 1, request.ep or 1
    model = home.model
    if shape.heads % tp:
        broken(
            "tp",
            f"`tp = {tp}` does not divide the {shape.heads} attention heads of `{model}`",
            _legal_heads(shape, 1, "tp"),
        )
    elif shape.kv_heads % tp and tp % shape.kv_heads:
        broken(
            "tp",
            f"`tp = {tp}` and the {shape.kv_heads} key-value heads of `{model}` do not divide each other",
            _legal_heads(shape, 1, "tp"),
        )
    elif cp > 1 and shape.heads % (tp * cp):
        broken(
            "cp",
            f"`cp = {cp}` exchanges heads, and does not divide the {shape.heads // tp} attention heads that a rank of "
            f"`{model}` has" + (f" with tp {tp}" if tp > 1 else ""),
            _legal_heads(shape, tp, "cp"),
        )
    elif cp > 1 and shape.kv_heads % (tp * cp) and (tp * cp) % shape.kv_heads:
        broken(
            "cp",
            f"`cp = {cp}`{f' x tp {tp}' if tp > 1 else ''} and the {shape.kv_heads} key-value heads of `{model}` do "
            f"not "
            "divide each other",
            _legal_heads(shape, tp, "cp"),
        )
    for width, name, part in (
        (shape.intermediate, "tp", "feed-forward width"),
        (shape.expert_intermediate, "etp", "expert width"),
    ):
        size = tp if name == "tp" else (request.etp or tp)
        if width and width % size:
            setting = name if name in request.settings else "tp"
            legal = [t for t in _divisors(shape.heads) if width % t == 0] if setting == "tp" else _divisors(width)
            broken(
                setting,
                f"`{name} = {size}` does not divide the {part} {width} of `{model}`",
                f"legal: {name} {_listed(legal)}",
            )
    _check_layers(request, model, shape, broken)
    if ep > 1 and not shape.experts:
        broken("ep", f"`{model}` has no experts to spread with `ep = {ep}`")
    elif shape.experts and shape.experts % ep:
        within = [n for n in _divisors(shape.experts) if n <= home.devices]
        broken(
            "ep",
            f"`ep = {ep}` does not divide the {shape.experts} experts of `{model}`",
            f"legal: ep {_listed(within)}",
        )
    if request.etp is not None and request.etp > 1 and not shape.experts:
        broken("etp", f"`{model}` has no experts to shard with `etp = {request.etp}`")


def _check_layers(request: PlaceRequest, model: str, shape: ModelShape, broken: Report) -> None:
    pp, vp = request.pp or 1, request.vp or 1
    parts = pp * vp
    what = f"{parts} parts (pp {pp} x vp {vp})" if vp > 1 else f"{pp} pipeline stage{'s' if pp != 1 else ''}"
    if request.split is not None:
        if len(request.split) != parts:
            broken(
                "split",
                f"`split` gives the layers of {len(request.split)} parts, and there are {what}",
                f"`split = {list(_even(shape.layers, parts))}`"
                if parts <= shape.layers
                else f"at most {shape.layers} parts",
            )
        elif sum(request.split) != shape.layers:
            broken(
                "split",
                f"the layers of `split` sum to {sum(request.split)}, and `{model}` has {shape.layers}",
                f"for example `split = {list(_even(shape.layers, parts))}`",
            )
    elif parts > shape.layers:
        broken(
            "vp" if vp > 1 else "pp",
            f"`{model}` has {shape.layers} layers, fewer than {what}",
            _legal(shape.layers, "pp"),
        )
    elif shape.layers % parts:
        setting = "vp" if vp > 1 and shape.layers % pp == 0 else "pp"
        subject = f"`vp = {vp}` x pp {pp}" if vp > 1 else f"`pp = {pp}`"
        uneven = f"`split = {list(_even(shape.layers, parts))}`"
        broken(
            setting,
            f"{subject} does not divide the {shape.layers} layers of `{model}`",
            _legal(shape.layers, "pp x vp" if vp > 1 else "pp"),
            f"or say how the layers are split: {uneven if len(uneven) <= 100 else '`split = [...]`'}",
        )


def _even(layers: int, parts: int) -> tuple[int, ...]:
    """Layers of every part, as equal as can be, the larger ones first."""
    return tuple(layers // parts + (part < layers % parts) for part in range(parts))


def _legal_heads(shape: ModelShape, tp: int, axis: str) -> str:
    """Sizes that divide the heads, and that the key-value heads divide or are divided by."""
    legal = [
        n for n in _divisors(shape.heads // tp) if shape.kv_heads % (n * tp) == 0 or (n * tp) % shape.kv_heads == 0
    ]
    return f"legal: {axis} {_listed(legal)}"


def _divisors(number: int) -> list[int]:
    return [d for d in range(1, number + 1) if number % d == 0]


def _legal(number: int, axis: str) -> str:
    return f"legal: {axis} {_listed(_divisors(number))}"


def _listed(numbers: list[int]) -> str:
    return ", ".join(map(str, numbers))
