"""The fitted numbers of a hardware family, and the published constants beside them."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import fields, replace
from functools import cache
from pathlib import Path
from typing import Any

from rlflow.cost.errors import CostError, UnknownFactError
from rlflow.values import dataclass


@dataclass(frozen=True, slots=True)
class Knobs:
    """At most eight numbers that a few measurements of a system fit. Shares are of the peak, in (0, 1]."""

    train_dense: float
    """Share of peak FLOP/s that the products of training a dense model reach."""
    train_moe: float
    """The same for a mixture of experts."""
    logprobs_over_train: float
    """Efficiency of a log-probability pass over that of training."""
    decode_memory: float
    """Share of memory bandwidth at which a decode step reads weights, keys and values."""
    host_layer_s: float
    """Seconds of host work for every layer of a decode step."""
    host_step_s: float
    """Seconds of host work for every decode step."""
    sync_bandwidth: float
    """Share of what software reaches on a link that a weight synchronisation gets, over all bytes that pass through a
    device: the whole model where tensors are gathered or broadcast whole."""
    step_residual: float
    """Share of a step that is in no stage."""

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            low_is_open = field.name not in ("host_layer_s", "host_step_s", "step_residual")
            if not value >= 0 or (low_is_open and value == 0):
                raise CostError(f"knob `{field.name}` cannot be {value!r}")


@dataclass(frozen=True, slots=True)
class Constants:
    """Published numbers that are not fitted; calibration.toml has the sources. Shares are of the peak."""

    prefill_flops: float
    kv_over_weights: float
    """Share of bandwidth at which keys and values are read, over that of weights: blocks lie scattered."""
    memory_copy: float
    link_inside: float
    """Of a link inside a host or supernode."""
    link_across: float
    latency_inside_s: float
    """Of one step of a collective."""
    latency_across_s: float
    small_all_reduce_inside_s: float
    """A whole all-reduce of a message so small that its bytes do not count, as in a decode step."""
    small_all_reduce_across_s: float
    expert_exchange_s: float
    """Either exchange of a mixture-of-experts layer in a decode step, before its bytes."""
    expert_exchange_share: float
    """Of what software reaches on a link, for the bytes of these exchanges: many small messages."""
    request_s: float
    """Of every running request and decode step, beyond products and bytes."""
    host_link: float


@dataclass(frozen=True, slots=True)
class Evidence:
    """Where the value of a knob comes from."""

    value: float
    low: float
    high: float
    text: str


@dataclass(frozen=True, slots=True)
class Calibration:
    family: str
    knobs: Knobs
    constants: Constants

    def override(self, **knobs: float) -> Calibration:
        """The same with some knobs set. CostError for an unknown knob or an impossible value."""
        unknown = sorted(set(knobs) - {field.name for field in fields(Knobs)})
        if unknown:
            raise CostError(f"there is no knob `{unknown[0]}`; knobs: {', '.join(f.name for f in fields(Knobs))}")
        return replace(self, knobs=replace(self.knobs, **knobs))


FAMILIES = {"huawei": "ascend", "nvidia": "nvidia", "cpu": "cpu"}
"""Vendor to hardware family."""


@cache
def calibration(family: str) -> Calibration:
    """The shipped calibration of a hardware family: ascend, nvidia or cpu. UnknownFactError for another."""
    section = _family(family)
    knobs = {name: float(entry["value"]) for name, entry in section["knobs"].items()}
    return Calibration(family, Knobs(**knobs), Constants(**{k: float(v) for k, v in section["constants"].items()}))


@cache
def evidence(family: str) -> Mapping[str, Evidence]:
    """Knob to where its shipped value comes from."""
    return {
        name: Evidence(float(entry["value"]), float(entry["range"][0]), float(entry["range"][1]), entry["evidence"])
        for name, entry in _family(family)["knobs"].items()
    }


def _family(family: str) -> Mapping[str, Any]:
    found = _file().get(family)
    if not isinstance(found, dict):
        raise UnknownFactError("calibration.toml", family)
    return found


@cache
def _file() -> dict[str, Any]:
    return tomllib.loads(Path(__file__).with_name("calibration.toml").read_text("utf-8"))
