"""Models of which only low-rank adapters are trained: what is published, and what a reader keeps.

A publish carries the adapters. A reader in another layout or on another pool keeps the frozen weights and, of the
adapted layers, a second copy with the adapters added in, which is made anew from the frozen ones at every publish, so
that rounding does not add up.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rlflow.ir.flow import Flow, Layout

if TYPE_CHECKING:
    from rlflow.ir.ops import Lora
    from rlflow.passes.analysis.costs import Costs


def lora_of(flow: Flow, model: str) -> Lora | None:
    """The adapters of a model; None where all of its weights are trained."""
    found: Lora | None = getattr(flow.models[model].source, "lora", None)
    return found


def merged_bytes(model: str, layout: Layout, costs: Costs) -> int:
    """Bytes of the adapted layers on the fullest device of a layout; 0 where all weights are trained, or nothing is
    known of the architecture. ReshardError for a layout that cannot hold the model."""
    lora, architecture = lora_of(costs.flow, model), costs.context.architectures.get(model)
    if lora is None or architecture is None:
        return 0
    from rlflow.reshard.adapters import adapted, adapter_layout
    from rlflow.reshard.catalogue import catalogue
    from rlflow.reshard.shards import Sharding
    from rlflow.reshard.storage import Storage

    dtype = "bfloat16" if costs.precision(model).weights == 2 else "float32"
    held = Sharding(adapted(catalogue(architecture, mtp=False), lora), adapter_layout(layout), Storage(dtype=dtype))
    return max(held.bytes_of(stage * held.stage_size) for stage in range(layout.pp))
