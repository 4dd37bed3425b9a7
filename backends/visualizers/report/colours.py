"""The fill of a stage in every chart of a report: one colour a stage, and a texture once the colours are used up."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from rlflow.backends.visualizers.palette import BLUE, GREEN, ORANGE, PURPLE, SKY, VERMILION, YELLOW
from rlflow.plan import Plan

FILLS: Final = (SKY, ORANGE, GREEN, PURPLE, BLUE, YELLOW, VERMILION)
OBJECTS: Final = (
    (" weights", BLUE),
    (" optimizer", ORANGE),
    (" gradients", VERMILION),
    (" activations", GREEN),
    (" keys and values", SKY),
    (" buckets", PURPLE),
)
"""Ending of the name of an object in memory, to its fill."""


@dataclass(frozen=True, slots=True)
class Fill:
    colour: str
    texture: int
    """0 = plain, 1 = stripes, 2 = stripes the other way, ..."""


def fills(plans: Iterable[Plan]) -> dict[str, Fill]:
    """Stage to fill, by the order of the stages of a step: take and the like first, then those of evaluations. A stage
    of two plans has one fill. Stages on devices come before the others, so that they get plain colours."""
    stages = [stage for plan in plans for stage in plan.stages]
    stages.sort(key=lambda stage: (stage.phase != "step", stage.layout is None))
    names = list(dict.fromkeys(stage.id for stage in stages))
    return {name: Fill(FILLS[at % len(FILLS)], at // len(FILLS)) for at, name in enumerate(names)}


def object_kind(name: str) -> int:
    """Number of the kind of an object of the memory table in OBJECTS; their number for any other."""
    return next((at for at, (ending, _) in enumerate(OBJECTS) if name.endswith(ending)), len(OBJECTS))
