"""softmax(scale q k^T) v for training, dense or packed, with grouped key heads.

Layouts: `BNSD` [batch, heads, length, size], `BSND` with heads and length exchanged, `TND` [tokens, heads, size] with
the sequences one after another, `ends` saying where each ends. `causal` is aligned at the end: the last query sees
every key. In masks True hides, as torch_npu has it (transformers' and torch's boolean masks say the opposite).

torch_npu: `npu_fusion_attention`, whose causal mode reads a fixed triangle of 2048 x 2048.
"""

from __future__ import annotations

from typing import Literal

import torch

from rlflow.backends.ray_runtime.kernels.kernel import Checker, Kernel, shape, wide

Layout = Literal["BNSD", "BSND", "TND"]

_TRIANGLE = 2048
_END_ALIGNED = 3
_WHOLE_MASK = 0
_MOST_HEADS = 256
_MOST_SIZE = 768
_MOST_LENGTH = 1 << 20
_MOST_SEQUENCES = 1024

_triangles: dict[torch.device, torch.Tensor] = {}


def reference(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    scale: float,
    layout: Layout = "BNSD",
    causal: bool = True,
    mask: torch.Tensor | None = None,
    ends: tuple[int, ...] | None = None,
    key_ends: tuple[int, ...] | None = None,
) -> torch.Tensor:
    """Of query's layout and dtype, with value's size.

    Args: `mask` bool, broadcasts to [batch, heads, queries, keys], instead of `causal`. `ends`, `key_ends`: for TND,
    the sequences' ends (the first is the first length), of keys where they differ. A query that sees no key gives 0.
    """
    if layout == "TND":
        assert ends is not None
        starts, key_stops = (0, *ends[:-1]), key_ends or ends
        key_starts = (0, *key_stops[:-1])
        parts = [
            _dense(
                query[a:b].transpose(0, 1),
                key[c:d].transpose(0, 1),
                value[c:d].transpose(0, 1),
                scale,
                causal,
                None,
            ).transpose(0, 1)
            for a, b, c, d in zip(starts, ends, key_starts, key_stops, strict=True)
        ]
        return torch.cat(parts)
    if layout == "BSND":
        q, k, v = (tensor.transpose(1, 2) for tensor in (query, key, value))
        return _dense(q, k, v, scale, causal, mask).transpose(1, 2)
    return _dense(query, key, value, scale, causal, mask)


def _dense(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scale: float,
    causal: bool,
    mask: torch.Tensor | None,
) -> torch.Tensor:
    """[..., heads, length, size]. Scores and softmax in fp32 at least."""
    group = query.shape[-3] // key.shape[-3]
    key, value = (tensor.repeat_interleave(group, -3) for tensor in (key, value))
    scores = wide(query) @ wide(key).transpose(-1, -2) * scale
    hidden = mask
    if causal:
        queries, keys = scores.shape[-2:]
        hidden = torch.ones(queries, keys, dtype=torch.bool, device=query.device).triu(keys - queries + 1)
    if hidden is None:
        return (torch.softmax(scores, -1) @ wide(value)).to(query.dtype)
    # A finite least score, so that a row without any key has no NaN in its gradient either.
    scores = scores.masked_fill(hidden, torch.finfo(scores.dtype).min)
    out = (torch.softmax(scores, -1) @ wide(value)).to(query.dtype)
    return out.masked_fill(hidden.all(-1, keepdim=True), 0.0)


def npu(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    scale: float,
    layout: Layout = "BNSD",
    causal: bool = True,
    mask: torch.Tensor | None = None,
    ends: tuple[int, ...] | None = None,
    key_ends: tuple[int, ...] | None = None,
) -> torch.Tensor:
    """As `reference`."""
    import torch_npu

    packed = {}
    if layout == "TND":
        assert ends is not None
        packed = {"actual_seq_qlen": list(ends), "actual_seq_kvlen": list(key_ends or ends)}
    out: torch.Tensor = torch_npu.npu_fusion_attention(
        query,
        key,
        value,
        query.shape[1 if layout == "BNSD" else -2],
        layout,
        atten_mask=triangle(query.device) if causal else mask,
        scale=scale,
        sparse_mode=_END_ALIGNED if causal else _WHOLE_MASK,
        **packed,
    )[0]
    return out


def triangle(device: torch.device) -> torch.Tensor:
    """The mask that torch_npu's causal modes read: bool [2048, 2048], True above the diagonal. Made once per device."""
    if torch.compiler.is_compiling() or _is_fake():
        return _make_triangle(device)
    if device not in _triangles:
        # Sampling may be the first to ask, in inference mode, and training could not use what is made in it.
        with torch.inference_mode(False):
            _triangles[device] = _make_triangle(device)
    return _triangles[device]


def _make_triangle(device: torch.device) -> torch.Tensor:
    return torch.ones(_TRIANGLE, _TRIANGLE, dtype=torch.bool, device=device).triu(1)


def _is_fake() -> bool:
    """Whether tensors made now have no memory: such a one must not be kept."""
    return torch._guards.detect_fake_mode() is not None


def check(
    checker: Checker,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    scale: float,
    layout: Layout = "BNSD",
    causal: bool = True,
    mask: torch.Tensor | None = None,
    ends: tuple[int, ...] | None = None,
    key_ends: tuple[int, ...] | None = None,
) -> None:
    """Heads that divide, sizes that agree, ends that lie in order."""
    checker.that(layout in ("BNSD", "BSND", "TND"), f"layout is `{layout}`, not `BNSD`, `BSND` or `TND`")
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        checker.dims(name, tensor, 3 if layout == "TND" else 4)
        checker.floating(name, tensor)
    checker.same_dtype(query=query, key=key, value=value)
    where = {"BNSD": (0, 1, 2), "BSND": (0, 2, 1), "TND": (None, 1, 0)}[layout]
    check_heads(checker, query, key, value, heads_at=where[1], length_at=where[2])
    if where[0] is not None:
        checker.that(len(query) == len(key), f"query has {len(query)} rows, and key {len(key)}")
    queries, keys = query.shape[where[2]], key.shape[where[2]]
    if layout == "TND":
        checker.that(mask is None, "a mask belongs to a dense layout; sequences of TND are told by their ends")
        _check_ends(checker, "ends", ends, queries)
        _check_ends(checker, "key_ends", key_ends or ends, keys)
        checker.that(len(ends or ()) == len(key_ends or ends or ()), "queries and keys are of different sequences")
    else:
        checker.that(ends is None and key_ends is None, "ends belong to the layout `TND`")
        check_mask(checker, mask, causal, query, queries, keys, query.shape[where[1]])
        checker.limit(not causal or queries <= keys, f"{queries} queries and {keys} keys: the first see no key")
    checker.that(scale > 0, f"scale is {scale:g}, not positive")
    checker.limit(
        query.shape[where[1]] <= _MOST_HEADS, f"{query.shape[where[1]]} heads, and {_MOST_HEADS} are the most"
    )
    checker.limit(query.shape[-1] <= _MOST_SIZE, f"heads of size {query.shape[-1]}, and {_MOST_SIZE} is the most")
    checker.limit(
        max(queries, keys) <= _MOST_LENGTH, f"a length of {max(queries, keys)} tokens, and {_MOST_LENGTH} is the most"
    )


def check_heads(
    checker: Checker, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *, heads_at: int, length_at: int
) -> None:
    """Of training and inference alike."""
    heads, kv_heads = query.shape[heads_at], key.shape[heads_at]
    checker.that(kv_heads > 0 and heads % kv_heads == 0, f"{heads} query heads do not divide into {kv_heads} key heads")
    checker.that(
        key.shape[:-1] == value.shape[:-1], f"key {shape(key)} and value {shape(value)} differ in more than their size"
    )
    checker.that(
        query.shape[-1] == key.shape[-1], f"query has heads of size {query.shape[-1]}, and key of {key.shape[-1]}"
    )
    checker.that(
        value.shape[-1] <= key.shape[-1], f"value has heads of size {value.shape[-1]}, more than key's {key.shape[-1]}"
    )
    checker.that(query.shape[length_at] > 0, f"query {shape(query)} is empty")


def check_mask(
    checker: Checker,
    mask: torch.Tensor | None,
    causal: bool,
    query: torch.Tensor,
    queries: int,
    keys: int,
    heads: int,
) -> None:
    """bool, of the whole matrix, and not beside `causal`."""
    if mask is None:
        return
    checker.that(not causal, "both a mask and causal: put the triangle into the mask")
    checker.that(mask.dtype == torch.bool, f"mask is {str(mask.dtype).removeprefix('torch.')}, not bool (True hides)")
    checker.dims("mask", mask, 2, 4)
    checker.that(list(mask.shape[-2:]) == [queries, keys], f"mask {shape(mask)} for {queries} queries and {keys} keys")
    if mask.dim() == 4:
        good = mask.shape[0] in (1, len(query)) and mask.shape[1] in (1, heads)
        checker.that(good, f"mask {shape(mask)} for {len(query)} rows of {heads} heads")


def _check_ends(checker: Checker, name: str, ends: tuple[int, ...] | None, tokens: int) -> None:
    if ends is None:
        checker.that(False, f"layout `TND` needs `{name}`")
        return
    checker.that(
        bool(ends) and all(a <= b for a, b in zip((0, *ends), ends, strict=False)), f"{name} do not rise: {ends}"
    )
    checker.that(ends[-1] == tokens, f"the last of {name} is {ends[-1]}, and there are {tokens} tokens")
    checker.limit(
        len(ends) <= _MOST_SEQUENCES,
        f"{len(ends)} sequences in one call, and {_MOST_SEQUENCES} are the most",
        "use smaller micro-batches",
    )


attention = Kernel("attention", reference=reference, npu=npu, check=check)
