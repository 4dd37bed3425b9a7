"""The cache of keys and values of a generation engine."""

from __future__ import annotations

from rlflow.cost.components import MIXED, Precision
from rlflow.cost.dimensions import Dimensions
from rlflow.cost.errors import WorkloadError
from rlflow.cost.shards import kv_heads_on, layers_of
from rlflow.ir.flow import Layout
from rlflow.values import dataclass

BLOCK_USE = (9, 10)
"""Share of the pool that blocks really use (inference-sim, BLIS, calibrated on vLLM)."""


def kv_bytes_per_token(model: Dimensions, layout: Layout, precision: Precision = MIXED) -> int:
    """Keys and values of one token on the device with the most layers.

    Tensor parallelism splits them down to one key-value head; the latent form has one for all heads and is not split.
    """
    layers = max(stage.layers for stage in layers_of(model, layout))
    if model.is_latent:
        return layers * (model.latent_kv + model.rope_size) * precision.kv
    return layers * kv_heads_on(model, layout.tp) * (model.key_size + model.value_size) * precision.kv


@dataclass(frozen=True, slots=True)
class KvPool:
    """The cache of one engine replica, as each of its devices holds it."""

    bytes_per_token: int
    tokens: int
    """How many fit; 0 when the weights leave no room."""

    def sequences(self, tokens: int) -> int:
        """Sequences of so many tokens that fit."""
        return self.tokens // tokens if tokens else 0


def kv_pool(
    model: Dimensions, layout: Layout, memory_bytes: int, used: int, *, share: float = 0.9, precision: Precision = MIXED
) -> KvPool:
    """What (share x memory - used) holds; `used` are weights and working memory, `share` what an engine may take."""
    if not 0 < share <= 1:
        raise WorkloadError(f"the share of memory is in (0, 1], not {share}")
    each = kv_bytes_per_token(model, layout, precision)
    free = max(0, int(memory_bytes * share) - used)
    return KvPool(each, free * BLOCK_USE[0] // BLOCK_USE[1] // each)
