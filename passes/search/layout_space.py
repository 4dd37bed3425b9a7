"""All layouts a stage may have on so many devices, as a generator: meshes, pipeline splits, and settings of a run."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Literal

from rlflow.ir.flow import Layout
from rlflow.passes.search.options import StageOption, StageTable

Recompute = Literal["none", "selective", "full"]


@dataclass(frozen=True, slots=True)
class LayoutChoice:
    """A layout, and what else the time and the bytes of a stage depend on."""

    layout: Layout
    micro_batches: int = 1
    """Micro-batches of one update on each data-parallel replica."""
    offload: bool = False
    """Everything of the stage leaves the device when it has run, and returns before it runs."""


def always(choice: Layout | LayoutChoice) -> bool:
    return True


@dataclass(frozen=True, slots=True)
class LayoutSpace:
    """The values of each axis that are tried, and the rules. Empty values are a ValueError.

    `legal_mesh` sees a layout without its settings (recompute, ZeRO, sequence parallelism), once per mesh: the place
    for rules of heads, experts and hosts. `legal` sees every complete choice.
    """

    layers: int
    tensor: Sequence[int] = (1, 2, 4, 8)
    """Up to 8, or 16 inside a supernode."""
    pipeline: Sequence[int] = (1, 2, 4, 8, 16)
    context: Sequence[int] = (1,)
    expert: Sequence[int] = (1,)
    expert_tensor: Sequence[int] = (1,)
    virtual: Sequence[int] = (1,)
    """Virtual pipeline stages of a rank."""
    micro_batches: Sequence[int] = (1,)
    recompute: Sequence[Recompute] = ("none",)
    zero: Sequence[int] = (0,)
    sequence_parallel: Sequence[bool] = (False,)
    offload: Sequence[bool] = (False,)
    uneven: bool = True
    """Whether pipeline stages may have different numbers of layers."""
    legal_mesh: Callable[[Layout], bool] = always
    legal: Callable[[LayoutChoice], bool] = always

    def __post_init__(self) -> None:
        axes = (self.tensor, self.pipeline, self.context, self.expert, self.expert_tensor, self.virtual)
        if any(size < 1 for axis in (*axes, self.micro_batches) for size in axis):
            raise ValueError("sizes of axes must be at least 1")
        settings = (self.recompute, self.zero, self.sequence_parallel, self.offload)
        if not all((*axes, self.micro_batches, *settings)) or self.layers < 1:
            raise ValueError("every axis needs a value, and a model a layer")

    def choices(self, devices: int) -> Iterator[LayoutChoice]:
        """Every legal choice that uses exactly so many devices, each once.

        Settings without a meaning on a mesh are off there: sequence parallelism without tensor parallelism, ZeRO
        without replicas.
        """
        settings = list(product(self.recompute, self.zero, self.sequence_parallel, self.micro_batches, self.offload))
        for mesh in self.meshes(devices):
            found: dict[LayoutChoice, None] = {}
            for recompute, zero, sp, count, offload in settings:
                if mesh.vp > 1 and count % mesh.pp:
                    continue  # interleaving goes round the pipeline in whole turns (Narayanan et al. 2021)
                sharded = zero if mesh.dp * mesh.cp > 1 else 0
                layout = replace(mesh, sp=sp and mesh.tp > 1, zero=sharded, recompute=recompute)
                found[LayoutChoice(layout, count, offload)] = None
            yield from filter(self.legal, found)

    def meshes(self, devices: int) -> Iterator[Layout]:
        """Every legal mesh of so many devices. The devices of a pipeline stage, tp x cp x dp, also hold ep x etp."""
        for tp, pp, cp in product(*map(dict.fromkeys, (self.tensor, self.pipeline, self.context))):
            if devices % (tp * pp * cp):
                continue
            stage = devices // pp
            for vp, ep, etp in product(*map(dict.fromkeys, (self.virtual, self.expert, self.expert_tensor))):
                if stage % (ep * etp) or (vp > 1 and pp == 1) or pp * vp > self.layers:
                    continue
                if self.layers % (pp * vp) and not self.uneven:
                    continue
                split = split_layers(self.layers, pp * vp)
                mesh = Layout(dp=stage // (tp * cp), tp=tp, pp=pp, ep=ep, cp=cp, etp=etp, vp=vp, split=split)
                if self.legal_mesh(mesh):
                    yield mesh


def split_layers(layers: int, parts: int) -> tuple[int, ...]:
    """Layers of each part as equal as can be; empty for equal parts.

    The ends get the smaller share, the last one first: it has the output head, the first the embedding.
    """
    each, more = divmod(layers, parts)
    if not more:
        return ()
    small = parts - more
    last = (small + 1) // 2
    first = small - last
    return (each,) * first + (each + 1,) * more + (each,) * last


Cost = Callable[[LayoutChoice], tuple[float, int, int] | None]
"""Seconds a period, static bytes and peak bytes of the fullest device; None for a choice that cannot run."""


def mesh_class(choice: LayoutChoice) -> Hashable:
    """What decides which part of the weights a device of a replica holds; with ZeRO 3 also over how many they lie."""
    layout = choice.layout
    sharded = layout.dp if layout.zero >= 3 else 0
    return layout.tp, layout.pp, layout.cp, layout.ep, layout.etp, layout.vp, layout.split, sharded


def stage_table(
    space: LayoutSpace,
    sizes: Iterable[int],
    cost: Cost,
    limit_bytes: int,
    class_of: Callable[[LayoutChoice], Hashable] = mesh_class,
) -> StageTable:
    """The table of a stage: every choice of every size, costed."""

    def options() -> Iterator[StageOption]:
        for devices in sizes:
            for choice in space.choices(devices):
                found = cost(choice)
                if found is not None:
                    yield StageOption(devices, *found, layout=choice, layout_class=class_of(choice))

    return StageTable.of(options(), limit_bytes)
