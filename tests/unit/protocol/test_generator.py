"""The virtual clock against a loop over tokens."""

from __future__ import annotations

from fractions import Fraction

from hypothesis import given, settings
from hypothesis import strategies as st

from rlflow.protocol.generator import Generator


def step_time(running: int) -> Fraction:
    return Fraction(8) + Fraction(running, 2)


@given(st.lists(st.integers(0, 12), min_size=1, max_size=12))
@settings(max_examples=60, deadline=None)
def test_ends_equal_a_token_loop(lengths: list[int]) -> None:
    g = Generator(step_time)
    for id, length in enumerate(lengths):
        g.start(id, 0, length)
    ends: dict[int, Fraction] = {}
    while (end := g.next_end()) is not None:
        for id in g.advance(end):
            ends[id] = Fraction(end)
            assert g.stop(id) == lengths[id]
    now, left = Fraction(0), dict(enumerate(lengths))
    expected: dict[int, Fraction] = {}
    while left:
        expected |= {id: now for id, length in left.items() if not length}
        left = {id: length - 1 for id, length in left.items() if length}
        if left:
            now += step_time(len(left))
    # A token loop steps together; nobody leaves between two tokens, because all lengths are whole.
    assert ends == expected


@given(st.lists(st.tuples(st.integers(1, 9), st.integers(0, 40)), min_size=1, max_size=8), st.integers(1, 7))
@settings(max_examples=60, deadline=None)
def test_interruptions_lose_nothing_at_whole_tokens(samples: list[tuple[int, int]], pause: int) -> None:
    """With one time unit per token, a sample that runs for L units in all has L tokens, whenever it was interrupted."""
    g = Generator(lambda running: 1)
    ran = dict.fromkeys(range(len(samples)), 0)
    waiting, now = list(ran), 0
    ended: dict[int, int] = {}
    while waiting or len(g):
        for id in waiting:
            g.start(id, ran[id], samples[id][0])
        waiting = []
        next_end = g.next_end()
        target = now + pause if next_end is None else min(now + pause, next_end)
        before, now = now, int(target)
        running = g.running
        for id in g.advance(target):
            ended[id] = g.stop(id)
        for id in running:
            ran[id] += now - before
        if now % pause == 0:
            for id in g.running:
                assert g.stop(id) == ran[id]
                waiting.append(id)
    assert ended == {id: length for id, (length, _) in enumerate(samples)}
    assert ran == ended


def test_a_run_that_was_stopped_and_started_again_ends_once() -> None:
    g = Generator(lambda running: 1)
    g.start(0, 0, 5)
    g.advance(2)
    g.start(0, g.stop(0), 5)
    assert g.next_end() == 5
    assert g.advance(5) == [0]
    assert g.stop(0) == 5
    assert g.next_end() is None
