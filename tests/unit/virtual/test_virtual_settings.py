"""What a virtual run is before it begins: clocks, crews, shares, and what is refused or warned of."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlflow.backends.ray_runtime.virtual.clock import Clock
from rlflow.backends.ray_runtime.virtual.crew import crew, replica, virtual_pools
from rlflow.backends.ray_runtime.virtual.preview import preview_of
from rlflow.backends.ray_runtime.virtual.rows import bounds, drawn, joined
from rlflow.backends.ray_runtime.virtual.settings import VirtualSettings, payload_share, times_of, too_short
from rlflow.cli import main
from rlflow.diagnostics import RunFailure
from rlflow.driver import compile
from rlflow.plan import Plan

EXAMPLES = Path(__file__).parents[3] / "examples"


@pytest.fixture(scope="module")
def large() -> Plan:
    """1,536 devices."""
    return compile(EXAMPLES / "pangu_ultra_moe.rlflow")


def cli(*arguments: str) -> int:
    with pytest.raises(SystemExit) as end:
        main([*arguments])
    assert isinstance(end.value.code, int)
    return end.value.code


def test_a_clock_that_runs_faster() -> None:
    now = [50.0]
    slept: list[float] = []

    def sleep(seconds: float) -> None:
        slept.append(seconds)
        now[0] += seconds

    clock = Clock(10.0, 50.0, lambda: now[0], sleep)
    started = clock.now()
    now[0] += 0.2  # two seconds of the plan go by while something is done
    clock.sleep_until(started + 5.0)
    assert slept == [pytest.approx(0.3)]
    assert clock.now() == pytest.approx(started + 5.0)
    clock.sleep_until(started)
    assert len(slept) == 1, "what is past is not slept for"
    assert clock.slept == pytest.approx(0.3)


def test_sleeps_below_the_timers_resolution_are_told_with_numbers(async_plan: Plan) -> None:
    durations = times_of(async_plan, VirtualSettings())
    found = too_short(async_plan, 100.0, durations, late=0.0001)
    assert found is not None
    assert (found.code, found.severity) == ("RLF5057", "warning")
    assert found.message == (
        "with a speed-up of 100 these sleep for less than this machine's timer resolves: "
        "`reshard actor` 0.3 us, `ref` 9.33 us, `actor.train` 18.8 us"
    )
    assert found.notes == ("it wakes 100 us late; sleeps below 1 ms are off by a tenth or more",)
    assert found.help == ("`--speed-up 0.03` or less resolves all of them",)
    assert too_short(async_plan, 0.03, durations, late=0.0001) is None
    assert too_short(async_plan, 0.031, durations, late=0.0001) is not None


def test_a_worker_stands_for_whole_replicas(large: Plan) -> None:
    pools = virtual_pools(large)
    assert [replica(large, pool) for pool in pools] == [4, 64]
    crews = crew(large, pools, VirtualSettings())
    assert sum(len(parts) for parts in crews.values()) <= 16
    for pool in pools:
        ranks = [rank for part in crews[pool.name] for rank in part]
        assert ranks == list(range(len(pool.ranks)))
        assert all(part.start % replica(large, pool) == 0 for part in crews[pool.name])
    few = crew(large, pools, VirtualSettings(ranks_per_worker=100))
    assert [len(part) for part in few["learner"]] == [128, 128, 128, 128]


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 200), st.integers(1, 40), st.integers(1, 40))
def test_rows_are_cut_and_joined_without_loss(count: int, before: int, after: int) -> None:
    rows = drawn(np.arange(count) + 3, 4, 2, lambda prompt, sample: 1 + (prompt * 7 + sample) % 9, 0.3, 12)
    parts = [rows.part(*bounds(count, before, rank)) for rank in range(before)]
    again = joined([joined(parts).part(*bounds(count, after, rank)) for rank in range(after)])
    for name in ("uid", "version", "lengths", "payload", "ends"):
        assert np.array_equal(getattr(again, name), getattr(rows, name)), name
    kept = rows.where(rows.uid % 4 < 2)
    assert np.array_equal(
        kept.payload,
        np.concatenate(
            [rows.part(i, i + 1).payload for i in range(count) if rows.uid[i] % 4 < 2] or [np.zeros(0, np.uint8)]
        ),
    )


def test_large_batches_carry_a_share_of_their_bytes(large: Plan, async_plan: Plan) -> None:
    assert payload_share(async_plan, VirtualSettings()) == 1.0
    share = payload_share(large, VirtualSettings(batch_bytes=1 << 24))
    assert share == pytest.approx((1 << 24) / (8192 * 4096 * 12), rel=0.01)


def test_what_is_decided_is_said(large: Plan) -> None:
    seen = preview_of(large, VirtualSettings())
    assert seen.settings.speed_up == 500.0, "a step of 1078 s takes about two"
    assert seen.sentence.startswith(
        "virtual: 1536 devices by 14 workers (10 for `rollout`, 4 for `learner`), 500 times"
    )
    assert seen.facts["workers"] == {"rollout": 10, "learner": 4}


def test_a_plan_without_estimates_is_refused_by_name(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    flow = str(EXAMPLES / "grpo_arithmetic.rlflow")
    assert cli("run", flow, "--device", "virtual", "--run-dir", str(tmp_path / "run")) == 1
    told = capsys.readouterr().err
    assert "error[RLF4004]: how long `samples`" in told
    assert "`--stage samples=SECONDS`" in told
    assert not (tmp_path / "run").exists()


def test_unknown_stages_and_devices_are_refused(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    flow = str(EXAMPLES / "async_grpo.rlflow")
    assert cli("run", flow, "--device", "virtual", "--stage", "sample=1", "--run-dir", str(tmp_path / "run")) == 1
    assert "did you mean `samples`?" in capsys.readouterr().err
    assert cli("run", flow, "--device", "vitrual") == 2
    assert "'vitrual' is not one of 'cpu', 'npu', 'virtual'" in capsys.readouterr().err
    for option, value in (("--speed-up", "3"), ("--ranks-per-worker", "3"), ("--stage", "samples=1")):
        assert cli("run", flow, option, value) == 2
        assert f"{option} is for virtual devices; add --device virtual" in capsys.readouterr().err


def test_samples_that_are_admitted_one_by_one_are_refused(async_plan: Plan) -> None:
    channels = tuple(
        channel.model_copy(update={"stale": tuple(s.model_copy(update={"trigger": 0.75}) for s in channel.stale)})
        for channel in async_plan.channels
    )
    with pytest.raises(RunFailure, match="a virtual run makes whole batches in order") as failure:
        preview_of(async_plan.model_copy(update={"channels": channels}), VirtualSettings())
    assert (failure.value.code, failure.value.stage) == ("RLF4003", "samples")


def test_a_plan_in_which_nothing_takes_time_is_refused(async_plan: Plan) -> None:
    free = {"samples": 0.0, "ref": 0.0, "actor.train": 0.0, "reshard actor": 0.0}
    with pytest.raises(RunFailure, match="says of no stage how long it takes"):
        preview_of(async_plan, VirtualSettings(stated=free))
