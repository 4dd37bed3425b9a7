"""The edge's own code under a fake clock: replicas, random durations, new weights, groups given up, several steps ahead.

Every decision below the edge is the protocol's; what is tested here is that the runtime's way of asking it keeps what
the rule promises, gives every prompt an end, and returns every credit.
"""

from __future__ import annotations

import random
from collections import Counter
from fractions import Fraction
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlflow.backends.ray_runtime.streams.sample_edge import SampleEdge
from rlflow.protocol.cursor import DataCursor
from rlflow.protocol.guarantees import guarantee
from rlflow.protocol.settings import Settings
from rlflow.protocol.trigger import Trigger


class Replica:
    """Samples at one token a tick, all at once; stops for new weights, or finishes what it has before (`drains`)."""

    def __init__(self, number: int, version: int) -> None:
        self.number, self.version, self.due = number, version, version
        self.left: dict[int, int] = {}
        self.position: dict[int, int] = {}
        self.begun: set[int] = set()
        self.finished: dict[int, set[int]] = {}
        self.births: dict[int, list[int]] = {}


class World:
    """Plays `edge` from `done` to `last`: ticks are the clock. `lengths(position, member)` in tokens."""

    def __init__(
        self, how: Settings, replicas: int, done: int, last: int, seed: int, drains: bool, cursor: Any = None
    ) -> None:
        early = how.rule == "in_order" and not how.trigger.carries
        self.edge = SampleEdge(how, replicas, done, last, early=early, cursor=cursor)
        self.how, self.last, self.drains = how, last, drains
        self.random = random.Random(seed)
        self.replicas = [Replica(number, done) for number in range(replicas)]
        self.train_s, self.load_s, self.reject = 3, 1, 0.0
        self.longest = 12
        self.ages: Counter[int] = Counter()
        self.trained: list[int] = []
        self.rejected: list[int] = []
        self.now, self.step, self.busy = 0, done, 0
        self.loads: list[tuple[int, int, int]] = []
        self.births: dict[int, int] = {}

    def length(self) -> int:
        return 1 + min(self.longest, int(self.random.lognormvariate(1.0, 1.0)))

    def play(self, until: int | None = None) -> None:
        ticks = 0
        while self.edge.trained_steps < (until or self.last):
            ticks += 1
            assert ticks < 20_000, f"nothing happens any more: {self.edge.describe()}"
            for replica in self.replicas:
                self._orders(replica)
                self._sample(replica)
            self._train()
            self.edge.controller.check()
            self.now += 1

    def _orders(self, replica: Replica) -> None:
        found = self.edge.orders(replica.number)
        replica.due = max(replica.due, found.version)
        for ticket in found.tickets:
            for sample in ticket.samples:
                replica.left[sample] = self.length()
                replica.position[sample] = ticket.position
        for position in found.drop:
            gone = [id for id, place in replica.position.items() if place == position]
            for id in gone:
                replica.left.pop(id, None)
                replica.begun.discard(id)
                del replica.position[id]
        if replica.due > replica.version and not (self.drains and replica.left):
            if replica.begun:
                self.edge.paused(dict.fromkeys(replica.begun, 1), replica.version)
                replica.begun.clear()
            if self.random.random() < 0.7:  # loading takes a while
                replica.version = replica.due
                self.edge.loaded(replica.number, replica.version)

    def _sample(self, replica: Replica) -> None:
        if replica.due > replica.version and not self.drains:
            return
        new = [id for id in replica.left if id not in replica.begun]
        self.edge.began(new, replica.version)
        replica.begun.update(new)
        for id in new:
            place = replica.position[id]
            self.births[place] = min(self.births.get(place, replica.version), replica.version)
        ended = []
        for id in list(replica.left):
            replica.left[id] -= 1
            if not replica.left[id]:
                ended.append(id)
                del replica.left[id]
                replica.begun.discard(id)
        if ended:
            self.edge.finished(ended)
        if replica.left and self.random.random() < self.reject:
            position = replica.position[self.random.choice(list(replica.left))]
            self.rejected.append(position)
            self.edge.reject(position, "failed")

    def _train(self) -> None:
        if self.busy:
            self.busy -= 1
            if not self.busy:
                self.edge.trained(self.step)
            return
        if self.step >= self.last:
            return
        self.edge.want(self.step + 1)
        self.edge.ask(self.step + 1)
        parts = [self.edge.positions(self.step + 1, replica.number) for replica in self.replicas]
        if parts[0] is None:
            return
        self.step += 1
        self.busy = self.random.randint(1, self.train_s)
        positions = [position for part in parts for position in part or []]
        batch = self.how.batch // self.how.group
        assert self.how.trigger.least(self.how.batch, self.how.group) <= len(positions) * self.how.group
        assert len(positions) <= batch
        self.trained += positions
        for position in positions:
            self.ages[self.step - 1 - self.births[position]] += 1


CASES = st.fixed_dictionaries(
    {
        "rule": st.sampled_from(["in_order", "slack_edf", "wait", "evict", "count"]),
        "bound": st.integers(0, 3),
        "groups": st.integers(1, 5),
        "group": st.integers(1, 3),
        "share": st.sampled_from([Fraction(1), Fraction(3, 4), Fraction(1, 2)]),
        "carry": st.sampled_from(["partial", "finish"]),
        "burst": st.integers(1, 4),
        "replicas": st.integers(1, 3),
        "reject": st.sampled_from([0.0, 0.1]),
        "seed": st.integers(0, 1 << 20),
    }
)


@settings(max_examples=80, deadline=None)
@given(case=CASES)
def test_no_sample_is_older_than_promised_and_every_prompt_ends_once(case: dict[str, Any]) -> None:
    trigger = Trigger(case["share"], case["carry"])
    sizes = {"batch": case["groups"] * case["group"], "group": case["group"]}
    burst = min(case["burst"], case["bound"] + 1)  # more is never live
    how = Settings(case["rule"], case["bound"], burst=burst, trigger=trigger, **sizes)
    world = World(how, case["replicas"], 0, 12, case["seed"], drains=case["carry"] == "finish")
    world.reject = case["reject"]
    world.play()
    promised = guarantee(case["rule"], bound=case["bound"], burst=burst, trigger=trigger, **sizes)
    if promised.worst_age is not None:
        assert max(world.ages) <= promised.worst_age
    cursor, tally = world.edge.cursor, world.edge.controller.tally
    assert len(set(world.trained)) == len(world.trained), "each prompt at most once"
    assert cursor.ends["trained"] == len(world.trained)
    assert cursor.ends["failed"] == len(world.rejected) == len(set(world.rejected))
    ended = sum(cursor.ends.values())
    assert ended + len(cursor.out) == cursor.next_new, "every prompt that was handed out is known"
    assert bool(tally.aborted) <= (case["rule"] == "evict")
    if case["rule"] != "evict" and not case["reject"]:
        assert tally.admitted == ended * case["group"] + len(cursor.out) * case["group"]


@settings(max_examples=20, deadline=None)
@given(case=CASES, stop=st.integers(1, 10))
def test_a_resumed_run_trains_on_what_was_left_first(case: dict[str, Any], stop: int) -> None:
    """Killed at any moment after the checkpoint of step `stop`: what was under way then comes again, before new ones."""
    how = Settings(
        case["rule"],
        case["bound"],
        case["groups"] * case["group"],
        case["group"],
        trigger=Trigger(case["share"], case["carry"]),
    )
    drains = case["carry"] == "finish"
    world = World(how, case["replicas"], 0, 12, case["seed"], drains)
    world.play(until=stop)
    saved = world.edge.cursor_json()
    before = [p for p in world.trained if p not in saved["again"]]
    again = World(how, case["replicas"], stop, 12, case["seed"] + 1, drains, DataCursor.from_json(saved))
    first = sorted(t.position for r in again.edge._replicas for t in r.tickets)
    assert first == sorted({*saved["again"], *first})[: len(first)], "the oldest prompts first"
    again.play()
    assert not set(before) & set(again.trained), "nothing is trained on twice"
    whole = {*before, *again.trained, *again.edge.cursor.out}
    if how.rule != "evict":
        assert whole == set(range(again.edge.cursor.next_new)), "nothing is skipped"


def pinned(rule: Any, bound: int, seed: int, **options: Any) -> World:
    """Short samples and few very long ones: what a cohort larger than a batch does."""
    how = Settings(rule, bound, 4, 1, **options)
    world = World(how, 1, 0, 30, seed, drains=False)
    world.train_s, world.longest = 1, 60
    world.length = lambda: 40 if world.random.random() < 0.15 else 1  # type: ignore[method-assign]
    world.play()
    return world


def test_wait_and_count_do_exceed_the_bound() -> None:
    """The rules whose names promise less keep less, through the same code; `slack_edf` does not (T12, T14, T15)."""
    waits = [max(pinned("wait", 3, seed).ages) for seed in range(8)]
    assert 3 < max(waits) <= 5, "max(s, 2s - 1)"
    assert max(max(pinned("count", 1, seed).ages) for seed in range(4)) > 3
    assert max(max(pinned("slack_edf", 3, seed).ages) for seed in range(8)) == 3
    assert max(max(pinned("evict", 1, seed).ages) for seed in range(4)) == 1


def test_a_trigger_with_carry_reaches_the_age_that_is_promised() -> None:
    ages = [max(pinned("slack_edf", 1, seed, trigger=Trigger(Fraction(3, 4), "partial")).ages) for seed in range(8)]
    assert max(ages) == 2, "ceil((1 + 1) / 75%) - 1"


def test_replicas_get_even_shares() -> None:
    edge = SampleEdge(Settings("slack_edf", 1, 12, 2), 3, 0, 5, early=False)
    assert [len(edge.orders(replica).tickets) for replica in range(3)] == [4, 4, 4]
    assert not edge.has_orders(0), "told once"


def test_nothing_more_is_admitted_than_the_run_can_train_on() -> None:
    edge = SampleEdge(Settings("slack_edf", 3, 4, 1), 1, 7, 9, early=False)
    assert len(edge.orders(0).tickets) == 8, "two steps are left, and four would be allowed"


def test_a_prompt_that_was_dropped_before_it_was_told_is_not_told() -> None:
    edge = SampleEdge(Settings("slack_edf", 0, 2, 1), 1, 0, 3, early=False)
    edge.reject(0, "too long")
    orders = edge.orders(0)
    assert [ticket.position for ticket in orders.tickets] == [1, 2]
    assert not orders.drop
    assert edge.cursor.ends == {"too long": 1}


@pytest.mark.parametrize("early", [False, True])
def test_a_step_is_fixed_when_training_wants_it_unless_order_says_it_before(early: bool) -> None:
    edge = SampleEdge(Settings("in_order", 1, 2, 1), 1, 0, 3, early=early)
    samples = [id for ticket in edge.orders(0).tickets for id in ticket.samples]
    edge.began(samples, 0)
    edge.finished(samples)
    edge.ask(1)
    assert (edge.positions(1, 0) is not None) is early
    edge.want(1)
    assert edge.positions(1, 0) == [0, 1]
    assert edge.positions(2, 0) is None
