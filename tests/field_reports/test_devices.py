"""Group P of the field reports (NPU): what a plan asks for."""

from __future__ import annotations

import json
from typing import Any

import pytest


def test_P6_the_plan_sets_how_long_collectives_wait(place_: Any) -> None:
    """Twice the longest stage, on all ranks, where that is above the default of 1800 s."""
    short = place_("pool main = 8 devices place actor on main with tp = 2")
    assert short.plan.collective_timeout_s == 1800
    assert "collectives wait" not in short.shown
    long = place_(
        "pool main = 16 devices place actor on main with tp = 8",
        model='preset("qwen3_32b")',
        prompts=512,
        n=16,
        max_new=16_384,
    )
    longest = max(estimate.us for estimate in long.plan.estimates) / 1e6
    assert longest > 900
    assert 2 * longest <= long.plan.collective_timeout_s < 2 * longest + 1
    assert f"collectives wait up to {long.plan.collective_timeout_s} s (default 1800)" in long.shown
    assert '"collective_timeout_s"' in long.plan.to_json()


@pytest.mark.parametrize(
    ("device", "kind", "other"),
    [("ascend_910b", "npu", "cuda"), ("ascend_910c", "npu", "cuda"), ("h100", "cuda", "npu")],
)
def test_P8_a_pool_asks_for_devices_of_its_kind(device: str, kind: str, other: str, place_: Any) -> None:
    result = place_("pool main = 8 devices", cluster=f"host = 8 * {device} {{ cpus = 64 }}")
    assert {pool.device for pool in result.plan.pools} == {kind, "functions"}
    words = json.dumps(result.plan.model_dump(mode="json", include={"pools", "programs", "channels"})).lower()
    assert other not in words
    assert "gpu" not in words


def test_P9_on_one_device_rows_and_weights_are_handed_over(place_: Any) -> None:
    """Same pool, same layout: no queue, no reshard, and readers use the tensors where they are."""
    plan = place_("pool main = 8 devices place actor on main with tp = 2").plan
    assert plan.queues == ()
    assert plan.reshards == ()
    assert plan.channels[0].transport == "cast"
    for pool in plan.pools:
        if pool.device != "functions":
            devices = [(rank.host, rank.index) for rank in pool.ranks]
            assert len(set(devices)) == len(devices), "no device is in a group twice"


def test_P10_tp_grows_within_the_devices_of_the_pool(place_: Any) -> None:
    """Training tp 1, dp 2; rollout tp 4 on the same two devices: the numbers are those of the rollout."""
    result = place_(
        "pool main = 2 devices place actor.generate on main with tp = 4 place actor.train on main with tp = 1"
    )
    assert result.codes == ["RLF2001"]
    assert "pool `main` of 2 devices does not divide into tp 4" in result.words
    assert "legal: tp 1, 2" in result.words
    assert result.places == ["tp = 4"]
    four = place_(
        "pool main = 4 devices place actor.generate on main with tp = 4 place actor.train on main with tp = 1"
    )
    assert four.codes == []
    assert four.plan.reshards[0].received == four.plan.reshards[0].lower_bound
