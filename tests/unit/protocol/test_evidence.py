"""The published comparison of admission rules, in shape: a small engine with long-tailed lengths and limited slots."""

from __future__ import annotations

import random
from functools import cache
from typing import Any

import pytest

from rlflow.protocol.game import Game
from rlflow.protocol.settings import Settings
from rlflow.protocol.world import Report, World

BATCH, SLOTS, STEPS = 64, 128, 20


@cache
def length(sample: int) -> int:
    return min(276, 1 + int(30 * random.Random(f"{sample}").lognormvariate(0, 0.9)))


@cache
def played(rule: Any, bound: int, burst: int = 1) -> Report:
    mean = sum(map(length, range(2000))) / 2000
    train = 0.8 * BATCH * mean * (8 + 15 * SLOTS / 1000) / SLOTS
    world = World(length, train=lambda step: train, step_time=lambda running: 8 + 15 * running / 1000, slots=SLOTS)
    report = Game(Settings(rule, bound, BATCH, burst=burst), world, STEPS).run()
    assert report.deadlock is None
    return report


def rate(report: Report) -> float:
    return len(report.samples) / float(report.now)


def test_without_staleness_all_rules_are_one() -> None:
    reports = [played(rule, 0) for rule in ("count", "in_order", "slack_edf", "wait", "evict")]
    assert {report.now for report in reports} == {reports[0].now}
    assert {report.worst_age for report in reports} == {0}


@pytest.mark.parametrize("bound", [1, 2])
def test_a_hard_bound_costs_throughput_or_data(bound: int) -> None:
    count, in_order, evict = (played(rule, bound) for rule in ("count", "in_order", "evict"))
    assert count.worst_age > bound == in_order.worst_age >= evict.worst_age
    assert rate(count) > rate(evict) > rate(in_order)
    if bound == 1:
        assert rate(count) > 1.6 * rate(in_order)
    assert evict.wasted_tokens > 0 == in_order.wasted_tokens
    # What is kept is short: the mean of the trained samples falls.
    mean = {name: sum(s.tokens for s in r.samples) / len(r.samples) for name, r in (("e", evict), ("o", in_order))}
    assert mean["e"] < 0.9 * mean["o"]


def test_bursts_make_samples_younger_at_the_same_bound() -> None:
    for bound in (2, 4):
        plain, burst, largest = (played("slack_edf", bound, g) for g in (1, bound, bound + 1))
        assert max(plain.worst_age, burst.worst_age, largest.worst_age) <= bound
        assert burst.mean_age < 0.85 * plain.mean_age
        assert largest.mean_age < burst.mean_age
        assert rate(burst) > rate(largest)
        assert rate(burst) > 0.95 * rate(plain)


def test_a_larger_bound_is_never_slower() -> None:
    for rule in ("count", "in_order", "slack_edf"):
        rates = [rate(played(rule, bound)) for bound in (0, 1, 2, 4)]
        assert rates == sorted(rates)
