"""Which versions are sent: what the reader of the plan asks for, step by step, and no other."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlflow.backends.ray_runtime.deliveries import Reading, due
from rlflow.plan import Evaluation


def evaluation(every: int) -> Evaluation:
    return Evaluation(name="held", every=every, instructions=())


@pytest.mark.parametrize(("lag", "versions"), [(0, [1, 2, 3, 4]), (1, [1, 2, 3]), (2, [1, 2]), (4, []), (9, [])])
def test_a_step_reads_what_its_staleness_says(lag: int, versions: list[int]) -> None:
    assert Reading(True, lag, ()).versions(0, 5) == versions


def test_an_evaluation_reads_the_weights_of_its_step() -> None:
    assert Reading(True, 1, (evaluation(2),)).versions(0, 5) == [2, 4, 5]
    assert Reading(False, 0, (evaluation(0),)).versions(0, 5) == [5]


def test_a_resumed_run_has_its_checkpoint() -> None:
    assert Reading(True, 1, ()).versions(3, 6) == [4]


@given(st.integers(0, 4), st.integers(0, 3), st.integers(0, 4), st.integers(1, 9))
def test_what_is_sent_is_what_is_received(lag: int, every: int, done: int, steps: int) -> None:
    """The reader walks through its steps as the interpreter does, and asks for every version that was sent, in order."""
    reading = Reading(True, lag, (evaluation(every),))
    last, have = done + steps, done
    asked = []
    for step in range(done + 1, last + 1):
        wanted = [reading.of_step(step)]
        if due(reading.evaluations[0], step, last):
            wanted.append(step)
        for version in wanted:
            assert version <= step, "not before it is trained"
            if version > have:
                asked.append(version)
                have = version
        assert step - 1 - have <= lag, "the promise of the plan"
    assert asked == reading.versions(done, last)
