"""How a side keeps its shards: fused tensors, padding of the vocabulary, ZeRO-3 slices, element type."""

from __future__ import annotations

from typing import Literal

from rlflow.values import dataclass

DTYPE_BYTES = {
    "float64": 8,
    "float32": 4,
    "bfloat16": 2,
    "float16": 2,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "int8": 1,
}
FUSED_NAMES = {"qkv": "qkv_proj", "gate_up": "gate_up_proj"}
"""Kind of fusion to the name of the fused module."""


@dataclass(frozen=True, slots=True)
class Storage:
    """Conventions of one side of a reshard.

    The defaults are those of Hugging Face modules under tensor parallelism and FSDP2: one local tensor per canonical
    tensor, no padding, ZeRO-3 by rows.
    """

    qkv: Literal["separate", "grouped", "stacked"] = "separate"
    """`grouped`: one tensor, per KV head its queries, its key, its value (Megatron). `stacked`: [Q | K | V] (vLLM)."""
    gate_up: Literal["separate", "stacked"] = "separate"
    """`stacked`: one tensor, [gate | up]."""
    vocabulary_multiple: int = 1
    """The vocabulary is padded to a multiple of this before it is cut; the whole multiple, not one per rank."""
    zero3: Literal["rows", "flat"] = "rows"
    """`rows`: dimension 0 of every local tensor in chunks (FSDP2); `flat`: its elements in equal runs (ZeRO-3)."""
    dtype: str = "bfloat16"
    mtp: bool = True
    """Whether multi-token prediction modules are held."""

    @property
    def element_bytes(self) -> int:
        """KeyError for an unknown type."""
        return DTYPE_BYTES[self.dtype]

    def padded_vocabulary(self, size: int) -> int:
        return -(-size // self.vocabulary_multiple) * self.vocabulary_multiple


MEGATRON = Storage(qkv="grouped", gate_up="stacked")
VLLM = Storage(qkv="stacked", gate_up="stacked", vocabulary_multiple=64)
