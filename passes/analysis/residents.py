"""What lives in the memory of a pool's devices, and in which stages it is needed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from rlflow.cost.components import Components
from rlflow.cost.stages import StageCost
from rlflow.ir.flow import Flow, Layout, Node, reads_model
from rlflow.ir.ops import FrozenModel, Generate, Train
from rlflow.passes.analysis.adapted import lora_of
from rlflow.passes.analysis.memory.objects import Kind, Resident
from rlflow.values import dataclass

CACHE = "keys and values"


@dataclass(frozen=True, slots=True)
class Placed:
    """A model stage of a pool, in the order in which the pool runs them, with its cost."""

    node: Node
    cost: StageCost
    least_cache: int = 0
    """Bytes of keys and values of one longest sequence; 0 for stages without a cache."""
    twin: str = ""
    """The model whose tensors these weights are: the base of a model of which only adapters are trained."""
    merged: int = 0
    """Bytes of the layers of which it reads a copy with the adapters added in, beside the frozen ones."""

    @property
    def layout(self) -> Layout:
        assert self.node.placement is not None
        assert self.node.placement.layout is not None
        return self.node.placement.layout

    @property
    def model(self) -> str:
        found = reads_model(self.node.op)
        assert found is not None
        return found


@dataclass(frozen=True, slots=True)
class Arrival:
    """A moment at which a model's weights are laid out anew, or sent away: a phase of its own. `bytes` of buckets are
    on the device beside what is read and what is written."""

    phase: str
    model: str
    bytes: int
    sends: bool
    """Whether it needs the weights that are trained here."""
    receives: frozenset[str] = frozenset()
    """The stages here whose copy it writes."""
    adapters: bool = False
    """Whether it brings adapters only, which are added to frozen weights that are here already."""
    in_place: bool = False
    """Whether it copies the weights that are trained to the host, and writes the copy that is read over them."""


def residents_of(flow: Flow, stages: Sequence[Placed], arrivals: Sequence[Arrival]) -> list[Resident]:
    """The objects of a pool, by what they are:

    - weights that are trained here, and the optimizer: written, so that leaving costs a copy out and a copy back;
    - gradients, activations and what is being computed, keys and values: not kept, dropped at no cost;
    - frozen weights: the host's copy stays valid, so that leaving costs one copy back;
    - a copy of trained weights in another layout: not kept, since the next reshard writes it anyway. Where that reshard
      is in place, the two lie in the same memory: of the larger of them only what the smaller lacks is added.

    Of a model of which only adapters are trained the weights are frozen. What samples from it reads, of the adapted
    layers, a second copy with the adapters added in; the frozen ones of them are needed only to make it.

    Stages that read one model in one layout share its weights.
    """
    sending: dict[str, frozenset[str]] = {}
    over = {arrival.model: arrival for arrival in arrivals if arrival.in_place}
    for arrival in arrivals:
        if arrival.sends:
            sending[arrival.model] = sending.get(arrival.model, frozenset()) | {arrival.phase}
    found: list[Resident] = []
    trained = {stage.model: stage for stage in stages if isinstance(stage.node.op, Train)}
    twins = _twins(flow, stages, trained)
    stages = [replace(stage, twin=twins.get(stage.node.id, "")) for stage in stages]
    for model, stage in trained.items():
        own, adapters = stage.cost.static, lora_of(flow, model) is not None
        readers = frozenset(
            s.node.id for s in stages if model in (s.model, s.twin) and s.layout.weights == stage.layout.weights
        )
        sent = sending.get(model, frozenset())
        readers |= frozenset() if adapters else sent
        here = frozenset({stage.node.id})
        found += [
            Resident(
                f"{model} weights",
                model,
                own.weights,
                readers,
                Kind.CLEAN if adapters else Kind.DIRTY,
                tag=stage.node.id,
                overwritten_in=over[model].phase if model in over else "",
            ),
            Resident(f"{model} gradients", model, own.gradients, here, Kind.DROPPABLE, tag=stage.node.id),
            Resident(
                f"{model} optimizer",
                model,
                own.optimizer,
                here | sent if adapters else here,  # with the adapters themselves
                Kind.DIRTY,
                tag=stage.node.id,
            ),
        ]
        sampling = [s for s in stages if s.model == model and s.merged and s.layout.weights == stage.layout.weights]
        if sampling:
            uses = frozenset(s.node.id for s in sampling)
            found.append(_merged(model, sampling, uses))
    copies: dict[tuple[str, Layout], list[Placed]] = {}
    for stage in stages:
        trainer = trained.get(stage.twin or stage.model)
        if trainer is None or stage.layout.weights != trainer.layout.weights:
            copies.setdefault((stage.model, stage.layout.weights), []).append(stage)
    names: dict[str, int] = {}
    for (model, _), readers_of in copies.items():
        names[model] = names.get(model, 0) + 1
        number = f" {names[model]}" if names[model] > 1 else ""
        if any(stage.merged for stage in readers_of):
            found += _with_adapters(model, number, readers_of, arrivals)
            continue
        frozen = not flow.models[model].trainable
        uses = frozenset(stage.node.id for stage in readers_of)
        size = max(stage.cost.static.weights for stage in readers_of)
        place = over.get(model)
        place = place if place is not None and uses & place.receives else None
        if place is not None:
            more = max(0, size - trained[model].cost.static.weights)
            found.append(
                Resident(f"{place.phase} room", model, more, frozenset({place.phase}), Kind.DROPPABLE, tag=model)
            )
        found.append(
            Resident(
                f"{model} weights{number}" if frozen or model not in trained else f"{model} rollout weights{number}",
                model,
                size,
                uses if frozen or place else uses | {a.phase for a in arrivals if uses & a.receives},
                Kind.CLEAN if frozen else Kind.DROPPABLE,
                tag=readers_of[0].node.id,
                written_in="" if place is None else place.phase,
            )
        )
    for arrival in arrivals:
        found.append(
            Resident(
                f"{arrival.phase} buckets", arrival.model, arrival.bytes, frozenset({arrival.phase}), Kind.DROPPABLE
            )
        )
    for stage in stages:
        found += _working(stage.node, stage.cost.static)
    return [resident for resident in found if resident.bytes]


def _merged(model: str, stages: Sequence[Placed], needed: frozenset[str], number: str = "") -> Resident:
    size = max(stage.merged for stage in stages)
    return Resident(f"{model} merged weights{number}", model, size, needed, Kind.DROPPABLE, tag=stages[0].node.id)


def _with_adapters(model: str, number: str, stages: Sequence[Placed], arrivals: Sequence[Arrival]) -> list[Resident]:
    """What stages in another layout than the one that trains keep of a model with adapters."""
    uses = frozenset(stage.node.id for stage in stages)
    coming = frozenset(arrival.phase for arrival in arrivals if uses & arrival.receives)
    under, tag = max(stage.merged for stage in stages), stages[0].node.id
    rest = max(stage.cost.static.weights for stage in stages) - under
    return [
        Resident(f"{model} frozen weights{number}", model, rest, uses, Kind.CLEAN, tag=tag),
        Resident(f"{model} weights under adapters{number}", model, under, coming, Kind.CLEAN, tag=tag),
        _merged(model, stages, uses | coming, number),
    ]


def _twins(flow: Flow, stages: Sequence[Placed], trained: dict[str, Placed]) -> dict[str, str]:
    """Stage to the model that it shares tensors with: a frozen copy of a model with adapters is that model's base."""
    found = {}
    for stage in stages:
        source = flow.models[stage.model].source
        if isinstance(source, FrozenModel) and source.of in trained:
            if lora_of(flow, source.of) is not None:
                found[stage.node.id] = source.of
    return found


def _working(node: Node, own: Components) -> list[Resident]:
    """What a stage needs only while it runs."""
    here = frozenset({node.id})
    found = []
    for name, size in (
        ("activations", own.activations + own.working + own.logits + own.buffers),
        (CACHE, own.kv_cache),
    ):
        if size:
            found.append(Resident(f"{node.id} {name}", node.id, size, here, Kind.DROPPABLE, tag=node.id))
    return found


def is_transient(resident: Resident) -> bool:
    """Whether an object comes and goes with the computing of its stage, so that no instruction moves it."""
    kept = resident.name.endswith(CACHE) or resident.written_in
    return resident.kind is Kind.DROPPABLE and len(resident.needed) == 1 and not kept


def keys_and_values(node: Node) -> str:
    """The name of a generate stage's cache."""
    assert isinstance(node.op, Generate)
    return f"{node.id} {CACHE}"
