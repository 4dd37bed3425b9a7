"""Ages, liveness and exactly-once of every rule in random worlds, and exact times against recurrences."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlflow.protocol.game import Game
from rlflow.protocol.guarantees import guarantee
from rlflow.protocol.prices import least_period
from rlflow.protocol.samples import Phase
from rlflow.protocol.saved import restore, save
from rlflow.protocol.settings import Settings
from rlflow.protocol.trigger import Trigger
from rlflow.protocol.world import Change, Report, World


def table(seed: int, choices: list[Any]) -> Any:
    """A fixed random choice for every number, the same in any order of asking."""
    return lambda *keys: random.Random(f"{seed} {keys}").choice(choices)


@st.composite
def worlds(draw: st.DrawFn, *, data: bool = False) -> World:
    """Slow and fast samples, slots that come and go, failures, filters, slow syncs, in-flight updates."""
    seed = draw(st.integers(0, 10**6))
    fails = draw(st.sampled_from([(None,), (None, None, None, 2), (None, 0, 5)]))
    fail = table(seed + 1, list(fails))
    filters = table(seed + 2, draw(st.sampled_from([[False], [False, False, True]])))
    slot_changes = draw(st.lists(st.tuples(st.integers(0, 60), st.integers(1, 6)), max_size=3))
    return World(
        length=table(seed, draw(st.sampled_from([[1, 2, 3], [0, 1, 1, 1, 40], [3, 5, 30], [1, 100]]))),
        train=table(seed + 3, draw(st.sampled_from([[0], [5], [1, 7]]))),
        sync=table(seed + 4, draw(st.sampled_from([[0], [2], [0, 9]]))),
        slots=draw(st.sampled_from([None, 1, 3, 8])),
        slot_changes=tuple(sorted(slot_changes)),
        groups=draw(st.integers(0, 30)) if data else None,
        fails=lambda sample, attempt: fail(sample, attempt) if attempt < 2 else None,
        on_failure=draw(st.sampled_from(["retry", "replace", "lose", "reject"])),
        filtered=filters,
        waits_for_sync=draw(st.booleans()),
        colocated=draw(st.booleans()),
        switch=draw(st.booleans()),
    )


triggers = st.sampled_from([100, 75, 50, 34, 20]).map(Trigger.percent) | st.sampled_from(
    [Trigger(Fraction(1, 2), "finish"), Trigger(Fraction(3, 4), "finish")]
)


@st.composite
def configurations(draw: st.DrawFn, rules: list[str], *, same_batch: bool = False) -> Settings:
    group = draw(st.integers(1, 3))
    bound = draw(st.integers(0, 3))
    trigger = (
        Trigger(draw(st.sampled_from([Fraction(1, 2), Fraction(1, 5)])), same_batch=True)
        if same_batch
        else draw(triggers)
    )
    return Settings(
        draw(st.sampled_from(rules)),
        bound,
        group * draw(st.integers(1, 4)),
        group,
        draw(st.integers(1, bound + 1)),
        trigger,
        draw(st.booleans()),
    )


def promised(s: Settings) -> int | None:
    return guarantee(
        s.rule,
        bound=s.bound,
        batch=s.batch,
        group=s.group,
        burst=s.burst,
        trigger=s.trigger,
        oldest_first=s.oldest_first,
    ).worst_age


def audit(game: Game) -> None:
    """The credits add up, and no more samples are out than the window holds."""
    game.controller.check()
    assert game.controller.gate.free >= 0


def once(report: Report) -> None:
    ids = [sample.id for sample in report.samples]
    assert len(set(ids)) == len(ids)


def play(s: Settings, world: World, steps: int = 14) -> Report:
    report = Game(s, world, steps, watch=audit).run()
    assert report.deadlock is None
    once(report)
    assert len(report.published) == steps or world.groups is not None
    return report


@given(configurations(["in_order", "slack_edf"]), worlds())
@settings(max_examples=60, deadline=None)
def test_in_order_and_slack_edf_never_exceed_the_promise(s: Settings, world: World) -> None:
    worst = promised(s)
    assert worst is not None
    assert play(s, world).worst_age <= worst


@given(configurations(["in_order", "slack_edf"], same_batch=True), worlds())
@settings(max_examples=30, deadline=None)
def test_starting_early_keeps_the_bound(s: Settings, world: World) -> None:
    report = play(s, world)
    assert report.worst_age <= s.bound == promised(s)


@given(configurations(["wait", "evict"]), worlds())
@settings(max_examples=60, deadline=None)
def test_wait_and_evict_never_exceed_the_promise(s: Settings, world: World) -> None:
    worst = promised(s)
    assert worst is not None
    assert play(s, world).worst_age <= worst


@given(configurations(["in_order", "slack_edf", "wait", "count"]), worlds(data=True))
@settings(max_examples=40, deadline=None)
def test_all_data_is_trained_once_or_rejected(s: Settings, world: World) -> None:
    """No starvation: when the data ends everything that was admitted has ended, none of it for its age."""
    report = play(s, world, steps=1000)
    tally = report.tally
    assert tally.consumed + tally.rejected.total() == tally.admitted
    assert not tally.aborted
    assert tally.consumed == len(report.samples)
    if (
        world.groups
        and world.fails(0, 0) is None
        and not any(map(world.filtered, range(world.groups)))
        and not tally.rejected
    ):
        assert tally.consumed == world.groups * s.group
    worst = promised(s)
    assert worst is None or report.worst_age <= worst


@given(
    configurations(["in_order", "slack_edf"]),
    worlds(),
    st.lists(st.tuples(st.integers(0, 8), st.booleans(), st.integers(0, 3)), max_size=4),
)
@settings(max_examples=40, deadline=None)
def test_changing_bound_and_batch(s: Settings, world: World, moves: list[tuple[int, bool, int]]) -> None:
    """Batches change at the first step that no sample is due at; each sample keeps the bound it was admitted under."""
    changes = tuple(
        Change(version, bound=value) if is_bound else Change(version, batch=(value + 1) * s.group)
        for version, is_bound, value in moves
    )
    s = replace(s, burst=1)
    deadlines: dict[int, int] = {}

    def watch(game: Game) -> None:
        game.controller.check()
        deadlines.update((unit.id, unit.deadline) for unit in game.controller.rule.units.values())

    report = Game(s, replace(world, changes=changes), 16, watch=watch).run()
    assert report.deadlock is None
    once(report)
    assert all(sample.step <= deadlines[sample.group] for sample in report.samples)


def test_shrinking_the_batch_at_once_makes_samples_late_once() -> None:
    s = Settings("slack_edf", 1, 8)
    world = World(lambda sample: 1, train=lambda step: 3, changes=(Change(4, batch=2, from_step=4),))
    report = Game(s, world, 20).run()
    late = sorted({sample.birth for sample in report.samples if sample.age > 1})
    assert report.deadlock is None
    assert late
    assert set(late) <= {3, 4}
    assert not [sample for sample in report.samples if sample.age > 1 and sample.step > 12]


# --- exact times ------------------------------------------------------------------------------------------------------


@given(
    st.integers(0, 3),
    st.integers(1, 4),
    st.lists(st.integers(1, 30), min_size=1, max_size=60),
    st.integers(0, 9),
    st.integers(0, 4),
)
@settings(max_examples=60, deadline=None)
def test_in_order_without_slots_is_the_recurrence(
    bound: int, batch: int, lengths: list[int], train: int, sync: int
) -> None:
    """Sample n enters when version ceil(n / B) - bound - 1 is published; the graph's equations, evaluated by hand."""
    steps = 12

    def length(sample: int) -> int:
        return lengths[sample % len(lengths)]

    report = Game(
        Settings("in_order", bound, batch), World(length, train=lambda s: train, sync=lambda s: sync), steps
    ).run()
    published = [0]
    for step in range(steps):
        entered = published[max(0, step - bound)]
        ready = max(entered + length(sample) for sample in range(step * batch, (step + 1) * batch))
        published.append(max(published[step], ready) + train + sync)
    assert report.published == published[1:]
    assert [sample.age for sample in report.samples] == [min(sample.step, bound) for sample in report.samples]


@given(
    st.integers(0, 4),
    st.integers(1, 3),
    st.integers(1, 200),
    st.integers(1, 9),
    st.integers(0, 5),
    st.booleans(),
    st.data(),
)
@settings(max_examples=40, deadline=None)
def test_prices_are_lower_bounds(
    bound: int, batch: int, longest: int, train: int, sync: int, waits: bool, data: Any
) -> None:
    """One straggler in every burst's cohort: no run is faster, and a long straggler costs exactly the price."""
    burst = data.draw(st.integers(1, bound + 1))
    period = least_period(longest, train, sync, worst_age=bound, burst=burst, waits_for_sync=waits)
    w = burst * -(-(bound + 1) // burst)
    steps = w * 12

    firsts: dict[int, int] = {}

    def length(sample: int) -> int:
        version = game.controller.samples[sample].version
        return longest if firsts.setdefault(version, sample) == sample else 1

    game = Game(
        Settings("slack_edf", bound, batch, burst=burst),
        World(length, train=lambda s: train, sync=lambda s: sync, waits_for_sync=waits),
        steps + 4 * w,
    )
    report = game.run()
    times = [0, *report.published]
    # From one burst to another whole cycles later, past the start.
    measured = Fraction(times[steps + 2 * w] - times[2 * w]) / steps
    assert report.worst_age <= bound
    assert measured >= period
    if longest > (bound + 2) * (train + sync + 1) and (waits or sync <= train):
        assert measured == period


# --- pinned -----------------------------------------------------------------------------------------------------------


def ages(rule: str, bound: int, length: Any, *, train: int = 10, batch: int = 4, steps: int = 40, **more: Any) -> int:
    report = Game(Settings(rule, bound, batch, **more), World(length, train=lambda step: train), steps).run()  # type: ignore[arg-type]
    assert report.deadlock is None
    return report.worst_age


@pytest.mark.parametrize(("bound", "oldest", "arrival"), [(0, 0, 0), (1, 1, 2), (2, 3, 4), (3, 5, 6), (4, 7, 8)])
def test_wait_exceeds_the_bound_after_the_burst_of_the_start(bound: int, oldest: int, arrival: int) -> None:
    """Cohort 0: B short and bound * B long samples; all else short."""
    length = lambda sample: 1000 if 4 <= sample < 4 + bound * 4 else 1  # noqa: E731
    assert ages("wait", bound, length) == oldest
    assert ages("wait", bound, length, oldest_first=False) == arrival
    for rule in ("in_order", "slack_edf", "evict"):
        assert ages(rule, bound, length) <= bound


def test_count_has_no_bound_in_the_bound() -> None:
    """One sample as long as ten steps, at bound 1."""
    length = lambda sample: 100 if sample == 0 else 1  # noqa: E731
    assert 9 <= ages("count", 1, length) <= 11
    assert ages("in_order", 1, length) == 1


@given(st.integers(0, 3), st.integers(1, 4), st.integers(1, 300), st.integers(1, 20), st.integers(0, 10**6))
@settings(max_examples=25, deadline=None)
def test_count_is_bounded_by_the_durations(bound: int, batch: int, longest: int, step: int, seed: int) -> None:
    length = table(seed, [1, 2, longest])
    worst = guarantee("count", bound=bound, batch=batch, longest=longest, shortest_step=step).worst_age
    assert worst is not None
    assert ages("count", bound, length, train=step, batch=batch) <= worst


@pytest.mark.parametrize(("bound", "percent", "worst"), [(0, 50, 1), (1, 75, 2), (1, 50, 3)])
def test_carry_over_reaches_its_bound(bound: int, percent: int, worst: int) -> None:
    length = lambda sample: 1 if sample % 2 else 100  # noqa: E731
    for rule in ("in_order", "slack_edf"):
        assert ages(rule, bound, length, trigger=Trigger.percent(percent)) == worst
    assert ages(rule, bound, length) <= bound


@pytest.mark.parametrize("bound", [0, 1, 2, 3])
def test_a_burst_above_the_bound_and_one_stops(bound: int) -> None:
    world = World(lambda sample: 3)
    report = Game(Settings("slack_edf", bound, 4, burst=bound + 2), world, 20).run()
    assert report.deadlock == f"step {bound + 1} waits for 4 more finished groups of 4"
    assert len(report.published) == bound + 1
    assert Game(Settings("slack_edf", bound, 4, burst=bound + 1), world, 20).run().deadlock is None


def test_bound_0_starts_nothing_before_the_publication() -> None:
    starts: dict[int, Any] = {}

    def watch(game: Game) -> None:
        for id, sample in game.controller.samples.items():
            if sample.phase is Phase.RUNNING:
                starts.setdefault(id, game.now)

    world = World(lambda sample: 1 + sample % 3, train=lambda step: 5, sync=lambda step: 2)
    report = Game(Settings("in_order", 0, 4), world, 6, watch=watch).run()
    assert report.worst_age == 0
    for sample in report.samples:
        assert sample.step == 0 or starts[sample.id] >= report.published[sample.step - 1]


def test_slow_prompts_are_trained_once_an_epoch() -> None:
    """Bound 1, fifteen prompts of one step and one of four; sixteen prompts, four to a step, three epochs."""
    length = lambda sample: 40 if sample % 16 == 5 else 10  # noqa: E731
    for rule in ("in_order", "slack_edf"):
        world = World(length, train=lambda step: 10, groups=48)
        report = Game(Settings(rule, 1, 4), world, 100).run()
        assert sorted(sample.id % 16 for sample in report.samples) == sorted(list(range(16)) * 3)
    dropped = Game(Settings("evict", 1, 4), world, 100).run()
    assert {sample.id % 16 for sample in dropped.samples} == set(range(16)) - {5}


def test_items_over_the_bound_are_filtered_and_counted_when_the_producer_stops() -> None:
    world = World(lambda sample: 1 if sample < 6 else 35, train=lambda step: 10, groups=12)
    report = Game(Settings("evict", 2, 2), world, 100).run()
    assert report.deadlock is None
    assert report.tally.consumed + report.tally.aborted["too old"] == 12
    assert report.worst_age <= 2


@pytest.mark.timeout(30)
def test_evict_does_not_admit_and_drop_for_ever_while_a_sync_is_late() -> None:
    """Steps run ahead of the publication: what would be too old at once must wait for the next version."""
    world = World(lambda sample: 1 + sample % 2, train=lambda step: 1, sync=lambda step: 50, waits_for_sync=False)
    report = Game(Settings("evict", 0, 2, trigger=Trigger.percent(50)), world, 6, watch=audit).run()
    assert report.deadlock is None
    assert (report.worst_age, len(report.published)) == (0, 6)
    assert report.tally.aborted["too old"] <= 12


def test_births_are_the_versions_at_the_first_token() -> None:
    """Seen from outside: the version published when a sample was first seen running."""
    births: dict[int, int] = {}
    since: dict[int, Any] = {}

    def watch(game: Game) -> None:
        for id, sample in game.controller.samples.items():
            # A publication at the very time of the start comes before the first token.
            if sample.phase is not Phase.ADMITTED and since.setdefault(id, game.now) == game.now:
                births[id] = game.controller.gate.version

    world = World(table(3, [2, 9, 30]), train=lambda step: 7, slots=5, switch=True)
    report = Game(Settings("slack_edf", 2, 4, trigger=Trigger.percent(50)), world, 30, watch=watch).run()
    assert {sample.id: sample.birth for sample in report.samples} == {s.id: births[s.id] for s in report.samples}
    assert [sample.age for sample in report.samples] == [sample.step - births[sample.id] for sample in report.samples]


# --- saving and determinism -------------------------------------------------------------------------------------------


@given(configurations(["in_order", "slack_edf", "wait", "evict", "count"]), worlds(), st.integers(1, 5))
@settings(max_examples=20, deadline=None)
def test_a_saved_controller_goes_on_the_same(s: Settings, world: World, every: int) -> None:
    whole = Game(s, world, 8).run()
    calls = 0

    def watch(game: Game) -> None:
        nonlocal calls
        calls += 1
        if calls % every == 0:
            game.controller = restore(json.loads(json.dumps(save(game.controller))))

    cut = Game(s, world, 8, watch=watch).run()
    assert (cut.samples, cut.published, cut.tally) == (whole.samples, whole.published, whole.tally)


@pytest.mark.parametrize("version", [0, 7])
def test_a_run_can_start_at_any_version(version: int) -> None:
    report = Game(Settings("in_order", 2, 4), World(lambda sample: 3), 5, version=version, watch=audit).run()
    assert [sample.step for sample in report.samples] == [version + k // 4 for k in range(20)]
    assert report.worst_age == 2


def test_the_result_does_not_depend_on_the_hash_seed() -> None:
    program = (
        "import json; from rlflow.protocol.game import Game; from rlflow.protocol.saved import save\n"
        "from rlflow.protocol.settings import Settings; from rlflow.protocol.world import World\n"
        "g = Game(Settings('evict', 1, 4), World(lambda i: 1 + i * 7 % 23, slots=5, train=lambda s: 4,\n"
        "    filtered=lambda g: g % 5 == 0), 30); r = g.run(); print(r.samples, json.dumps(save(g.controller)))"
    )
    texts = {
        subprocess.run(
            [sys.executable, "-c", program],
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    }
    assert len(texts) == 1
    assert len(texts.pop()) > 1000


def test_the_package_needs_the_standard_library_only() -> None:
    """Nothing else of rlflow but its way of making values, and nothing installed."""
    program = (
        "import sys, pkgutil, importlib, rlflow.values\n"
        "before = set(sys.modules)\n"
        "import rlflow.protocol as p\n"
        "for m in pkgutil.iter_modules(p.__path__): importlib.import_module('rlflow.protocol.' + m.name)\n"
        "new = {n for n in set(sys.modules) - before if n.split('.')[0] not in sys.stdlib_module_names}\n"
        "print(len(new), sorted(n for n in new if not n.startswith('rlflow.protocol')))"
    )
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[3])}
    out = subprocess.run([sys.executable, "-S", "-c", program], capture_output=True, text=True, env=env)
    assert out.returncode == 0, out.stderr
    count, others = out.stdout.split(" ", 1)
    assert int(count) > 20
    assert others.strip() == "[]"
