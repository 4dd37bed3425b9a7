"""Names of a checkpoint or a live model against the catalogue: every tensor used once, none unknown, none missing."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping

from rlflow.reshard.boxes import Shape
from rlflow.reshard.catalogue import EMBEDDING, HEAD, Catalogue, Rule, TensorSpec
from rlflow.reshard.errors import ReshardError
from rlflow.reshard.shards import Sharding
from rlflow.values import dataclass

ONE_EXPERT = re.compile(r"(?P<before>.*\.experts)\.(?P<expert>\d+)\.(?P<after>.+)")
STACKED_EXPERTS = re.compile(r".*\.experts\.\w+_proj")
OTHER_NAMES = (
    (re.compile(r"\.block_sparse_moe\."), ".mlp."),
    (re.compile(r"\.shared_expert\."), ".shared_experts."),
    (re.compile(r"(\.experts\.\d+)\.w1\."), r"\1.gate_proj."),
    (re.compile(r"(\.experts\.\d+)\.w3\."), r"\1.up_proj."),
    (re.compile(r"(\.experts\.\d+)\.w2\."), r"\1.down_proj."),
)
"""What some families call the same thing (Mixtral's experts, Qwen2-MoE's one shared expert)."""


@dataclass(frozen=True, slots=True)
class Source:
    """Where a named tensor belongs: a whole canonical tensor, or its slice `expert` along dimension 0.

    A named tensor that joins `parts` canonical ones along its rows (its last dimension but one) has this one as `part`.
    """

    tensor: str
    expert: int | None = None
    part: int = 0
    parts: int = 1


def canonical(name: str) -> tuple[Source, ...]:
    """The canonical tensors that a named tensor has, in the order of its rows.

    `mlp.experts.17.gate_proj.weight` is slice 17 of `mlp.experts.gate_proj.weight`; the parameter
    `mlp.experts.gate_up_proj` of transformers is `gate_proj.weight` above `up_proj.weight`. Other names are themselves.
    """
    for pattern, replacement in OTHER_NAMES:
        name = pattern.sub(replacement, name)
    if STACKED_EXPERTS.fullmatch(name):
        name += ".weight"
    found = ONE_EXPERT.fullmatch(name)
    expert = int(found["expert"]) if found else None
    if found:
        name = f"{found['before']}.{found['after']}"
    if ".gate_up_proj." not in name:
        return (Source(name, expert),)
    halves = [name.replace(".gate_up_proj.", f".{half}_proj.") for half in ("gate", "up")]
    return tuple(Source(half, expert, part, 2) for part, half in enumerate(halves))


def match_names(catalogue: Catalogue, shapes: Mapping[str, Shape]) -> dict[str, tuple[Source, ...]]:
    """Every given name to its places. A plain `lm_head.weight` beside tied embeddings is left out: it is the embedding.

    ReshardError lists all unknown names, shapes that differ, tensors or experts that are missing or given twice.
    """
    places: dict[str, tuple[Source, ...]] = {}
    holders: dict[tuple[str, int | None], str] = {}
    problems: list[str] = []
    for name, shape in shapes.items():
        if name == HEAD and catalogue.tied:
            if tuple(shape) != catalogue[EMBEDDING].shape:
                problems.append(f"{name} is tied to {EMBEDDING} but has shape {list(shape)}")
            continue
        found = canonical(name)
        specs = [catalogue.by_name.get(place.tensor) for place in found]
        known = [spec for spec in specs if spec is not None]
        if len(known) < len(specs) or (found[0].expert is not None and known[0].rule is not Rule.EXPERT):
            problems.append(f"unknown tensor {name} {list(shape)}")
            continue
        expected = _expected(known, found)
        if tuple(shape) != expected:
            problems.append(f"{name} has shape {list(shape)}, expected {list(expected)}")
        expert = found[0].expert
        if expert is not None and expert >= known[0].shape[0]:
            problems.append(f"{name}: there are {known[0].shape[0]} experts")
        for place in found:
            if (place.tensor, expert) in holders:
                problems.append(f"{holders[place.tensor, expert]} and {name} are both {place.tensor}")
            holders[place.tensor, expert] = name
        places[name] = found
    problems += [problem for spec in catalogue for problem in _coverage(spec, holders)]
    if problems:
        raise ReshardError(problems)
    return places


def _expected(specs: list[TensorSpec], places: tuple[Source, ...]) -> Shape:
    """Shape of a named tensor that joins these."""
    shape = specs[0].shape if places[0].expert is None else specs[0].shape[1:]
    if len(specs) == 1:
        return shape
    rows = sum(spec.shape[-2] for spec in specs)
    return (*shape[:-2], rows, shape[-1])


def _coverage(spec: TensorSpec, holders: Mapping[tuple[str, int | None], str]) -> list[str]:
    experts = range(spec.shape[0]) if spec.rule is Rule.EXPERT else ()
    absent = [expert for expert in experts if (spec.name, expert) not in holders]
    given = len(experts) - len(absent)
    if (spec.name, None) in holders:
        return [f"{spec.name} is given whole and for {given} experts"] if given else []
    if not given:
        return [f"{spec.name} {list(spec.shape)} is missing"]
    return [f"{spec.name}: experts {absent} are missing"] if absent else []


def check_ranks(sharding: Sharding, named: Mapping[int, Iterable[str]]) -> None:
    """What every rank says it holds, by local names, against what the layout gives it.

    ReshardError lists, for every rank, names that are not its own (a stage that counts its layers from 0 gives those of
    another), names that it leaves out, and names that it gives twice.
    """
    problems = []
    for rank, names in sorted(named.items()):
        given = Counter(names)
        expected = sharding.local_tensors(rank)
        stage = rank // sharding.stage_size
        twice = [name for name, count in given.items() if count > 1]
        foreign = [name for name in given if name not in expected]
        absent = [name for name in expected if name not in given]
        problems += [f"rank {rank} gives {name} more than once" for name in twice]
        problems += [f"rank {rank} gives {name}, which pipeline stage {stage} does not hold" for name in foreign]
        problems += [f"rank {rank} does not give {name} of pipeline stage {stage}" for name in absent]
    if problems:
        raise ReshardError(problems)
