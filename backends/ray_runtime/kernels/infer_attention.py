"""Attention without gradients, over a cache: a prompt (several queries per row) or a decode step (one).

Keys lie either whole, [batch, heads, length, size], or in blocks of a shared cache, [blocks, block size, heads, size],
with a table of each row's blocks. `write_cache` puts new keys and values into such a cache.

torch_npu: `npu_fused_infer_attention_score`; for one query also `npu_incre_flash_attention`, under the implementation
name `npu_incremental`. Both compute in 16 bits only, and want key and value of one size: value is padded with zeros,
which adds columns of zeros to the result that are cut away.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from rlflow.backends.ray_runtime.kernels.attention import check_heads, check_mask, triangle
from rlflow.backends.ray_runtime.kernels.attention import reference as attention_reference
from rlflow.backends.ray_runtime.kernels.kernel import Checker, Kernel, shape

_END_ALIGNED = 3
_WHOLE_MASK = 0
_MEND_EMPTY_ROWS = 2
_MOST_SIZE = 512
_SIZE_UNIT = 16
_MOST_GROUP = 64
_MOST_BLOCK = 512
_MOST_ROW = 65_535
_HALF = (torch.float16, torch.bfloat16)


def reference(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    scale: float,
    causal: bool = True,
    mask: torch.Tensor | None = None,
    lengths: tuple[int, ...] | None = None,
    blocks: torch.Tensor | None = None,
) -> torch.Tensor:
    """query [batch, heads, queries, size]; returns the same with value's size.

    Args:
        mask: bool [batch or 1, 1, queries, keys], True hides, instead of `causal`.
        lengths: tokens of each row; keys beyond are not seen. Needed with `blocks`.
        blocks: int32 [batch, most blocks of a row]; key and value are then the cache.
    """
    if blocks is not None:
        key, value = (cache[blocks.long()].flatten(1, 2).transpose(1, 2) for cache in (key, value))
    if lengths is None:
        return attention_reference(query, key, value, scale=scale, causal=causal, mask=mask)
    rows = [
        attention_reference(
            query[row : row + 1],
            key[row : row + 1, :, :length],
            value[row : row + 1, :, :length],
            scale=scale,
            causal=causal,
            mask=None if mask is None else mask[row if len(mask) > 1 else 0, None, :, :length],
        )
        for row, length in enumerate(lengths)
    ]
    return torch.cat(rows)


def npu(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    scale: float,
    causal: bool = True,
    mask: torch.Tensor | None = None,
    lengths: tuple[int, ...] | None = None,
    blocks: torch.Tensor | None = None,
) -> torch.Tensor:
    """As `reference`."""
    import torch_npu

    size, several = value.shape[-1], query.shape[2] > 1
    key, value, settings = _operands(query, key, value, lengths, blocks)
    triangular = causal and several  # one query sees all keys in any case
    out: torch.Tensor = torch_npu.npu_fused_infer_attention_score(
        query.contiguous(),
        key,
        value,
        atten_mask=triangle(query.device) if triangular else mask,
        actual_seq_lengths_kv=None if lengths is None else list(lengths),
        scale=scale,
        sparse_mode=_END_ALIGNED if triangular else _WHOLE_MASK,
        inner_precise=_MEND_EMPTY_ROWS if mask is not None and several else 0,
        **settings,
    )[0]
    return out[..., :size]


def npu_incremental(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    scale: float,
    causal: bool = True,
    mask: torch.Tensor | None = None,
    lengths: tuple[int, ...] | None = None,
    blocks: torch.Tensor | None = None,
) -> torch.Tensor:
    """As `reference`, for one query per row."""
    import torch_npu

    if query.shape[2] > 1:
        return npu(query, key, value, scale=scale, causal=causal, mask=mask, lengths=lengths, blocks=blocks)
    size = value.shape[-1]
    key, value, settings = _operands(query, key, value, lengths, blocks)
    out: torch.Tensor = torch_npu.npu_incre_flash_attention(
        query.contiguous(),
        key,
        value,
        atten_mask=mask,
        actual_seq_lengths=None if lengths is None else list(lengths),
        scale_value=scale,
        inner_precise=0,
        **settings,
    )
    return out[..., :size]


def _operands(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    lengths: tuple[int, ...] | None,
    blocks: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor, dict[str, object]]:
    """Key and value of one size in contiguous memory, and what both operators call by the same names."""
    missing = key.shape[-1] - value.shape[-1]
    value = F.pad(value, (0, missing)) if missing else value
    settings: dict[str, object] = {
        "num_heads": query.shape[1],
        "num_key_value_heads": key.shape[1 if blocks is None else 2],
        "input_layout": "BNSD",
    }
    if blocks is not None:
        settings |= {"block_table": blocks, "block_size": key.shape[1]}
        key, value = key.flatten(2), value.flatten(2)
    return key.contiguous(), value.contiguous(), settings


def check(
    checker: Checker,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    scale: float,
    causal: bool = True,
    mask: torch.Tensor | None = None,
    lengths: tuple[int, ...] | None = None,
    blocks: torch.Tensor | None = None,
) -> None:
    """Heads and sizes; the blocks that the lengths need; 16 bits and the sizes of the operators on an NPU."""
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        checker.dims(name, tensor, 4)
        checker.floating(name, tensor, *_HALF)
    checker.same_dtype(query=query, key=key, value=value)
    batch, heads, queries, size = query.shape
    kv_heads = key.shape[1 if blocks is None else 2]
    turned = (key, value) if blocks is None else (key.transpose(1, 2), value.transpose(1, 2))
    check_heads(checker, query, *turned, heads_at=1, length_at=2)
    wants = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in (query, key, value))
    checker.that(not wants, "a gradient is wanted", "use the kernel `attention`, or torch.no_grad()")
    if blocks is None:
        checker.that(len(key) == batch, f"query has {batch} rows, and key {len(key)}")
        keys = key.shape[2]
    else:
        keys = _check_blocks(checker, batch, queries, key, lengths, blocks)
    if lengths is not None:
        checker.that(len(lengths) == batch, f"{len(lengths)} lengths for {batch} rows")
        checker.that(
            0 < min(lengths) and max(lengths) <= keys, f"lengths {min(lengths)} to {max(lengths)} of {keys} keys"
        )
    check_mask(checker, mask, causal and queries > 1, query, queries, keys, 1)
    checker.limit(size <= _MOST_SIZE, f"heads of size {size}, and {_MOST_SIZE} is the most")
    checker.limit(size % _SIZE_UNIT == 0, f"heads of size {size}, not a multiple of {_SIZE_UNIT}")
    checker.limit(
        heads // kv_heads <= _MOST_GROUP, f"{heads // kv_heads} query heads per key head, most is {_MOST_GROUP}"
    )


def _check_blocks(
    checker: Checker,
    batch: int,
    queries: int,
    cache: torch.Tensor,
    lengths: tuple[int, ...] | None,
    blocks: torch.Tensor,
) -> int:
    """Tokens that a row's blocks can hold."""
    block = int(cache.shape[1])
    checker.dims("blocks", blocks, 2)
    checker.integers("blocks", blocks, torch.int32)
    checker.that(len(blocks) == batch, f"blocks {shape(blocks)} for {batch} rows")
    checker.that(lengths is not None, "a cache in blocks needs `lengths`")
    room = int(blocks.shape[1]) * block
    unit = 128 if queries > 1 else 16
    checker.limit(
        block % unit == 0 and block <= _MOST_BLOCK,
        f"blocks of {block} tokens for {queries} queries: a multiple of {unit} up to {_MOST_BLOCK} is needed",
    )
    row = cache.shape[2] * cache.shape[3]
    checker.limit(
        row <= _MOST_ROW, f"{cache.shape[2]} heads of {cache.shape[3]} are {row} numbers, most is {_MOST_ROW}"
    )
    return room


infer_attention = Kernel("infer_attention", reference=reference, npu=npu, check=check)
infer_attention.register("npu_incremental", npu_incremental)


def write_reference(
    key: torch.Tensor, value: torch.Tensor, key_cache: torch.Tensor, value_cache: torch.Tensor, slots: torch.Tensor
) -> None:
    """key, value [tokens, heads, size] to the places `slots` int [tokens] = block * block size + place, in place."""
    for new, cache in ((key, key_cache), (value, value_cache)):
        cache.flatten(0, 1).index_copy_(0, slots.long(), new)


def write_npu(
    key: torch.Tensor, value: torch.Tensor, key_cache: torch.Tensor, value_cache: torch.Tensor, slots: torch.Tensor
) -> None:
    """As `write_reference`. `Norm` is the plain layout; the operator's default is another."""
    import torch_npu

    torch_npu.npu_scatter_pa_kv_cache(
        key.contiguous(), value.contiguous(), key_cache, value_cache, slots, cache_mode="Norm"
    )


def check_write(
    checker: Checker,
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slots: torch.Tensor,
) -> None:
    """Tokens of the cache's heads and sizes. That slots are unique and inside is the caller's business."""
    checker.same_dtype(key=key, value=value, key_cache=key_cache, value_cache=value_cache)
    checker.integers("slots", slots, torch.int32, torch.int64)
    for name, new, cache in (("key", key, key_cache), ("value", value, value_cache)):
        checker.dims(name, new, 3)
        checker.dims(f"{name}_cache", cache, 4)
        checker.that(new.shape[1:] == cache.shape[2:], f"{name} {shape(new)} does not fit its cache {shape(cache)}")
        checker.that(len(new) == slots.numel(), f"{len(new)} tokens of {name}, and {slots.numel()} slots")
        checker.that(cache.is_contiguous(), f"{name}_cache is not contiguous: it would be written in a copy")
    checker.that(
        key_cache.shape[:2] == value_cache.shape[:2], f"caches {shape(key_cache)} and {shape(value_cache)} differ"
    )


write_cache = Kernel("write_cache", reference=write_reference, npu=write_npu, check=check_write)
