"""Group P of the field reports (NPU): what a plan asks for."""

from __future__ import annotations

import json
from typing import Any

import pytest

from rlflow.device_rules import (
    RAY_RESOURCE,
    environment_findings,
    logical_index,
    normalised,
    physical_device,
    refuse_environment,
    visible_devices,
    worker_environment,
)
from rlflow.diagnostics import RunFailure
from rlflow.plan import Plan, Pool

TWO_ON_EIGHT = "pool main = 8 devices place actor on main with tp = 2"


def messages(plan: Plan, environ: dict[str, str], **more: bool) -> list[str]:
    """What is found in an environment; everything of one code."""
    found = environment_findings(plan, environ, **more)
    assert {diagnostic.code for diagnostic in found} <= {"RLF4020"}
    return [diagnostic.message for diagnostic in found]


def npus(plan: Plan) -> Pool:
    return next(pool for pool in plan.pools if pool.device == "npu")


def test_P1_a_physical_number_becomes_a_logical_index() -> None:
    """T4: device 6 of the host is the third of those that the process sees."""
    visible = visible_devices("npu", {"ASCEND_RT_VISIBLE_DEVICES": "4,5,6,7"})
    assert logical_index(6, visible) == 2
    assert logical_index(6, visible_devices("npu", {})) == 6
    with pytest.raises(RunFailure, match="device 1 is not among the visible devices 4,5,6,7"):
        logical_index(1, visible)


def test_P2_a_list_that_does_not_ascend_is_put_in_order_or_refused(place_: Any) -> None:
    environ = {"ASCEND_RT_VISIBLE_DEVICES": "7,6,5,4,3,2,1,0"}
    assert normalised("npu", environ) == {"ASCEND_RT_VISIBLE_DEVICES": "0,1,2,3,4,5,6,7"}
    plan = place_(TWO_ON_EIGHT).plan
    assert messages(plan, environ) == []
    for text, words in (
        ("0,1,1", "ASCEND_RT_VISIBLE_DEVICES is `0,1,1`, and device 1 stands there twice"),
        ("0,npu1", "ASCEND_RT_VISIBLE_DEVICES is `0,npu1`, and `npu1` is no number"),
        ("", "rank 0 is to hold device 0 of host `host`, which shows 0"),
        ("1,0", "rank 2 is to hold device 2 of host `host`, which shows 2"),
    ):
        first, *_ = messages(plan, {"ASCEND_RT_VISIBLE_DEVICES": text})
        assert words.replace("`host`", "") == first.replace(f"`{npus(plan).ranks[0].host}`", "")


def test_P3_ranks_of_the_second_host_hold_its_own_first_devices(place_: Any) -> None:
    pool = npus(place_("pool main = 16 devices place actor on main with tp = 2").plan)
    visible = visible_devices("npu", {"ASCEND_RT_VISIBLE_DEVICES": "0,1,2,3,4,5,6,7"})
    second = [place for place in pool.ranks if place.rank >= 8]
    assert {place.host for place in second}.isdisjoint(place.host for place in pool.ranks if place.rank < 8)
    assert [physical_device(place, visible) for place in second] == list(range(8))


def test_B9_a_rank_holds_the_device_of_its_place_among_the_visible(compile_: Any) -> None:
    """Devices 1 to 3 are visible: three ranks hold those, nobody device 0, and torch knows them as 0, 1 and 2."""
    pool = npus(compile_(devices=3, prompts=9).plan)
    visible = visible_devices("npu", {"ASCEND_RT_VISIBLE_DEVICES": "1,2,3"})
    held = [physical_device(place, visible) for place in pool.ranks]
    assert held == [1, 2, 3]
    assert [logical_index(device, visible) for device in held] == [0, 1, 2]


def test_P4_devices_from_ray_and_a_flag_against_it(place_: Any) -> None:
    plan = place_(TWO_ON_EIGHT).plan
    flag = "RAY_EXPERIMENTAL_NOSET_ASCEND_RT_VISIBLE_DEVICES"
    refuse_environment(plan, {flag: "0"})
    with pytest.raises(RunFailure) as caught:
        refuse_environment(plan, {flag: "1"})
    assert caught.value.code == "RLF4020"
    assert caught.value.message == f"{flag} is set, and the ranks of pool `main` get their devices from Ray"
    assert caught.value.help == (f"unset {flag}",)
    assert messages(plan, {"RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "1"}) == []


def test_P5_ports_are_chosen_by_the_system_in_every_worker(place_: Any) -> None:
    plan = place_("pool main = 8 devices place actor.train on main with tp = 4").plan
    names = ("HCCL_HOST_SOCKET_PORT_RANGE", "HCCL_NPU_SOCKET_PORT_RANGE")
    worker = worker_environment(plan, npus(plan), {})
    assert [worker[name] for name in names] == ["auto", "auto"]
    own = worker_environment(plan, npus(plan), {names[1]: "61000-61050"})
    assert own[names[1]] == "61000-61050"


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


def test_P6_every_rank_waits_as_long_as_the_plan_says(place_: Any) -> None:
    """A shorter limit of the user's is refused, a longer one is kept; events wait longer than collectives."""
    long = place_(
        "pool main = 16 devices place actor on main with tp = 8",
        model='preset("qwen3_32b")',
        prompts=512,
        n=16,
        max_new=16_384,
    ).plan
    seconds = long.collective_timeout_s
    worker = worker_environment(long, npus(long), {})
    assert worker["HCCL_EXEC_TIMEOUT"] == worker["HCCL_CONNECT_TIMEOUT"] == str(seconds)
    assert int(worker["HCCL_EVENT_TIMEOUT"]) > seconds
    patient = worker_environment(long, npus(long), {"HCCL_EXEC_TIMEOUT": str(2 * seconds)})
    assert patient["HCCL_EXEC_TIMEOUT"] == str(2 * seconds)
    assert messages(long, {"HCCL_EXEC_TIMEOUT": "1800"}) == [
        f"HCCL_EXEC_TIMEOUT is 1800 s, and ranks of this plan may wait {seconds} s for each other"
    ]
    assert messages(long, {"HCCL_EXEC_TIMEOUT": "soon"}) == ["HCCL_EXEC_TIMEOUT is `soon`, not a number of seconds"]


def test_P7_weights_that_are_written_in_place_have_the_plain_format(place_: Any) -> None:
    plan = place_(TWO_ON_EIGHT).plan
    assert worker_environment(plan, npus(plan), {})["VLLM_ASCEND_ENABLE_NZ"] == "0"
    assert messages(plan, {"VLLM_ASCEND_ENABLE_NZ": "0"}) == []
    assert messages(plan, {"VLLM_ASCEND_ENABLE_NZ": "1"}) == [
        "VLLM_ASCEND_ENABLE_NZ is `1`, and the weights in pool `main` are written in place every step"
    ]
    gpus = place_(TWO_ON_EIGHT, cluster="host = 8 * h100 { cpus = 64 }").plan
    assert messages(gpus, {"VLLM_ASCEND_ENABLE_NZ": "1"}) == []


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
    assert RAY_RESOURCE[kind] == {"npu": "NPU", "cuda": "GPU"}[kind]


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


# --- rules of the platform that no report of the group names ---------------------------------------------------------


def test_expandable_segments_and_a_sleeping_engine(place_: Any) -> None:
    plan = place_(TWO_ON_EIGHT).plan
    environ = {"PYTORCH_NPU_ALLOC_CONF": "max_split_size_mb:64,expandable_segments:True"}
    assert messages(plan, environ) == []
    assert messages(plan, environ, sleeping_engine=True) == [
        "PYTORCH_NPU_ALLOC_CONF has expandable_segments, and the rollout engine's sleep mode cannot work with it"
    ]
    assert messages(plan, {"PYTORCH_NPU_ALLOC_CONF": "expandable_segments:False"}, sleeping_engine=True) == []


def test_a_plan_for_cpus_asks_nothing_of_the_environment(compile_: Any) -> None:
    bad = {"ASCEND_RT_VISIBLE_DEVICES": "1,1", "VLLM_ASCEND_ENABLE_NZ": "1", "HCCL_EXEC_TIMEOUT": "soon"}
    plan = compile_(edit=("host = 8 * ascend_910b { memory = 1.5 TiB, cpus = 64 }", "host = 4 * cpu")).plan
    assert messages(plan, bad) == []
    assert worker_environment(plan, plan.pools[0], bad) == {}


def test_tensor_parallel_ranks_on_two_a2_hosts(place_: Any) -> None:
    """On an A2 only the host is fast; in a supernode of A3 hosts everything is."""
    schedule = "pool main = 32 devices place actor.generate on main with tp = 16 place actor.train on main with tp = 8"
    slow = place_(schedule, model='preset("qwen3_32b")')
    assert slow.codes == ["RLF2021"]
    assert "tp 16 of `samples` spans 2 hosts that no fast network joins" in slow.words
    assert "use tp 8 at most" in slow.words
    fast = place_(schedule, model='preset("qwen3_32b")', cluster="machines = 1 * cloudmatrix384")
    assert fast.codes == []


def test_buffers_of_communicators_shrink_where_the_device_is_full(place_: Any) -> None:
    """All ranks; tp and dp of rollout; tp, cp, dp, gradients and pp of training. 1 GiB gives each 64 MiB, both ways."""
    plan = place_(
        "pool main = 16 devices "
        "place actor.generate on main with tp = 4 place actor.train on main with tp = 2, cp = 2, pp = 2"
    ).plan
    assert "HCCL_BUFFSIZE" not in worker_environment(plan, npus(plan), {})
    (memory,) = plan.memory
    full = memory.model_copy(update={"peak": memory.capacity + memory.reserved - (1 << 30)})
    tight = plan.model_copy(update={"memory": (full,)})
    assert int(worker_environment(tight, npus(tight), {})["HCCL_BUFFSIZE"]) == 1024 // 2 // 8
    assert worker_environment(tight, npus(tight), {"HCCL_BUFFSIZE": "40"})["HCCL_BUFFSIZE"] == "40"
    assert worker_environment(tight, npus(tight), {"HCCL_BUFFSIZE": "400"})["HCCL_BUFFSIZE"] == "64"
