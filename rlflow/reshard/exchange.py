"""Experts that move between devices: a change of expert parallelism is an all-to-all, not an all-gather.

An all-gather makes room for all experts of a layer on every device. Where every device gets just the experts it needs,
the room is what it gets.
"""

from __future__ import annotations

from rlflow.reshard.catalogue import Rule
from rlflow.reshard.need import missing
from rlflow.reshard.plan import ReshardPlan
from rlflow.values import dataclass


@dataclass(frozen=True, slots=True)
class ExpertExchange:
    """Bytes on the wire; the largest of the steps, one per layer and matrix (gate and up are one)."""

    whole_experts: bool
    """Whether no expert is cut on the way, that is, only expert parallelism and replicas change."""
    sent: dict[tuple[int, int], int]
    """From device to device, over all layers."""
    buffer_bytes: int
    """What a device receives at most in one step."""
    all_gather_bytes: int
    """What it would need for all experts of that step."""

    @property
    def saved(self) -> float:
        """Share of the all-gather's memory that is not needed."""
        return 1 - self.buffer_bytes / self.all_gather_bytes


def expert_exchange(plan: ReshardPlan) -> ExpertExchange | None:
    """None for a model without experts, and where every device has its experts already."""
    experts = {spec.name: spec for spec in plan.catalogue if spec.rule is Rule.EXPERT}
    received: dict[tuple[str, str], dict[int, int]] = {}
    whole = True
    for found in plan.classes:
        absent = missing(found)
        for part in found.parts if absent else ():
            for name in part.names:
                if name not in experts:
                    continue
                spec = experts[name]
                whole = whole and all(box[1:] == tuple((0, n) for n in spec.shape[1:]) for box in part.boxes)
                step = received.setdefault((name.rsplit(".", 2)[0], spec.fused or name), {})
                for device in absent:
                    step[device] = step.get(device, 0) + part.elements_each
    if not received:
        return None
    sizes: dict[tuple[str, str], int] = {}
    for name, spec in experts.items():
        key = (name.rsplit(".", 2)[0], spec.fused or name)
        sizes[key] = sizes.get(key, 0) + spec.elements
    sent: dict[tuple[int, int], int] = {}
    for number, route in enumerate(plan.routes):
        parts = plan.classes[route.delivery.number].parts
        if any(name in experts for part in parts for name in part.names):
            for pair, elements in plan.route_elements(number, experts).items():
                sent[pair] = sent.get(pair, 0) + elements * plan.element_bytes
    largest = max(max(step.values()) for step in received.values())
    gathered = max(sizes[key] for key in received)
    return ExpertExchange(
        whole, dict(sorted(sent.items())), largest * plan.element_bytes, gathered * plan.element_bytes
    )
