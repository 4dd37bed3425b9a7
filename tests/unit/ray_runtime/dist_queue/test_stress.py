"""A small game of benchmarks/queue_stress.py: random durations, readers that die, all of the real queues on Ray."""

from __future__ import annotations

import pytest

from benchmarks.queue_stress import Game

pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("ray_cluster")]


@pytest.mark.parametrize("rule", ["evict", "slack_edf, trigger 75 %"])
def test_nothing_is_lost_doubled_or_too_old(rule: str) -> None:
    game = Game(rule, seed=3, steps=10, deaths=0.2)
    game.play()
    assert sum(game.ages.values()) == len(game.trained) >= 10 * 5
