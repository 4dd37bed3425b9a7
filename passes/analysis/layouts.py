"""Which sharding a model stage gets on its pool, and whether it is legal."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from rlflow.cluster.shape import ModelShape
from rlflow.cluster.spec import PlaceRequest
from rlflow.diagnostics import Span
from rlflow.ir.flow import Layout


@dataclass(frozen=True, slots=True)
class Violation:
    """A rule that the layout breaks, with the place of the setting and the values that would be legal."""

    message: str
    span: Span | None
    help: tuple[str, ...]


def layout_of(
    request: PlaceRequest | None, size: int, pool: str, model: str, shape: ModelShape | None
) -> tuple[Layout, list[Violation]]:
    """The layout of `model` on `size` devices: pinned axes as they are, dp takes the rest. All violations at once."""
    if request is None:
        return Layout(dp=size), []
    tp, pp, ep = request.tp or 1, request.pp or 1, request.ep or 1
    found: list[Violation] = []

    def broken(axis: str, message: str, *help: str) -> None:
        found.append(Violation(message, request.settings.get(axis, request.span), help))

    if size % (tp * pp):
        axes = " x ".join(f"{name} {n}" for name, n in (("tp", tp), ("pp", pp)) if n > 1)
        axis = "tp" if request.tp else "pp"
        broken(
            axis, f"pool `{pool}` of {size} devices does not divide into {axes} = {tp * pp}", _legal(size, "product")
        )
        return Layout(dp=size), found
    dp = size // (tp * pp)
    if request.dp is not None and request.dp != dp:
        fill = f"{size} device{'s' if size != 1 else ''}"
        with_them = f" with tp {tp} and pp {pp}" if tp * pp > 1 else ""
        broken(
            "dp",
            f"`dp = {request.dp}` does not fill pool `{pool}` of {fill}{with_them}",
            f"`dp = {dp}`, or a pool of {request.dp * tp * pp} devices",
        )
    if (dp * tp) % ep:
        broken(
            "ep",
            f"`ep = {ep}` does not divide the {dp * tp} ranks of a pipeline stage (dp {dp} x tp {tp})",
            _legal(dp * tp, "ep"),
        )
    if shape is not None:
        _check_shape(model, shape, tp, pp, ep, broken)
    return Layout(dp=dp, tp=tp, pp=pp, ep=ep), found


def _check_shape(model: str, shape: ModelShape, tp: int, pp: int, ep: int, broken: Callable[..., None]) -> None:
    if shape.heads % tp:
        broken(
            "tp",
            f"`tp = {tp}` does not divide the {shape.heads} attention heads of `{model}`",
            _legal(shape.heads, "tp"),
        )
    elif shape.kv_heads % tp and tp % shape.kv_heads:
        legal = [t for t in _divisors(shape.heads) if shape.kv_heads % t == 0 or t % shape.kv_heads == 0]
        broken(
            "tp",
            f"`tp = {tp}` and the {shape.kv_heads} key-value heads of `{model}` do not divide each other",
            f"legal: tp {', '.join(map(str, legal))}",
        )
    if shape.layers % pp:
        broken("pp", f"`pp = {pp}` does not divide the {shape.layers} layers of `{model}`", _legal(shape.layers, "pp"))
    if ep > 1 and not shape.experts:
        broken("ep", f"`{model}` has no experts to spread with `ep = {ep}`")
    elif shape.experts and shape.experts % ep:
        broken(
            "ep", f"`ep = {ep}` does not divide the {shape.experts} experts of `{model}`", _legal(shape.experts, "ep")
        )


def _divisors(number: int) -> list[int]:
    return [d for d in range(1, number + 1) if number % d == 0]


def _legal(number: int, axis: str) -> str:
    return f"legal: {axis} {', '.join(map(str, _divisors(number)))}"
