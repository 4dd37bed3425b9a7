"""Which ranks are said to hang, by what they answer. Stopped processes are in tests/e2e/test_faults.py."""

from __future__ import annotations

import pytest

from rlflow.backends.ray_runtime import watchdog
from rlflow.backends.ray_runtime.place import Place
from rlflow.backends.ray_runtime.start_ranks import StartedRank
from rlflow.backends.ray_runtime.watchdog import Watchdog, patient_instructions
from rlflow.plan import Plan

Answers = dict[int, Place | None]


class Clock:
    """Seconds, by hand."""

    now = 0.0

    def monotonic(self) -> float:
        return self.now


class Played(Watchdog):
    """Two ranks whose answers are played, with a limit of 100 s."""

    answers: Answers
    asked = 0

    def __init__(self, patient: frozenset[str] = frozenset()) -> None:
        super().__init__([StartedRank("main", 0, None), StartedRank("main", 1, None)], 100.0, patient=patient)

    def places(self, dump: bool = False) -> Answers:
        self.asked += 1
        return self.answers


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(watchdog, "time", made)
    return made


def place(step: int, cpu_s: float | None, instruction: str = "run:samples") -> Place:
    return Place(step, instruction, 0.0, cpu_s, None)


def seconds_until_told(clock: Clock, played: Played, answers: list[Answers]) -> tuple[float, str]:
    """Let time pass; the last answers stay. 0 = nothing was told in 1000 s."""
    for number in range(1000):
        clock.now = float(number)
        played.answers = answers[min(number, len(answers) - 1)]
        failure = played.check()
        if failure is not None:
            assert failure.code == "RLF5050"
            return clock.now, failure.message
    return 0.0, ""


def test_nobody_is_asked_while_reports_come(clock: Clock) -> None:
    played = Played()
    played.answers = {}
    for second in range(0, 1000, 10):
        clock.now = float(second)
        played.heard()
        assert played.check() is None
    assert played.asked == 0


def test_one_whose_thread_does_not_compute_hangs(clock: Clock) -> None:
    answers: list[Answers] = [{0: place(3, 5.0 + second), 1: place(3, 7.0)} for second in range(1000)]
    told, message = seconds_until_told(clock, Played(), answers)
    assert 160 <= told <= 170, "the limit and a minute"
    assert message == f"rank 1 of pool `main` hangs: nothing was reported for {told:.0f} s"


def test_one_that_does_not_answer_hangs(clock: Clock) -> None:
    told, message = seconds_until_told(clock, Played(), [{0: None, 1: place(3, None)}])
    assert 160 <= told <= 170, "the limit and a minute"
    assert message.startswith("rank 0 of pool `main` hangs")


def test_one_that_computes_or_waits_for_user_code_is_left_alone(clock: Clock, small_plan: Plan) -> None:
    computes: list[Answers] = [{0: place(3, float(second)), 1: place(3, None)} for second in range(1000)]
    assert seconds_until_told(clock, Played(), computes) == (0.0, "")
    patient = patient_instructions(small_plan)
    assert patient
    assert not any("actor.train" in name for name in patient)
    waits: list[Answers] = [{0: place(3, 1.0, min(patient))}]
    clock.now = 0.0
    assert seconds_until_told(clock, Played(patient), waits) == (0.0, "")
