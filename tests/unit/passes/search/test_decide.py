"""The decision: what is chosen, by how much everything else loses, and what does not fit."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from search_oracles import LIMIT, Moves, best_period, options, reshards, resident

from rlflow.passes.search.alternatives import Alternative, DecisionKind
from rlflow.passes.search.bounds import gap, lower_bound
from rlflow.passes.search.candidate import Candidate
from rlflow.passes.search.decide import Decision, Refusal, search
from rlflow.passes.search.devices import pool_sizes
from rlflow.passes.search.options import StageOption, StageTable
from rlflow.passes.search.problem import DeviceType, Pins, PoolPin, Problem

GIB = 2**30
SIZES = (1, 2, 4, 8, 16)
HOSTS = (8, 8)


def scaling(work: float, static: int = 1, peak: int = 2, cls: str = "a", overhead: float = 0.0) -> list[StageOption]:
    """Time work / n + overhead on n devices."""
    return [StageOption(n, work / n + overhead, static, peak, (cls, n), cls) for n in SIZES]


def problem(
    tables: dict[str, list[StageOption]], hosts: tuple[int, ...] = HOSTS, limit: int = LIMIT, **more: object
) -> Problem:
    made = {stage: StageTable.of(some, limit) for stage, some in tables.items()}
    return Problem(tuple(tables), (DeviceType("npu", hosts, limit, made),), **more)  # type: ignore[arg-type]


def decided(of: Problem) -> Decision:
    found = search(of)
    assert isinstance(found, Decision), found
    return found


def shape(candidate: Candidate) -> list[tuple[tuple[str, ...], int]]:
    return [(pool.stages, pool.devices) for pool in candidate.pools]


def alternative(decision: Decision, kind: DecisionKind, *subject: str) -> Alternative:
    return next(a for a in decision.alternatives if a.kind == kind and a.subject == subject)


# --- by hand ----------------------------------------------------------------------------------------------------------


def test_perfect_scaling_is_colocated_and_at_the_bound() -> None:
    """160 + 80 device-seconds on 16 devices: 15 s together; apart 8 give 20 s, and 4 are then enough for training."""
    decision = decided(problem({"rollout": scaling(160.0), "train": scaling(80.0)}))
    assert shape(decision.chosen) == [(("rollout", "train"), 16)]
    assert decision.chosen.period == decision.bound.seconds == decision.lower_bound == 15.0
    assert (decision.gap, decision.proven, decision.stopped_early) == (0.0, True, False)
    (other,) = decision.runners_up
    assert shape(other.candidate) == [(("rollout",), 8), (("train",), 4)]
    assert str(other.loss) == "slower by 33 %, with 4 devices fewer"
    assert alternative(decision, DecisionKind.PARTITION).reason == str(other.loss)
    fewer = alternative(decision, DecisionKind.FEWER, "rollout", "train")
    assert fewer.other is not None
    assert shape(fewer.other) == [(("rollout", "train"), 8)]
    assert fewer.reason == "slower by 100 %, with 8 devices fewer"


def test_a_fixed_overhead_splits_the_stages() -> None:
    """Each has 10 s that no device takes away: together at least 20 s, apart on 8 each 10 + 80 / 8."""
    tables = {"rollout": scaling(80.0, overhead=10.0), "train": scaling(80.0, overhead=10.0)}
    decision = decided(problem(tables))
    assert shape(decision.chosen) == [(("rollout",), 8), (("train",), 8)]
    assert decision.chosen.period == 20.0
    together = alternative(decision, DecisionKind.COLOCATED)
    assert together.other is not None
    assert together.other.period == 30.0
    assert together.loss is not None
    assert (together.loss.seconds, together.loss.share, together.loss.more_devices) == (10.0, 0.5, 0)


def test_what_does_not_fit_is_said_with_both_numbers() -> None:
    """30 GiB stay of either, and training peaks at 50 GiB: 80 GiB of 64 when they share."""
    tables = {
        "rollout": scaling(160.0, 30 * GIB, 40 * GIB),
        "train": scaling(80.0, 30 * GIB, 50 * GIB),
    }
    decision = decided(problem(tables, limit=64 * GIB))
    assert shape(decision.chosen) == [(("rollout",), 8), (("train",), 4)]
    assert not decision.runners_up
    together = alternative(decision, DecisionKind.COLOCATED)
    assert together.other is None
    assert together.reason == (
        "`rollout`, `train` together on 16 devices does not fit: at least 80.00 GiB a device while `train` runs, "
        "and a device has 64.00 GiB"
    )
    assert alternative(decision, DecisionKind.PARTITION).misfit == together.misfit


def test_the_other_layout_of_a_stage() -> None:
    """Layout b of training is 25 % slower there; everything else is chosen again."""
    tables = {"rollout": scaling(160.0), "train": [*scaling(80.0), *scaling(100.0, cls="b")]}
    decision = decided(problem(tables))
    other = alternative(decision, DecisionKind.LAYOUT, "train")
    assert other.other is not None
    assert other.other.option_of("train").layout_class == "b"
    assert other.other.period == 260.0 / 16
    only = alternative(decision, DecisionKind.LAYOUT, "rollout")
    assert (only.other, only.misfit, only.reason) == (None, None, "nothing else is legal")


def test_a_layout_that_is_too_large_is_the_reason() -> None:
    tables = {"train": [*scaling(80.0), *scaling(40.0, 30, 31, cls="b")]}
    other = alternative(decided(problem(tables)), DecisionKind.LAYOUT, "train")
    assert other.other is None
    assert other.reason == "`train` on 16 devices does not fit: at least 31 bytes a device, and a device has 20 bytes"


def test_nothing_fits() -> None:
    found = search(problem({"rollout": scaling(1.0), "train": scaling(1.0, 30, 40)}))
    assert isinstance(found, Refusal)
    assert [(m.stage, m.needed_bytes, m.limit_bytes) for m in found.misfits] == [("train", 40, LIMIT)]
    assert found.message == "`train` on 16 devices does not fit: at least 40 bytes a device, and a device has 20 bytes"


def test_pinned_together_they_do_not_fit() -> None:
    pins = Pins(together=(("rollout", "train"),))
    found = search(problem({"rollout": scaling(1.0, 9, 10), "train": scaling(1.0, 9, 14)}, pins=pins))
    assert isinstance(found, Refusal)
    assert [(m.stages, m.needed_bytes) for m in found.misfits] == [(("rollout", "train"), 23)]


def test_pinned_pools_that_find_no_room() -> None:
    pins = Pins(pools=(PoolPin("a", ("rollout",), 12), PoolPin("b", ("train",), 8)))
    found = search(problem({"rollout": scaling(1.0), "train": scaling(1.0)}, pins=pins))
    assert isinstance(found, Refusal)
    assert found.message == "2 pools find no room on the devices there are: 16 of `npu`"
    contradiction = Pins(together=(("rollout", "train"),), apart=(("rollout", "train"),))
    found = search(problem({"rollout": scaling(1.0), "train": scaling(1.0)}, pins=contradiction))
    assert isinstance(found, Refusal)
    assert found.message == "the pins leave no way to put the stages on pools"


def test_hosts_decide_where_pools_lie() -> None:
    """Hosts of 4, 8 and 4: a pool of 8 lies on its own host, or on the two others' devices without a gap."""
    pins = Pins(apart=(("rollout", "train"),))
    decision = decided(problem({"rollout": scaling(80.0), "train": scaling(40.0)}, (4, 8, 4), pins=pins))
    sizes = {pool.devices for pool in decision.chosen.pools}
    assert sizes == {4, 8}
    assert decision.chosen.period == 10.0


@pytest.mark.parametrize(
    "wrong",
    [
        {"pins": Pins(together=(("rollout", "nowhere"),))},
        {"pins": Pins(layouts={"nowhere": lambda option: True})},
        {"pins": Pins(pools=(PoolPin("a", ("rollout",)), PoolPin("b", ("rollout",))))},
        {"pins": Pins(pools=(PoolPin("a"), PoolPin("a")))},
        {"pins": Pins(pools=(PoolPin("a", device_type="tpu"),))},
    ],
)
def test_pins_that_name_nothing_are_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=r"nowhere|twice|tpu"):
        problem({"rollout": scaling(1.0)}, **wrong)


# --- properties -------------------------------------------------------------------------------------------------------

STAGES = ("s0", "s1", "s2")
three = st.tuples(*(options(SIZES, most=6) for _ in STAGES))


def random_problem(tables: Sequence[list[StageOption]], moves: Moves, **more: object) -> Problem:
    return problem(dict(zip(STAGES, tables, strict=True)), reshard=lambda *key: moves[key], **more)


@settings(max_examples=40, derandomize=True, deadline=None)
@given(three, reshards(STAGES))
def test_the_alternatives_are_the_best_there_are(tables: tuple[list[StageOption], ...], moves: Moves) -> None:
    """Each against everything tried with that decision changed."""
    found = search(random_problem(tables, moves))
    if not isinstance(found, Decision):
        return
    stages = list(STAGES)
    mine = tuple(tuple(stages.index(s) for s in pool.stages) for pool in found.chosen.pools)

    def best(tables: Sequence[list[StageOption]], allowed: object = None) -> float:
        rule = allowed or (lambda partition, chosen: True)
        return best_period(tables, pool_sizes(HOSTS), HOSTS, moves, resident, rule)  # type: ignore[arg-type]

    for a in found.alternatives:
        period = math.inf if a.other is None else a.other.period
        if a.kind is DecisionKind.PARTITION:
            assert period == best(tables, lambda partition, chosen: partition != mine)
        elif a.kind is DecisionKind.COLOCATED:
            assert period == best(tables, lambda partition, chosen: len(partition) == 1)
        elif a.kind is DecisionKind.DISAGGREGATED:
            assert period == best(tables, lambda partition, chosen: len(partition) == 3)
        elif a.kind is DecisionKind.LAYOUT:
            banned = found.chosen.option_of(a.subject[0]).layout_class
            kept = [
                [o for o in some if s != a.subject[0] or o.layout_class != banned]
                for s, some in zip(STAGES, tables, strict=True)
            ]
            assert period == best(kept)
        else:
            block = tuple(stages.index(s) for s in a.subject)
            size = found.chosen.pool_of(a.subject[0]).devices
            smaller = a.kind is DecisionKind.FEWER

            def keeps(
                partition: tuple[tuple[int, ...], ...],
                chosen: tuple[int, ...],
                block: tuple[int, ...] = block,
                size: int = size,
                smaller: bool = smaller,
            ) -> bool:
                n = dict(zip(partition, chosen, strict=True)).get(block)
                return n is not None and (n < size if smaller else n > size)

            assert period == best(tables, keeps)
        assert period >= found.chosen.period
        assert a.reason
    partitions = [c.partition for c in (found.chosen, *(r.candidate for r in found.runners_up))]
    assert len(set(partitions)) == len(partitions), "a plan twice"
    periods = [found.chosen.period, *(r.candidate.period for r in found.runners_up)]
    assert periods == sorted(periods)
    again = search(random_problem(tables, moves))
    assert isinstance(again, Decision)
    assert repr(again) == repr(found)


@settings(max_examples=40, derandomize=True, deadline=None)
@given(three, reshards(STAGES))
def test_the_runners_up_are_the_best_of_each_partition(tables: tuple[list[StageOption], ...], moves: Moves) -> None:
    found = search(random_problem(tables, moves, top=10, alternatives=False))
    if isinstance(found, Decision):
        for candidate in (found.chosen, *(r.candidate for r in found.runners_up)):
            blocks = tuple(part.stages for part in candidate.partition)
            expected = best_period(
                tables,
                pool_sizes(HOSTS),
                HOSTS,
                moves,
                resident,
                lambda partition, chosen, blocks=blocks: partition == blocks,
            )
            assert candidate.period == expected
            assert candidate.period == max(pool.plan.seconds for pool in candidate.pools)


@settings(max_examples=60, derandomize=True, deadline=None)
@given(three)
def test_bounds_hold_for_every_placement(tables: tuple[list[StageOption], ...]) -> None:
    made = {stage: [StageTable.of(some, LIMIT)] for stage, some in zip(STAGES, tables, strict=True)}
    none = {(a, x, b, y): 0.0 for a in STAGES for b in STAGES for x in "ab" for y in "ab"}
    best = best_period(tables, pool_sizes(HOSTS), HOSTS, none, resident)
    bound = lower_bound(made, [16])
    assert bound.seconds <= best * (1 + 1e-12)
    assert bound.seconds == max(bound.slowest_seconds, bound.area_seconds)


def test_the_gap() -> None:
    assert gap(12.0, 10.0) == pytest.approx(0.2)
    assert gap(10.0, 10.0000000001) == 0.0
    assert gap(0.0, 0.0) == 0.0
    assert gap(1.0, 0.0) == math.inf


# --- refinement and time ----------------------------------------------------------------------------------------------


def test_refined_periods_decide() -> None:
    """The simulation finds that sharing costs twice what the tables say."""
    asked: list[int] = []

    def simulate(candidates: Sequence[Candidate]) -> list[float]:
        asked.append(len(candidates))
        return [c.model_period * (2.0 if len(c.pools) == 1 else 1.1) for c in candidates]

    tables = {"rollout": scaling(160.0), "train": scaling(80.0)}
    decision = decided(problem(tables, refine=simulate))
    assert shape(decision.chosen) == [(("rollout",), 8), (("train",), 4)]
    assert decision.chosen.period == pytest.approx(22.0)
    assert decision.chosen.model_period == 20.0
    assert decision.lower_bound == 15.0
    assert decision.gap == pytest.approx(22.0 / 15.0 - 1.0)
    assert not decision.proven
    assert decision.effort.refined == sum(asked)


def test_refining_stops_within_the_tolerance() -> None:
    asked: list[Candidate] = []

    def simulate(candidates: Sequence[Candidate]) -> list[float]:
        asked.extend(candidates)
        return [c.model_period * 1.01 for c in candidates]

    tables = {f"s{i}": scaling(100.0 + i) for i in range(4)}
    near = decided(problem(tables, refine=simulate, tolerance=0.02))
    assert len(asked) == 8, "the first batch holds one within 2 % of the bound"
    assert near.gap <= 0.02
    asked.clear()
    decided(problem(tables, refine=simulate))
    assert len(asked) >= 15, "all partitions, and neighbours"
    assert len({c.identity for c in asked}) == len(asked), "no plan is simulated twice"


def test_every_candidate_refused() -> None:
    found = search(problem({"rollout": scaling(1.0)}, refine=lambda candidates: [math.inf] * len(candidates)))
    assert isinstance(found, Refusal)


def test_a_spent_time_limit_is_said_and_there_is_a_plan() -> None:
    ticks = iter(range(10**6))
    tables = {f"s{i}": scaling(10.0 * i + 10.0, overhead=1.0) for i in range(5)}
    short = decided(problem(tables, time_limit=3.0, clock=lambda: float(next(ticks))))
    whole = decided(problem(tables))
    assert short.stopped_early
    assert not short.proven
    assert not whole.stopped_early
    assert short.chosen.period >= whole.chosen.period
    assert short.lower_bound <= whole.chosen.period
    assert short.effort.partitions < whole.effort.partitions
