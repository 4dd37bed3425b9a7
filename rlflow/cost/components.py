"""Named bytes of one device, and the precisions that they follow from."""

from __future__ import annotations

from rlflow.values import dataclass


@dataclass(frozen=True, slots=True)
class Precision:
    """Bytes of one number. The defaults are mixed precision: 16-bit weights, 32-bit gradients, and for AdamW a 32-bit
    master copy and two 32-bit moments."""

    weights: int = 2
    gradients: int = 4
    optimizer: int = 12
    kv: int = 2


MIXED = Precision()
FULL = Precision(weights=4, gradients=4, optimizer=8, kv=4)
"""32 bits throughout, where no master copy is needed."""


@dataclass(frozen=True, slots=True)
class Components:
    """Bytes on one device. `total` is their sum."""

    weights: int = 0
    gradients: int = 0
    optimizer: int = 0
    """Master copy and moments."""
    activations: int = 0
    """Kept for the backward pass."""
    working: int = 0
    """What is being computed: a layer of a forward pass, or one that is computed again."""
    logits: int = 0
    kv_cache: int = 0
    buffers: int = 0
    """Of communication: gathered layers, exchanged tokens, stage boundaries."""

    @property
    def total(self) -> int:
        return self.resident + self.activations + self.working + self.logits + self.kv_cache + self.buffers

    @property
    def resident(self) -> int:
        """What stays between the batches of a stage unless it is swapped out."""
        return self.weights + self.gradients + self.optimizer

    def named(self) -> dict[str, int]:
        return {
            "weights": self.weights,
            "gradients": self.gradients,
            "optimizer": self.optimizer,
            "activations": self.activations,
            "working": self.working,
            "logits": self.logits,
            "kv_cache": self.kv_cache,
            "buffers": self.buffers,
        }
