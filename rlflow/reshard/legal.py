"""Whether a layout can hold a model: all clashes, with both numbers."""

from __future__ import annotations

from collections.abc import Iterator

from rlflow.ir.flow import Layout
from rlflow.reshard.catalogue import Catalogue, Rule, TensorSpec
from rlflow.reshard.storage import DTYPE_BYTES, Storage


def layout_problems(catalogue: Catalogue, layout: Layout, storage: Storage) -> list[str]:
    """Sentences; empty when the layout is legal."""
    return list(dict.fromkeys(_problems(catalogue, layout, storage)))


def _problems(catalogue: Catalogue, layout: Layout, storage: Storage) -> Iterator[str]:
    sizes = {axis: getattr(layout, axis) for axis in ("dp", "tp", "pp", "ep", "cp", "etp", "vp")}
    for axis, size in sizes.items():
        if size < 1:
            yield f"{axis} = {size} is not a size"
    if min(sizes.values()) < 1:
        return
    if storage.dtype not in DTYPE_BYTES:
        yield f"unknown element type {storage.dtype} (known: {', '.join(DTYPE_BYTES)})"
    if storage.vocabulary_multiple < 1:
        yield f"the vocabulary cannot be padded to a multiple of {storage.vocabulary_multiple}"
        return
    yield from _pipeline(catalogue.layers, layout)
    stage = layout.dp * layout.cp * layout.tp
    if catalogue.experts:
        if stage % (layout.ep * layout.etp):
            yield (
                f"ep {layout.ep} x etp {layout.etp} = {layout.ep * layout.etp} does not divide the {stage} devices of a"
                f" pipeline stage (dp {layout.dp} x cp {layout.cp} x tp {layout.tp})"
            )
    elif layout.ep > 1 or layout.etp > 1:
        yield f"ep {layout.ep}, etp {layout.etp}: the model has no experts"
    first: dict[object, TensorSpec] = {}
    for spec in catalogue:
        first.setdefault(spec.structure, spec)
    for spec in first.values():
        yield from _tensor(spec, layout, storage)
    if storage.qkv == "grouped":
        yield from _grouped(catalogue, layout)


def _pipeline(layers: int, layout: Layout) -> Iterator[str]:
    parts = layout.pp * layout.vp
    if layout.split:
        if len(layout.split) != parts:
            yield f"split has {len(layout.split)} parts, pp {layout.pp} x vp {layout.vp} = {parts} are needed"
        if sum(layout.split) != layers or min(layout.split) < 0:
            yield f"split {list(layout.split)} gives {sum(layout.split)} layers, the model has {layers}"
    elif layers % parts:
        yield f"{layers} layers do not divide into pp {layout.pp} x vp {layout.vp} = {parts} equal parts: state a split"


def _tensor(spec: TensorSpec, layout: Layout, storage: Storage) -> Iterator[str]:
    what = spec.name.removeprefix(f"model.layers.{spec.layer}.")
    if spec.rule is Rule.SHARD and spec.units % layout.tp:
        yield f"tp {layout.tp} does not divide the {spec.units} units of {what}"
    elif spec.rule is Rule.KV and spec.units % layout.tp and layout.tp % spec.units:
        yield f"{what}: neither of tp {layout.tp} and {spec.units} key-value heads divides the other"
    elif spec.rule is Rule.VOCAB:
        padded = storage.padded_vocabulary(spec.units)
        if padded % layout.tp:
            yield f"tp {layout.tp} does not divide the {padded} rows of {what}: pad the vocabulary"
    elif spec.rule is Rule.EXPERT:
        if spec.shape[0] % layout.ep:
            yield f"ep {layout.ep} does not divide the {spec.shape[0]} experts of {what}"
        if spec.units % layout.etp:
            yield f"etp {layout.etp} does not divide the width {spec.units} of {what}"


def _grouped(catalogue: Catalogue, layout: Layout) -> Iterator[str]:
    """One query tensor and its key tensor are interleaved per KV head of the rank."""
    heads = {spec.units for spec in catalogue if spec.fused == "qkv" and spec.rule is Rule.SHARD}
    groups = {spec.units for spec in catalogue if spec.rule is Rule.KV}
    for queries in sorted(heads):
        for kv in sorted(groups):
            if queries % kv:
                yield f"{kv} key-value heads do not divide the {queries} query heads"
