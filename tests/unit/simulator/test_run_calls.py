"""Reward calls that fail: tries, the time of the workers, and what the rule makes of the rest."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from rlflow import driver
from rlflow.backends.simulator.run import Options, simulate
from rlflow.backends.simulator.run_calls import Calls
from rlflow.cli import main
from rlflow.diagnostics import RunFailure
from rlflow.plan import Plan

EXAMPLES = Path(__file__).parents[3] / "examples"
TIMES = {"samples": 2.0, "ref": 0.5, "actor.train": 1.5, "digits": 4.0}

Compile = Callable[..., Plan]


@pytest.fixture
def rewarded(tmp_path: Path) -> Compile:
    def make(rule: str) -> Plan:
        for name in ("data", "rewards.py"):
            if not (tmp_path / name).exists():
                (tmp_path / name).symlink_to(EXAMPLES / name)
        text = (EXAMPLES / "async_grpo.rlflow").read_text("utf-8")
        assert "timeout = 5 s)" in text
        file = tmp_path / "f.rlflow"
        file.write_text(text.replace("timeout = 5 s)", f"timeout = 5 s, on_error = {rule})"), "utf-8")
        return driver.compile(file)

    return make


def calls(rows: int, workers: int, retries: int, share: float) -> Calls:
    return Calls("e", rows, workers, retries, True, share, 0)


def test_workers_take_the_next_sample_when_they_are_free() -> None:
    """Without failures all take their part; where nothing ever succeeds, 1 + retries times as long."""
    assert calls(10, 4, 2, 0.0).stretch(0) == 1.0
    hopeless = calls(12, 4, 2, 1.0)
    assert hopeless.stretch(0) == 3.0
    assert (hopeless.tries[0], hopeless.lost[0]) == (36, 12)
    assert calls(1, 8, 1, 0.0).stretch(0) == 1.0


@pytest.mark.parametrize(("share", "retries"), [(0.1, 0), (0.3, 2), (0.6, 3)])
def test_as_many_tries_as_by_hand(share: float, retries: int) -> None:
    """1 + p + ... + p^r tries; p^(r + 1) of the samples are lost; many workers' time grows by the tries."""
    many = calls(20_000, 10, retries, share)
    stretch = many.stretch(3)
    expected = sum(share**i for i in range(retries + 1))
    assert many.tries[3] / many.rows == pytest.approx(expected, rel=0.02)
    assert many.lost[3] / many.rows == pytest.approx(share ** (retries + 1), rel=0.1)
    assert stretch == pytest.approx(expected, rel=0.02)


def test_retries_take_time_of_the_step(rewarded: Compile) -> None:
    plan = rewarded("retry(3, then = drop)")
    none, some = (simulate(plan, Options(steps=20, stated=TIMES, failing=f)) for f in ({}, {"digits": 0.2}))
    found = some.failed_calls["digits"]
    assert found.tries == pytest.approx(1 + 0.2 + 0.04 + 0.008, rel=0.02)
    assert found.lost == pytest.approx(0.2**4, abs=0.001)
    assert found.stops == 0
    assert none.failed_calls == {}
    # 2 s of samples, and then 4 s of the workers, which become 4 x 1.25 and the wait for the last of them.
    assert float(none.period) / 1e6 == pytest.approx(6.0, rel=0.01)
    assert 6.0 + 4.0 * 0.2 < float(some.period) / 1e6 < 6.0 + 4.0 * 0.45


def test_a_run_that_would_stop_says_so(rewarded: Compile) -> None:
    found = simulate(rewarded("fail"), Options(steps=50, stated=TIMES, failing={"digits": 0.002})).failed_calls[
        "digits"
    ]
    assert found.stops == pytest.approx(1 - 0.998**512, abs=0.2)
    assert found.tries == 1


def test_plans_see_the_same_failures(rewarded: Compile) -> None:
    options = [Options(steps=10, stated=TIMES | {"actor.train": s}, failing={"digits": 0.1}) for s in (1.5, 9.0)]
    fast, slow = (simulate(rewarded("retry(1, then = drop)"), each) for each in options)
    assert fast.failed_calls == slow.failed_calls
    assert fast.period != slow.period


def test_names_and_words(rewarded: Compile, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(RunFailure, match="no stage `digit` calls a function") as failure:
        simulate(rewarded("retry(1)"), Options(stated=TIMES, failing={"digit": 0.5}))
    assert failure.value.help == ("did you mean `digits`?",)
    stated = [word for name, seconds in TIMES.items() for word in ("--stage", f"{name}={seconds}")]

    def run(*more: str) -> int:
        with pytest.raises(SystemExit) as ended:
            main(["simulate", str(tmp_path / "f.rlflow"), *stated, *more])
        return int(ended.value.code or 0)

    assert run("--fail", "digits=30%", "--seeds", "2") == 0
    text = capsys.readouterr().out
    assert "calls of digits: 1.3 tries a sample, 9% of the samples without a score" in text
    assert "at 100% of the steps the run would stop" in text
    assert run("--fail", "digits=0.3", "--format", "json") == 0
    assert json.loads(capsys.readouterr().out)["failed_calls"]["digits"]["stops"] == 1
    assert run("--fail", "digits=2") == 2
    assert "--fail digits=2: write NAME=SHARE" in capsys.readouterr().err
