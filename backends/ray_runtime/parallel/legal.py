"""Layouts that cannot run a model: each refused with the nearest one that can."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import nn

from rlflow.backends.ray_runtime.heads import ValueHeadModel
from rlflow.backends.ray_runtime.models import LoadedModel
from rlflow.backends.ray_runtime.parallel.adapters import linear
from rlflow.diagnostics.diagnostic import RunFailure
from rlflow.ir.flow import Layout

_ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
_FEED_FORWARD = ("gate_proj", "up_proj", "down_proj")


def refuse_impossible(loaded: LoadedModel, layout: Layout) -> None:
    """RunFailure RLF4003 when this version cannot train or run the model under the layout."""
    if layout.size == 1 and layout.ep == layout.etp == 1 and layout.recompute == "none":
        return
    if layout.cp > 1:
        raise _refusal(
            loaded,
            layout,
            "a model runs with every sequence whole on a rank",
            replace(layout, cp=1, dp=layout.dp * layout.cp),
        )
    divided = layout.tp > 1 or layout.pp > 1 or layout.ep > 1 or layout.etp > 1
    if loaded.adapters is not None:
        _check_adapters(loaded, layout)
    if divided:
        _check_structure(loaded, layout)
    if layout.zero == 3 or layout.recompute != "none":
        layers = getattr(loaded.model.get_decoder(), "layers", [None])
        if not all(hasattr(layer, "self_attn") and hasattr(layer, "mlp") for layer in layers):
            nearest = replace(layout, zero=min(layout.zero, 2), recompute="none")
            raise _refusal(loaded, layout, "its layers are not known one by one", nearest)
    if layout.tp > 1:
        _check_heads(loaded, layout)
    if layout.ep > 1 or layout.etp > 1:
        _check_experts(loaded, layout)
    if layout.pp > 1:
        _check_pipeline(loaded, layout)
    if layout.pp > 1 and layout.zero >= 2:
        raise _refusal(
            loaded, layout, "pipeline stages keep weights and gradients whole until an update", replace(layout, zero=1)
        )


def _check_adapters(loaded: LoadedModel, layout: Layout) -> None:
    why, nearest = "", layout
    if layout.pp > 1:
        why = "a model with LoRA adapters has all of its layers on every rank"
        nearest = replace(layout, pp=1, vp=1, split=(), dp=layout.dp * layout.pp)
    elif layout.ep > 1 or layout.etp > 1:
        why = "a model with LoRA adapters has all of its experts on every rank"
        nearest = replace(layout, ep=1, etp=1)
    elif layout.tp > 1 and hasattr(loaded.model.config, "num_experts"):
        why = "a model with experts and LoRA adapters is whole on every rank"
        nearest = replace(layout, tp=1, sp=False, dp=layout.dp * layout.tp)
    elif layout.sp:
        why = "what lies between the parts of a model with LoRA adapters is whole on every rank"
        nearest = replace(layout, sp=False)
    elif layout.tp > 1 and loaded.critic is not None:
        why = "a model with LoRA adapters and a value head on its body is whole on every rank"
        nearest = replace(layout, tp=1, dp=layout.dp * layout.tp)
    if why:
        raise _refusal(loaded, layout, why, nearest)


def _check_structure(loaded: LoadedModel, layout: Layout) -> None:
    model = loaded.model
    decoder = model.get_decoder()
    for layer in getattr(decoder, "layers", [None]):
        attention, feed_forward = getattr(layer, "self_attn", None), getattr(layer, "mlp", None)
        parts = [getattr(attention, name, None) for name in _ATTENTION]
        if hasattr(feed_forward, "experts") and model.config.model_type != "qwen3_moe":
            parts.append(None)
        elif not hasattr(feed_forward, "experts"):
            parts += [getattr(feed_forward, name, None) for name in _FEED_FORWARD]
        if not all(isinstance(linear(part), nn.Linear) for part in parts):
            raise _refusal(
                loaded,
                layout,
                "its layers are not those of Llama, Qwen2, Qwen3 or Qwen3-MoE",
                Layout(dp=layout.size),
            )
    head = getattr(model, "lm_head", None)
    if layout.tp > 1 and not isinstance(model, ValueHeadModel) and getattr(head, "bias", None) is not None:
        raise _refusal(loaded, layout, "its head has a bias", replace(layout, tp=1, dp=layout.dp * layout.tp))


def _check_heads(loaded: LoadedModel, layout: Layout) -> None:
    config, tp = loaded.model.config, layout.tp
    heads, kv_heads = int(config.num_attention_heads), int(config.num_key_value_heads)
    inner = int(config.intermediate_size)
    dense = any(not hasattr(layer.mlp, "experts") for layer in loaded.model.get_decoder().layers)
    why = ""
    if heads % tp:
        why = f"tp {tp} does not divide its {heads} heads"
    elif kv_heads % tp and tp % kv_heads:
        why = f"tp {tp} and its {kv_heads} key-value heads do not divide each other"
    elif dense and inner % tp:
        why = f"tp {tp} does not divide the width {inner} of its feed-forward part"
    if why:
        best = next(
            n
            for n in range(tp, 0, -1)
            if layout.dp * tp % n == 0 and not (heads % n or (dense and inner % n) or (kv_heads % n and n % kv_heads))
        )
        raise _refusal(loaded, layout, why, replace(layout, tp=best, dp=layout.dp * tp // best))


def _check_experts(loaded: LoadedModel, layout: Layout) -> None:
    config = loaded.model.config
    experts = int(getattr(config, "num_experts", 0) or 0)
    why = ""
    if not experts:
        why = "it has no experts"
    elif experts % layout.ep:
        why = f"ep {layout.ep} does not divide its {experts} experts"
    elif int(config.moe_intermediate_size) % layout.etp:
        why = f"etp {layout.etp} does not divide the width {config.moe_intermediate_size} of its experts"
    if why:
        best = next(
            n for n in range(layout.ep, 0, -1) if layout.ep % n == 0 and (n == 1 or (experts and not experts % n))
        )
        raise _refusal(loaded, layout, why, replace(layout, ep=best, etp=1))


def _check_pipeline(loaded: LoadedModel, layout: Layout) -> None:
    layers = len(loaded.model.get_decoder().layers)
    parts = layout.pp * layout.vp
    even = [n for n in range(1, layout.size + 1) if layout.dp * layout.pp % n == 0 and layers % n == 0 and n <= parts]
    nearest = replace(layout, pp=even[-1], dp=layout.dp * layout.pp // even[-1], vp=1, split=())
    if not layout.split and layers % parts:
        raise _refusal(loaded, layout, f"its {layers} layers do not divide into {parts} equal parts", nearest)
    if layout.split and (len(layout.split) != parts or sum(layout.split) != layers or min(layout.split) < 0):
        why = f"a split of its {layers} layers into {parts} parts is wanted"
        raise _refusal(loaded, layout, why, nearest)
    if any(not layout.layers_of(stage, layers) for stage in range(layout.pp)):
        raise _refusal(loaded, layout, "a pipeline stage without a layer has nothing to train", nearest)


def _refusal(loaded: LoadedModel, layout: Layout, why: str, nearest: Layout) -> RunFailure:
    name = loaded.model.config.model_type
    return RunFailure(
        "RLF4003",
        f"a model of type `{name}` does not run under {describe(layout)}",
        notes=(why,),
        help=(f"the nearest layout that runs is {describe(nearest)}",),
    )


def describe(layout: Layout) -> str:
    """As a schedule writes it, without what has its default: `tp = 2, dp = 2`."""
    plain = Layout()
    words: list[str] = []
    for axis in ("dp", "tp", "pp", "ep", "cp", "etp", "vp", "split", "sp", "zero", "recompute"):
        value: Any = getattr(layout, axis)
        if value != getattr(plain, axis):
            words.append(f"{axis} = {_written(value)}")
    return f"`{', '.join(words) or 'dp = 1'}`"


def _written(value: Any) -> str:
    if isinstance(value, tuple):
        return "[" + ", ".join(map(str, value)) + "]"
    return str(value).lower() if isinstance(value, bool) else str(value)
