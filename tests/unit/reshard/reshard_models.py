"""Random small models and layouts, and what every rank of a layout holds, written down again with plain numpy slicing.

`naive_shard` knows nothing of boxes and placements: it is what the package is compared with.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
from hypothesis import strategies as st

from rlflow.cluster.presets.architecture import Architecture
from rlflow.ir.flow import Layout
from rlflow.reshard.catalogue import Catalogue, Home, catalogue
from rlflow.reshard.endpoint import Endpoint, Fabric
from rlflow.reshard.legal import layout_problems
from rlflow.reshard.storage import Storage

Arrays = dict[str, np.ndarray[Any, np.dtype[Any]]]


@st.composite
def architectures(draw: st.DrawFn) -> Architecture:
    moe = draw(st.booleans())
    facts: dict[str, Any] = {
        "family": "made up",
        "kind": "moe" if moe else "dense",
        "num_layers": draw(st.integers(1, 4)),
        "hidden_size": draw(st.sampled_from([3, 4])),
        "ffn_hidden_size": draw(st.sampled_from([4, 8])),
        "norms_per_layer": draw(st.sampled_from([2, 4])),
        "vocab_size": draw(st.integers(5, 17)),
        "tie_word_embeddings": draw(st.booleans()),
        "num_attention_heads": draw(st.sampled_from([4, 8])),
        "attention": draw(st.sampled_from(["gqa", "gqa", "mla"])),
    }
    if facts["attention"] == "gqa":
        facts |= {
            "num_key_value_heads": draw(st.sampled_from([1, 2, 4])),
            "head_dim": draw(st.sampled_from([1, 2])),
            "qkv_bias": draw(st.booleans()),
            "qk_norm": draw(st.booleans()),
        }
    else:
        facts |= {"q_lora_rank": 3, "kv_lora_rank": 2, "qk_nope_head_dim": 2, "qk_rope_head_dim": 1, "v_head_dim": 1}
    if moe:
        facts |= {
            "num_dense_layers": draw(st.integers(0, facts["num_layers"])),
            "num_mtp_layers": draw(st.integers(0, 1)),
            "num_routed_experts": draw(st.sampled_from([4, 8])),
            "moe_ffn_hidden_size": draw(st.sampled_from([2, 4])),
            "top_k": 2,
            "shared_expert_ffn_hidden_size": draw(st.sampled_from([0, 4])),
            "router_expert_bias": draw(st.booleans()),
        }
    return Architecture("made up", facts)


@st.composite
def splits(draw: st.DrawFn, layers: int, parts: int) -> tuple[int, ...]:
    """Any numbers of layers per part that sum to all, 0 among them."""
    cuts = sorted(draw(st.lists(st.integers(0, layers), min_size=parts - 1, max_size=parts - 1)))
    return tuple(b - a for a, b in zip([0, *cuts], [*cuts, layers], strict=True))


@st.composite
def sides(draw: st.DrawFn, tensors: Catalogue, *, zero: bool = True) -> tuple[Layout, Storage]:
    """Any legal layout with its storage."""
    tp = draw(st.sampled_from([1, 2, 4]))
    pp, vp = draw(st.sampled_from([(1, 1), (2, 1), (3, 1), (2, 2)]))
    layout = Layout(
        dp=draw(st.integers(1, 3)),
        tp=tp,
        pp=pp,
        vp=vp,
        cp=draw(st.sampled_from([1, 1, 2])),
        split=draw(splits(tensors.layers, pp * vp)),
        zero=draw(st.sampled_from([0, 1, 3])) if zero else 0,
    )
    stage = layout.dp * layout.cp * tp
    if tensors.experts:
        grids = [
            (ep, etp)
            for ep in (1, 2, 3, 4, 8)
            for etp in (1, 2)
            if stage % (ep * etp) == 0 and tensors.experts % ep == 0
        ]
        ep, etp = draw(st.sampled_from(grids))
        layout = replace(layout, ep=ep, etp=etp)
    storage = Storage(
        qkv=draw(st.sampled_from(["separate", "grouped", "stacked"])),
        gate_up=draw(st.sampled_from(["separate", "stacked"])),
        vocabulary_multiple=tp * draw(st.integers(1, 3)),
        zero3=draw(st.sampled_from(["rows", "flat"])),
        dtype="float32",
        mtp=True,
    )
    assert layout_problems(tensors, layout, storage) == []
    return layout, storage


@st.composite
def reshards(draw: st.DrawFn, *, zero: bool = True) -> tuple[Architecture, Catalogue, Endpoint, Endpoint, Fabric]:
    """Two layouts of a model on devices that are the same, others, or partly the same, in any order."""
    architecture = draw(architectures())
    tensors = catalogue(architecture)
    before, source_storage = draw(sides(tensors, zero=zero))
    after, target_storage = draw(sides(tensors, zero=zero))
    if draw(st.booleans()):
        target_storage = replace(target_storage, mtp=False)
    count = max(before.size, after.size, draw(st.integers(1, before.size + after.size)))
    order = draw(st.permutations(range(count)))
    start = draw(st.integers(0, count - after.size))
    target = draw(st.permutations(order[start : start + after.size]))
    fabric = Fabric.uniform(count, draw(st.integers(1, 5)), 1e9, 3e8)
    source = Endpoint(before, tuple(order[: before.size]), source_storage)
    return architecture, tensors, source, Endpoint(after, tuple(target), target_storage), fabric


def numbered(tensors: Catalogue) -> Arrays:
    """Every element its own number, from 1: padding is 0."""
    arrays, start = {}, 1
    for spec in tensors:
        arrays[spec.name] = np.arange(start, start + spec.elements, dtype=np.int32).reshape(spec.shape)
        start += spec.elements
    return arrays


# --- the oracle ------------------------------------------------------------------------------------------------------


def naive_shard(architecture: Architecture, tensors: Catalogue, layout: Layout, storage: Storage, rank: int) -> Arrays:
    """The local tensors of a rank, under the names that the package gives them."""
    facts, arrays = architecture.facts, numbered(tensors)
    stage_size = layout.dp * layout.cp * layout.tp
    p, local = divmod(rank, stage_size)
    data, t = divmod(local, layout.tp)
    x, rest = divmod(local, layout.ep * layout.etp)
    e, y = divmod(rest, layout.etp)
    mine: Arrays = {}
    for name in names_on_stage(tensors, layout, storage, p):
        mine[name] = tensor_parallel(name, arrays[name], facts, layout, storage, t, e, y)
    fused = fuse(mine, facts, layout, storage)
    if layout.zero == 3:
        return {
            name: zero_slice(
                value, storage, *((layout.expert_replicas, x) if ".experts." in name else (layout.dp * layout.cp, data))
            )
            for name, value in fused.items()
        }
    return fused


def names_on_stage(tensors: Catalogue, layout: Layout, storage: Storage, p: int) -> list[str]:
    parts = list(layout.split) or [tensors.layers // (layout.pp * layout.vp)] * (layout.pp * layout.vp)
    owner = [part % layout.pp for part, count in enumerate(parts) for _ in range(count)]
    last = layout.pp - 1
    found = []
    for spec in tensors:
        home = spec.home
        on = (
            owner[int(spec.name.split(".")[2])] == p
            if home is Home.LAYER
            else p == last and storage.mtp
            if home is Home.MTP
            else p == last
            if home is Home.HEAD
            else p == 0 or (p == last and (tensors.tied or (tensors.has_mtp and storage.mtp)))
        )
        if on:
            found.append(spec.name)
    return found


def tensor_parallel(name: str, a: Any, facts: Any, layout: Layout, storage: Storage, t: int, e: int, y: int) -> Any:
    tp = layout.tp
    leaf = name.split(".")[-2] if not name.endswith("e_score_correction_bias") else "router"
    if ".mlp.experts." in name:
        a = np.split(a, layout.ep)[e]
        return np.split(a, layout.etp, axis=2 if leaf == "down_proj" else 1)[y]
    if leaf in ("embed_tokens", "lm_head"):
        missing = -len(a) % storage.vocabulary_multiple
        return np.split(np.concatenate([a, np.zeros((missing, a.shape[1]), a.dtype)]), tp)[t]
    if leaf in ("q_proj", "q_b_proj", "kv_b_proj", "gate_proj", "up_proj"):
        return np.split(a, tp)[t]
    if leaf in ("o_proj", "down_proj"):
        return np.split(a, tp, axis=1)[t]
    if leaf in ("k_proj", "v_proj"):
        heads = facts["num_key_value_heads"]
        if tp <= heads:
            return np.split(a, tp)[t]
        return np.split(a, heads)[t * heads // tp]
    return a


def fuse(mine: Arrays, facts: Any, layout: Layout, storage: Storage) -> Arrays:
    found: Arrays = {}
    for name, value in mine.items():
        stem, leaf, kind = ("." + name).rsplit(".", 2)
        stem = stem.removeprefix(".")
        if leaf in ("q_proj", "k_proj", "v_proj") and storage.qkv != "separate":
            if leaf == "q_proj":
                q, k, v = (mine[f"{stem}.{part}.{kind}"] for part in ("q_proj", "k_proj", "v_proj"))
                if storage.qkv == "stacked":
                    joined = np.concatenate([q, k, v])
                else:
                    groups = len(k) // facts["head_dim"]
                    blocks = [np.split(part, groups) for part in (q, k, v)]
                    joined = np.concatenate([blocks[part][g] for g in range(groups) for part in range(3)])
                found[f"{stem}.qkv_proj.{kind}"] = joined
        elif leaf in ("gate_proj", "up_proj") and storage.gate_up == "stacked":
            if leaf == "gate_proj":
                axis = 1 if ".mlp.experts." in name else 0
                found[f"{stem}.gate_up_proj.{kind}"] = np.concatenate([value, mine[f"{stem}.up_proj.{kind}"]], axis)
        else:
            found[name] = value
    return found


def zero_slice(value: Any, storage: Storage, replicas: int, index: int) -> Any:
    if storage.zero3 == "rows":
        step = -(-len(value) // replicas)
        return value[index * step : (index + 1) * step]
    step = -(-value.size // replicas)
    flat = np.concatenate([value.reshape(-1), np.zeros(step * replicas - value.size, value.dtype)])
    return flat[index * step : (index + 1) * step]
